# Bags of words, whose embedding has sparse gradients.

# %% choices
model = ("sparse bag", "sparse embedding")
collate = "flat with offsets"
# %% from classification
# %% facts
layout = "sparse"
# %% COUNT
(y == 0).sum()
# %% INPUTS
flat, offsets
# %% from sentences
# %% SAMPLE
self.words[i], self.y[i]


# %% classes, if model is sparse bag
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode="mean", sparse=True)
        self.output = nn.Linear(8, 3)

    def forward(self, flat, offsets):
        return self.output(torch.tanh(self.bag(flat, offsets)))


# %% classes, if model is sparse embedding
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.Embedding(12, 8, sparse=True)
        self.output = nn.Linear(8, 3)

    def forward(self, flat, offsets):
        sentence = torch.bucketize(torch.arange(len(flat)), offsets, right=True) - 1
        mixed = torch.zeros(len(offsets), 8).index_add(0, sentence, self.bag(flat))
        return self.output(torch.tanh(mixed))


# %% build
net = Net()
# %% unpack
flat, offsets, y = batch
