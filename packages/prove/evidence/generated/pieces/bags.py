# The class of a sentence: words of all sentences in one row, or packed.

# %% choices
model = ("embedding bag", "packed lstm")
# %% choices, if model is embedding bag
collate = "flat with offsets"
# %% choices, if model is packed lstm
collate = "pad with lengths"
# %% from classification
# %% COUNT
(y == 0).sum()
# %% INPUTS, if model is embedding bag
flat, offsets
# %% INPUTS, if model is packed lstm
words, lengths
# %% from sentences
# %% SAMPLE
self.words[i], self.y[i]


# %% classes, if model is embedding bag
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode="mean")
        self.output = nn.Linear(8, 3)

    def forward(self, flat, offsets):
        return self.output(torch.tanh(self.bag(flat, offsets)))


# %% classes, if model is packed lstm
def collate(samples):
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    lengths = torch.tensor([len(words) for words, _ in samples])
    return words, lengths, torch.stack([label for _, label in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, 3)

    def forward(self, words, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.output(hidden[-1])


# %% build
net = Net()
# %% unpack, if model is embedding bag
flat, offsets, y = batch
# %% unpack, if model is packed lstm
words, lengths, y = batch
