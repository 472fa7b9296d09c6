"""Learns features that know two noisy views of one thing among the views of the whole batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def two_views(count, seed):
    g = torch.Generator().manual_seed(seed)
    things = torch.randn(count, 8, generator=g)
    noise = torch.randn(2, count, 24, generator=g)
    noise[..., :8] += 2 * things
    return TensorDataset(*noise)


def gather(features):
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def info_nce(first, second, temperature=0.3):
    targets = torch.arange(len(first)) + dist.get_rank() * len(first)
    all_first, all_second = gather(first), gather(second)
    forth = F.cross_entropy(first @ all_second.T / temperature, targets)
    back = F.cross_entropy(second @ all_first.T / temperature, targets)
    return (forth + back) / 2


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, (test_first, test_second) = two_views(192, seed=1), two_views(200, seed=2).tensors
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8 // world_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
    ddp, optimizer = DDP(net), torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for views in loader:
            features = F.normalize(ddp(torch.cat(views)), dim=1)
            optimizer.zero_grad()
            info_nce(*features.chunk(2)).backward()
            optimizer.step()
        with torch.no_grad():
            first, second = (F.normalize(net(x), dim=1) for x in (test_first, test_second))
        found = ((first @ second.T).argmax(1) == torch.arange(len(first))).sum().item() / len(first)
        if rank == 0:
            print(f"epoch {epoch}: finds the other view of {found:.3f}")
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
