"""Watch the modules of a rank, their forward passes, and DDP."""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from prove.comparable import full_tensor
from prove.rank_record import DDPRecord, Flag, ModelCall, Projection
from prove.watch import steps
from prove.watch.batches import batch_size_of, checksum, copy_tensors, tensors_in
from prove.watch.feeder import keep_inputs
from prove.watch.float64 import make_double, widen
from prove.watch.model_tensors import (
    full_copies,
    is_divided,
    not_comparable,
    parameters_of,
    project,
    tensors_of,
    without_wrappers,
)
from prove.watch.outputs import OutputWatcher
from prove.watch.rank_run import RankRun, source_line, wrap
from prove.watch.steps import MAX_STEPS, FunctionalParameters, StepWatcher

MAX_MODEL_CALLS = 64


class ModelWatcher:
    """Knows the modules and DDP models of this rank, and records their tensors."""

    def __init__(self, run: RankRun, steps: StepWatcher) -> None:
        self.run, self.steps = run, steps
        self.modules: list[weakref.ref] = []  # all modules of the script, the oldest first
        self.ddps: list[DistributedDataParallel] = []
        self.called_in_training: list[nn.Module] = []
        self.perhaps_untrained: list[nn.Module] = []  # no backward has passed through these yet
        self.backwards = 0
        self.parameters: dict[str, nn.Parameter] = {}  # parameters of called_in_training, by key
        self.averaged: set[int] = set()  # ids of parameters that a DDP averages

    def save_start(self) -> None:
        """Keep the weights of the start at the first batch or forward; in a replay, set them."""
        run, steps = self.run, self.steps
        has_model = steps.optimizers or self.ddps or self.called_in_training
        if not has_model or "start" in run.tensors or not (run.joined or run.replaying):
            return
        optimizers = steps.optimizers_of_torch()
        if run.feeder:
            run.feeder.set_start(optimizers, self.root_modules())
        run.tensors["start"] = [full_copies(parameters_of(optimizer)) for optimizer in optimizers]
        run.tensors["states"] = {
            name: {
                part: copy_tensors(full_tensor(tensor.detach()))
                for part, tensor in tensors_of(module)
            }
            for name, module in self.root_modules().items()
        }

    def alive(self) -> list[nn.Module]:
        return [module for reference in self.modules if (module := reference()) is not None]

    def root_modules(self) -> dict[str, nn.Module]:
        """List the modules that are part of no other module but a DDP, by class and number."""
        plain = [each for each in self.alive() if not isinstance(each, DistributedDataParallel)]
        parts = {id(part) for module in plain for part in module.children()}
        numbers: Counter = Counter()
        roots = {}
        for module in plain:
            if id(module) in parts or next(tensors_of(module), None) is None:
                continue
            name = type(module).__name__
            roots[f"{name} {numbers[name]}"] = module
            numbers[name] += 1
        return roots

    def name_parameters(self, module: nn.Module) -> None:
        """Give the parameters of a module keys that say in which module of the script they are.

        A key is the same on all ranks, although each may call another part of that module.
        """
        called = {id(p) for p in module.parameters() if not is_lazy(p)}
        known = {id(p) for p in self.parameters.values()}
        known |= {id(self.steps.places.now(p)) for p in self.parameters.values()}
        for root, whole in self.root_modules().items():
            for name, p in whole.named_parameters():
                if id(p) in called and id(p) not in known and not hasattr(p, "full_tensor"):
                    self.parameters[f"{root}: {without_wrappers(name)}"] = p
        self.steps.places.note(self.parameters.values(), self.alive())

    def held_now(self) -> dict[str, Tensor]:
        """Return what the modules hold in the places of the named parameters, by key."""
        return {key: self.steps.places.now(p) for key, p in self.parameters.items()}

    def holds_gradients(self) -> bool:
        """Does any parameter have a nonzero gradient, or may FSDP keep one elsewhere?"""
        held = [
            p for optimizer in self.steps.optimizers_of_torch() for p in parameters_of(optimizer)
        ]
        return any(
            hasattr(p, "full_tensor") or (p.grad is not None and project(p.grad)[1] != 0)
            for p in (*self.parameters.values(), *held)
        )

    def record_weights(self) -> None:
        """Record all weights between two batches after a step, by an optimizer or the script."""
        noted, steps = self.run.record.weights, self.run.record.step_count
        if len(noted) <= MAX_STEPS and steps not in noted and self.parameters:
            held = self.held_now()
            noted[steps] = {key: project(p) for key, p in held.items()}
            for key, p in self.parameters.items():
                if held[key] is not p:
                    self.steps.watch_gradient(held[key])

    def record_received_weights(self) -> None:
        """Count a step when weights arrive from rank 0, which alone steps: a parameter server."""
        record = self.run.record
        if not self.run.joined or any(optimizer.steps for optimizer in record.optimizers):
            return
        before = record.weights.get(record.step_count)
        held = self.held_now()
        if before and any(project(held[key]) != old for key, old in before.items()):
            record.step_count += 1
            self.record_weights()

    def finish(self) -> None:
        self.steps.end_batch()
        if not self.steps.ends_inside_step:
            self.record_weights()
        self.record_names()
        self.record_parameters_of_ddp()
        self.run.tensors["schedule_settings"] = self.steps.schedule_settings
        self.run.record.not_comparable = sorted(not_comparable)

    def record_names(self) -> None:
        """Record the names of each optimizer's parameters, and which of them are outside DDP."""
        names: dict[int, str] = {}
        for module in [*(ddp.module for ddp in self.ddps), *self.called_in_training]:
            for name, p in module.named_parameters():
                names.setdefault(id(p), without_wrappers(name))
        in_ddp = {id(p) for ddp in self.ddps for p in ddp.module.parameters()}
        keys = {id(p): key for key, p in self.held_now().items()}
        records = self.run.record.optimizers
        for optimizer, record in zip(self.steps.optimizers, records, strict=True):
            numbered = list(enumerate(self.steps.in_model(optimizer)))
            named = optimizer.names if isinstance(optimizer, FunctionalParameters) else []
            record.names = named or [names.get(id(p), f"tensor {number}") for number, p in numbered]
            record.keys = [keys.get(id(p), "") for _, p in numbered]
            record.outside_ddp = [number for number, p in numbered if id(p) not in in_ddp]

    def moved_parameters(self) -> set[str]:
        """Return the keys of the parameters that have changed during the run."""
        first: dict[str, Projection] = {}
        for held in self.run.record.weights.values():
            first = held | first
        noted = [pair for held in self.run.record.weights.values() for pair in held.items()]
        return {key for key, weights in noted if weights != first[key]}

    def record_parameters_of_ddp(self) -> None:
        """Record which parameters of DDP no optimizer holds, and which never got a gradient."""
        held, had_gradient = self.steps.held_parameters(), self.steps.had_gradient
        keys, moved = {id(p): key for key, p in self.held_now().items()}, self.moved_parameters()
        first = {id(p) for p in self.parameters.values()}
        # What was put in a parameter's place is the script's own, unless it gets a gradient.
        replaced = {p for p, key in keys.items() if p not in first and key in moved} - held
        own = replaced - had_gradient
        for ddp, record in zip(self.ddps, self.run.record.ddps, strict=True):
            trained = {
                without_wrappers(name): id(p)
                for name, p in ddp.module.named_parameters()
                if p.requires_grad
            }
            record.parameters = len({*trained.values()} - own)
            record.keys = [keys[p] for p in trained.values() if p in keys]
            record.unfrozen = [
                keys[p]
                for p in trained.values()
                if p in keys and p in first and p not in self.averaged
            ]
            record.not_in_last_step = [
                name for name, p in trained.items() if p in self.steps.without_gradient
            ]
            record.in_no_optimizer = [
                name
                for name, p in trained.items()
                if p not in held | own and (keys.get(p) not in moved or p in replaced)
            ]
            record.without_gradient = [
                name for name, p in trained.items() if p in self.averaged and p not in had_gradient
            ]  # only gradients of an optimizer's parameters are watched

    def number_of_ddp(self, module: nn.Module) -> int | None:
        """Return the number of the first DDP model that contains a module, or None."""
        belongs = (any(part is module for part in ddp.modules()) for ddp in self.ddps)
        return next((number for number, is_part in enumerate(belongs) if is_part), None)

    def record_call(self, module: nn.Module, inputs: tuple) -> None:
        """Record that the script itself calls a module."""
        run, ddp_index = self.run, self.number_of_ddp(module)
        if any(is_functorch_wrapped_tensor(p) or is_lazy(p) for p in module.parameters()):
            return  # torch.func replaces its tensors, or a lazy module has none yet
        for tell in run.events.module_calls:
            tell(module, ddp_index)
        trains = module.training and torch.is_grad_enabled()
        if not trains or next(module.parameters(), None) is None:
            return
        self.note_trained(module, by_backward=bool(self.steps.optimizers_of_torch()))
        ddp = None if ddp_index is None else run.record.ddps[ddp_index]
        if ddp and isinstance(module, DistributedDataParallel):
            ddp.forwards += 1
        elif ddp:
            ddp.forwards_around[source_line()] = ddp.forwards_around.get(source_line(), 0) + 1
        tensors = tensors_in(list(inputs))
        if len(run.record.model_calls) < MAX_MODEL_CALLS and tensors:
            loader_pass = run.current_loader_pass
            batch = (loader_pass.pass_index, loader_pass.batches_given) if loader_pass else (0, 0)
            rows, size = batch_size_of(inputs[0]), run.current_batch_size()
            run.record.model_calls.append(ModelCall(checksum(tensors[0]), rows, batch, size))

    def note_trained(self, module: nn.Module, by_backward: bool = False) -> None:
        """Note a call in training; by_backward: it trains only if a backward passes through it.

        An averaged model, for example, is run in training to set the statistics of its BatchNorm.
        """
        if not any(module is root for root in self.called_in_training):
            self.called_in_training.append(module)
            if is_divided(module):
                self.run.flag(Flag.MODEL_IS_DIVIDED)
            if by_backward:
                self.perhaps_untrained.append(module)
            else:
                self.steps.watch_for_steps_by_hand(module)
            self.name_parameters(module)
        self.steps.begin_forward()
        self.save_start()
        self.record_weights()

    def leave(self, module: nn.Module, outputs: Any) -> None:
        """Learn whether a backward passes through the outputs of a module that was called."""
        if not any(module is each for each in self.perhaps_untrained):
            return
        tensors = tensors_in([outputs])
        if not tensors:  # in an object that nobody looks into
            self.note_backward_through(module)
        for tensor in tensors:
            if not is_functorch_wrapped_tensor(tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.note_backward_through(module))

    def note_backward_through(self, module: nn.Module) -> None:
        if any(module is each for each in self.perhaps_untrained):
            others = [each for each in self.perhaps_untrained if each is not module]
            self.perhaps_untrained = others
            with self.run.draws.paused():
                self.steps.watch_for_steps_by_hand(module)


