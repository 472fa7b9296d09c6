"""What a run writes: one line per step, one summary, and its output."""

import json
import statistics
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.bar import progress_bar
from common.run_folder import explain_write_errors, open_run_folder, write_atomically


@dataclass
class Progress:
    """How far a run has come. A checkpoint holds it beside the weights."""

    epoch: int = 0  # whole epochs that are done
    epoch_step: int = 0  # steps of the epoch after them
    step: int = 0  # optimizer steps of all epochs
    losses: list[float] = field(default_factory=list)  # losses of the unfinished epoch's steps


class Recorder:
    """Counts and times the steps. On rank 0, it also writes metrics.jsonl and summary.json."""

    def __init__(
        self,
        args: Namespace,
        progress: Progress,
        optimizer: Optimizer,
        train_samples: int,
        local_batch: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.args, self.progress, self.optimizer = args, progress, optimizer
        self.is_rank_zero = rank == 0
        self.seconds: list[float] = []  # how long each step took
        self.rates: list[float] = []  # the learning rate of each step
        self.epoch_line = ""  # the line of an epoch, until print_epoch prints it
        self.copied_losses: deque[Any] = deque(maxlen=2)  # on the CPU, and when they got there
        self.ticks: list[Any] = []  # the start of an epoch, and the end of each step
        keys = ("stage", "dataset", "model", "epochs", "seed", "device")
        self.summary = {key: getattr(args, key) for key in keys} | {"world_size": world_size}
        self.summary |= {"train_samples": train_samples}
        self.summary |= {"global_batch": args.batch_size, "local_batch": local_batch}
        if self.is_rank_zero:
            open_run_folder(args, progress.step)
            parts = f"{args.batch_size // local_batch} × {local_batch}"
            print(f"global batch {args.batch_size} = {parts}", flush=True)

    def start_epoch(self, steps: int) -> None:
        """Begin an epoch of so many steps; a resumed run has taken some of them before."""
        done, steps_left = self.progress.epoch_step, self.args.max_steps - self.progress.step
        name, total = f"epoch {self.progress.epoch + 1}/{self.args.epochs}", done + steps_left
        counts = {"total": min(steps, total), "initial": done, "unit": "step"}
        self.bar = progress_bar(name, **counts, shown=self.is_rank_zero)
        self.epoch_steps, self.ticks = steps, [self.tick()]

    def step(self, loss: Tensor | None = None) -> bool:
        """Count and time an optimizer step; return whether it was the last one of --max-steps.

        loss: what the bar shows.
        """
        self.progress.step += 1
        self.progress.epoch_step += 1
        if self.progress.epoch_step == self.epoch_steps:
            self.progress.epoch += 1
            self.progress.epoch_step = 0
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.ticks.append(self.tick())
        self.show_step(loss)
        return self.progress.step >= self.args.max_steps

    def show_step(self, loss: Tensor | None) -> None:
        """Move the bar on; evaluation comes after the last step."""
        if self.bar.update() and loss is not None:  # so it was drawn: at most twice a second
            # Even an old loss's .item() would wait for all steps so far. A copy waits for its own.
            copy = loss.detach().to("cpu", non_blocking=True)
            self.copied_losses.append((copy, self.tick()))
            copy, copied = self.copied_losses[0]  # begun at the drawing before this one
            if self.args.device == "cuda":
                copied.synchronize()
            self.bar.set_postfix_str(f"loss {copy.item():.4f}", refresh=False)
        if self.bar.n == self.bar.total:
            self.bar.set_description("evaluation")

    def tick(self) -> float | torch.cuda.Event:
        if self.args.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the CPU runs ahead of the GPU
        event.record()
        return event

    def seconds_of_steps(self) -> list[float]:
        """Return the seconds of each step since start_epoch, with the loading of its batch."""
        if self.args.device != "cuda":
            return [end - begin for begin, end in pairwise(self.ticks)]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(self.ticks)]

    def write(self, epoch: int, losses: Tensor) -> None:
        """Add a line per step to metrics.jsonl. losses: (steps,), means over global batches."""
        self.bar.close()
        n, samples = len(losses), self.args.batch_size
        self.progress.losses += losses.tolist()
        if not self.is_rank_zero:
            return
        self.seconds += self.seconds_of_steps()
        rows = zip(self.progress.losses[-n:], self.rates[-n:], self.seconds[-n:], strict=True)
        folder = self.args.run_dir
        with explain_write_errors(folder), (folder / "metrics.jsonl").open("a") as log:
            for step, (loss, lr, seconds) in enumerate(rows, self.progress.step - n + 1):
                line = {"epoch": epoch, "step": step, "loss": loss, "lr": lr, "samples": samples}
                log.write(json.dumps(line | {"seconds": round(seconds, 7)}) + "\n")

    def end_epoch(self, epoch: int, losses: Tensor, test_loss: float, accuracy: float) -> None:
        """Add a line per step to metrics.jsonl, and make one for print_epoch."""
        self.write(epoch, losses)
        mean = statistics.fmean(self.progress.losses)
        self.summary |= {"train_loss": mean, "test_loss": test_loss, "test_accuracy": accuracy}
        if self.progress.epoch_step == 0:  # not where --max-steps ended the run inside an epoch
            self.progress.losses = []
        if self.is_rank_zero:
            speed = self.args.batch_size / statistics.median(self.seconds[-len(losses) :])
            self.epoch_line = (
                f"epoch {epoch + 1}/{self.args.epochs}  loss {mean:.4f}  test loss {test_loss:.4f}"
                f"  test accuracy {accuracy:.2%}  {speed:,.0f} samples/s"
            )

    def print_epoch(self) -> None:
        """Print the epoch that has ended: after its save, because a closed pipe ends the run."""
        if self.epoch_line:
            print(self.epoch_line, flush=True)
        self.epoch_line = ""

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
        text = json.dumps(self.summary, indent=2) + "\n"
        write_atomically(self.args.run_dir / "summary.json", text.encode())
        print(f"wrote metrics.jsonl, summary.json and checkpoint.pt to {self.args.run_dir}")
