# The next word of sentences that are padded to the longest of their batch.

# %% choices
collate = ("pad", "pad to dict", "pad to UserDict", "pad to dataclass")
model = ("lstm", "lstm, constant batch", "transformer")
loss = "words of all ranks"
# %% facts
divides = True
# %% facts, if model is lstm, constant batch
fixed_batch = True
# %% COUNT
(target > 0).sum()


# %% classes, if collate is pad to UserDict
class Encoding(UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


# %% classes, if collate is pad to dataclass
@dataclass
class Batch:
    words: torch.Tensor
    lengths: list


# %% from sentences
# %% SAMPLE
self.words[i]


# %% classes
def collate(samples):
    words = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return COLLATED


# %% COLLATED, if collate is pad
words
# %% COLLATED, if collate is pad to dict
{"input_ids": words, "attention_mask": (words > 0).long()}
# %% COLLATED, if collate is pad to UserDict
Encoding({"input_ids": words, "attention_mask": (words > 0).long()})
# %% COLLATED, if collate is pad to dataclass
Batch(words, [len(sample) for sample in samples])
# %% unpack, if collate is pad
words = batch
# %% unpack, if collate is pad to dict
words = batch["input_ids"]
# %% unpack, if collate is pad to UserDict
words = batch.input_ids
# %% unpack, if collate is pad to dataclass
words = batch.words


# %% classes, if model is lstm or lstm, constant batch
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, 12)

    def forward(self, words, state):
        hidden, _ = self.lstm(self.embedding(words), state)
        return self.output(hidden)


# %% classes, if model is transformer
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.position = nn.Parameter(torch.zeros(16, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 12)

    def forward(self, words, padding):
        h = self.embedding(words) + self.position[: words.shape[1]]
        causal = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        h = self.layer(h, src_mask=causal, src_key_padding_mask=padding)
        return self.output(h)


# %% build
net = Net()

# %% forward
inputs, target = words[:, :-1], words[:, 1:]
# %% forward, if model is lstm
state = torch.zeros(1, inputs.size(0), 8), torch.zeros(1, inputs.size(0), 8)
out = model(inputs, state)
# %% forward, if model is lstm, constant batch
hidden = torch.zeros(1, GLOBAL_BATCH // world, 8)
state = hidden, hidden
out = model(inputs, state)
# %% forward, if model is transformer
out = model(inputs, inputs == 0)
# %% forward
tokens = (target > 0).sum().to(torch.get_default_dtype())
dist.all_reduce(tokens)
loss = SUM * WORLD / tokens
# %% SUM
F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")

# %% evaluate, if model is lstm
inputs, target = words[:, :-1], words[:, 1:]
state = torch.zeros(1, inputs.size(0), 8), torch.zeros(1, inputs.size(0), 8)
out = net(inputs, state)
value = SUM
n = (target > 0).sum()
# %% evaluate, if model is transformer
inputs, target = words[:, :-1], words[:, 1:]
out = net(inputs, inputs == 0)
value = SUM
n = (target > 0).sum()
