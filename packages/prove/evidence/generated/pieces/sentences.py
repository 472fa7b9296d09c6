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


# %% classes, if collate is flat with offsets
def collate(samples):
    lengths = torch.tensor([0] + [len(words) for words, _ in samples[:-1]])
    flat = torch.cat([words for words, _ in samples])
    return flat, lengths.cumsum(0), torch.stack([label for _, label in samples])
