"""What one rank writes down about itself, and how its run ends when enough has been seen."""

import atexit
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
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
PATHS = sysconfig.get_paths()
LIBRARIES = tuple({PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
SECONDS_PER_BEAT = 0.2
MAIN_CLOCK = 0  # of the main thread: a rank that computes does not hang


def is_user_file(file: str) -> bool:
    installed = file.startswith((*LIBRARIES, "<")) or "-packages/" in file
    return not installed and os.path.dirname(file) != HERE


def user_line(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is the user's code."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def where() -> str:
    return user_line(sys._getframe(1))


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
        self.pid, self.rank, self.world = os.getpid(), 0, 1
        self.joined = self.written = False
        self.events = 0  # a run whose ranks have no new events may hang
        self.beats = 0  # how often the facts were written: is this process still alive?
        self.steps = 0  # of all optimizers together
        self.waiting: str | None = None  # the collective that this rank is in
        self.current_pass: dict | None = None  # over the loader that gave the last batch
        self.after_fetch: list[int] | None = None  # digests of generators when the step began
        self.counts: Counter = Counter()
        self.tensors: dict[str, Any] = {}
        self.facts: dict[str, Any] = {"ended": None, "error": None, "scale": 1.0, "autocast": False}
        self.facts["loss_inside"] = False  # the model returns the loss
        lists = "passes collectives files prints backwards optimizers ddps roots lr_in_epochs"
        self.facts |= {name: [] for name in lists.split()}
        self.facts |= {"dropout": {}, "batchnorm": {}, "notes": {}, "random_in_step": 0}

        # What the modules give each other: see their install().
        self.start: Any = None
        self.epoch_ended: Any = None
        self.step_ended: Any = None
        self.optimizers: Any = None
        self.feed: Any = None
        self.feed_forward: Any = None
        self.length_of: Any = None
        self.set_start: Any = None
        self.use_recorded_rates: Any = None
        self.per_rank_batchnorm = False

    def note(self, kind: str) -> None:
        """A fact that needs no more than the line that it happened at."""
        self.facts["notes"].setdefault(kind, where())

    def write_facts(self, ended: str | None) -> None:
        state: dict[str, Any] = {"rank": self.rank, "world": self.world, "pid": self.pid}
        state |= {"steps": self.steps}
        state |= {"events": self.events, "waiting": self.waiting, "ended": ended}
        state |= {"line": user_line(main_frame()), "in_backward": is_in_backward()}
        state |= {"beats": self.beats, "cpu_seconds": round(time.clock_gettime(MAIN_CLOCK), 1)}
        path = self.folder / f"{self.mode}.{self.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.facts | state, default=str))
        part.replace(path)  # renamed, so that nobody reads half a file

    def keep_file(self, name: str) -> Path:
        return self.folder / f"{self.mode}.{self.rank}.{name}.pt"


RUN: Run
writing = threading.Lock()
save_tensors = torch.save  # the user's torch.save is watched


def main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_in_backward() -> bool:
    frame = main_frame()
    return frame is not None and "_run_backward" in frame.f_code.co_name


def write(ended: str) -> None:
    """Write all that is known. A run that we ended ourselves is not written again."""
    trained_alone = RUN.replaying and RUN.steps > 0
    if RUN.written or os.getpid() != RUN.pid or not (RUN.joined or trained_alone):
        return
    from prove import watch_model

    watch_model.finish()
    with writing:
        RUN.written = True
        RUN.write_facts(ended)
    save_tensors(RUN.tensors, RUN.keep_file("tensors"))


def leave(ended: str) -> None:
    """End this process as soon as all ranks are here: who leaves early breaks the others."""
    write(ended)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if len(list(RUN.folder.glob(f"{RUN.mode}.*.tensors.pt"))) >= RUN.world:
            break
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def beat() -> None:
    """Write the facts again and again: a rank that is killed leaves nothing else."""
    while not RUN.written:
        RUN.beats += 1
        with writing, suppress(RuntimeError, OSError):  # facts changed meanwhile; folder is gone
            if not RUN.written:
                RUN.write_facts("killed")
        time.sleep(SECONDS_PER_BEAT)


def join() -> None:
    """The process group is there: now we know which rank this is."""
    global MAIN_CLOCK
    if not RUN.joined:
        MAIN_CLOCK = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        RUN.rank, RUN.world, RUN.joined = dist.get_rank(), dist.get_world_size(), True
        RUN.pid = os.getpid()  # another one, if the script has forked its ranks
        multiprocessing.util.Finalize(None, write, ("script",), exitpriority=100)
        threading.Thread(target=beat, daemon=True).start()


def on_error(error: BaseException) -> None:
    """The record of a script that ends with an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    at = f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    if isinstance(error, StopIteration) or "StopIteration" in str(error):
        return write("epochs")  # the script asked for more batches than we give
    RUN.facts["error"] = [type(error).__name__, str(error)[:500], at]
    write("error")


narrow = torch.Tensor.float


def double_or_float(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """x.float() of a script that runs in float64. GradScaler needs what it asks for."""
    caller: Any = sys._getframe(1)
    while os.path.dirname(caller.f_code.co_filename) == HERE:  # --cpu: a mode calls it once more
        caller = caller.f_back
    by_torch = "/torch/amp/" in caller.f_code.co_filename
    return narrow(x, *args, **kwargs) if by_torch else x.double()


def install() -> None:
    """Called once in each process of the user's, after `import torch`."""
    global RUN, MAIN_CLOCK
    MAIN_CLOCK = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    RUN = Run(json.loads(os.environ["PROVE"]))
    settings = json.loads(os.environ["PROVE"])
    if settings["cpu"]:
        from prove import cpu

        cpu.install(settings["gpus"])
    if RUN.double:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = double_or_float  # type: ignore[assignment]
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore
    from prove import replay, watch_data, watch_model, watch_world

    for module in (watch_data, watch_model, watch_world, replay):
        module.install(RUN)
    atexit.register(write, "script")
    previous = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        on_error(error)
        previous(kind, error, trace)

    sys.excepthook = hook
