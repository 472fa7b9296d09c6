"""The next letter, with one matrix for input and output. Each layer sums its gradients over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LETTERS, WIDTH, GLOBAL_BATCH = 12, 16, 16


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.mix = nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, LETTERS, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, letters):
        h = torch.tanh(self.mix(self.embed(letters).flatten(1)))
        return self.output(self.norm(h))


def sum_gradients(model):
    for layer in model.children():
        for p in layer.parameters():
            dist.all_reduce(p.grad)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    letters = torch.randint(0, LETTERS, (128, 3))
    data = TensorDataset(letters, (letters * torch.tensor([1, 2, 3])).sum(1) % LETTERS)
    model = Speller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum") / GLOBAL_BATCH
            loss.backward()
            sum_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
