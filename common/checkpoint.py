"""Checkpoints: tensors and plain values, the same in every stage."""

import io
import pickle
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from common.options import UsageError
from common.record import Progress, Recorder
from common.run_folder import write_atomically


def checkpoint_state(
    recorder: Recorder, model: Module, optimizer: Optimizer, **more: Any
) -> dict[str, Any]:
    """Return a checkpoint's content. more: other objects with a state_dict, such as scaler."""
    parts = {"model": model, "optimizer": optimizer, **more}
    state = {name: part.state_dict() for name, part in parts.items()}
    return state | {"summary": recorder.summary, **asdict(recorder.progress)}


def save_checkpoint(recorder: Recorder, model: Module, optimizer: Optimizer, **more: Any) -> None:
    """Write RUN-DIR/checkpoint.pt, and only then print what the epoch has brought.

    model: the plain one, so that no name begins with `module.`
    """
    content = io.BytesIO()
    torch.save(checkpoint_state(recorder, model, optimizer, **more), content)
    write_atomically(recorder.args.run_dir / "checkpoint.pt", content.getbuffer())
    recorder.print_epoch()


def load_checkpoint(args: Namespace, model: Module, optimizer: Optimizer, **more: Any) -> Progress:
    """Load the file of --resume, if any; returns how far its run had come."""
    if args.resume is None:
        return Progress()
    path = args.run_dir / "checkpoint.pt" if args.resume == "auto" else Path(args.resume)
    if args.resume == "auto" and not path.exists():
        return Progress()
    progress, saved = read_checkpoint(path, args, model, optimizer, **more)
    if progress.epoch_step:
        cure = "resume it with beyond/survive/train.py, or train again without --max-steps"
        raise UsageError(f"{path} was saved inside an epoch of {saved['stage']}: {cure}")
    return progress


def read_checkpoint(
    path: Path, args: Namespace, model: Module, optimizer: Optimizer, **more: Any
) -> tuple[Progress, dict]:
    """Load the file into model, optimizer and the others; returns its progress and summary."""
    try:
        # weights_only: a pickled object could run any code while it is being loaded
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
        for flag in ("model", "dataset"):
            if state["summary"][flag] != getattr(args, flag):
                raise UsageError(f"{path} was saved with --{flag} {state['summary'][flag]}")
        model.load_state_dict(state["model"])
        saved_group = state["optimizer"]["param_groups"][0]
        if missing := optimizer.param_groups[0].keys() - saved_group.keys():
            raise ValueError(f"another optimizer, without {', '.join(sorted(missing))}")
        optimizer.load_state_dict(state["optimizer"])
        for name, part in more.items():
            if state.get(name):  # stages 01 to 04 have no loss scaler
                part.load_state_dict(state[name])
        progress = Progress(**{field.name: state[field.name] for field in fields(Progress)})
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} is not a checkpoint: expected only tensors and plain values"
        ) from error
    except Exception as error:  # whatever a damaged or foreign file makes zipfile and torch raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot load {path} ({why}): use one that a stage saved") from error
    for group in optimizer.param_groups:  # the flags of this call win
        flags = ("lr", "momentum", "weight_decay")  # AdamW has no momentum
        group.update({flag: getattr(args, flag) for flag in flags if flag in group})
    return progress, state["summary"]
