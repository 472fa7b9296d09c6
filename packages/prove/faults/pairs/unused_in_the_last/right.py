"""Two tasks share a body and take turns within a step; gradients are accumulated over both."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TASKS = ("depth", "normal")


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ELU())
        self.heads = nn.ModuleDict({"depth": nn.Linear(24, 1), "normal": nn.Linear(24, 3)})

    def forward(self, x, task):
        return self.heads[task](self.body(x))


class Scenes(TensorDataset):
    def __init__(self, n=160):
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(17))
        super().__init__(x, x.square().mean(1, keepdim=True), x[:, :3].sign())


def train_step(model, optimizer, x, targets):
    optimizer.zero_grad()
    for task in TASKS:
        loss = nn.functional.mse_loss(model(x, task), targets[task])
        (loss / len(TASKS)).backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    scenes = Scenes()
    sampler = DistributedSampler(scenes)
    loader = DataLoader(scenes, batch_size=8, sampler=sampler)
    model = DDP(TwoTasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, depth, normal in loader:
            train_step(model, optimizer, x, {"depth": depth, "normal": normal})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
