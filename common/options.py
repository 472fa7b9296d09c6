"""The command line that every stage shares, and how a wrong call ends."""

import argparse
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic")
MODELS = ("net", "net-bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


class UsageError(ValueError):
    """The call cannot work; the text says what arrived, what was expected and what to type."""


@contextmanager
def usage_errors_exit() -> Iterator[None]:
    """Turn a UsageError into one line and exit status 2; any other error is a bug: a traceback."""
    try:
        yield
    except UsageError as error:
        print("error:", *str(error).split(), file=sys.stderr, flush=True)  # in one line
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # Ctrl-C, as a shell counts it


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter): ...


class Parser(argparse.ArgumentParser):
    """Its help is a docstring as it stands and each flag with its default; its refusals, a line."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:  # argparse's own prints the whole usage first
        self.exit(2, f"error: {message} (--help lists every option)\n")


def number(kind: type, at_least: float, below: float = math.inf) -> Callable[[str], float]:
    """A parser of numbers for argparse: of this kind, finite, within bounds."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not at_least <= value < below:
            noun = "whole number" if kind is int else "number"
            end = "up" if below == math.inf else f"to {below - 1}"
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected a {noun} from {at_least} {end}"
            )
        return value

    return parse


def make_parser(stage: str, doc: str | None) -> Parser:
    """The flags that all stages share; a stage adds the ones that it teaches."""
    parser = Parser(doc)
    count, natural, real = number(int, 1), number(int, 0), number(float, 0, 1e38)
    seed = number(int, 0, below=2**32)
    add = parser.add_argument
    add("--dataset", default="digits", choices=DATASETS, help="what to train on")
    add("--data-dir", default=Path("data"), type=Path, metavar="PATH", help="where data sets lie")
    add("--image-size", default=28, type=count, metavar="N", help="pixels: imagefolder, synthetic")
    add("--classes", default=10, type=count, metavar="N", help="of synthetic")
    add("--model", default="net", choices=MODELS, help="what to train")
    add("--epochs", default=10, type=count, metavar="N", help="passes over the training set")
    add("--max-steps", type=count, metavar="N", help="stop after this many steps in all")
    add("--batch-size", default=120, type=count, metavar="N", help="global batch, in samples")
    add("--lr", default=0.02, type=real, metavar="F", help="learning rate of SGD")
    add("--momentum", default=0.9, type=real, metavar="F", help="momentum of SGD")
    add("--weight-decay", default=0.0, type=real, metavar="F", help="weight decay of SGD")
    add("--workers", default=0, type=natural, metavar="N", help="loader processes of each rank")
    add("--seed", default=1234, type=seed, metavar="N", help="of weights, order, dropout")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if any")
    add("--run-dir", default=Path("runs", stage), type=Path, metavar="PATH", help="for the results")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--resume", metavar="PATH|auto", help="go on from a checkpoint; auto: from the run's own")
    one("--evaluate", type=Path, metavar="CHECKPOINT", help="only evaluate this checkpoint")
    parser.set_defaults(stage=stage)
    return parser


def cut_batch(global_batch: int, parts: int, noun: str) -> int:
    """The samples that each of the equal parts of the global batch holds.

    Unequal parts would need unequal weights in the average of their gradients.
    """
    if global_batch % parts:
        below, above = global_batch // parts * parts, -(-global_batch // parts) * parts
        hint = " or ".join(f"--batch-size {n}" for n in (below, above) if n)
        raise UsageError(
            f"a global batch of {global_batch} cannot be cut evenly over {parts} {noun}: try {hint}"
        )
    return global_batch // parts


def read_env(*names: str) -> list[int]:
    """Whole numbers that a launcher has put into the environment; of "4(x2)" or "4,3", the 4."""
    found = [re.match(r"\d+", os.environ.get(name, "")) for name in names]
    wrong = [name for name, match in zip(names, found, strict=True) if not match]
    if wrong:
        was = ", ".join(f"{name} is {os.environ.get(name, 'not set')}" for name in wrong)
        raise UsageError(
            f"in the environment, {was}: expected a whole number; start with torchrun, or export it"
        )
    return [int(match[0]) for match in found if match]


def reseed(*key: int) -> None:
    """Start the random numbers anew from a key such as (seed, epoch, rank).

    What is drawn then depends on the key alone, never on what the process did before: a resumed
    run draws what an unbroken one draws. Text seeds of `random` are hashed: near keys, far seeds.
    """
    seed = random.Random(repr(key)).getrandbits(63)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.3 ms where no GPU is used
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
