"""What a run writes: one line per step, one summary, and its output."""

import json
import os
import platform
import re
import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.options import UsageError


def hardware(device: torch.device) -> str:
    """The name of the GPU or CPU that computes."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated by torch on a GPU; resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


class Recorder:
    """Times each step. On rank 0, it also writes metrics.jsonl and summary.json, and prints."""

    def __init__(
        self,
        args: Namespace,
        optimizer: Optimizer,
        saved: dict,  # the checkpoint that the run resumes from, or FRESH
        local_batch: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.args, self.optimizer, self.enabled = args, optimizer, rank == 0
        self.epoch, self.epoch_step, self.step = saved["epoch"], saved["epoch_step"], saved["step"]
        self.losses: list[float] = list(saved["losses"])  # of each step of an unfinished epoch
        self.seconds: list[float] = []  # of each step
        self.rates: list[float] = []  # the learning rate of each step
        self.metrics, self.mode, self.kept = args.run_dir / "metrics.jsonl", "w", ""
        keys = ("stage", "dataset", "model", "epochs", "seed", "device")
        self.summary = {key: getattr(args, key) for key in keys} | {"world_size": world_size}
        self.summary |= {"global_batch": args.batch_size, "local_batch": local_batch}
        if args.evaluate or not self.enabled:
            return
        try:
            args.run_dir.mkdir(parents=True, exist_ok=True)
            self.metrics.touch()  # the first epoch replaces the content of an earlier run
            if "path" in saved and saved["path"].resolve().parent == args.run_dir.resolve():
                lines = self.metrics.read_text().splitlines(keepends=True)
                self.kept = "".join(lines[: self.step])  # later steps are repeated
        except OSError as error:
            raise UsageError(f"cannot write to --run-dir ({error}): name another one") from error
        print(f"global batch {args.batch_size} = {args.batch_size // local_batch} × {local_batch}")

    def timed(self, batches: Iterable, steps: int) -> Iterator:
        """The same batches, timed. steps: how many a whole epoch has."""
        ticks: list[Any] = [self._tick()]
        for batch in batches:
            self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
            yield batch  # the training step runs during this line
            ticks.append(self._tick())
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        if self.epoch_step == steps:
            self.epoch, self.epoch_step = self.epoch + 1, 0
        if self.args.device == "cuda":
            torch.cuda.synchronize()
            self.seconds += [a.elapsed_time(b) / 1000 for a, b in pairwise(ticks)]
        else:
            self.seconds += [b - a for a, b in pairwise(ticks)]

    def write(self, epoch: int, losses: Tensor) -> None:
        """Write one line per step. losses: (steps,), means over global batches."""
        n, samples = len(losses), self.args.batch_size
        self.losses += losses.tolist()  # not in each step: the CPU would wait for the GPU
        if not self.enabled:
            return
        rows = zip(self.losses[-n:], self.rates[-n:], self.seconds[-n:], strict=True)
        with self.metrics.open(self.mode) as file:
            file.write(self.kept)
            self.mode, self.kept = "a", ""
            for step, (loss, lr, seconds) in enumerate(rows, self.step - n + 1):
                line = {"epoch": epoch, "step": step, "loss": loss, "lr": lr, "samples": samples}
                file.write(json.dumps(line | {"seconds": round(seconds, 7)}) + "\n")

    def end_epoch(self, epoch: int, losses: Tensor, test_loss: float, accuracy: float) -> None:
        """Write one line per step, print one per epoch."""
        self.write(epoch, losses)
        mean = statistics.fmean(self.losses)
        self.summary |= {"train_loss": mean, "test_loss": test_loss, "test_accuracy": accuracy}
        if self.epoch_step == 0:  # else --max-steps has ended the run inside the epoch
            self.losses = []
        if self.enabled:
            speed = self.args.batch_size / statistics.median(self.seconds[-len(losses) :])
            print(
                f"epoch {epoch + 1}/{self.args.epochs}  loss {mean:.4f}  test loss {test_loss:.4f}"
                f"  test accuracy {accuracy:.2%}  {speed:,.0f} samples/s",
                flush=True,
            )

    def end_evaluation(self, test_loss: float, accuracy: float) -> None:
        if self.enabled:
            print(f"test loss {test_loss:.4f}  test accuracy {accuracy:.2%}")

    def finish(self, device: torch.device, peaks: list[int]) -> None:
        """Write the summary. peaks: the peak memory of each GPU or process, in bytes."""
        if self.enabled and not self.seconds:
            print(f"nothing to train: step {self.step} is done; try more --epochs or --max-steps")
        if not self.enabled or not self.seconds:
            return
        steps = sorted(self.seconds[5:] or self.seconds)  # the first steps allocate memory
        low, median, high = (1000 * steps[len(steps) * k // 4] for k in (1, 2, 3))  # ms
        self.summary |= {
            "steps": self.step,
            "samples_per_second": round(1000 * self.args.batch_size / median, 1),
            "step_ms": round(median, 4),
            "step_ms_quartiles": [round(low, 4), round(high, 4)],
            "peak_memory_bytes": peaks,
            "torch": torch.__version__,
            "hardware": hardware(device),
        }
        (self.args.run_dir / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        print(f"wrote metrics.jsonl, summary.json and checkpoint.pt to {self.args.run_dir}")

    def _tick(self) -> float | torch.cuda.Event:
        if self.args.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the CPU runs ahead of the GPU
        event.record()
        return event
