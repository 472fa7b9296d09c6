"""Checkpoints: tensors and plain values only, the same in every stage, never half written."""

import hashlib
import os
import pickle
import signal
from argparse import Namespace
from io import BytesIO
from pathlib import Path

import torch
from torch import nn

from common.options import UsageError
from common.record import Recorder, before

MARK = b"\nsha256 "  # the last line of a checkpoint; torch.load reads no further than its own end
END = len(MARK) + 64  # bytes


class StopSignal:
    """SIGTERM asks for an end: SLURM and Kubernetes send it, and SIGKILL some seconds later."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def save_checkpoint(
    recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, **more: object
) -> None:
    """Write the run's checkpoint and keep the one before; a kill at any moment leaves a whole one.

    model: the plain one, without any wrapper, so that no name gains a `module.` prefix.
    """
    options = vars(recorder.args).items()
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in options},
        "ranks": recorder.world_size,
        "losses": recorder.losses,
        **recorder.position,
        **more,
    }
    buffer = BytesIO()
    torch.save(content, buffer)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(MARK + digest.encode())
    path, unfinished = recorder.checkpoint, recorder.checkpoint.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())  # on disk before it gets its name, or a power cut leaves zeros
        if path.exists():
            path.replace(before(path))
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path} ({error.strerror}); the ones before are whole: make room, then "
            "--resume auto"
        ) from error


def read_checkpoint(path: Path) -> dict:
    """The content of a checkpoint, on the CPU; UsageError if it is missing, torn, or not ours.

    weights_only=True: a pickled object could run any code while it is being loaded.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"no checkpoint at {path} ({error.strerror}): a run writes RUN-DIR/checkpoint.pt"
        ) from error
    body, end = data[:-END], data[-END:]
    if end != MARK + hashlib.sha256(body).hexdigest().encode():
        other = before(path) if before(path).exists() else "another"
        raise UsageError(
            f"{path} is cut off, damaged, or not written by a stage (its checksum does not fit): "
            f"use {other}, or start without it"
        )
    try:
        content = torch.load(BytesIO(body), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(
            f"{path} holds more than tensors and plain values: not loaded, since loading such a "
            "file can run any code; use one that a stage has written"
        ) from error
    keys = {"model", "optimizer", "options", "ranks", "epoch", "epoch_step", "step"}
    if not isinstance(content, dict) or not keys <= set(content):
        raise UsageError(f"{path} is not a checkpoint of this project: use one a stage has written")
    return {**content, "path": path, "notes": []}


def read_latest(path: Path) -> dict | None:
    """The run's checkpoint; if it is damaged or missing, the one before; None if there is none."""
    if not path.exists() and not before(path).exists():
        return None
    try:
        return read_checkpoint(path)
    except UsageError as error:
        try:
            content = read_checkpoint(before(path))
        except UsageError:
            raise error from None
        note = f"{error}\ngoing on from {content['path']}, at step {content['step']}"
        return {**content, "notes": [note]}


def restore(args: Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Load what --evaluate or --resume names; return its content; if none, a fresh start.

    Its `lr` tells the optimiser's learning rate, now and later: a stage may change it on the way.
    The learning rate, momentum and weight decay of this call win over the saved ones.
    """
    path, lr = args.evaluate or args.resume, lambda: optimizer.param_groups[0]["lr"]
    if path == "auto":
        content = read_latest(args.run_dir / "checkpoint.pt")
    else:
        content = None if path is None else read_checkpoint(Path(path))
    if content is None:
        return {"epoch": 0, "epoch_step": 0, "step": 0, "lr": lr}
    saved, path, same = content["options"], content["path"], ["model", "dataset"]
    if content["epoch_step"] and not args.evaluate:  # the rest of an epoch needs its very order
        same += ["batch_size", "seed"]
        if saved.get("world_size") != getattr(args, "world_size", None):  # a flag of 03's shards
            raise UsageError(
                f"{path} was written inside an epoch by {saved['stage']}, which deals the samples "
                "in another order than this call: go on as there, and end the epoch first"
            )
    for flag in same:
        if saved.get(flag) != getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(
                f"{path} has {name} {saved.get(flag)}, this call {name} {getattr(args, flag)}: "
                "use one"
            )
    try:
        model.load_state_dict(content["model"])
        if not args.evaluate:
            optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} does not fit --model {args.model} on this data: same --classes, --image-size?"
        ) from error
    for group in optimizer.param_groups:
        group.update(lr=args.lr, initial_lr=args.lr)
        group.update(momentum=args.momentum, weight_decay=args.weight_decay)
    return {**content, "lr": lr}


def refuse_other_start(start: dict, first_step: int) -> None:
    """UsageError if this process would go on from another step than the first of them does."""
    if start["step"] != first_step:
        raise UsageError(
            f"--resume would go on from step {start['step']} here, from {first_step} on rank 0: "
            "put --run-dir on a disk that all machines share"
        )
