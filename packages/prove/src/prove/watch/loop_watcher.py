"""Record the data that a training loop reads without a DataLoader.

A mode of torch sees every call of a torch function outside of modules, backward and optimizers. Two
kinds of calls count. A *source* reads or makes data: `x[ids]`, torch.stack, a random draw. In a
*gradient input*, data without a gradient come together with a tensor that has one: the inputs of a
model, the targets of a loss, the advantages of a policy. Only the last sources before a gradient
input matter, so an environment in which each rank acts by itself stays as it is. In a replay,
loop_feeder.py replaces the data of sources and gradient inputs by those of all ranks.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from prove import random_state
from prove.rank_record import CENTERED, DataFinding, Mode, RankFile, Statistic
from prove.watch import loss
from prove.watch.batches import own_copy, tensors_in
from prove.watch.draws import MAX_DRAWN_BYTES, is_number
from prove.watch.feeder import batch_of_forward, size_of
from prove.watch.loop_feeder import CallKey, GradientInput, LoopFeeder, Source
from prove.watch.model_tensors import project
from prove.watch.rank_run import (
    OWN_FOLDERS,
    RankRun,
    callers,
    is_user_file,
    save_tensors,
    source_line,
    wrap,
)

READS = {"__getitem__", "index_select"}
PUTS_TOGETHER = {"stack", "cat", "concat"}
MAKES = {*PUTS_TOGETHER, "as_tensor", "tensor", "from_numpy", "asarray"}
DRAWS = {"randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "normal"}
STATISTICS = {"mean", "std", "var", "std_mean", "var_mean", "amax", "amin", "median", "quantile"}
SUMS = {"sum", "count_nonzero"}  # count as statistics if they sum over all elements
SCALES = {"mul", "div", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__imul__"}
SCALES |= {"__itruediv__", "mul_", "div_", "multiply", "divide", "true_divide", "__div__"}
FROM_OUTSIDE = {"as_tensor", "tensor", "from_numpy", "asarray"}
NO_DATA = {"size", "__len__", "numel", "dim", "stride", "is_floating_point", "__repr__"}


def parts_of(args: tuple, kwargs: dict) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def replace_parts(nested: Any, changed: dict[int, Any]) -> Any:
    if id(nested) in changed:
        return changed[id(nested)]
    if type(nested) in (list, tuple):
        return type(nested)(replace_parts(part, changed) for part in nested)
    return nested


def is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided


def is_centered(value: Tensor) -> bool:
    """Do these numbers have mean 0, because their own mean was subtracted?"""
    if not value.is_floating_point() or value.numel() < 4:
        return False
    deviation, mean = torch.std_mean(value.double())
    return bool(mean.abs() < 1e-6 * deviation)


def drops_rows(name: str, args: tuple) -> bool:
    """Does this index not choose a batch? `x[3]` is one sample, `x[:, 2]` has all samples."""
    if name != "__getitem__":
        return False
    index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    is_int = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0)
    return is_int or index is None or (isinstance(index, slice) and index == slice(None))


class LoopWatcher:
    """Records this rank's sources and gradient inputs, or lets a LoopFeeder replace the data."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.feeder = LoopFeeder(run, run.feeder, self) if run.feeder else None
        self.main_thread = threading.main_thread().ident
        self.calls: Counter = Counter()
        self.tags = WeakTensorKeyDictionary()  # last sources and statistics of each tensor
        self.sources: dict[CallKey, Tensor] = {}
        self.gradient_inputs: dict[CallKey, GradientInput] = {}
        self.open_gradient_input: CallKey | None = None  # one whose call has not returned yet
        self.size: int | None = None  # number of samples in the last input of a model
        self.forwards = 0  # number of calls of models without DDP
        self.statistics: dict[CallKey, Statistic] = {}
        self.bytes_kept = 0
        self.local = threading.local()
        self.mode = LoopMode(self)

    def leave(self) -> None:
        """Stop watching, because the loop reads the batches of a loader."""
        if _get_current_function_mode() is self.mode:
            self.mode.__exit__(None, None, None)

    def is_watching(self) -> bool:
        run = self.run
        if run.written or getattr(self.local, "busy", False) or not run.has_no_loader():
            return False
        if self.feeder and not self.feeder.gradient_inputs_of_ranks:
            return False
        if threading.get_ident() != self.main_thread:
            return True
        in_backward = torch._C._current_graph_task_id() != -1
        # A loss is a module, too. It may get keyword arguments, which no hook sees.
        in_model = any(next(part.parameters(), None) is not None for part in run.running_modules)
        return not (in_model or in_backward or run.models.steps.depth)

    def is_recording(self) -> bool:
        return not self.feeder and self.run.record.step_count < self.run.most_steps()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing meanwhile, because torch's own calls are no part of the loop."""
        busy, self.local.busy = getattr(self.local, "busy", False), True
        try:
            yield
        finally:
            self.local.busy = busy

    def note(self, finding: DataFinding, at: str) -> None:
        noted = self.run.record.data.setdefault(finding, [])
        if (self.run.record.step_count + 1, at) not in noted:
            noted.append((self.run.record.step_count + 1, at))

    def next_key(self, name: str, line: str) -> CallKey:
        if self.run.settings.mode == Mode.ORIGINAL:
            line = ""  # the original has other lines, so its calls are matched by order
        self.calls[name, line] += 1
        return CallKey(line, name, self.calls[name, line] - 1)

    def tags_of(self, value: Any) -> frozenset:
        return self.tags.get(value, frozenset()) if isinstance(value, Tensor) else frozenset()

    def call(self, function: Callable, args: tuple, kwargs: dict, direct: bool) -> Any:
        """Call a function of torch; watch it if the script calls it outside of its modules."""
        name = getattr(function, "__name__", "")
        if name in NO_DATA or not self.is_watching():
            return function(*args, **kwargs)
        with self.paused():
            return self.watched_call(name, function, args, kwargs, direct)

    def watched_call(
        self, name: str, function: Callable, args: tuple, kwargs: dict, direct: bool
    ) -> Any:
        parts = list(parts_of(args, kwargs))
        tensors = [part for part in parts if isinstance(part, Tensor)]
        has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if has_gradient and threading.get_ident() == self.main_thread:
            return self.call_with_gradient(name, function, args, kwargs, direct)
        result = function(*args, **kwargs)
        if not self.feeder and not self.is_recording():
            return result
        if isinstance(result, Tensor) and self.is_source(name, result, args):
            return self.save_or_merge_source(name, result, args, tensors)
        if not self.feeder:
            self.pass_tags_on(name, result, args, tensors)
        return result

    def is_source(self, name: str, result: Tensor, args: tuple) -> bool:
        if not result.ndim or result.requires_grad or not is_plain(result):
            return False
        return name in MAKES or name in DRAWS or (name in READS and not drops_rows(name, args))

    def save_or_merge_source(
        self, name: str, result: Tensor, args: tuple, tensors: list[Tensor]
    ) -> Tensor:
        at = source_line()
        if at == "?":
            return result
        key = self.next_key(name, at)
        if self.feeder:
            return self.feeder.merged_source(key, result)
        self.keep(result)
        self.sources[key] = own_copy(result)
        tags = [tag for tensor in tensors for tag in self.tags_of(tensor)]
        # A tensor that was stacked or indexed keeps the statistics of its parts.
        kept = {tag for tag in tags if isinstance(tag, str)}
        if name in FROM_OUTSIDE and is_centered(result):  # the call of NumPy's mean is not seen
            kept.add(self.statistic(CENTERED, [result]))
        if name in READS:
            indices = [t for t in tensors[1:] if t.ndim and len(t) == len(result)]
            kept |= {tag for index in indices for tag in self.tags_of(index)}
        self.tags[result] = frozenset({key, *kept})
        return result

    def keep(self, tensor: Tensor) -> None:
        self.bytes_kept += tensor.nbytes
        if self.bytes_kept > MAX_DRAWN_BYTES:
            self.sources.clear()
            self.gradient_inputs.clear()
            self.note(DataFinding.TOO_MANY, source_line())

    def pass_tags_on(self, name: str, result: Any, args: tuple, tensors: list[Tensor]) -> None:
        tags = frozenset().union(*map(self.tags_of, tensors))
        results = [part for part in parts_of((result,), {}) if isinstance(part, Tensor)]
        if name == "__setitem__":
            results = [args[0]]
        is_sum = name in SUMS and isinstance(result, Tensor) and not result.ndim
        if (is_sum or name in STATISTICS) and tags and tensors[0].ndim:
            rows = len(tensors[0])
            if all(not part.ndim or len(part) != rows for part in results):
                tags |= {self.statistic(name, results)}
        if tags:
            for part in results:
                self.tags[part] = tags | self.tags_of(part)

    def statistic(self, name: str, results: list[Tensor]) -> str:
        at = source_line()
        key = self.next_key(f"statistic {name}", at)
        value = project(results[0])[0]
        self.statistics[key] = Statistic(name, at, key.call_index, value)
        return self.statistics[key].tag

    def forget_statistics(self, tensor: Any) -> None:
        """Forget the statistics of a tensor that a collective has combined over all ranks."""
        if isinstance(tensor, Tensor) and (tags := self.tags_of(tensor)):
            self.tags[tensor] = frozenset(tag for tag in tags if not isinstance(tag, str))

    def call_with_gradient(
        self, name: str, function: Callable, args: tuple, kwargs: dict, direct: bool
    ) -> Any:
        """Call a function in which data may meet gradients.

        Draws of such a function itself, as of dropout, cannot be recorded here.
        """
        values = [part for part in parts_of(args, kwargs) if is_plain(part)]
        values = [part for part in values if not part.requires_grad]
        if direct and name in SCALES:
            values += [part for part in args if is_number(part)]
        if values:
            changed = self.record_or_match(name, values, None)
            self.note_handmade_gradient(name)
            args = replace_parts(args, changed)
            kwargs = {key: replace_parts(value, changed) for key, value in kwargs.items()}
        before = random_state.state_digests()
        result = function(*args, **kwargs)
        self.note_backward_of(result)
        is_computed = any(isinstance(r, Tensor) and r.grad_fn for r in parts_of((result,), {}))
        if is_computed and random_state.state_digests() != before:
            self.note(DataFinding.NOT_GIVEN, source_line())
        return result

    def enter_module(self, module: nn.Module, inputs: tuple) -> tuple | None:
        """Let data meet gradients in a module other than DDP; return inputs to replace its own."""
        if not self.is_watching() or not torch.is_grad_enabled():
            return None
        tensors = [part for part in parts_of(inputs, {}) if isinstance(part, Tensor)]
        trained = any(p.requires_grad for p in module.parameters())
        if not trained and not any(tensor.requires_grad for tensor in tensors):
            return None
        values: list[Any] = [part for part in tensors if is_plain(part) and not part.requires_grad]
        if not values:
            return None
        values += [part for part in inputs if isinstance(part, str)]  # may name a part to use
        with self.paused():
            if trained:
                self.size = size_of((list(inputs),))
            changed = self.record_or_match("model" if trained else "module", values, self.size)
            if trained:
                self.begin_draws()
        return replace_parts(inputs, changed) if changed else None

    def begin_draws(self) -> None:
        """Record the draws of a model without DDP in this forward and its backward."""
        self.forwards += 1
        if self.feeder:
            self.feeder.begin_draws(self.forwards)
        elif self.is_recording():
            self.run.draws.begin_forward(batch_of_forward(self.forwards), [self.size or 1], [])
        else:
            self.run.draws.end_batch()

    def record_or_match(self, name: str, values: list, size: int | None) -> dict[int, Any]:
        """While observing, record a gradient input; in a replay, match it with those of all ranks.

        Returns the replacements by the ids of the values.
        """
        at = source_line()
        key = self.next_key(f"gradient input {name}", at)
        if self.feeder:
            return self.feeder.match_data(key, values)
        if self.is_recording():
            rows = [len(value) for value in values if isinstance(value, Tensor) and value.ndim]
            size = size or self.size or (rows[0] if rows else 1)
            self.save_gradient_input(key, values, size)
            self.open_gradient_input = key
        return {}

    def leave_module(self, inputs: tuple, outputs: Any) -> None:
        """Pass tags on through a module that the script has called, such as a target network."""
        self.note_backward_of(outputs)
        if self.is_watching() and self.is_recording():
            tags = frozenset().union(*map(self.tags_of, tensors_in([inputs])))
            for tensor in tensors_in([outputs]) if tags else []:
                if not tensor.requires_grad:
                    self.tags[tensor] = tags | self.tags_of(tensor)

    def note_backward_of(self, outputs: Any) -> None:
        """Note when backward passes through the open gradient input: only then it trains."""
        key, self.open_gradient_input = self.open_gradient_input, None
        for tensor in tensors_in([outputs]) if key else []:
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self.note_training(key))

    def note_handmade_gradient(self, name: str) -> None:
        """Note that a gradient which the script gives to backward trains, whatever made it.

        What was put together from outputs of the model is no source of it: given that of all ranks,
        a replay would be right also where each rank has computed it wrongly.
        """
        key = self.open_gradient_input
        if name == "backward" and key in self.gradient_inputs:
            made = self.gradient_inputs[key]
            read = [source for source in made.sources if source.name not in PUTS_TOGETHER]
            self.gradient_inputs[key] = made._replace(sources=read)
            self.note_training(key)

    def note_training(self, key: CallKey | None) -> None:
        if key in self.gradient_inputs:
            self.gradient_inputs[key] = self.gradient_inputs[key]._replace(trains=True)

    def save_gradient_input(self, key: CallKey, values: list, size: int) -> None:
        tags = {tag for value in values for tag in self.tags_of(value)}
        statistics = sorted(tag for tag in tags if isinstance(tag, str))
        sources = [tag for tag in tags if isinstance(tag, CallKey)]
        copies = []
        for value in values:
            if isinstance(value, Tensor):
                self.keep(value)
                value = own_copy(value)
            copies.append(value)
        self.gradient_inputs[key] = GradientInput(copies, size, statistics, sources)
        used = {each.tag: each for each in self.statistics.values()}
        for tag in statistics:
            if used[tag] not in self.run.record.statistics:
                self.run.record.statistics.append(used[tag])

    def enter_ddp(self, args: tuple, kwargs: dict) -> bool:
        """Record the inputs of DDP as a gradient input; in a replay, are they the merged ones?"""
        if not self.run.has_no_loader() or (
            self.feeder and not self.feeder.gradient_inputs_of_ranks
        ):
            return False
        self.size = size_of((list(args), kwargs))
        values = [part for part in parts_of(args, kwargs) if is_plain(part)]
        values = [value for value in values if not value.requires_grad]
        changed = self.record_or_match("model", values, self.size)
        self.note_training(self.open_gradient_input)
        self.open_gradient_input = None
        return not changed

    def finish(self) -> None:
        run = self.run
        if self.feeder or not run.has_no_loader():
            return
        needed = {
            key: Source(self.sources[key], gradient_input.size)
            for gradient_input in reversed(self.gradient_inputs.values())
            for key in gradient_input.sources
            if gradient_input.trains and key in self.sources
        }
        save_tensors((needed, self.gradient_inputs), run.file(RankFile.LOOP))


