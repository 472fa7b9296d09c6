"""A damaged checkpoint loads as it was saved, or not at all: then its line says that it is damaged.

Cut off, with a flipped bit, in the format before torch 1.6, or with the state of something else.
"""

import io
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW

from common.checkpoint import read_checkpoint
from common.data import load_dataset
from common.models import build_model
from common.options import UsageError
from helpers.refusals import assert_one_line, refusal
from local_ranks.train_stage import FP32, ONE_EPOCH, options, train_once

ARGS = options(*ONE_EPOCH)
DIGITS = load_dataset(ARGS)[0]
NUMBER = 300  # damages of each kind


@cache
def good_file() -> bytes:
    run = train_once("01", 1, *ONE_EPOCH, "--max-steps=3", **FP32)
    return (run.folder / "checkpoint.pt").read_bytes()


def state_of(content: bytes) -> dict:
    return torch.load(io.BytesIO(content), weights_only=True)


@cache
def old_file() -> bytes:
    """Convert good_file() to the format before torch 1.6, which has no checksums."""
    file = io.BytesIO()
    torch.save(state_of(good_file()), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


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


def flipped(content: bytes) -> Iterator[bytes]:
    """A bit anywhere; every other time, one of the last bytes, where a zip file has its table."""
    numbers = random.Random(2)
    for number in range(NUMBER):
        first = len(content) - 4000 if number % 2 else 0
        damaged = bytearray(content)
        damaged[numbers.randrange(first, len(content))] ^= 1 << numbers.randrange(8)
        yield bytes(damaged)


@pytest.mark.parametrize("damage", [truncated, flipped])
@pytest.mark.parametrize("file", [good_file, old_file])
def test_a_damaged_file_loads_as_it_was_saved_or_is_refused(file, damage, tmp_path):
    """It may be whole all the same: some bytes of a zip file are only padding."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(good_file())
    saved, refusals = load(path), []
    for content in damage(file()):
        path.write_bytes(content)
        try:
            assert load(path) == saved
        except UsageError as error:
            refusals.append(str(error))
    assert NUMBER / 2 < len(refusals) <= NUMBER
    assert all(line.startswith(f"cannot load {path} (") for line in refusals)


def test_torch_itself_loads_a_flipped_bit_of_a_weight_and_a_stage_refuses_it(tmp_path):
    """The reader of torch compares no checksums, which is why ours does."""
    weight = state_of(good_file())["model"]["fc1.weight"]
    content = bytearray(good_file())
    content[content.index(weight.numpy().tobytes()) + 2] ^= 1
    assert (state_of(bytes(content))["model"]["fc1.weight"] != weight).sum() == 1
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    for call in (f"01 --resume={path}", f"01_single_gpu/evaluate.py {path} --device=cpu"):
        line = refusal(*call.split(), "--model=net-bn")
        assert_one_line(line, f"cannot load {path} (BadZipFile: ", "is damaged): use one that a s")


def of_another_optimizer() -> dict:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = AdamW([parameter])
    optimizer.step()
    return optimizer.state_dict()


FOREIGN = {  # what becomes of a checkpoint
    "a list of optimizers": lambda saved: saved | {"optimizer": [1]},
    "of another class": lambda saved: saved | {"optimizer": of_another_optimizer()},
    "no state": lambda saved: saved | {"optimizer": saved["optimizer"] | {"state": None}},
    "a list of states": lambda saved: saved | {"optimizer": saved["optimizer"] | {"state": [1]}},
    "numbers": lambda saved: saved | {"optimizer": saved["optimizer"] | {"param_groups": [3]}},
    "no model": lambda saved: saved | {"model": None},
    "a list of models": lambda saved: saved | {"model": [1]},
    "no summary": lambda saved: saved | {"summary": None},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_state_is_refused(kind, tmp_path):
    path, saved = tmp_path / "checkpoint.pt", state_of(good_file())
    torch.save(saved, path)
    load(path)  # the control
    torch.save(FOREIGN[kind](saved), path)
    with pytest.raises(UsageError, match=r"use one that a stage saved|has another optimizer"):
        load(path)
