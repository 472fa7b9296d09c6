"""AveragedModel keeps a moving average of the weights, which is evaluated, saved and loaded."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed):
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


@torch.no_grad()
def accuracy(model, data):
    inputs, labels = data.tensors
    return (model(inputs).argmax(1) == labels).double().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from", default=None, help="a file such as runs/ckpt.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    start = 0
    if args.resume_from:
        checkpoint = torch.load(args.resume_from)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        ema.load_state_dict(checkpoint["ema"])
        start = checkpoint["epoch"]
    train_set, test_set = make_data(64, 10), make_data(100, 11)
    sampler = DistributedSampler(train_set, seed=1)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    for epoch in range(start, 4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            ema.update_parameters(model)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy of the average {accuracy(ema, test_set):.3f}")
            os.makedirs("runs", exist_ok=True)
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ema": ema.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(checkpoint, "runs/ckpt.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
