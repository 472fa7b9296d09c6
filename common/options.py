"""The command line that all stages share, and how a wrong call ends."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic")
MODELS = ("net", "net-bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


class UsageError(ValueError):
    """A wrong call. The text says what arrived, what was expected and what to type."""


@contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """Let these errors end the program in one line, with status 2; a bug keeps its traceback."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        tqdm = sys.modules.get("tqdm")  # without it, there is no bar
        with tqdm.tqdm.external_write_mode() if tqdm else nullcontext():  # erases the bar
            if not isinstance(error, errors):
                raise
            text = str(error).rpartition("UsageError: ")[2]  # a worker sends a whole traceback
            line = " ".join(["error:", *text.split()])
            sys.stderr.write(f"{line}\n")  # in one piece, because other ranks may write at once
            raise SystemExit(2) from None


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Shows the docstring as written and each default; reports a wrong call in one line."""

    def __init__(self, doc: str | None, **options: Any) -> None:
        super().__init__(description=doc, formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists every option)\n")


def bounded(kind: type, noun: str, lowest: float, below: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a number from `lowest` on and less than `below`."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if lowest <= kind(text) < below:
                return kind(text)
        limits = f"at least {lowest}" + (f" and less than {below}" if below < math.inf else "")
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a {noun}, {limits}")

    return parse


def int_at_least(lowest: int, below: int = 10**9) -> Callable[[str], Any]:
    """An argparse type: a whole number, by default below a billion, which suffices for counts."""
    return bounded(int, "whole number", lowest, below)


float_at_least = partial(bounded, float, "number")


def make_parser(stage: str, doc: str | None) -> Parser:
    """Make a parser with the flags of all stages; a stage adds only those that it teaches."""
    parser = Parser(doc)
    real, seed = float_at_least(0, below=1e38), int_at_least(0, below=2**32)
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    add, positive = parser.add_argument, int_at_least(1)
    add("--dataset", default="digits", choices=DATASETS, help="data set to train on")
    add("--data-dir", default=Path("data"), type=Path, help="folder that holds the data sets")
    add("--image-size", default=28, type=positive, help="pixels, for imagefolder and synthetic")
    add("--classes", default=10, type=positive, help="number of classes, for synthetic")
    add("--model", default="net", choices=MODELS, help="network to train")
    add("--epochs", default=10, type=positive, help="passes over the training set")
    steps, loaders = int_at_least(1, below=2**63), int_at_least(0, below=1000)
    add("--max-steps", default=math.inf, type=steps, help="stop after this many optimizer steps")
    add("--batch-size", default=120, type=positive, help="samples per step, of all ranks together")
    add("--lr", default=0.02, type=real, help="learning rate of SGD")
    add("--momentum", default=0.9, type=real, help="momentum of SGD")
    add("--weight-decay", default=0.0, type=real, help="weight decay of SGD")
    add("--workers", default=0, type=loaders, help="loader processes per rank; 0: none")
    add("--seed", default=1234, type=seed, help="for weights, order of the samples, dropout")
    add("--device", default=devices[0], choices=devices, help="cuda: if torch sees a GPU")
    add("--run-dir", default=Path("runs", stage), type=Path, help="folder for the results")
    resume_help = "resume it; auto: the one in --run-dir, if any"
    add("--resume", metavar="PATH|auto", help=resume_help)
    parser.set_defaults(stage=stage)
    return parser
