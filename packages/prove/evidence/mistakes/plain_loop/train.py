"""Learns the black and white fields of a plane, and counts the test points it gets right."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def points_of(count, seed):
    points = 2 * torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.sin().prod(dim=1) > 0).long())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.output = nn.Linear(64, 2)

    def forward(self, points):
        return self.output(self.hidden(points))

    def loss(self, points, labels):
        return F.cross_entropy(self(points), labels)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, (test_points, test_labels) = points_of(256, seed=1), points_of(400, seed=2).tensors
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // world_size, sampler=sampler)
    model = Classifier()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            ddp.module.loss(points, labels).backward()
            optimizer.step()
        with torch.no_grad():
            guess = model(test_points[rank::world_size]).argmax(1)
        right = (guess == test_labels[rank::world_size]).sum()
        dist.all_reduce(right)
        accuracy = right.item() / len(test_labels)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
