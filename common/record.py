"""What a run leaves behind: one line a step, one summary, and what it prints on the way."""

import json
import os
import platform
import resource
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from common.options import UsageError

WARM_UP_STEPS = 5  # left out of the medians: first allocations, algorithm choice, bucket layout


def hardware(device: torch.device) -> str:
    """The processor that computes, by its name."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: allocated by torch on a GPU, resident of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:  # getrusage would count what the parent held before this process was born
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Recorder:
    """Times every step, writes the files of the run and prints its progress.

    Several programs may train together: each has a recorder, and only the enabled one writes.
    start: where the run goes on, as `restore` tells it.
    """

    def __init__(
        self,
        args: Namespace,
        device: torch.device,
        world_size: int,
        local_batch: int,
        start: dict,
        enabled: bool = True,
    ) -> None:
        self.args, self.device, self.enabled = args, device, enabled
        self.world_size, self.local_batch = world_size, local_batch
        self.position = {key: start[key] for key in ("epoch", "epoch_step", "step")}
        self.seconds: list[float] = []  # of every step
        self.kept: list[str] | None = None  # the lines of an earlier run that this one continues
        self.results: dict[str, float] = {}
        self.checkpoint = args.run_dir / "checkpoint.pt"
        self.metrics = args.run_dir / "metrics.jsonl"
        if not enabled or args.evaluate:
            return
        try:
            args.run_dir.mkdir(parents=True, exist_ok=True)
            self.metrics.touch()  # what an earlier run left there stays until the first epoch ends
            old = self.metrics.read_text(errors="replace").splitlines(keepends=True)
            self.kept = old[: start["step"]]  # what came after the checkpoint is done again
        except OSError as error:
            why = f"cannot write to --run-dir {args.run_dir} ({error.strerror})"
            raise UsageError(f"{why}: name another folder") from error

    def epochs(self) -> Iterator[int]:
        """The epochs still to do, counted from 0, until --epochs or --max-steps is reached."""
        while self.position["epoch"] < self.args.epochs and not self._at_last_step():
            yield self.position["epoch"]

    def watch(self, loader: DataLoader) -> Iterator:
        """The batches of one epoch; the time from one to the next is the time of a step."""
        ticks = [self._tick()]
        for batch in tqdm(loader, disable=None if self.enabled else True, leave=False, unit="step"):
            yield batch  # the training step runs while this line waits
            ticks.append(self._tick())
            self.position["step"] += 1
            self.position["epoch_step"] += 1
            if self._at_last_step():
                break
        if self.position["epoch_step"] == len(loader):
            self.position.update(epoch=self.position["epoch"] + 1, epoch_step=0)
        self.seconds += _spans(ticks)

    def end_epoch(self, epoch: int, losses: Tensor, test_loss: float, test_accuracy: float) -> None:
        """Write a line a step, print a line an epoch. losses: (steps,), means of global batches."""
        values = losses.tolist()  # once an epoch: it waits for the GPU
        seconds = self.seconds[-len(values) :]
        self.results = {
            "train_loss": statistics.fmean(values),
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
        }
        if not self.enabled:
            return
        same = {"lr": self.args.lr, "samples": self.args.batch_size}
        if self.kept is not None:
            self.metrics.write_text("".join(self.kept))
            self.kept = None
        first = self.position["step"] - len(values) + 1
        with self.metrics.open("a") as file:
            for step, (loss, span) in enumerate(zip(values, seconds, strict=True), first):
                line = {
                    "epoch": epoch,
                    "step": step,
                    "loss": loss,
                    **same,
                    "seconds": round(span, 7),
                }
                file.write(json.dumps(line) + "\n")
        print(
            f"epoch {epoch + 1}/{self.args.epochs}  loss {self.results['train_loss']:.4f}"
            f"  test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}"
            f"  {self.args.batch_size / statistics.median(seconds):,.0f} samples/s",
            flush=True,
        )

    def end_evaluation(self, test_loss: float, test_accuracy: float) -> None:
        if self.enabled:
            print(f"test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}")

    def finish(self, memory: list[int]) -> None:
        """Write the summary. memory: the peak of every GPU or process, in bytes."""
        if not self.enabled:
            return
        if not self.seconds:
            print(f"nothing to train: {self.position['epoch']} epochs are done; try more --epochs")
            return
        args, on_gpu = self.args, self.device.type == "cuda"
        steps = sorted(self.seconds[WARM_UP_STEPS:] or self.seconds)
        step = statistics.median(steps)
        summary = {
            **{key: getattr(args, key) for key in ("stage", "dataset", "model", "epochs", "seed")},
            "device": self.device.type,
            "world_size": self.world_size,
            "global_batch": args.batch_size,
            "local_batch": self.local_batch,
            "steps": self.position["step"],
            "samples_per_second": round(args.batch_size / step, 1),
            "step_ms": round(step * 1000, 4),
            "step_ms_quartiles": [round(steps[len(steps) * k // 4] * 1000, 4) for k in (1, 3)],
            "peak_memory_bytes": memory,
            "memory_source": "torch.cuda.max_memory_allocated" if on_gpu else "peak resident set",
            **self.results,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "python": platform.python_version(),
            "hardware": hardware(self.device),
        }
        (args.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"wrote metrics.jsonl, summary.json and checkpoint.pt to {args.run_dir}", flush=True)

    def _at_last_step(self) -> bool:
        return self.args.max_steps is not None and self.position["step"] >= self.args.max_steps

    def _tick(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the host runs ahead: the GPU keeps the time
        event.record()
        return event


def _spans(ticks: list) -> list[float]:
    """The seconds between neighbouring ticks."""
    if isinstance(ticks[0], float):
        return [after - before for before, after in pairwise(ticks)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(ticks)]
