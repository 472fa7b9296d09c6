"""Barlow Twins: the correlation of two embeddings, over the batch of all ranks, becomes the identity."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, size: int = 144) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(index)
        x = torch.randn(12, generator=g)
        return x + 0.2 * torch.randn(12, generator=g), x + 0.2 * torch.randn(12, generator=g)


class BarlowTwinsLoss(nn.Module):
    def __init__(self, lambda_param: float = 0.05) -> None:
        super().__init__()
        self.lambda_param = lambda_param

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        c = a.T @ b / len(a)
        c = c / dist.get_world_size()
        dist.all_reduce(c)
        diagonal = c.diagonal()
        off_diagonal = c - torch.diag(diagonal)
        return (diagonal - 1).pow(2).sum() + self.lambda_param * off_diagonal.pow(2).sum()


class Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6), nn.LayerNorm(6))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(a), self.net(b)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    pairs = Pairs()
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=12, sampler=sampler, drop_last=True)
    model, criterion = DDP(Projector()), BarlowTwinsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for first, second in loader:
            loss = criterion(*model(first, second))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
