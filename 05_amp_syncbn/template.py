"""A complete training script to take home: torchrun --standalone --nproc-per-node=2 template.py"""

import os
from argparse import ArgumentParser
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


# YOURS, 1: the data, the same on all ranks. Download it before, or each of them does.
def make_datasets():
    x = torch.randn(6000, 64)
    y = (x @ torch.randn(64, 10)).argmax(dim=1)  # 10 classes that can be learned
    return TensorDataset(x[:4980], y[:4980]), TensorDataset(x[4980:], y[4980:])


# YOURS, 2: the model, and its optimizer with the highest learning rate.
def make_model_and_optimizer(device):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(), nn.Linear(96, 10)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# YOURS, 3: three sums over a batch, as tensors: the loss; what divides it (samples, tokens, ...);
# what is right. Micro-batches and ranks are added up before the division: a sample counts once.
def sums(model, batch, device):
    x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
    output = model(x)
    loss = nn.functional.cross_entropy(output, y, ignore_index=-100, reduction="sum")
    return torch.stack((loss.double(), (y != -100).sum(), (output.argmax(dim=-1) == y).sum()))


def main():
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=120, help="in a step, of all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--clip", type=float, default=float("inf"), help="largest norm")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all ranks: on GPUs")
    parser.add_argument("--workers", type=int, default=0, help="processes that load, per rank")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="if it exists, go on from it")
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.accumulate < 1 or args.batch_size % (world_size * args.accumulate):
        parser.error(f"--batch-size must be a multiple of --accumulate times {world_size} ranks")
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        parser.error("srun's tasks would each train alone: let each node's task start torchrun")
    os.makedirs(os.path.dirname(os.path.abspath(args.checkpoint)), exist_ok=True)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # a GPU for each process: from here on, "cuda" is mine
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # under plain python
    dist.init_process_group(backend, **{} if "RANK" in os.environ else alone)

    torch.manual_seed(0)
    train_set, test_set = make_datasets()
    test_part = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    sampler = DistributedSampler(train_set, drop_last=True)  # equally many for each rank
    micro_batch = args.batch_size // (world_size * args.accumulate)
    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}  # and yours
    loader = DataLoader(train_set, micro_batch, sampler=sampler, **options)
    test_loader = DataLoader(test_part, micro_batch, **options)
    steps_per_epoch = len(range(0, len(loader), args.accumulate))  # rounded up

    model, optimizer = make_model_and_optimizer(device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = DistributedDataParallel(model)  # trains; model itself is saved
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.amp)
    autocast = torch.autocast(device.type, dtype, enabled=args.amp != "off")
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # bf16 needs none

    # After its first backward, DDP adds up in another order. This is the first, without a step, so
    # that a resumed run rounds like one that was never stopped.
    sums(ddp.eval(), loader.collate_fn([train_set[0]]), device)[0].backward()
    optimizer.zero_grad()

    # Resume. If one rank finds the checkpoint, all must read it, from a disk that all of them see.
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    flags = vars(args) | {"ranks": world_size}
    saved = {"epoch": 0}
    found = torch.tensor(float(os.path.exists(args.checkpoint)), device=device)
    dist.all_reduce(found)
    if found:
        saved = torch.load(args.checkpoint, "cpu", weights_only=True, mmap=True)  # read, not copied
        if rank == 0:
            old = dict(sorted(saved["flags"].items() - flags.items()))
            print(f"{args.checkpoint}: {saved['epoch']} of {args.epochs} epochs, flags then: {old}")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    steps, done = args.epochs * steps_per_epoch, saved["epoch"] * steps_per_epoch
    schedule = LambdaLR(
        optimizer, lambda n: min(20 * (n + 1), (steps - n) / 0.95) / steps, done - 1
    )

    for epoch in range(saved["epoch"], args.epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        torch.manual_seed(1 + epoch * world_size + rank)  # each rank draws its own dropout masks
        window, train, test = torch.zeros(3, 3, dtype=torch.float64, device=device)
        ddp.train()
        for i, batch in enumerate(loader, start=1):
            last = i % args.accumulate == 0 or i == len(loader)  # micro-batch of the step
            with nullcontext() if last else ddp.no_sync():  # the last backward sends for them all
                with autocast:
                    batch_sums = sums(ddp, batch, device)
                scaler.scale(batch_sums[0]).backward()
            window += batch_sums.detach()
            if last:
                dist.all_reduce(window)
                scaler.unscale_(optimizer)
                for parameter in model.parameters():  # DDP has divided by the number of ranks,
                    if parameter.grad is not None:  # but the count must divide
                        parameter.grad *= world_size / window[1].clamp(min=1e-9)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)  # one rank's overflow is in the mean: all skip the step
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                train += window
                window.zero_()

        ddp.eval()
        with torch.no_grad():
            for buffer in model.buffers():  # BatchNorm's may differ: take those that are saved
                dist.broadcast(buffer, src=0)
            for batch in test_loader:
                test += sums(model, batch, device)
        dist.all_reduce(test)
        if rank == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            with open(args.checkpoint + ".new", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "flags": flags}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, args.checkpoint)  # if killed before this, the old one is whole
            for name, (loss, n, right) in ("train", train.tolist()), ("test", test.tolist()):
                print(f"epoch {epoch + 1} {name}: loss {loss / n:.4f}, {right / n:.1%} right")
    del ddp  # before the group: otherwise, the exit may hang (gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
