"""A damaged checkpoint loads as it was saved, or not at all: then its line says that it is damaged.

Cut off, with a flipped bit, in the format before torch 1.6, or with something else in it.
"""

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
NUMBER = 100  # damages of each kind


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


def with_part(name: str, **values: Any) -> Callable[[dict], dict]:
    """Replace values of a part of the checkpoint."""
    return lambda saved: saved | {name: saved[name] | values}


OURS, ADAMW = "use one that a stage saved", AdamW([torch.zeros(1)]).state_dict()
FOREIGN = {  # what becomes of a checkpoint, and what the line says
    "a list": (lambda saved: [1], OURS),
    "a tensor": (lambda saved: torch.zeros(3), OURS),
    "a list of optimizers": (lambda saved: saved | {"optimizer": [1]}, OURS),
    "of AdamW": (
        lambda saved: saved | {"optimizer": ADAMW},
        "another optimizer, expected one with dampening, momentum, nesterov",
    ),
    "no state": (with_part("optimizer", state=None), OURS),
    "a list of states": (with_part("optimizer", state=[1]), OURS),
    "numbers": (with_part("optimizer", param_groups=[3]), OURS),
    "no model": (lambda saved: saved | {"model": None}, OURS),
    "a list of models": (lambda saved: saved | {"model": [1]}, OURS),
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
