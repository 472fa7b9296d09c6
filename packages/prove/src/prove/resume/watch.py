"""Record in each rank what a resumed run must have in common with one that was never stopped."""

import argparse
import os
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from prove import random_state
from prove.rank_record import LoaderPass, Projection
from prove.resume.record import FileChange, FileRead, ResumeRecord, Saved, StepStart
from prove.watch.model_tensors import parameters_of, project, tensors_of
from prove.watch.rank_run import RankRun, callers, source_line, wrap
from prove.watch.schedule import rates_ahead
from prove.watch.steps import makes_state

MAX_STEPS = 64  # further steps are not recorded
MAX_FILES = 2000  # further changes and reads are not recorded
RATES_AHEAD = 20
SECONDS_FOR_THREADS = 30  # threads of the script may still write a checkpoint
SHORTEST_RANDOM_STATE = 16  # bytes; the state of a CUDA generator has this length
STATE_LENGTHS = (624, 625)  # of numpy's and Python's generators
LOADING = os.path.join("torch", "utils", "data")  # samplers shuffle there
MOST_ITEMS = 1000  # a longer list is not looked into
SETTINGS = ("lr", "momentum", "weight_decay", "betas", "eps")
REMEMBERED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return all that a checkpoint holds by name: tensors as projections, and plain values."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):
            value = value.to_local()  # gathering would need all ranks, and only one may save
        is_random = value.dtype == torch.uint8 and value.numel() >= SHORTEST_RANDOM_STATE
        return {f"{name} (random state)" if is_random else name: project(value)}
    if type(value).__name__ == "ndarray":
        value = value.tolist()
    is_list = isinstance(value, list | tuple)
    if is_list and len(value) in STATE_LENGTHS and all(isinstance(each, int) for each in value):
        return {f"{name} (random state)": hash(tuple(value))}
    if isinstance(value, list | tuple) and len(value) > MOST_ITEMS:
        return {name: f"{len(value)} items"}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        parts = (flat(part, f"{name}.{key}" if name else str(key)) for key, part in value.items())
        return {key: number for part in parts for key, number in part.items()}
    is_plain = isinstance(value, int | float | str | bool) or value is None
    return {name: value if is_plain else type(value).__name__}


