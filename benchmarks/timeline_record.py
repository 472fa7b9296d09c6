"""Record when a process computes and sends, through hooks on torch: the script does not change.

timeline.py starts the script with prove's hook on its path, which calls `install`. Each process
that takes an optimizer step writes its spans to a file in TIMELINE_FOLDER.

On a CPU, `time.perf_counter` is one clock for all processes of a machine. On a GPU, the CPU runs
ahead, so a mark is a CUDA event, which the GPU reaches later (no GPU has run this yet).
"""

import atexit
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

STEPS = 200  # recorded of a run: later ones cost nothing
COLLECTIVES = ["all_reduce", "reduce", "broadcast", "barrier", "gather", "scatter"]
COLLECTIVES += ["all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"]
COLLECTIVES += ["reduce_scatter", "reduce_scatter_tensor"]
Mark = float | tuple[int, torch.cuda.Event]  # seconds, or an event of the GPU with this number
Span = list[Any]  # [step, kind, thread, begin, end, bytes]
# Kinds of messages: the first lets its caller wait until it is there. A bucket is DDP's.
MESSAGE, STARTED, BUCKET = "message", "started message", "bucket"
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


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
    """What this thread is in the middle of."""

    def __init__(self) -> None:
        self.modules: list[Span | None] = []  # one inside another; the outer one has a span
        self.optimizers: list[Span | None] = []
        self.is_sending = False


class SpanRecorder:
    """The spans of this process, until it has taken all the steps that are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.now = folder, Clock(), OfThread()
        self.spans: list[Span] = []
        self.step, self.first_optimizer, self.rank = 0, 0, 0
        self.in_backward = False

    def begin(self, kind: str, size: int = 0) -> Span | None:
        if self.step >= STEPS:
            return None
        is_main = threading.current_thread() is threading.main_thread()
        thread = "main" if is_main else threading.current_thread().name
        self.spans.append([self.step, kind, thread, self.clock.mark(), None, size])
        return self.spans[-1]

    def end(self, span: Span | None) -> None:
        if span:
            span[4] = self.clock.mark()

    def before_module(self, module: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if isinstance(module, DistributedDataParallel):
            watch_buckets(module)
        # Not in an evaluation, nor where checkpointing computes forward again in backward.
        is_outer = not self.now.modules and torch.is_grad_enabled() and not self.in_backward
        self.now.modules.append(self.begin("forward") if is_outer else None)

    def after_module(self, *_: Any) -> None:
        if self.now.modules and not torch.compiler.is_compiling():
            self.end(self.now.modules.pop())

    def around_backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def timed(*args: Any, **kwargs: Any) -> None:
            if self.in_backward:
                return backward(*args, **kwargs)
            self.in_backward, span = True, self.begin("backward")
            try:
                backward(*args, **kwargs)
            finally:
                self.end(span)
                self.in_backward = False

        return timed

    def around_message(self, send: Callable) -> Callable:
        """A call that sends: it returns when all is there, or returns a Work that tells when."""

        @functools.wraps(send)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.now.is_sending:  # some collectives call another one
                return send(*args, **kwargs)
            first = [*args, *kwargs.values(), None][0]
            self.now.is_sending, span = True, self.begin(MESSAGE, size_of(first))
            try:
                work = send(*args, **kwargs)
            finally:
                self.now.is_sending = False
            if isinstance(work, dist.Work):
                if span:
                    span[1] = STARTED
                work.get_future().then(lambda _: self.end(span))
            else:
                self.end(span)
            return work

        return timed

    def around_hook(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def timed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            span = self.begin(BUCKET, size_of(bucket.buffer()))

            def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                self.end(span)
                return future.value()

            return hook(state, bucket).then(arrived)

        return timed

    def before_optimizer(self, *_: Any) -> None:
        self.now.optimizers.append(self.begin("optimizer"))

    def after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.end(self.now.optimizers.pop())
        self.first_optimizer = self.first_optimizer or id(optimizer)
        if id(optimizer) != self.first_optimizer:
            return  # a GAN has two: a step ends with the first one's
        if self.step == 0:
            self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.step += 1
        if self.step == STEPS:
            self.save()

    def save(self) -> None:
        if not self.step or not self.spans:
            return  # it does not train, or has saved all
        complete = [span for span in self.spans if span[4] is not None]
        spans = [
            [step, kind, thread, self.clock.seconds(begin), self.clock.seconds(end), size]
            for step, kind, thread, begin, end, size in complete
        ]
        what = {"rank": self.rank, "gpu": gpu_name(), "torch": torch.__version__, "spans": spans}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(what))
        if self.step >= STEPS:
            self.spans = []


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""


def size_of(sent: Any) -> int:
    """Bytes of a tensor, or of a list of them."""
    tensors = sent if isinstance(sent, (list, tuple)) else [sent]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def average(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook: divide, then add up over the ranks."""
    work = group.allreduce([bucket.buffer().div_(group.size())])
    return work.get_future().then(lambda future: future.value()[0])


def watch_buckets(ddp: Any) -> None:
    """Before its first forward: only a hook learns when DDP sends. The script may have its own."""
    if not getattr(ddp, "has_timeline_hook", False):
        ddp.register_comm_hook(ddp.process_group, average)


def install() -> SpanRecorder:
    recorder = SpanRecorder(Path(os.environ["TIMELINE_FOLDER"]))
    register_module_forward_pre_hook(recorder.before_module)
    register_module_forward_hook(recorder.after_module, always_call=True)
    register_optimizer_step_pre_hook(recorder.before_optimizer)
    register_optimizer_step_post_hook(recorder.after_optimizer)
    torch.autograd.backward = recorder.around_backward(torch.autograd.backward)
    for name in COLLECTIVES:
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
