"""A script without DDP: its own optimizer averages the gradients inside step()."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


class AveragingSGD(torch.optim.Optimizer):
    """SGD with momentum, of the mean gradient of all ranks."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average(p.grad)
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p -= group["lr"] * momentum


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    train_set = TensorDataset(points, points[:, :3].argmax(1))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=12 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = build_model()
    params = list(model.parameters())
    optimizer = AveragingSGD(params, lr=0.1)
    torch.manual_seed(1000 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            loss = F.cross_entropy(model(x), labels)
            model.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
