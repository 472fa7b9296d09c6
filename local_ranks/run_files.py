"""What a run of a stage has left behind, read back."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in their order, one for each step; a run may be writing just now.

    A resumed run takes some steps again. So a line replaces those before it that are of its step or
    of a later one. What a crash has damaged is left out.
    """
    file = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    for text in file.read_text(errors="replace").splitlines() if file.exists() else ():
        if line := parse_line(text):
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
    return lines


def parse_line(text: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None if it is damaged."""
    with suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            return line
    return None


@dataclass(frozen=True)
class Run:
    """What a run of a stage left behind: files, each rank's last weights, what rank 0 printed."""

    folder: Path
    states: list[dict[str, torch.Tensor]]
    output: str

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder)

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor([line["loss"] for line in self.metrics], dtype=torch.float64)

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def checkpoint(self) -> dict:
        return torch.load(self.folder / "checkpoint.pt", weights_only=True)


def same_weights(a: Run, b: Run) -> bool:
    """Did two runs end with the same bits of weights, buffers and momenta?"""

    def result(run: Run) -> list:
        saved = run.checkpoint
        momenta = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
        tensors = [*saved["model"].values(), *momenta]
        return [saved["step"], saved.get("scaler"), *(tensor.tolist() for tensor in tensors)]

    return result(a) == result(b)


def same_run(a: Run, b: Run) -> bool:
    """Did two runs log the same steps and end with the same bits?"""
    logs = [[(line["step"], line["lr"], line["loss"]) for line in run.metrics] for run in (a, b)]
    return logs[0] == logs[1] and same_weights(a, b)
