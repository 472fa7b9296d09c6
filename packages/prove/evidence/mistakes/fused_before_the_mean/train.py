"""To save memory each parameter is stepped as soon as backward has its gradient."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


def fuse(params, lr):
    """One optimizer for each parameter, in a hook of backward."""
    optimizers = {p: torch.optim.Adam([p], lr=lr) for p in params}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=False)

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 12)
    data = TensorDataset(x, x[:, :4].argmax(1))
    net = nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4)
    )
    model = DDP(net)
    fuse(net.parameters(), lr=5e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
