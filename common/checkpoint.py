"""Checkpoints: tensors and plain values, the same in every stage."""

import pickle
from argparse import Namespace
from pathlib import Path

import torch
from torch.nn import Module
from torch.optim import Optimizer

from common.options import UsageError
from common.record import Recorder

FRESH = {"epoch": 0, "epoch_step": 0, "step": 0, "losses": []}  # a new run starts here


def save_checkpoint(recorder: Recorder, model: Module, optimizer: Optimizer, **more: dict) -> None:
    """Write RUN-DIR/checkpoint.pt. model: the plain one, so that no name starts with `module.`"""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}
    state |= {key: getattr(recorder, key) for key in ("summary", *FRESH)}
    path = recorder.args.run_dir / "checkpoint.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # atomic: a crash leaves the old one or the new one


def load_checkpoint(args: Namespace, model: Module, optimizer: Optimizer) -> dict:
    """Load the file of --resume or --evaluate. Returns its content, or FRESH without a file."""
    path = args.evaluate or args.resume
    if path == "auto":
        path = args.run_dir / "checkpoint.pt"
    if path is None or (args.resume == "auto" and not path.exists()):
        return FRESH
    try:  # weights_only: a pickled object could run any code while it is being loaded
        state = torch.load(path, map_location="cpu", weights_only=True)
        for flag in ("model", "dataset"):
            if state["summary"][flag] != getattr(args, flag):
                raise UsageError(f"{path} was saved with --{flag} {state['summary'][flag]}")
        if state["epoch_step"] and not args.evaluate:
            raise UsageError(
                f"{path} was saved inside an epoch: resume it with beyond/survive/train.py"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path} is not a checkpoint: it holds more than plain values") from error
    except (OSError, RuntimeError, TypeError, KeyError, EOFError) as error:
        raise UsageError(f"cannot load {path} ({error}): use one that a stage saved") from error
    for group in optimizer.param_groups:  # the flags of this call win
        group.update(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    return state | {"path": Path(path)}
