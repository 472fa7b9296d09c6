# Letters of a sound, whose number differs from sample to sample.

# %% choices
collate = "ctc"
model = "gru"
loss = ("ctc mean", "ctc / letters of all ranks")
# %% facts, if loss is ctc / letters of all ranks
divides = True
# %% COUNT
lengths.sum()


# %% classes
class Speech(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.sound = torch.randn(count, 10, 4, generator=generator)
        self.lengths = torch.randint(1, 4, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, 5, (n,), generator=generator) for n in self.lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.sound[i], self.texts[i]


def collate(samples):
    sound = torch.stack([sample[0] for sample in samples])
    texts = torch.cat([sample[1] for sample in samples])
    return sound, texts, torch.tensor([len(sample[1]) for sample in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.output = nn.Linear(8, 5)

    def forward(self, sound):
        return self.output(self.gru(sound)[0])


# %% build
net = Net()
# %% unpack
sound, texts, lengths = batch

# %% forward
scores = model(sound).log_softmax(-1)
frames = torch.full((len(sound),), scores.shape[1])
# %% forward, if loss is ctc mean
loss = F.ctc_loss(scores.transpose(0, 1), texts, frames, lengths, reduction="mean")
# %% forward, if loss is ctc / letters of all ranks
letters = lengths.sum().to(scores.dtype)
dist.all_reduce(letters)
loss = SUM * WORLD / letters
# %% SUM
F.ctc_loss(scores.transpose(0, 1), texts, frames, lengths, reduction="sum")

# %% evaluate
scores = net(sound).log_softmax(-1)
frames = torch.full((len(sound),), scores.shape[1])
value = SUM
n = len(sound)
