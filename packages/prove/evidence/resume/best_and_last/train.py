"""best.pt for those who use the model, last.pt for the run that goes on."""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        score = (model(x).argmax(1) == y).double().mean()
    model.train()
    return score.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--folder", default="weights")
    args = parser.parse_args()
    last, best_file = (os.path.join(args.folder, name) for name in ("last.pt", "best.pt"))
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    x = torch.randn(128, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train, test = TensorDataset(x[:64], y[:64]), (x[64:], y[64:])
    model = nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    net = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    start, best = 0, -1.0
    if args.resume:
        checkpoint = torch.load(last)
        model.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["opt"])
        start, best = checkpoint["epoch"], checkpoint["best"]
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, 8, sampler=sampler)
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            opt.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            opt.step()
        if dist.get_rank() == 0:
            score = evaluate(model, *test)
            is_best, best = score > best, max(best, score)
            os.makedirs(args.folder, exist_ok=True)
            checkpoint = {"model": model.state_dict(), "opt": opt.state_dict()}
            torch.save({**checkpoint, "epoch": epoch + 1, "best": best}, last)
            if is_best:
                shutil.copyfile(last, best_file)
            print(f"epoch {epoch}: accuracy {score:.3f}, best {best:.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