def watch_threads(watcher: LoopWatcher) -> None:
    """Watch threads that read ahead, too: a mode of torch sees only its own thread."""

    @wrap(threading.Thread, "start")
    def start(original: Callable, self: Any) -> None:
        own = self.run

        def run_watched() -> None:
            with LoopMode(watcher):
                own()

        if watcher.run.has_no_loader():
            self.run = run_watched
        original(self)


def install(run: RankRun) -> None:
    run.loop_watcher = watcher = LoopWatcher(run)
    run.at_end.append(watcher.finish)
    watch_threads(watcher)

    @wrap(torch, "from_numpy")
    def from_numpy(original: Callable, *args: Any, **kwargs: Any) -> Any:
        return watcher.call(original, args, kwargs, direct=True)

    for name in ("all_reduce", "broadcast"):

        @wrap(dist, name)
        def collective(original: Callable, *args: Any, **kwargs: Any) -> Any:
            watcher.forget_statistics(args[0] if args else kwargs.get("tensor"))
            return original(*args, **kwargs)

    apply = vars(torch.autograd.Function)["apply"]

    def applied(kind: type, *args: Any, **kwargs: Any) -> Any:
        direct = is_user_file(sys._getframe(1).f_code.co_filename)
        return watcher.call(apply.__get__(None, kind), args, kwargs, direct)

    torch.autograd.Function.apply = classmethod(applied)
    watcher.mode.__enter__()


class LoopMode(TorchFunctionMode):
    def __init__(self, watcher: LoopWatcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if file == loss.__file__:  # loss.py wraps a function of torch: find its caller
            file = next(own for own, *_ in callers() if os.path.dirname(own) not in OWN_FOLDERS)
        if os.path.dirname(file) in OWN_FOLDERS:
            return function(*args, **(kwargs or {}))
        direct = is_user_file(file)
        return self.watcher.call(function, args, kwargs or {}, direct)
