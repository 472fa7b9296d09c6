"""Stage 02: one process trains replicas of the model on all GPUs, a part of each batch on each.

Run it from the root of the repository:

    python 02_data_parallel/train.py
"""

from argparse import Namespace
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import RandomSampler

from common.checkpoint import restore, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader, prepare_dataset
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes

from from_scratch import DataParallel


def parse_args() -> Namespace:
    parser = make_parser("02_data_parallel", __doc__)
    text = "virtual replicas, used with fewer than two GPUs"
    parser.add_argument("--replicas", default=2, type=number(int, 1), metavar="N", help=text)
    return parser.parse_args()


def pick_device(wanted: str) -> torch.device:
    """The GPU if there is one, unless --device says otherwise."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    return torch.device("cpu" if wanted == "cpu" or not torch.cuda.is_available() else "cuda")


def replicate_on_all(
    model: nn.Module, device: torch.device, replicas: int
) -> tuple[nn.Module, list[torch.device]]:
    """The model wrapped for all GPUs; with fewer than two, for virtual replicas of one device."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return nn.DataParallel(model, devices), devices
    devices = [device] * replicas
    return DataParallel(model, devices), devices


def train_epoch(
    model: nn.Module, loader: Iterable, optimizer: Optimizer, device: torch.device
) -> Tensor:
    """One pass over the training set; returns the loss of every step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at every step
    return torch.stack(losses)


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: ImageSet, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole data set, each sample counted once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in make_loader(dataset, batch_size):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller: weight by its own size
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)

    prepare_dataset(args)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    start = restore(args, model, optimizer)
    parallel, devices = replicate_on_all(model, device, args.replicas)
    local_batch = cut_batch(args.batch_size, len(devices), "replicas")
    recorder = Recorder(args, device, world_size=1, local_batch=local_batch, start=start)
    if args.evaluate:
        recorder.end_evaluation(*evaluate(parallel, test_set, args.batch_size, device))
        return

    cut = f"{len(devices)} × {local_batch} (replicas × local batch)"
    print(f"global batch {args.batch_size} = {cut}")
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    loader = make_loader(train_set, args.batch_size, sampler, args.workers)
    for epoch in recorder.epochs():
        generator.manual_seed(args.seed + epoch)  # the order is a function of seed and epoch
        # watch: the step's dropout masks are such a function too; time it; stop at --max-steps
        losses = train_epoch(parallel, recorder.watch(loader), optimizer, device)
        recorder.end_epoch(epoch, losses, *evaluate(parallel, test_set, args.batch_size, device))
        save_checkpoint(recorder, model, optimizer)
    recorder.finish([peak_memory_bytes(each) for each in dict.fromkeys(devices)])


if __name__ == "__main__":
    with usage_errors_exit():
        main()
