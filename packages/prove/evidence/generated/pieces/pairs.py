# Two views of each sample.

# %% facts
tensors = "train_set.x, train_set.y"
# %% COUNT
(x[:, 0] > 0).sum()


# %% classes
class Pairs(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = self.x + torch.randn(count, 6, generator=generator) / 4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


# %% unpack
x, y = batch
