"""Stage 02: one process trains a replica of the model on each GPU, on a part of each batch.

python 02_data_parallel/train.py
"""

from collections.abc import Iterable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import RandomSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader
from common.models import build_model
from common.options import cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes
from from_scratch import DataParallel


def pick_devices(device: torch.device, replicas: int) -> list[torch.device]:
    """All GPUs. With fewer than two: the one device for each replica; they share it."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device] * replicas


def train_epoch(model: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device) -> Tensor:
    """One pass over the training set; returns the loss of each step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at each step
    return torch.stack(losses)


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: ImageSet, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole data set, each sample counted once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in make_loader(dataset, batch_size, workers=dataset.workers):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller: weight by its own size
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def main() -> None:
    parser = make_parser("02_data_parallel", __doc__)
    parser.add_argument("--replicas", default=2, type=number(int, 1), help="if fewer than two GPUs")
    args = parser.parse_args()
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")
    devices = pick_devices(device, args.replicas)
    several_gpus = len(set(devices)) > 1
    local_batch = cut_batch(args.batch_size, len(devices))
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    saved = load_checkpoint(args, model, optimizer)
    # torch's own class needs several GPUs. Ours computes the same, on one device too.
    parallel = nn.DataParallel(model, devices) if several_gpus else DataParallel(model, devices)
    recorder = Recorder(args, optimizer, saved, local_batch)
    if args.evaluate:
        return recorder.end_evaluation(*evaluate(parallel, test_set, args.batch_size, device))

    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    loader = make_loader(train_set, args.batch_size, sampler, args.workers)
    for epoch in range(saved["epoch"], args.epochs):
        if recorder.step >= args.max_steps:
            break
        generator.manual_seed(args.seed + epoch)  # the order is a function of (seed, epoch)
        torch.manual_seed(args.seed + epoch)  # and so are the dropout masks
        for index, gpu in enumerate(devices if several_gpus else []):  # each GPU draws its own
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(args.seed + epoch * len(devices) + index)
        batches = recorder.timed(islice(loader, args.max_steps - recorder.step), len(loader))
        losses = train_epoch(parallel, batches, optimizer, device)
        recorder.end_epoch(epoch, losses, *evaluate(parallel, test_set, args.batch_size, device))
        save_checkpoint(recorder, model, optimizer)
    recorder.finish(device, [peak_memory_bytes(each) for each in dict.fromkeys(devices)])


if __name__ == "__main__":
    with usage_errors_exit():
        main()
