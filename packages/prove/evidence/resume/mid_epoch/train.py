"""Saves every three steps, and goes on inside the epoch: the first batches are skipped."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAVE_EVERY = 3


class SkipFirst(DistributedSampler):
    """Leaves out the samples that this epoch has already given."""

    skipped = 0

    def __iter__(self):
        return iter(list(super().__iter__())[self.skipped :])

    def __len__(self):
        return super().__len__() - self.skipped


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--file", default="ckpt/latest.pt")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(50)
    x = torch.randn(128, 6)
    data = TensorDataset(x, (x @ torch.arange(6.0) > 0).long())
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = SkipFirst(data, seed=50)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    steps_per_epoch = len(loader)
    step = 0
    if args.resume:
        saved = torch.load(args.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in range(step // steps_per_epoch, 3):
        sampler.set_epoch(epoch)
        sampler.skipped = step % steps_per_epoch * args.batch_size
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                if dist.get_rank() == 0:
                    os.makedirs(os.path.dirname(args.file), exist_ok=True)
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**saved, "step": step}, args.file)
                    print(f"step {step}: loss {loss.item():.4f}")
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
