"""What the three peers share: the flags, the data sets, and the lines that peers.py waits for.

It is no lesson: it makes them comparable. They take the flags of the stages and say what these say.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import load_dataset
from common.options import cut_batch, make_parser


def parse_args(name: str, doc: str | None) -> Namespace:
    parser = make_parser(name, doc)
    text = "ours: common/data.py in the place of one picture after the other"
    parser.add_argument("--data", default="pictures", choices=("pictures", "ours"), help=text)
    parser.set_defaults(dataset="mnist")
    return parser.parse_args()


def datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """The training set and the test set of MNIST, as PyTorch's example has them, or as ours."""
    if args.data == "ours":
        return load_dataset(args)
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    train, test = (MNIST(args.data_dir, part, transform) for part in (True, False))
    return train, test


def loader_options(args: Namespace) -> dict:
    """Of a DataLoader. Processes that load stay from epoch to epoch, which is best for the peer."""
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    return options | ({"collate_fn": whole_batch} if args.data == "ours" else {})


def whole_batch(batch: tuple) -> tuple:
    return batch  # our data set gives a batch, not a list of samples


def begin(args: Namespace) -> int:
    """The local batch; says what a stage says before its ranks join."""
    world_size = int(os.environ["WORLD_SIZE"])
    local_batch = cut_batch(args.batch_size, world_size)
    if os.environ["RANK"] == "0":
        print(f"global batch {args.batch_size} = {world_size} × {local_batch}", flush=True)
    return local_batch


def epochs(args: Namespace, whole: int) -> Iterator[tuple[int, int]]:
    """Epochs, counted from 0, and the steps of each: `whole` ones, until --max-steps is reached."""
    left = args.max_steps
    for epoch in range(args.epochs):
        if left > 0:
            yield epoch, min(left, whole)
        left -= whole


def end_epoch(args: Namespace, epoch: int, losses: list[Tensor], accuracy: float) -> None:
    """Say how good the model is; keep the loss of each global batch in metrics.jsonl."""
    means = torch.stack(losses)  # (steps,), of the local batch
    dist.all_reduce(means)  # every rank must reach this line
    values = (means / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        with (args.run_dir / "metrics.jsonl").open("a" if epoch else "w") as file:
            file.writelines(json.dumps({"epoch": epoch, "loss": x}) + "\n" for x in values)
        mean = sum(values) / len(values)
        line = f"epoch {epoch + 1}/{args.epochs}  loss {mean:.4f}  test accuracy {accuracy:.2%}"
        print(line, flush=True)
