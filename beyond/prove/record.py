"""What one rank writes down about itself, and how its run ends when enough has been seen."""

import atexit
import inspect
import json
import multiprocessing.util
import os
import random
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
PATHS = sysconfig.get_paths()
LIBRARIES = tuple({PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
SECONDS_PER_BEAT = 0.2
SECONDS_FOR_OTHERS = 20  # to come to the end of their runs, too

save_tensors = torch.save  # the user's torch.save is watched


def wrap(owner: Any, name: str) -> Callable:
    """A decorator: its function replaces owner.name, and gets what it replaces as an argument."""
    original = getattr(owner, name)

    def put_in_place(function: Callable) -> Callable:
        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put_in_place


def callers(frame: FrameType | None = None) -> Iterator[tuple[str, int, str]]:
    """File, line and function of each frame on the stack, the innermost first."""
    for each, line in traceback.walk_stack(frame or inspect.currentframe()):
        yield each.f_code.co_filename, line, each.f_code.co_name


def is_user_file(file: str) -> bool:
    installed = file.startswith((*LIBRARIES, "<")) or "-packages/" in file
    return not installed and os.path.dirname(file) != HERE


def where(frame: FrameType | None = None, outside: str = "") -> str:
    """File and line of the innermost frame that is the user's code, in no function of this name."""
    for file, line, function in callers(frame):
        if is_user_file(file) and function != outside:
            return f"{os.path.relpath(file)}:{line}"
    return "?"


def main_frame() -> FrameType | None:
    """What the main thread does, as the thread that writes the record sees it."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def digests_of_generators() -> list[int]:
    """A number for the state of each generator of random numbers: torch, random, numpy."""
    torch_state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():
        torch_state ^= zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    python_state = zlib.crc32(repr(random.getstate()).encode())
    numpy_state = 0
    if "numpy" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy"].random.get_state()
        numpy_state = zlib.crc32(keys.tobytes()) + position
    return [torch_state, python_state, numpy_state]


class Run:
    """The run of one rank. `facts` becomes a JSON file, `tensors` a file of torch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder, self.mode = Path(settings["folder"]), settings["mode"]
        self.double, self.limit = settings["double"], settings["batches"]
        self.ranks = settings["ranks"]  # of the observed run, once that is known
        self.shared_batches = settings["shared_batches"]  # each rank takes its rows of one batch
        self.replaying = self.mode != "observe"
        self.rank, self.world = 0, 1
        self.joined = self.written = False
        self.events = 0  # a run whose ranks have no new events may hang
        self.beats = 0  # how often the facts were written: is this process still alive?
        self.steps = 0  # of all optimizers together
        self.waiting: str | None = None  # the collective that this rank is in
        self.current_pass: dict | None = None  # over the loader that gave the last batch
        self.after_fetch: list[int] | None = None  # digests of generators when the step began
        self.counts: Counter = Counter()
        self.tensors: dict[str, Any] = {"batches": []}  # of each training pass of the first epoch
        self.facts: dict[str, Any] = {"error": None, "scale": 1.0, "own_batch_size": None}
        self.facts |= {"autocast": False, "loss_inside": False, "random_in_step": 0}
        self.facts["samples_elsewhere"] = False  # not in the first dimension of a batch
        lists = "passes collectives files prints backwards optimizers ddps roots lr_in_epochs"
        self.facts |= {name: [] for name in lists.split()}
        self.facts |= {"dropout": {}, "batchnorm": {}, "notes": {}, "other_parameters": {}}
        self.model: Any = None  # a watch_model.ModelWatcher
        self.feeder: Any = None  # a replay.Feeder, while replaying
        self.writing = threading.Lock()
        self.started()

    def started(self) -> None:
        """In this process, which may be another one than that which made this object."""
        self.pid = os.getpid()
        self.main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def joined_group(self) -> None:
        """The process group is there: now we know which rank this is."""
        if not self.joined:
            self.started()
            self.rank, self.world, self.joined = dist.get_rank(), dist.get_world_size(), True
            multiprocessing.util.Finalize(None, self.write, ("script",), exitpriority=100)
            threading.Thread(target=self.beat, daemon=True).start()

    def note(self, kind: str) -> None:
        """A fact that needs no more than the line that it happened at."""
        self.facts["notes"].setdefault(kind, where())

    def has_no_loader(self) -> bool:
        return not any(p["training"] for p in self.facts["passes"])

    def keep_file(self, name: str) -> Path:
        return self.folder / f"{self.mode}.{self.rank}.{name}.pt"

    def write_facts(self, ended: str) -> None:
        """ended: "script" (at its end), "epochs" (we ended it), "error", "killed" (not yet)."""
        frame = main_frame()
        state = {
            "rank": self.rank, "world": self.world, "pid": self.pid, "steps": self.steps,
            "events": self.events, "beats": self.beats, "waiting": self.waiting, "ended": ended,
            "line": where(frame), "cpu_seconds": round(time.clock_gettime(self.main_clock), 1),
            "in_backward": frame is not None and "_run_backward" in frame.f_code.co_name,
        }  # fmt: skip
        path = self.folder / f"{self.mode}.{self.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.facts | state, default=str))
        part.replace(path)  # renamed, so that nobody reads half a file

    def beat(self) -> None:
        """Write the facts again and again: a rank that is killed leaves nothing else."""
        while not self.written:
            self.beats += 1
            with self.writing, suppress(RuntimeError, OSError):  # facts changed; folder is gone
                if not self.written:
                    self.write_facts("killed")
            time.sleep(SECONDS_PER_BEAT)

    def write(self, ended: str) -> None:
        """Write all that is known. A run that we ended ourselves is not written again."""
        trained_alone = self.replaying and self.steps > 0
        if self.written or os.getpid() != self.pid or not (self.joined or trained_alone):
            return
        self.model.finish()
        with self.writing:
            self.written = True
            self.write_facts(ended)
        save_tensors(self.tensors, self.keep_file("tensors"))

    def leave(self, ended: str) -> None:
        """End this process as soon as all ranks are here: who leaves early breaks the others."""
        self.write(ended)
        end = time.monotonic() + SECONDS_FOR_OTHERS
        while time.monotonic() < end:
            if len(list(self.folder.glob(f"{self.mode}.*.tensors.pt"))) >= self.world:
                break
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def failed(self, error: BaseException) -> None:
        """The record of a script that ends with an error."""
        cut = not self.joined or any(p["given"] >= self.limit for p in self.facts["passes"])
        if cut and "StopIteration" in f"{type(error).__name__} {error}":
            self.leave("epochs")  # the script asked for more batches than we give
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        at = f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
        self.facts["error"] = [type(error).__name__, str(error)[:500], at]
        self.write("error")


def compute_in_float64() -> None:
    torch.set_default_dtype(torch.float64)

    @wrap(torch.Tensor, "float")
    def double(original: Callable, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = next(file for file, *_ in callers() if os.path.dirname(file) != HERE)
        by_torch = "/torch/amp/" in caller  # GradScaler needs what it asks for
        return original(x, *args, **kwargs) if by_torch else x.double()


def install() -> Run:
    """Called once in each process of the user's, after `import torch`."""
    settings = json.loads(os.environ["PROVE"])
    run = Run(settings)
    if settings["cpu"]:
        from prove import cpu

        cpu.install(settings["gpus"])
    if run.double:
        compute_in_float64()
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore
    from prove import replay, watch_data, watch_model, watch_world

    for module in (watch_data, watch_model, watch_world, replay):
        module.install(run)
    atexit.register(run.write, "script")

    @wrap(sys, "excepthook")
    def hook(show: Callable, kind: Any, error: BaseException, trace: Any) -> None:
        run.failed(error)
        show(kind, error, trace)

    return run
