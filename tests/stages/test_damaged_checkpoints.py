"""A checkpoint that was cut off, or holds something else, is refused in one line."""

import io
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from common.checkpoint import read_checkpoint
from common.data import load_dataset
from common.models import build_model
from common.options import UsageError
from helpers.refusals import assert_one_line, refusal, seal
from local_ranks.train_stage import FP32, ONE_EPOCH, options, train_once

ARGS = options(*ONE_EPOCH)
DIGITS = load_dataset(ARGS)[0]
NUMBER = 100  # places where a file is cut off


@cache
def good_file() -> bytes:
    run = train_once("01", 1, *ONE_EPOCH, "--max-steps=3", **FP32)
    return (run.folder / "checkpoint.pt").read_bytes()


def state_of(content: bytes) -> dict:
    return torch.load(io.BytesIO(content), weights_only=True)


def load(path: Path) -> list:
    """What `--resume` takes from the file: weights, momenta, and how far the run had come."""
    model = build_model(ARGS.model, DIGITS)
    optimizer = SGD(model.parameters(), ARGS.lr, ARGS.momentum)
    progress, summary = read_checkpoint(path, ARGS, model, optimizer)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    tensors = [*model.state_dict().values(), *momenta]
    return [progress, summary, *(tensor.tolist() for tensor in tensors)]


def truncated(content: bytes) -> Iterator[bytes]:
    numbers = random.Random(1)
    for _ in range(NUMBER):
        yield content[: numbers.randrange(len(content))]


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    """The control is the whole file."""
    path, refusals = tmp_path / "checkpoint.pt", 0
    path.write_bytes(good_file())
    load(path)
    for content in truncated(good_file()):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="cannot load"):
            load(path)
        refusals += 1
    assert refusals == NUMBER


def with_part(name: str, **values: Any) -> Callable[[dict], dict]:
    """Replace values of a part of the checkpoint."""
    return lambda saved: saved | {name: saved[name] | values}


OURS, ADAMW = "use one that a stage saved", AdamW([torch.zeros(1)]).state_dict()
FOREIGN = {  # what becomes of a checkpoint, and what the line says
    "a list": (lambda saved: [1], OURS),
    "a list of optimizers": (lambda saved: saved | {"optimizer": [1]}, OURS),
    "of AdamW": (
        lambda saved: saved | {"optimizer": ADAMW},
        "another optimizer, without dampening, momentum, nesterov",
    ),
    "no state": (with_part("optimizer", state=None), OURS),
    "no model": (lambda saved: saved | {"model": None}, OURS),
    "other sizes": (
        with_part("model", **{"fc2.weight": torch.zeros(7, 50)}),
        "size mismatch for fc2.weight",
    ),
    "no summary": (lambda saved: saved | {"summary": None}, OURS),
    "another network": (with_part("summary", model="net"), "was saved with --model net$"),
    "another data set": (
        with_part("summary", dataset="cifar10"),
        "was saved with --dataset cifar10$",
    ),
}


@pytest.mark.parametrize(("change", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused(change, words, tmp_path):
    path, saved = tmp_path / "checkpoint.pt", state_of(good_file())
    torch.save(saved, path)
    load(path)  # the control
    torch.save(change(saved), path)
    with pytest.raises(UsageError, match=words):
        load(path)


def test_only_survive_resumes_a_checkpoint_that_was_saved_inside_an_epoch(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(good_file())
    line = refusal("01", *ONE_EPOCH, f"--resume={path}")
    assert_one_line(line, "saved inside an epoch of 01_single_gpu: resume it with beyond/survive/")


def test_survive_refuses_a_foreign_state_although_its_checksum_is_right(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(good_file())
    seal(path)
    line = refusal("survive", "--model=net", f"--resume={path}")
    assert_one_line(line, "checkpoint.pt was saved with --model net-bn")
