"""A folder for each save, named by its step: weights, optimizer, schedule and state apart."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sentences(Dataset):
    def __init__(self, count=64, length=9, words=23):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(words, (count, length), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"inputs": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def newest(output_dir):
    return max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def save(output_dir, model, optimizer, scheduler, state):
    folder = output_dir / f"checkpoint-{state['step']}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps(state))


def load(folder, model, optimizer, scheduler):
    model.load_state_dict(torch.load(folder / "weights.pt"))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
    return json.loads((folder / "trainer_state.json").read_text())


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Embedding(23, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 23))
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=4e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=16)
    state = {"epoch": 0, "step": 0}
    if args.resume_from_checkpoint:
        state = load(newest(args.output_dir), model, optimizer, scheduler)
    data = Sentences()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(state["epoch"], 4):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = F.cross_entropy(ddp(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["step"] += 1
        state["epoch"] = epoch + 1
        if dist.get_rank() == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"step {state['step']}: loss {loss.item():.4f}, learning rate {rate:.6f}")
            save(args.output_dir, model, optimizer, scheduler, state)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default="out")
    parser.add_argument("--resume-from-checkpoint", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