class GeneratorWatcher(TorchFunctionMode):
    """A mode of torch that notes which generators of the script draw inside a step."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []  # in the order of their first draws
        self.in_step = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        generator: Any = (kwargs or {}).get("generator")
        is_known = any(generator is known for known in self.generators)
        is_new = isinstance(generator, torch.Generator) and not is_known
        if self.in_step and is_new and not any(LOADING in file for file, *_ in callers()):
            self.generators.append(generator)
        return function(*args, **(kwargs or {}))

    def digest(self) -> int:
        states = (random_state.bytes_of(each.get_state()) for each in self.generators)
        return zlib.crc32(b"".join(states))


class ResumeWatcher:
    """Records the state before each step, and the files that are read and written."""

    def __init__(self, run: RankRun) -> None:
        self.run, self.model = run, run.models
        self.record = run.record.part(ResumeRecord)
        self.batches: list[tuple[int, int]] = []  # since the last step
        self.contents: list[list[int]] = []  # of these batches
        self.last_batches: list[tuple[int, int]] = []  # of the last step that had any
        self.last_contents: list[list[int]] = []
        self.calls = 0  # model calls before the last step
        self.epochs: list[str] = []
        self.at_batch: list[int] = []
        self.other_tensors: dict[str, Projection] = {}
        self.backwards = 0  # before the last step
        self.schedulers: list[weakref.ref] = []
        self.scaler: Callable[[], Any] = lambda: None  # a weak reference, once there is one
        self.text_files: set[str] = set()
        self.own_generators = GeneratorWatcher()

    def begin_pass(self, loader: Any) -> None:
        self.run.train_alone()
        batches = getattr(loader, "batch_sampler", None)
        owners = (loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset)
        epochs = [getattr(owner, "epoch", None) for owner in owners]
        self.epochs = [str(epoch) for epoch in epochs if isinstance(epoch, int)]

    def begin_batch(self, loader_pass: LoaderPass) -> None:
        self.batches.append((loader_pass.pass_index, loader_pass.batches_given))
        self.contents.append(loader_pass.contents[-1] if loader_pass.contents else [])
        self.note_before_forward()

    def note_before_forward(self) -> None:
        self.own_generators.in_step = True
        self.at_batch = random_state.state_digests()
        held = self.model.steps.held_places()
        self.other_tensors = {
            f"{root}/{name}{'' if tensor.requires_grad else ' (buffer)'}": project(tensor)
            for root, module in self.model.root_modules().items()
            for name, tensor in tensors_of(module)
            if id(tensor) not in held and not hasattr(tensor, "full_tensor")
        }

    def enter_module(self, module: torch.nn.Module, ddp_index: int | None) -> None:
        """Without a loader, a step begins where the script calls its model."""
        trains = module.training and torch.is_grad_enabled()
        if not trains or not self.run.has_no_loader():
            return
        if self.made_all_steps() and not self.run.settings.ends_at_step:
            self.run.end_early()
        self.run.train_alone()
        self.note_before_forward()

    def made_all_steps(self) -> bool:
        steps = self.run.settings.steps
        return bool(steps) and self.run.record.step_count >= (steps or 0) and self.run.joined

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        watched, starts = self.model.steps, self.record.starts
        ends_at_step = self.run.settings.ends_at_step and self.made_all_steps()
        if ends_at_step and optimizer in watched.optimizers and not makes_state():
            self.run.end_early()
        if optimizer not in watched.optimizers or len(starts) >= MAX_STEPS or makes_state():
            return
        if watched.depth > 1:  # ZeRO's optimizer keeps its state in an inner one
            starts[-1].state += [state_of(optimizer, p) for p in parameters_of(optimizer)]
            return
        with self.run.draws.paused():
            starts.append(self.start_of(optimizer, watched.optimizers.index(optimizer)))
        self.own_generators.in_step = False
        if self.batches:
            self.last_batches, self.last_contents = self.batches, self.contents
        self.batches, self.contents = [], []
        self.backwards, self.calls = self.model.backwards, len(self.run.record.model_calls)

    def start_of(self, optimizer: Any, number: int) -> StepStart:
        record, parameters = self.run.record, parameters_of(optimizer)
        micro_batches = max(1, self.model.backwards - self.backwards)
        batches = self.batches or self.last_batches  # a second optimizer steps with the same batch
        contents = (self.contents or self.last_contents)[-micro_batches:]
        if not batches:
            contents = [[call.checksum] for call in record.model_calls[self.calls :]]
        schedulers = self.named_schedulers()
        return StepStart(
            number=record.step_count,
            optimizer=number,
            source_line=source_line(),
            batches=batches[-micro_batches:],
            contents=contents,
            epochs=self.epochs,
            groups=[numbers_of(group) for group in optimizer.param_groups],
            rates_ahead={
                name: rates_ahead(each, RATES_AHEAD)[0] for name, each in schedulers.items()
            },
            metrics={name: metrics_of(each) for name, each in schedulers.items()},
            loss_scale=scale_of(self.scaler()),
            weights=[project(p) for p in self.model.steps.in_model(optimizer)],
            state=[state_of(optimizer, p) for p in parameters],
            is_of_torch=type(optimizer).__module__.startswith("torch.optim"),
            other_tensors=self.other_tensors,
            at_batch=self.at_batch or random_state.state_digests(),
            at_step=random_state.state_digests(),
            own_generators=self.own_generators.digest(),
        )

    def named_schedulers(self) -> dict[str, Any]:
        """Name the schedulers by class and number, the newest first: old ones may be left over."""
        alive = [each for reference in self.schedulers if (each := reference()) is not None]
        numbers: Counter[str] = Counter()
        named = {}
        for scheduler in reversed(alive):
            name = type(scheduler).__name__
            named[f"{name} {numbers[name]}"] = scheduler
            numbers[name] += 1
        return named

    def note_change(self, path: str, mode: str | None) -> None:
        if len(self.record.changes) < MAX_FILES:
            steps, batches = self.run.record.step_count, self.run.batches_given()
            self.record.changes.append(FileChange(path, mode, steps, batches, source_line()))

    def note_read(self, path: str) -> None:
        is_code = path.endswith((".py", ".pyc", ".so")) or "-packages/" in path
        if not is_code and not self.run.record.step_count and len(self.record.reads) < MAX_FILES:
            self.record.reads.append(FileRead(path, source_line()))

    def note_text(self, path: str, text: str) -> None:
        if path not in self.text_files:
            self.text_files.add(path)
            self.record.text_files.append(path)

    def note_save(self, obj: Any, file: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            file = getattr(file, "name", None)  # of an open file
        if not isinstance(file, str | os.PathLike):
            return  # it stays in memory
        path = os.path.realpath(os.fsdecode(file))
        with self.run.draws.paused():
            steps, batches = self.run.record.step_count, self.run.batches_given()
            saved = Saved(path, steps, batches, source_line(), flat(obj))
        self.record.saves.append(saved)

    def join_threads(self) -> None:
        """Let threads end that the script has started to write a checkpoint."""
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join(SECONDS_FOR_THREADS)


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for name in SETTINGS:
        value = group.get(name)
        parts = value if isinstance(value, list | tuple) else [value]
        for index, part in enumerate(parts):
            if isinstance(part, int | float | torch.Tensor):
                numbers[f"{name}[{index}]" if len(parts) > 1 else name] = float(part)
    return numbers


def metrics_of(scheduler: Any) -> dict[str, float]:
    if not isinstance(scheduler, ReduceLROnPlateau):
        return {}
    held = vars(scheduler)
    return {name: float(held[name]) for name in REMEMBERED if isinstance(held[name], int | float)}


def scale_of(scaler: Any) -> dict[str, float]:
    if scaler is None or not scaler.is_enabled():
        return {}
    state = scaler.state_dict()
    return {"scale": state["scale"], "growth tracker": state["_growth_tracker"]}


def state_of(optimizer: Any, p: torch.Tensor) -> dict[str, Projection]:
    """Project the optimizer's state of a parameter; a plain number counts as a tensor of one."""
    state = getattr(optimizer, "state", {}).get(p, {})
    return {
        str(name): project(torch.as_tensor(value, dtype=None))
        for name, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor | int | float)
    }


