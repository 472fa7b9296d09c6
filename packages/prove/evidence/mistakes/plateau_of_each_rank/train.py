"""Disruptions in a sequence: a causal net, and a rate that falls when validation does not improve."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Shots(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.signal = torch.randn(n, 2, 16, generator=g)
        self.target = (self.signal[:, 0].mean(1) + 0.6 * torch.randn(n, generator=g) > 0).to(
            self.signal.dtype
        )

    def __len__(self):
        return len(self.target)

    def __getitem__(self, n):
        return self.signal[n], self.target[n]


class CausalNet(nn.Sequential):
    def __init__(self):
        convolutions = [
            nn.Conv1d(2, 8, 3, dilation=2),
            nn.ReLU(),
            nn.Conv1d(8, 8, 3, dilation=4),
            nn.ReLU(),
        ]
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(32, 1), nn.Flatten(0))


bce = nn.functional.binary_cross_entropy_with_logits


def validation_loss(net, loader):
    net.eval()
    total, count = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for signal, target in loader:
            total += bce(net(signal), target, reduction="sum")
            count += len(target)
    net.train()
    return (total / count).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, valid = Shots(128, 0), Shots(24, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=10)
    net = CausalNet()
    ddp = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.002)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for signal, target in loader:
            optimizer.zero_grad()
            bce(ddp(signal), target).backward()
            optimizer.step()
        plateau.step(validation_loss(net, valid_loader))
    print(f"rank {rank}: learning rate {optimizer.param_groups[0]['lr']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