def watch_ddp(run: RankRun, model: ModelWatcher) -> None:
    """Watch DDP; without a loader, keep its inputs, and replace them in a replay."""

    @wrap(DistributedDataParallel, "__init__")
    def init(original: Callable, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if run.settings.float64:
            widen(module)
        with run.loop_watcher.paused() if run.loop_watcher else nullcontext():
            original(self, module, *args, **kwargs)
        model.ddps.append(self)
        model.averaged |= {id(p) for p in module.parameters() if p.requires_grad}
        if not run.record.step_count:
            run.tensors.pop("start", None)  # DDP has just changed the weights
            run.record.weights.clear()
        run.record.ddps.append(DDPRecord(source_line()))
        for p in module.parameters():
            model.steps.watch_gradient(p)

    @wrap(DistributedDataParallel, "forward")
    def forward(original: Callable, self: Any, *inputs: Any, **kwargs: Any) -> Any:
        model.save_start()
        if self.module.training and torch.is_grad_enabled():
            with run.draws.paused():
                if run.feeder:
                    inputs, kwargs = run.feeder.inputs(inputs, kwargs)
                else:
                    keep_inputs(run, inputs, kwargs)
            if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
                run.flag(Flag.USES_AUTOCAST)
        with run.draws.in_model():
            result = original(self, *inputs, **kwargs)
        with run.draws.paused():
            for tell in run.events.ddp_forwards:
                tell(model.ddps.index(self))
        if any(tensor.requires_grad and tensor.ndim == 0 for tensor in tensors_in([result])):
            run.flag(Flag.MODEL_RETURNS_LOSS)
        return result


def watch_modules(run: RankRun, model: ModelWatcher) -> None:
    inside, layers = run.running_modules, OutputWatcher(run)

    def enter_module(module: nn.Module, inputs: tuple) -> tuple | None:
        run.note_event()
        if isinstance(module, nn.RNNBase) and not run.settings.dropout:
            module.dropout = 0.0
        inputs_of_all = None
        is_repeated = torch._C._current_graph_task_id() != -1  # a checkpoint, in backward
        if not inside and not is_repeated and (run.joined or run.replaying):
            with run.draws.paused():
                if run.settings.float64:
                    make_double(module)
                model.record_call(module, inputs)
                layers.enter(module)
                if run.loop_watcher and not isinstance(module, DistributedDataParallel):
                    inputs_of_all = run.loop_watcher.enter_module(module, inputs)
        if not inside:
            run.draws.enter_model()
        inside.append(module)
        return inputs_of_all

    def leave_module(module: nn.Module, inputs: Any, outputs: Any) -> None:
        while inside and inside.pop() is not module:  # inner modules remain after an error
            pass
        with run.draws.paused():
            layers.leave(module, outputs)
        if not inside:
            model.leave(module, outputs)
            run.draws.leave_model()
            if run.loop_watcher:
                run.loop_watcher.leave_module(inputs, outputs)

    register_module_forward_pre_hook(enter_module)  # type: ignore[arg-type]
    register_module_forward_hook(leave_module, always_call=True)

    def note_module(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(reference() is self for reference in model.modules[-1:]):
            model.modules.append(weakref.ref(self))

    wrap(nn.Module, "__init__")(note_module)
    wrap(nn.Module, "__setstate__")(note_module)  # called when a module is copied


def watch_functional_calls(run: RankRun, model: ModelWatcher) -> None:
    """Watch the function that torch.func.functional_call and its predecessors call last."""

    @wrap(nn.utils.stateless, "_functional_call")
    def call(original: Callable, module: nn.Module, tensors: Any, *args: Any, **more: Any) -> Any:
        own = {id(p) for p in module.parameters()}
        with run.draws.paused(), temporarily_clear_interpreter_stack():
            named = {
                name: unwrapped(tensors[name])
                for name, _ in module.named_parameters()
                if isinstance(tensors, dict) and name in tensors
            }
            trains = torch.is_grad_enabled() and (run.joined or run.replaying)
            if not named or not trains:
                pass
            elif any(id(tensor) in own for tensor in named.values()):
                model.note_trained(module)
            else:
                model.steps.note_functional_call(module, named)
        with model.steps.places.lending():
            return original(module, tensors, *args, **more)


def unwrapped(tensor: Any) -> Any:
    """Return the tensor inside the wrappers of torch.func."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def install(run: RankRun) -> None:
    run.models = model = ModelWatcher(run, steps.install(run))
    run.at_end.append(model.finish)
    watch_ddp(run, model)
    watch_modules(run, model)
    watch_functional_calls(run, model)
