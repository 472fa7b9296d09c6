"""The command line that all stages share, and how a wrong call ends."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic")
MODELS = ("net", "net-bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


class UsageError(ValueError):
    """A wrong call. The text says what arrived, what was expected and what to type."""


@contextmanager
def usage_errors_exit(*others: type[Exception]) -> Iterator[None]:
    """End such an error with one line and status 2. Other errors are bugs: keep the traceback."""
    try:
        yield
    except (UsageError, *others) as error:  # type: ignore[misc]
        print("error:", *str(error).split(), file=sys.stderr, flush=True)  # in one line
        raise SystemExit(2) from None


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter): ...


class Parser(argparse.ArgumentParser):
    """Shows the docstring as written and each default; reports a wrong call in one line."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists every option)\n")


def number(kind: type, at_least: float, below: float = math.inf) -> Callable[[str], float]:
    """An argparse type: an int or float within bounds."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if at_least <= kind(text) < below:
                return kind(text)
        noun = "whole number" if kind is int else "number"
        limits = f"at least {at_least}" if below == math.inf else f"from {at_least} to {below - 1}"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a {noun}, {limits}")

    return parse


def make_parser(stage: str, doc: str | None) -> Parser:
    """The flags of all stages. A stage adds only the flags that it teaches."""
    parser = Parser(doc)
    count, natural, real = number(int, 1), number(int, 0), number(float, 0, 1e38)
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    add = parser.add_argument
    add("--dataset", default="digits", choices=DATASETS, help="data set to train on")
    add("--data-dir", default=Path("data"), type=Path, help="folder that holds the data sets")
    add("--image-size", default=28, type=count, help="pixels, for imagefolder and synthetic")
    add("--classes", default=10, type=count, help="number of classes, for synthetic")
    add("--model", default="net", choices=MODELS, help="network to train")
    add("--epochs", default=10, type=count, help="passes over the training set")
    add("--max-steps", default=10**9, type=count, help="stop after this many optimizer steps")
    add("--batch-size", default=120, type=count, help="global batch: samples per step, all ranks")
    add("--lr", default=0.02, type=real, help="learning rate of SGD")
    add("--momentum", default=0.9, type=real, help="momentum of SGD")
    add("--weight-decay", default=0.0, type=real, help="weight decay of SGD")
    add("--workers", default=0, type=natural, help="loader processes per rank; 0: none")
    add("--seed", default=1234, type=number(int, 0, 2**32), help="for weights, order, dropout")
    add("--device", default=devices[0], choices=devices, help="cuda: if torch sees a GPU")
    add("--run-dir", default=Path("runs", stage), type=Path, help="folder for the results")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--resume", metavar="PATH|auto", help="resume it; auto: the one in --run-dir, if any")
    one("--evaluate", metavar="PATH", help="only evaluate this checkpoint")
    parser.set_defaults(stage=stage)
    return parser


def cut_batch(global_batch: int, parts: int) -> int:
    """The size of `parts` equal pieces. Unequal pieces would need weighted gradients."""
    if global_batch % parts:
        larger = -(-global_batch // parts) * parts
        raise UsageError(f"--batch-size {global_batch} does not divide by {parts}: try {larger}")
    return global_batch // parts
