"""Gradients of two batches make a step of AdamW; a file after every second step."""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE, SAVE_EVERY, EPOCHS = 2, 2, 3


def parameter_groups(model):
    """Biases do not decay."""
    named = list(model.named_parameters())
    decaying = [p for name, p in named if not name.endswith("bias")]
    others = [p for name, p in named if name.endswith("bias")]
    return [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def load(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"]


def save(path, model, optimizer, steps):
    path.parent.mkdir(exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    torch.save(state, path)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(110)
    model = nn.Sequential(nn.Linear(7, 28), nn.ReLU(), nn.Linear(28, 7))
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=3e-3)
    done = load(args.resume, model, optimizer) if args.resume else 0
    x = torch.randn(128, 7, generator=torch.Generator().manual_seed(111))
    data = TensorDataset(x, x.argsort(1).argsort(1).float())
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    steps_per_epoch = len(loader) // ACCUMULATE
    steps = done
    for epoch in range(done // steps_per_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, ranks) in enumerate(loader):
            if epoch * steps_per_epoch + number // ACCUMULATE < done:
                continue  # before the stop
            is_last = (number + 1) % ACCUMULATE == 0
            with nullcontext() if is_last else ddp.no_sync():
                loss = F.mse_loss(ddp(inputs), ranks) / ACCUMULATE
                loss.backward()
            if not is_last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                save(Path("steps", f"{steps:06}.pt"), model, optimizer, steps)
                print(f"{steps} steps: loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", help="a file in steps")
    main(parser.parse_args())
