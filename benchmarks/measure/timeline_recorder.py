"""Record when a process loads, computes and sends, through hooks on torch: no script changes.

timeline.py starts the script with prove's hook on its path, which calls `install`. Each process
that takes an optimizer step writes its recording to a file in TIMELINE_FOLDER. This file is the
only one of ours that the script's process imports, so the names of the collectives come in
TIMELINE_COLLECTIVES.

On a CPU, `time.perf_counter` is one clock for all processes of a machine. On a GPU, the CPU runs
ahead, so a mark is a CUDA event, which the GPU reaches later.
"""

import atexit
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

STEPS = 200  # recorded of a run; later ones cost no time
Mark = float | tuple[int, torch.cuda.Event]  # seconds, or an event of the GPU with this number
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class Kind(str, Enum):
    LOADING = "loading"  # the script waits for a DataLoader's next batch
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    MESSAGE = "message"  # the sender waits until the message is there
    STARTED = "started message"  # the sender goes on meanwhile
    BUCKET = "bucket"  # a message of DDP, whose backward goes on meanwhile


MESSAGES = (Kind.MESSAGE, Kind.STARTED, Kind.BUCKET)


class Span(NamedTuple):
    kind: Kind
    thread: str  # main, or the name of another one
    begin: float  # in seconds; in a RecordedStep, in milliseconds since its begin
    end: float


class Recording(TypedDict):
    """What one process has recorded."""

    rank: int
    gpu: str  # the name of the GPU, or nothing
    torch: str
    steps: list[list[Span]]


class RankOfStep(TypedDict):
    rank: int
    spans: list[Span]


class RecordedStep(TypedDict):
    """One step of all ranks."""

    ms: float
    ranks: list[RankOfStep]


@dataclass
class OpenSpan:
    """A span whose end has perhaps not come yet."""

    kind: Kind
    thread: str
    begin: Mark
    end: Mark | None = None


class Clock:
    """Makes marks, and turns them into seconds on the one clock of the machine."""

    def __init__(self) -> None:
        self.starts: dict[int, tuple[float, torch.cuda.Event]] = {}  # of each GPU

    def mark(self) -> Mark:
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        gpu = torch.cuda.current_device()
        if gpu not in self.starts:
            torch.cuda.synchronize(gpu)
            self.starts[gpu] = time.perf_counter(), self.event()
        return gpu, self.event()

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        gpu, event = mark
        seconds, start = self.starts[gpu]
        event.synchronize()
        return seconds + start.elapsed_time(event) / 1000


class OfThread(threading.local):
    """Knows what this thread is in the middle of."""

    def __init__(self) -> None:
        self.modules: list[OpenSpan | None] = []  # one inside another; only the outer has a span
        self.optimizers: list[OpenSpan | None] = []
        self.is_sending = False
        self.is_loading = False


