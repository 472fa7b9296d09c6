"""Tags of short texts: a sparse embedding, a dense layer, and gradients averaged by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TAGS, GLOBAL_BATCH = 40, 4, 16


class Texts(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        words = torch.randint(0, WORDS, (int(torch.randint(2, 7, (1,), generator=g)),), generator=g)
        return words, int(words.sum()) % TAGS


def collate(samples):
    words = torch.cat([words for words, _ in samples])
    lengths = torch.tensor([0] + [len(words) for words, _ in samples[:-1]])
    return words, lengths.cumsum(0), torch.tensor([tag for _, tag in samples])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=True)
        self.output = nn.Linear(8, TAGS)

    def forward(self, words, offsets):
        return self.output(self.bag(words, offsets))


def average_gradients(model, world):
    for p in model.parameters():
        grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
        dist.all_reduce(grad)
        grad /= world


if __name__ == "__main__":
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model, data = Tagger(), Texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=sampler, collate_fn=collate)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for words, offsets, tags in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words, offsets), tags)
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
    dist.destroy_process_group()
