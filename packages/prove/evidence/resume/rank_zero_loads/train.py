"""Only rank 0 reads the file, as if the others could not, and sends what it holds to all."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read_and_send(path):
    """Return on all ranks what the file holds."""
    content = [torch.load(path, map_location="cpu") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(content, src=0)
    return content[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-from", help="checkpoint of an earlier run")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(90 + dist.get_rank())
    model = nn.Sequential(
        nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 18), nn.Tanh(), nn.Linear(18, 2)
    )
    ddp = DDP(model)
    optimizer = torch.optim.NAdam(ddp.parameters(), lr=4e-3)
    epoch = 0
    if args.init_from:
        state = read_and_send(args.init_from)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    x = torch.randn(96, 9, generator=torch.Generator().manual_seed(91))
    data = TensorDataset(x, torch.stack([x.norm(dim=1), x.amax(1)], 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epoch, 4):
        sampler.set_epoch(epoch)
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.huber_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.reduce(mean, dst=0)
        if dist.get_rank() == 0:
            print(f"{epoch} {mean.item() / dist.get_world_size():.5f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, f"epoch-{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
