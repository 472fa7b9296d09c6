"""Keep the record of one rank, write it regularly, and end the run when enough was seen.

observe.install() makes one RankRun in each process of the user's command, and every watcher adds to
its record. A thread writes the record again and again.
"""

import inspect
import multiprocessing.util
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from prove.rank_record import (
    SECONDS_PER_BEAT,
    STARTED_IN,
    Ended,
    Flag,
    LoaderPass,
    Mode,
    RaisedError,
    RankFile,
    RankRecord,
    Settings,
    SourceLine,
    end_process,
)

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
# Folder of prove's own code, which runs beside the script.
OWN_FOLDERS = (HERE, PACKAGE, os.path.join(PACKAGE, "checks"), os.path.join(PACKAGE, "resume"))
PATHS = sysconfig.get_paths()
LIBRARIES = tuple({PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
LOADING_FILES = {  # files in which a rank loads data or imports; two of them are ours
    inspect.getfile(torch.utils.data.DataLoader), "<frozen importlib._bootstrap>",
    os.path.join(HERE, "data.py"), os.path.join(HERE, "batches.py"),
}  # fmt: skip
DDP_FILE = inspect.getfile(torch.nn.parallel.DistributedDataParallel)
STEPS_PER_BATCH = 3  # without a loader: limit of steps for each of --batches
SECONDS_FOR_OTHERS = 20  # time for the other ranks to come to their ends

save_tensors = torch.save  # the user's torch.save is watched


def wrap(owner: Any, name: str) -> Callable:
    """Decorate a function that replaces owner.name and gets the original as an argument."""
    original = getattr(owner, name)

    def put_in_place(function: Callable) -> Callable:
        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put_in_place


def wrap_everywhere(module: Any, name: str) -> Callable:
    """Replace a function as wrap does, also where torch.distributed has imported it by name."""
    original = getattr(module, name)

    def put_in_place(function: Callable) -> Callable:
        replacement: Callable = wrap(module, name)(function)
        for other_name, other in list(sys.modules.items()):
            if not other_name.startswith("torch.distributed"):
                continue
            if getattr(other, "__dict__", {}).get(name) is original:
                setattr(other, name, replacement)
        return replacement

    return put_in_place


def callers(frame: FrameType | None = None) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of each frame on the stack, the innermost first."""
    for caller, line in traceback.walk_stack(frame or inspect.currentframe()):
        yield caller.f_code.co_filename, line, caller.f_code.co_name


def is_user_file(file: str) -> bool:
    installed = file.startswith((*LIBRARIES, "<")) or "-packages/" in file
    return not installed and os.path.dirname(file) not in OWN_FOLDERS


def is_loading(frame: FrameType | None) -> bool:
    """Does this frame wait for a batch, for the workers of a loader, or for an import?"""
    return any(file in LOADING_FILES for file, *_ in callers(frame))


def source_line(frame: FrameType | None = None, outside: str = "") -> str:
    """Find the innermost line of the user's code, outside of functions named `outside`."""
    for file, line, function in callers(frame):
        if is_user_file(file) and function != outside:
            return line_of_user(file, line)
    return "?"


def line_of_user(file: str, line: int | None) -> SourceLine:
    """Name a line from the folder where prove was started, which the script may have left."""
    folder = os.environ.get(STARTED_IN) or os.getcwd()
    return SourceLine(f"{os.path.relpath(os.path.join(folder, file), folder)}:{line}")


class Events:
    """The events that a check may hear of: each list holds functions to call."""

    def __init__(self) -> None:
        # A backward begins. Argument: its loss.
        self.backwards: list[Callable[[torch.Tensor], None]] = []
        # The script calls a module. Arguments: the module, and the number of its DDP model.
        self.module_calls: list[Callable[[torch.nn.Module, int | None], None]] = []
        # DDP has computed its forward. Argument: the number of this DDP model.
        self.ddp_forwards: list[Callable[[int], None]] = []
        # A loader is made. Arguments: the loader, and its line. Then, it is read: the loader.
        self.loaders_made: list[Callable[[Any, str], None]] = []
        self.loaders_read: list[Callable[[Any], None]] = []
        # A batch is given in training. Argument: its pass.
        self.batches: list[Callable[[LoaderPass], None]] = []
        # A file is opened for writing, renamed or removed. Arguments: its path, and the mode of
        # open(), or None if it is not opened.
        self.file_changes: list[Callable[[str, str | None], None]] = []
        # A file is opened for reading. Argument: its path.
        self.file_reads: list[Callable[[str], None]] = []
        # ReduceLROnPlateau gets a metric. Argument: its value.
        self.metrics: list[Callable[[float], None]] = []
        # A text file is opened or written to. Arguments: its path, and the text.
        self.texts: list[Callable[[str, str], None]] = []
        # torch.save is called. Arguments: the path, and a function that saves to another file.
        self.saves: list[Callable[[str, Callable[[Any], None]], None]] = []


class RankRun:
    """Holds the record of one rank, which every watcher completes, and decides when to end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replaying = settings.mode != Mode.OBSERVE
        self.record, self.events = RankRecord(), Events()
        self.tensors: dict[str, Any] = {"batches": []}  # tensors that a replay needs
        self.gradients: dict[int, list] = {}  # at the first step, by optimizer
        self.exchanges = 0  # number of calls that reached other ranks
        self.joined = self.written = False
        self.in_second_epoch = False
        self.running_modules: list[torch.nn.Module] = []  # modules in forward, the innermost last
        self.current_loader_pass: LoaderPass | None = None  # the pass of the last batch
        # The other watchers of this rank; observe.install() makes them in this order.
        self.draws: Any  # a Draws
        self.feeder: Any = None  # a Feeder, only in a replay
        self.models: Any  # a ModelWatcher
        self.loop_watcher: Any = None  # a LoopWatcher, only if operations are watched
        self.at_end: list[Callable[[], None]] = []  # functions that complete the record
        self.before_early_end: list[Callable[[], None]] = []
        self.writing = threading.Lock()
        self.begin_in_this_process()

    def begin_in_this_process(self) -> None:
        """Note this process, which may be a fork of the one that made this object."""
        self.record.pid = os.getpid()
        self.main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def join_group(self) -> None:
        """Note which rank this is, now that there is a process group, and begin to write."""
        if not self.joined:
            self.begin_in_this_process()
            self.record.rank, self.record.world_size = dist.get_rank(), dist.get_world_size()
            self.joined = True
            multiprocessing.util.Finalize(None, self.write, (Ended.FINISHED,), exitpriority=100)
            threading.Thread(target=self.write_until_end, daemon=True).start()

    def train_alone(self) -> None:
        """Begin to write as the only process, if the script makes no process group."""
        if not self.joined and os.environ.get("WORLD_SIZE", "1") == "1":
            self.joined = True
            threading.Thread(target=self.write_until_end, daemon=True).start()

    def file(self, kind: RankFile, rank: int | None = None) -> Path:
        """Name a file of this run; `rank` says of which rank, by default of this one."""
        rank = self.record.rank if rank is None else rank
        return kind.of(self.settings.folder, self.settings.name, rank)

    def note_event(self) -> None:
        self.record.progress.events += 1

    def flag(self, flag: Flag) -> None:
        if flag not in self.record.flags:
            self.record.flags[flag] = source_line()

    def batches_given(self) -> int:
        """Count the batches of all passes with gradients."""
        passes = self.record.loader_passes
        return sum(each.batches_given for each in passes if each.with_gradients)

    def has_no_loader(self) -> bool:
        return not any(loader_pass.with_gradients for loader_pass in self.record.loader_passes)

    def running_batchnorm(self) -> str:
        """Return the class of the BatchNorm layer in forward now, or an empty text."""
        layers = [type(m).__name__ for m in self.running_modules[-1:] if isinstance(m, _BatchNorm)]
        return "".join(layers)

    def most_steps(self) -> int:
        """Return the limit of steps for a script without a loader that could be cut."""
        stepping = sum(bool(optimizer.steps) for optimizer in self.record.optimizers)
        return STEPS_PER_BATCH * self.settings.batches * max(1, stepping)

    def current_batch_size(self) -> int | None:
        current = self.current_loader_pass
        known = current is not None and 0 < current.batches_given <= len(current.sizes)
        return current.sizes[current.batches_given - 1] if current and known else None

    def write_record(self, ended: Ended) -> None:
        record, progress = self.record, self.record.progress
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        progress.source_line = source_line(frame)
        progress.cpu_seconds = round(time.clock_gettime(self.main_clock), 1)
        progress.in_backward = frame is not None and "_run_backward" in frame.f_code.co_name
        progress.in_ddp = frame is not None and frame.f_code.co_filename == DDP_FILE
        progress.is_loading = frame is not None and is_loading(frame)
        record.ended = ended
        record.write(self.file(RankFile.RECORD))

    def write_until_end(self) -> None:
        """Write the record again and again, because a killed rank leaves nothing else."""
        while not self.written:
            self.record.progress.beats += 1
            # The record may change meanwhile, or its folder may be gone.
            with self.writing, suppress(RuntimeError, OSError):
                if not self.written:
                    self.write_record(Ended.NOT_YET)
            time.sleep(SECONDS_PER_BEAT)

    def write(self, ended: Ended) -> None:
        """Write the whole record and the tensors for a replay, once, when the run ends."""
        trained_alone = self.replaying and self.record.step_count > 0
        is_another_process = os.getpid() != self.record.pid
        if self.written or is_another_process or not (self.joined or trained_alone):
            return
        for finish in self.at_end:
            finish()
        with self.writing:
            self.written = True
            self.write_record(ended)
        save_tensors(self.gradients, self.file(RankFile.GRADIENTS))
        save_tensors(self.tensors, self.file(RankFile.TENSORS))

    def end_early(self) -> None:
        """End this rank, as soon as all ranks are here: leaving early would break the others."""
        for prepare in self.before_early_end:
            prepare()
        self.write(Ended.WHEN_SEEN)
        ends = [self.file(RankFile.TENSORS, rank) for rank in range(self.record.world_size)]
        end = time.monotonic() + SECONDS_FOR_OTHERS
        while time.monotonic() < end and not all(file.exists() for file in ends):
            time.sleep(0.02)
        end_process(0)

    def write_failure(self, error: BaseException) -> None:
        """Write the record of a script that ends with an error."""
        cut = not self.joined or any(
            loader_pass.batches_given >= loader_pass.most_batches
            for loader_pass in self.record.loader_passes
        )
        if cut and "StopIteration" in f"{type(error).__name__} {error}":
            self.end_early()  # the script asked for more batches than it gets
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        at = line_of_user(frames[-1].filename, frames[-1].lineno) if frames else "?"
        self.record.error = RaisedError(type(error).__name__, str(error)[:500], at, time.time())
        self.write(Ended.WITH_ERROR)
