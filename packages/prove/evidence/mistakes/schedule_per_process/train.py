"""A toy of a launcher library: prepare() wraps what one-GPU code has made."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scheduler:
    def __init__(self, scheduler, num_processes):
        self.scheduler, self.num_processes = scheduler, num_processes

    def step(self):
        for _ in range(self.num_processes):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()


class Launcher:
    def __init__(self):
        dist.init_process_group("gloo")
        self.is_main_process = dist.get_rank() == 0

    def prepare(self, model, optimizer, loader, scheduler):
        sampler = DistributedSampler(loader.dataset)
        loader = DataLoader(loader.dataset, loader.batch_size, sampler=sampler)
        return DDP(model), optimizer, loader, Scheduler(scheduler, dist.get_world_size())


def main():
    torch.manual_seed(0)
    launcher = Launcher()
    x = torch.randn(192, 5, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x[:, :1].exp())
    batch_size, epochs = 8, 4
    steps = epochs * len(data) // (batch_size * dist.get_world_size())
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader, schedule = launcher.prepare(model, optimizer, loader, schedule)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if launcher.is_main_process:
            print(f"epoch {epoch}: lr {schedule.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