def watch_schedulers(watcher: ResumeWatcher) -> None:
    for kind in (LRScheduler, ReduceLROnPlateau):

        @wrap(kind, "__init__")
        def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            if not any(reference() is self for reference in watcher.schedulers):
                watcher.schedulers.append(weakref.ref(self))
            original(self, *args, **kwargs)

    @wrap(torch.amp.GradScaler, "__init__")
    def init_scaler(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watcher.scaler = weakref.ref(self)


def watch_saving(watcher: ResumeWatcher) -> None:
    @wrap(torch, "save")
    def save(original: Callable, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        watcher.note_save(obj, f)
        original(obj, f, *args, **kwargs)

    @wrap(torch, "load")
    def load(original: Callable, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):  # with mmap=True, C++ opens the file
            watcher.note_read(os.path.realpath(f))
        return original(f, *args, **kwargs)


def watch_divided_saving(watcher: ResumeWatcher) -> None:
    """Watch torch.distributed.checkpoint, once the script has imported it."""
    checkpoint: Any = sys.modules.get("torch.distributed.checkpoint")
    if checkpoint is None or hasattr(checkpoint, "prove_watches"):
        return
    checkpoint.prove_watches = True
    for name in ("save", "async_save"):

        @wrap(checkpoint, name)
        def save(original: Callable, state: Any, *args: Any, **kwargs: Any) -> Any:
            watcher.note_save(state, kwargs.get("checkpoint_id", args[0] if args else None))
            return original(state, *args, **kwargs)


def install(run: RankRun) -> None:
    watcher, events = ResumeWatcher(run), run.events
    events.loaders_read.append(watcher.begin_pass)
    events.batches.append(watcher.begin_batch)
    events.module_calls.append(watcher.enter_module)
    events.file_changes.append(watcher.note_change)
    events.file_reads.append(watcher.note_read)
    events.texts.append(watcher.note_text)
    run.before_early_end.append(watcher.join_threads)
    watcher.own_generators.__enter__()
    watch_schedulers(watcher)
    watch_saving(watcher)
    register_optimizer_step_pre_hook(watcher.before_step)

    @wrap(torch.distributed, "init_process_group")
    def begin(original: Callable, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        watch_divided_saving(watcher)
