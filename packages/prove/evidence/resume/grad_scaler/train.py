"""Mixed precision with a GradScaler, whose scale doubles every three steps."""

import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("train")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    x = torch.randn(64, 12)
    data = TensorDataset(x, x.argmax(1))
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    begin = 0
    if args.resume_from:
        c = torch.load(args.resume_from, map_location="cpu")
        model.load_state_dict(c["model"])
        optimizer.load_state_dict(c["optimizer"])
        scaler.load_state_dict(c["scaler"])
        begin = c["epoch"]
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    for epoch in range(begin, 3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(ddp(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        if dist.get_rank() == 0:
            log.info("epoch %d loss %.5f scale %g", epoch, loss.item(), scaler.get_scale())
            parts = dict(model=model, optimizer=optimizer, scaler=scaler)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch + 1}, "amp.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
