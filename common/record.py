"""What a run writes: one line per step, one summary, and its output."""

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.options import UsageError


@dataclass
class Progress:
    """How far a run has come. A checkpoint holds it beside the weights."""

    epoch: int = 0  # whole epochs that are done
    epoch_step: int = 0  # steps of the epoch after them
    step: int = 0  # optimizer steps of all epochs
    losses: list[float] = field(default_factory=list)  # of the unfinished epoch's steps


class Recorder:
    """Counts and times the steps. On rank 0, it also writes metrics.jsonl and summary.json."""

    def __init__(
        self,
        args: Namespace,
        progress: Progress,
        optimizer: Optimizer,
        local_batch: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.args, self.progress, self.optimizer = args, progress, optimizer
        self.is_rank_zero = rank == 0
        self.seconds: list[float] = []  # how long each step took
        self.rates: list[float] = []  # the learning rate of each step
        self.metrics = args.run_dir / "metrics.jsonl"
        keys = ("stage", "dataset", "model", "epochs", "seed", "device")
        self.summary = {key: getattr(args, key) for key in keys} | {"world_size": world_size}
        self.summary |= {"global_batch": args.batch_size, "local_batch": local_batch}
        if args.evaluate or not self.is_rank_zero:
            return
        try:
            args.run_dir.mkdir(parents=True, exist_ok=True)
            self.metrics.write_text("".join(self.old_lines()))
        except OSError as error:
            raise UsageError(f"cannot write to --run-dir ({error}): name another one") from error
        print(f"global batch {args.batch_size} = {args.batch_size // local_batch} × {local_batch}")

    def old_lines(self) -> list[str]:
        """The steps before the checkpoint, if it is one of this --run-dir; else none."""
        resume, folder = self.args.resume, self.args.run_dir
        if resume is None or not self.metrics.exists():
            return []
        if resume != "auto" and Path(resume).resolve().parent != folder.resolve():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        whole = (line for line in lines if line.endswith("\n"))  # a crash can cut the last one
        return [line for line in whole if json.loads(line)["step"] <= self.progress.step]

    def timed(self, batches: Any, epoch_steps: int | None = None) -> Iterator:
        """The same batches, at most to --max-steps, each timed while its training step runs.

        epoch_steps: how many a whole epoch has, if batches is no loader that knows its length.
        """
        progress = self.progress
        ticks: list[Any] = [self.tick()]
        for batch in islice(batches, self.args.max_steps - progress.step):
            progress.step += 1
            progress.epoch_step += 1
            yield batch  # the training step runs during this line
            ticks.append(self.tick())
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        if progress.epoch_step == (epoch_steps or len(batches)):
            progress.epoch += 1
            progress.epoch_step = 0
        if self.args.device == "cuda":
            torch.cuda.synchronize()
            self.seconds += [a.elapsed_time(b) / 1000 for a, b in pairwise(ticks)]
        else:
            self.seconds += [b - a for a, b in pairwise(ticks)]

    def tick(self) -> float | torch.cuda.Event:
        if self.args.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the CPU runs ahead of the GPU
        event.record()
        return event

    def write(self, epoch: int, losses: Tensor) -> None:
        """Write one line per step. losses: (steps,), means over global batches."""
        n, samples = len(losses), self.args.batch_size
        self.progress.losses += losses.tolist()  # here, the CPU waits for the GPU
        if not self.is_rank_zero:
            return
        rows = zip(self.progress.losses[-n:], self.rates[-n:], self.seconds[-n:], strict=True)
        with self.metrics.open("a") as file:
            for step, (loss, lr, seconds) in enumerate(rows, self.progress.step - n + 1):
                line = {"epoch": epoch, "step": step, "loss": loss, "lr": lr, "samples": samples}
                file.write(json.dumps(line | {"seconds": round(seconds, 7)}) + "\n")

    def end_epoch(self, epoch: int, losses: Tensor, test_loss: float, accuracy: float) -> None:
        """Write one line per step, print one per epoch."""
        self.write(epoch, losses)
        mean = statistics.fmean(self.progress.losses)
        self.summary |= {"train_loss": mean, "test_loss": test_loss, "test_accuracy": accuracy}
        if self.progress.epoch_step == 0:  # otherwise --max-steps has ended it inside
            self.progress.losses = []
        if self.is_rank_zero:
            speed = self.args.batch_size / statistics.median(self.seconds[-len(losses) :])
            print(
                f"epoch {epoch + 1}/{self.args.epochs}  loss {mean:.4f}  test loss {test_loss:.4f}"
                f"  test accuracy {accuracy:.2%}  {speed:,.0f} samples/s",
                flush=True,
            )

    def print_evaluation(self, test_loss: float, accuracy: float) -> None:
        if self.is_rank_zero:
            print(f"test loss {test_loss:.4f}  test accuracy {accuracy:.2%}")

    def finish(self) -> None:
        """Write the summary."""
        if not self.is_rank_zero:
            return
        if not self.seconds:
            done = f"nothing to train: step {self.progress.step} is done"
            print(f"{done}; try more --epochs or --max-steps")
            return
        steps = sorted(self.seconds[5:] or self.seconds)  # the first steps allocate memory
        low, median, high = (1000 * steps[len(steps) * k // 4] for k in (1, 2, 3))  # ms
        self.summary |= {
            "steps": self.progress.step,
            "samples_per_second": round(1000 * self.args.batch_size / median, 1),
            "step_ms": round(median, 4),
            "step_ms_quartiles": [round(low, 4), round(high, 4)],
            "torch": torch.__version__,
        }
        (self.args.run_dir / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        print(f"wrote metrics.jsonl, summary.json and checkpoint.pt to {self.args.run_dir}")
