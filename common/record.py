"""What a run leaves behind: one line a step, one summary, and what it prints on the way."""

import json
import os
import platform
import resource
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from common.data import start_epoch
from common.options import UsageError, reseed

WARM_UP_STEPS = 5  # left out of the medians: first allocations, algorithm choice, bucket layout


def before(checkpoint: Path) -> Path:
    """Where the checkpoint before this one is kept."""
    return checkpoint.with_name(f"{checkpoint.stem}.before{checkpoint.suffix}")


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
        self.lr: Callable[[], float] = start["lr"]
        self.position = {key: start[key] for key in ("epoch", "epoch_step", "step")}
        self.stopped = False  # before its end, since somebody asked
        self.seconds: list[float] = []  # of every step
        self.losses: list[float] = start.get("losses", [])  # of every step of the epoch
        self.rates: list[float] = []  # the learning rate of every step
        self.kept: list[str] | None = None  # the lines of an earlier run that this one continues
        self.results: dict[str, float] = {}
        self.batches: Iterator | None = None  # of an epoch that a checkpoint has cut
        self.checkpoint = args.run_dir / "checkpoint.pt"
        own = [path.resolve() for path in (self.checkpoint, before(self.checkpoint))]
        self.goes_on = "path" in start and start["path"].resolve() in own
        self.notes: list[str] = start.get("notes", [])
        if (ranks := start.get("ranks", world_size)) != world_size:
            self.notes.append(
                f"the checkpoint was written by {ranks} ranks, this run has {world_size}: each "
                "sample is still seen once an epoch, rounding and dropout masks differ from now on"
            )
        self.metrics = args.run_dir / "metrics.jsonl"
        if not enabled or args.evaluate:
            return
        try:
            args.run_dir.mkdir(parents=True, exist_ok=True)
            self.metrics.touch()  # what an earlier run left there stays until the first epoch ends
            old = self.metrics.read_text(errors="replace").splitlines(keepends=True)
            # What came after the checkpoint is done again; lines of another run are not ours.
            self.kept = old[: start["step"]] if self.goes_on else []
        except OSError as error:
            why = f"cannot write to --run-dir {args.run_dir} ({error.strerror})"
            raise UsageError(f"{why}: name another folder") from error

    def epochs(self) -> Iterator[int]:
        """The epochs still to do, counted from 0, until --epochs or --max-steps is reached.

        An epoch that a checkpoint cuts comes again, until all its steps are done.
        """
        for path in (self.checkpoint, before(self.checkpoint)):
            # An old run's: --resume auto would take it for ours if we are killed before our first.
            if self.enabled and not self.goes_on and path.exists():
                path.replace(path.with_suffix(".old.pt"))
        for note in self.notes if self.enabled else []:
            print(note, flush=True)
        while self.position["epoch"] < self.args.epochs and not self._at_last_step():
            yield self.position["epoch"]
            if self.stopped:
                return

    def watch(
        self, loader: DataLoader, stream: int = 0, stop: Callable[[], bool] = lambda: False
    ) -> Iterator:
        """The batches up to the end of the epoch, the next checkpoint, or the step that stop ends.

        The time from one to the next is the time of a step. Random numbers begin anew for every
        step, as a function of seed, epoch, step and stream: programs that train together have a
        stream each, and draw their own dropout masks.
        """
        epoch, done = self.position["epoch"], self.position["epoch_step"]
        self.batches = self.batches or start_epoch(loader, epoch, done)
        quiet = None if self.enabled else True  # None: a bar on a terminal only
        bar = tqdm(total=len(loader), initial=done, disable=quiet, leave=False, unit="step")
        ticks = [self._tick()]
        for batch in self.batches:
            reseed(self.args.seed, epoch, self.position["epoch_step"], stream)
            self.rates.append(self.lr())
            self.position["step"] += 1
            self.position["epoch_step"] += 1
            yield batch  # the training step runs while this line waits
            ticks.append(self._tick())
            bar.update()
            self.stopped = stop()
            if self.stopped or self._at_last_step() or self._checkpoint_is_due():
                break
        bar.close()
        if self.position["epoch_step"] == len(loader):
            self.position.update(epoch=epoch + 1, epoch_step=0)
            self.batches = None
        self.seconds += _spans(ticks)

    def inside_epoch(self) -> bool:
        """Whether the last steps ended inside an epoch: too early to evaluate."""
        return self.position["epoch_step"] > 0 and not self._at_last_step()

    def refuse_nan(self, losses: Tensor, model: nn.Module, rank: int) -> None:
        """UsageError if a loss, weight or buffer is nan or inf. losses: (ranks, steps), the last.

        Weights too: a gradient can overflow in a step whose loss was finite.
        """
        step, why = self.position["step"], ""
        broken = (
            (~losses.isfinite()).T.nonzero().tolist()
        )  # pairs (step, rank), the first ones first
        if broken:
            index, first = broken[0]
            step += 1 + index - losses.shape[1]
            why = f"the loss of rank {first} is {losses[first, index].item()} in step {step}"
        elif not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
            why = f"weights of rank {rank} are nan or inf after step {step}"
        if why:
            raise UsageError(
                f"{why}: nothing is saved from then on; try a lower --lr with --resume auto"
            )

    def write(self, epoch: int, losses: Tensor) -> None:
        """Write a line a step. losses: (steps,), means of global batches."""
        values = losses.tolist()  # now and then, not at every step: it waits for the GPU
        seconds = self.seconds[-len(values) :]
        first = self.position["step"] - len(values) + 1
        self.losses += values
        if not self.enabled:
            return
        if self.kept is not None:
            self.metrics.write_text("".join(self.kept))
            self.kept = None
        rates, samples = self.rates[-len(values) :], self.args.batch_size
        with self.metrics.open("a") as file:
            steps = zip(values, rates, seconds, strict=True)
            for step, (loss, lr, span) in enumerate(steps, first):
                line = {"epoch": epoch, "step": step, "loss": loss, "lr": lr, "samples": samples}
                line["seconds"] = round(span, 7)
                file.write(json.dumps(line) + "\n")

    def end_epoch(self, epoch: int, losses: Tensor, test_loss: float, test_accuracy: float) -> None:
        """Write a line a step, print a line an epoch. losses: (steps,), means of global batches."""
        self.write(epoch, losses)
        self.results = {
            "train_loss": statistics.fmean(self.losses),
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
        }
        seconds = statistics.median(self.seconds[-len(self.losses) :])
        if self.position["epoch_step"] == 0:  # else --max-steps has cut it: the next run goes on
            self.losses = []
        if self.enabled:
            print(
                f"epoch {epoch + 1}/{self.args.epochs}  loss {self.results['train_loss']:.4f}"
                f"  test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}"
                f"  {self.args.batch_size / seconds:,.0f} samples/s",
                flush=True,
            )

    def end_evaluation(self, test_loss: float, test_accuracy: float) -> None:
        if self.enabled:
            print(f"test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}")

    def finish(self, memory: list[int]) -> None:
        """Write the summary. memory: the peak of every GPU or process, in bytes."""
        if not self.enabled:
            return
        done = self.position["epoch"] == self.args.epochs or self._at_last_step()
        if self.stopped and not done:
            print(f"stopped after step {self.position['step']}, as asked: --resume auto goes on")
            return
        if not self.seconds:
            flag = "--max-steps" if self._at_last_step() else "--epochs"
            print(f"nothing to train: step {self.position['step']} is done; try more {flag}")
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

    def _checkpoint_is_due(self) -> bool:
        every = getattr(self.args, "checkpoint_every_steps", None)
        return every is not None and self.position["step"] % every == 0

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
