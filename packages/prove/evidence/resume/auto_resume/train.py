"""Goes on by itself if its file exists. It writes another file first, and then renames it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT, LOG = "run/checkpoint.pt", "run/train.log"


def save(state):
    torch.save(state, CHECKPOINT + ".tmp")
    os.replace(CHECKPOINT + ".tmp", CHECKPOINT)


def load():
    if not os.path.isfile(CHECKPOINT):
        return None
    return torch.load(CHECKPOINT, map_location="cpu", weights_only=True)


def main():
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    os.makedirs("run", exist_ok=True)
    torch.manual_seed(11)
    x = torch.randn(96, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    net = DDP(nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    epoch = 0
    saved = load()
    if saved:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        epoch = saved["epoch"]
    log = open(LOG, "a") if is_main else None
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    while epoch < 6:
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        scheduler.step()
        epoch += 1
        if is_main:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch})
            mean = total.item() / len(loader) / dist.get_world_size()
            print(f"epoch {epoch}: loss {mean:.5f}", file=log, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