class SpanRecorder:
    """Records the spans of this process, until it has taken as many steps as are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.now = folder, Clock(), OfThread()
        self.steps: list[list[OpenSpan]] = [[]]  # the last step is not over
        self.is_over = False
        self.first_optimizer, self.rank = 0, 0
        self.in_backward = False

    def begin(self, kind: Kind) -> OpenSpan | None:
        if self.is_over:
            return None
        is_main = threading.current_thread() is threading.main_thread()
        thread = "main" if is_main else threading.current_thread().name
        span = OpenSpan(kind, thread, self.clock.mark())
        self.steps[-1].append(span)
        return span

    def end(self, span: OpenSpan | None) -> None:
        if span:
            span.end = self.clock.mark()

    def before_module(self, module: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if isinstance(module, DistributedDataParallel):
            watch_buckets(module)
        # Not in an evaluation, nor where checkpointing computes forward again in backward.
        is_outer = not self.now.modules and torch.is_grad_enabled() and not self.in_backward
        self.now.modules.append(self.begin(Kind.FORWARD) if is_outer else None)

    def after_module(self, *_: Any) -> None:
        if self.now.modules and not torch.compiler.is_compiling():
            self.end(self.now.modules.pop())

    def around_backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def timed(*args: Any, **kwargs: Any) -> None:
            if self.in_backward:
                return backward(*args, **kwargs)
            self.in_backward, span = True, self.begin(Kind.BACKWARD)
            try:
                backward(*args, **kwargs)
            finally:
                self.end(span)
                self.in_backward = False

        return timed

    def around_loading(self, load: Callable) -> Callable:
        """Time waiting for a DataLoader's next batch, if it is the main thread that waits."""

        @functools.wraps(load)
        def timed(loader: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if self.now.is_loading or not is_main:  # a dataset may have a loader of its own
                return load(loader)
            self.now.is_loading, span = True, self.begin(Kind.LOADING)
            try:
                return load(loader)
            finally:
                self.end(span)
                self.now.is_loading = False

        return timed

    def around_message(self, send: Callable) -> Callable:
        """Time a call that sends, until it returns or the Work is done that it returns."""

        @functools.wraps(send)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.now.is_sending:  # some collectives call another one
                return send(*args, **kwargs)
            self.now.is_sending, span = True, self.begin(Kind.MESSAGE)
            try:
                work = send(*args, **kwargs)
            finally:
                self.now.is_sending = False
            if isinstance(work, dist.Work):
                if span:
                    span.kind = Kind.STARTED
                work.get_future().then(lambda _: self.end(span))
            else:
                self.end(span)
            return work

        return timed

    def around_hook(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def timed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            span = self.begin(Kind.BUCKET)

            def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                self.end(span)
                return future.value()

            return hook(state, bucket).then(arrived)

        return timed

    def before_optimizer(self, *_: Any) -> None:
        self.now.optimizers.append(self.begin(Kind.OPTIMIZER))

    def after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.end(self.now.optimizers.pop())
        self.first_optimizer = self.first_optimizer or id(optimizer)
        if self.is_over or id(optimizer) != self.first_optimizer:
            return  # a GAN has two optimizers: a step ends with the first one's
        if len(self.steps) == 1:
            self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.steps.append([])
        if len(self.steps) > STEPS:
            self.save()
            self.is_over = True

    def save(self) -> None:
        *steps, _ = self.steps
        if self.is_over or not steps:
            return  # the process has saved all, or does not train
        recording: Recording = {
            "rank": self.rank,
            "gpu": gpu_name(),
            "torch": torch.__version__,
            "steps": [self.complete_spans(step) for step in steps],
        }
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(recording))

    def complete_spans(self, step: list[OpenSpan]) -> list[Span]:
        seconds = self.clock.seconds
        return [
            Span(span.kind, span.thread, seconds(span.begin), seconds(span.end))
            for span in step
            if span.end is not None
        ]


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""


def average(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP does without a hook: divide, then add up over the ranks."""
    work = group.allreduce([bucket.buffer().div_(group.size())])
    return work.get_future().then(lambda future: future.value()[0])


def watch_buckets(ddp: Any) -> None:
    """Give DDP a hook before its first forward, unless the script has: only that sees it send."""
    if not getattr(ddp, "has_timeline_hook", False):
        ddp.register_comm_hook(ddp.process_group, average)


def install() -> SpanRecorder:
    recorder = SpanRecorder(Path(os.environ["TIMELINE_FOLDER"]))
    register_module_forward_pre_hook(recorder.before_module)
    register_module_forward_hook(recorder.after_module, always_call=True)
    register_optimizer_step_pre_hook(recorder.before_optimizer)
    register_optimizer_step_post_hook(recorder.after_optimizer)
    torch.autograd.backward = recorder.around_backward(torch.autograd.backward)
    loader_class: Any = _BaseDataLoaderIter
    loader_class.__next__ = recorder.around_loading(loader_class.__next__)
    names = os.environ["TIMELINE_COLLECTIVES"].split(",")
    for name in (name for name in names if hasattr(distributed_c10d, name)):
        timed = recorder.around_message(getattr(distributed_c10d, name))
        for module in (dist, distributed_c10d):
            setattr(module, name, timed)

    register, destroy = DistributedDataParallel.register_comm_hook, dist.destroy_process_group

    def register_timed(ddp: Any, state: object, hook: Hook) -> None:
        ddp.has_timeline_hook = True
        register(ddp, state, recorder.around_hook(hook))

    def save_and_destroy(*args: Any, **kwargs: Any) -> None:
        recorder.save()  # a process of mp.spawn may never come to `atexit`
        destroy(*args, **kwargs)

    ddp_class: Any = DistributedDataParallel
    ddp_class.register_comm_hook = register_timed
    # BatchNorm's running statistics, which DDP sends at the beginning of forward.
    ddp_class._sync_buffers = recorder.around_message(ddp_class._sync_buffers)
    dist.destroy_process_group = distributed_c10d.destroy_process_group = save_and_destroy
    atexit.register(recorder.save)
    return recorder
