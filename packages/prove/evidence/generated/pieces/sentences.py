# Sentences of any length.


# %% classes
class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
        self.words = [torch.randint(1, 12, (n,), generator=generator) for n in self.lengths]
        self.y = torch.tensor([int(words[0]) % 3 for words in self.words])

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return SAMPLE
