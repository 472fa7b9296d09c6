"""Checkpoints: tensors and plain values only, the same in every stage."""

import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path

import torch
from torch import nn

from common.options import UsageError
from common.record import Recorder


def save_checkpoint(
    recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, **more: object
) -> None:
    """Write the run's checkpoint under another name, then rename: a kill leaves the old one whole.

    model: the plain one, without any wrapper, so that no name gains a `module.` prefix.
    """
    options = vars(recorder.args).items()
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in options},
        **recorder.position,
        **more,
    }
    unfinished = recorder.checkpoint.with_suffix(".tmp")
    torch.save(content, unfinished)
    os.replace(unfinished, recorder.checkpoint)


def read_checkpoint(path: Path) -> dict:
    """The content of a checkpoint, on the CPU; UsageError if it is missing, torn, or not ours.

    weights_only=True: a pickled object could run any code while it is being loaded.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}: a run writes RUN-DIR/checkpoint.pt")
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not compare the checksums inside
            raise ValueError("a checksum does not fit")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors and plain values, or is damaged: not loaded, since "
            "loading such a file can run any code; use one that a stage has written"
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise UsageError(
            f"{path} is cut off or damaged: use another, or start without it"
        ) from error
    keys = {"model", "optimizer", "options", "epoch", "epoch_step", "step"}
    if not isinstance(content, dict) or not keys <= set(content):
        raise UsageError(f"{path} is not a checkpoint of this project: use one a stage has written")
    return content


def restore(args: Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Load what --evaluate or --resume names; return its content; if none, a fresh start.

    The learning rate, momentum and weight decay of this call win over the saved ones.
    """
    path = args.evaluate or (None if args.resume is None else Path(args.resume))
    if args.resume == "auto":
        path = args.run_dir / "checkpoint.pt"
    if path is None or (args.resume == "auto" and not path.exists()):
        return {"epoch": 0, "epoch_step": 0, "step": 0}
    content = read_checkpoint(path)
    for flag in ("model", "dataset"):
        saved, wanted = content["options"].get(flag), getattr(args, flag)
        if saved != wanted:
            raise UsageError(f"{path} has --{flag} {saved}, this call --{flag} {wanted}: use one")
    try:
        model.load_state_dict(content["model"])
        if not args.evaluate:
            optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} does not fit --model {args.model} on this data: same --classes, --image-size?"
        ) from error
    if content["epoch_step"] and not args.evaluate:
        raise UsageError(
            f"{path} was written inside an epoch, where --max-steps ended the run: "
            "go on from one that was written at the end of an epoch"
        )
    for group in optimizer.param_groups:
        group.update(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    return content
