"""What does the model of a rank compute? Forward passes, gradients and steps are watched."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prove.draws import Draws
from prove.model_tensors import (
    is_divided,
    parameters_of,
    project,
    projected_buffers,
    rates_of,
    schedule_settings,
    tensors_of,
    whole,
    whole_copies,
    without_wrappers,
)
from prove.rank_record import (
    Backward,
    DDPRecord,
    EvaluatedModule,
    ModelCall,
    Note,
    OptimizerRecord,
    OptimizerStep,
    Projection,
)
from prove.rank_run import RankRun, where, wrap, wrap_everywhere
from prove.replay import Feeder, InputKeeper
from prove.samples import batch_size_of, checksum, copied, tensors_in
from prove.watch_operations import HandMadeSteps

MOST_STEPS = 24  # of each optimizer are written down
MOST_CALLS = 64
MOST_EVALUATED = 32
STEPS_PER_BATCH = 3  # of --batches, if there is no loader that could be cut
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@dataclass
class LocalGradient:
    """What backward gave one parameter on this rank, before anybody averaged it."""

    total: float = 0.0  # projections, since p.grad was zero or None
    arrivals: int = 0  # since the last step
    was_zero: bool = False  # p.grad, at one of these arrivals

    def arrived(self, gradient: Tensor, old: Tensor | None) -> None:
        if old is None or not old.any():
            self.total, self.was_zero = 0.0, True
        self.total += project(gradient)[0]
        self.arrivals += 1


class ModelWatcher:
    """The optimizers, DDP models and parameters of this rank, in the order of their making."""

    def __init__(self, run: RankRun, draws: Draws, feeder: Feeder | None) -> None:
        self.run, self.draws, self.feeder = run, draws, feeder  # it feeds a replay only
        self.optimizers: list[Any] = []  # of torch, and the one that stands in for steps by hand
        self.by_hand = HandMadeSteps()
        self.weights_by_hand: list[Tensor] = []  # before the first of these steps
        self.modules: list[weakref.ref] = []  # all that the script has made, in this order
        self.wrapped: list[DistributedDataParallel] = []
        self.roots: list[nn.Module] = []  # modules that the script calls in training
        self.local: dict[int, LocalGradient] = {}  # by the id of a parameter
        self.watched: dict[int, Tensor] = {}
        self.had_gradient: set[int] = set()
        self.schedule_settings: dict[int, list[list[dict]]] = {}  # by optimizer, before each step
        self.depth = 0  # of nested calls of step()
        self.changes = False  # the script is changing parameters itself
        self.weights_at_batch: list[Projection] = []
        self.backwards = 0
        self.evaluated: weakref.WeakKeyDictionary[nn.Module, tuple[str, int]] = (
            weakref.WeakKeyDictionary()  # their names, and the steps before they were written down
        )

    def watch(self, p: Tensor) -> None:
        if id(p) in self.watched or not p.requires_grad or not p.is_leaf:
            return
        if hasattr(p, "full_tensor"):  # its gradient arrives by no hook
            return
        self.watched[id(p)], self.local[id(p)] = p, LocalGradient()

        def arrived(gradient: Tensor) -> None:
            self.run.note_event()
            self.had_gradient.add(id(p))
            self.local[id(p)].arrived(gradient, p.grad)

        p.register_hook(arrived)

    def keep_start(self) -> None:
        """At the first batch or forward: keep the weights of the start, or set them."""
        run = self.run
        has_model = self.optimizers or self.wrapped or self.roots
        if not has_model or "start" in run.tensors or not (run.joined or run.replaying):
            return
        optimizers = [optimizer for optimizer in self.optimizers if optimizer is not self.by_hand]
        if self.feeder:
            self.feeder.set_start(optimizers, self.root_modules())
        run.tensors["start"] = [whole_copies(parameters_of(optimizer)) for optimizer in optimizers]
        run.tensors["states"] = {
            name: {part: copied(whole(tensor.detach())) for part, tensor in tensors_of(module)}
            for name, module in self.root_modules().items()
        }

    def root_modules(self) -> dict[str, nn.Module]:
        """All modules that are no part of another, whatever wraps them, by class and number."""
        alive = [module for reference in self.modules if (module := reference()) is not None]
        plain = [module for module in alive if not isinstance(module, DistributedDataParallel)]
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

    def begin_batch(self, batch: tuple[int, int], sizes: list[int], sources: list[dict]) -> None:
        """Until the next one is asked for, a step draws and changes weights."""
        if self.by_hand.addresses:
            self.weights_at_batch = [project(p) for p in parameters_of(self.by_hand)]
        self.draws.begin_batch(batch, sizes, sources)

    def end_batch(self) -> None:
        """A step that the script makes by hand has its end, too."""
        self.draws.end_batch()
        if not self.changes and self.by_hand.addresses and self.by_hand.exchanged():
            self.parameters_change()
            steps = self.run.record.optimizers[self.optimizers.index(self.by_hand)].steps
            steps[-1].weights_before = self.weights_at_batch
        if self.changes:
            self.changes = False
            self.depth = 1
            self.after_step(self.by_hand, (), {})

    def parameters_change(self) -> None:
        """The script itself writes to a parameter; in the first such moment a step begins."""
        if self.depth or self.changes:
            return
        with self.draws.paused():
            if self.by_hand not in self.optimizers:
                self.optimizers.append(self.by_hand)
                self.run.record.optimizers.append(OptimizerRecord(where(), False, is_by_hand=True))
            self.before_step(self.by_hand, (), {})
            self.depth, self.changes = 0, True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """If there is a closure, the gradients are there when it was called for the first time."""
        self.depth += 1
        if self.depth > 1 or optimizer not in self.optimizers:
            return None
        closure = next(
            (each for each in (*args[1:], kwargs.get("closure")) if callable(each)), None
        )
        if closure is None:
            self.write_step(optimizer)
            return None
        is_first = True

        def watched_closure() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                is_first = False
                self.write_step(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": watched_closure}

    def write_step(self, optimizer: Any) -> None:
        run, number = self.run, self.optimizers.index(optimizer)
        steps = run.record.optimizers[number].steps
        with self.draws.paused():
            if len(steps) < MOST_STEPS:
                steps.append(self.step_of(optimizer))
                self.schedule_settings.setdefault(number, []).append(schedule_settings(optimizer))
                if len(steps) == 1:
                    run.record.optimizers[number].begins_later = run.in_second_epoch
                    run.gradients[number] = whole_copies([p.grad for p in parameters_of(optimizer)])
            if self.feeder:
                self.feeder.use_recorded_schedule(optimizer, number, len(steps) - 1)

    def step_of(self, optimizer: Optimizer) -> OptimizerStep:
        parameters, loader_run = parameters_of(optimizer), self.run.current_loader_run
        gradients = [p.grad for p in parameters]
        local = [self.local.get(id(p), LocalGradient()) for p in parameters]
        return OptimizerStep(
            at=where(),
            batch=loader_run.given if loader_run else 0,
            batch_size=self.run.current_batch_size(),
            learning_rates=rates_of(optimizer),
            loss_scale=self.run.record.loss_scale,
            dtype=next((str(gradient.dtype) for gradient in gradients if gradient is not None), ""),
            weights_before=[project(p) for p in parameters],
            gradients=[None if gradient is None else project(gradient) for gradient in gradients],
            local_gradients=[own.total if own.arrivals else None for own in local],
            has_old_gradient=any(
                gradient is not None and own.arrivals and not own.was_zero and bool(gradient.any())
                for gradient, own in zip(gradients, local, strict=True)
            ),
        )

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.depth or optimizer not in self.optimizers:
            return
        run = self.run
        with self.draws.paused():
            self.note_changes(optimizer)
        run.record.steps += 1
        run.note_event()
        if run.current_loader_run:
            run.current_loader_run.steps += 1
        for p in parameters_of(optimizer):
            self.local[id(p)] = LocalGradient()
        enough = run.record.steps >= STEPS_PER_BATCH * run.settings.batches and not run.replaying
        if enough and run.joined and run.has_no_loader():
            run.leave()

    def note_changes(self, optimizer: Any) -> None:
        """What the step has made of the weights; a replay goes back to the script's own rates."""
        number = self.optimizers.index(optimizer)
        own_record = self.run.record.optimizers[number]
        step = own_record.steps[-1] if own_record.steps else None
        if step is None or step.weights_after:
            return
        step.weights_after = [project(p) for p in parameters_of(optimizer)]
        if self.run.replaying:
            own_schedule = self.schedule_settings[number][-1]
            for group, settings in zip(optimizer.param_groups, own_schedule, strict=True):
                group.update(settings)
        if len(own_record.steps) == 1 and not any(step.gradients):
            self.compare_changes(number, own_record)

    def compare_changes(self, number: int, own_record: OptimizerRecord) -> None:
        """No gradient is kept in p.grad (autograd.grad): what the step changed stands for it."""
        if own_record.is_by_hand:
            after = whole_copies(parameters_of(self.by_hand))
            pairs = zip(after, self.weights_by_hand, strict=True)
            self.run.gradients[number] = [new - old for new, old in pairs]
            own_record.compares_changes = True

    def end_epoch(self) -> None:
        """Which learning rate does each rank have now?"""
        rates = [rate for optimizer in self.optimizers for rate in rates_of(optimizer)]
        self.run.record.rates_after_epochs.append(rates)

    def finish(self) -> None:
        """Names of parameters, and which of them DDP and the optimizers hold."""
        self.end_batch()
        names: dict[int, str] = {}
        for module in [*(ddp.module for ddp in self.wrapped), *self.roots]:
            for name, p in module.named_parameters():
                names.setdefault(id(p), without_wrappers(name))
        held = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        in_ddp = {id(p) for ddp in self.wrapped for p in ddp.module.parameters()}
        record = self.run.record
        for optimizer, known in zip(self.optimizers, record.optimizers, strict=True):
            numbered = list(enumerate(parameters_of(optimizer)))
            known.names = [names.get(id(p), f"tensor {number}") for number, p in numbered]
            known.outside_ddp = [number for number, p in numbered if id(p) not in in_ddp]
        for ddp, its_record in zip(self.wrapped, record.ddps, strict=True):
            trained = {without_wrappers(name): id(p) for name, p in ddp.module.named_parameters()
                       if p.requires_grad}  # fmt: skip
            its_record.parameters = len(trained)
            its_record.in_no_optimizer = [name for name, p in trained.items() if p not in held]
            its_record.without_gradient = [
                name for name, p in trained.items() if p not in self.had_gradient
            ]
            its_record.buffers_at_end = projected_buffers(ddp.module)
        self.run.tensors["schedule_settings"] = self.schedule_settings

    def note_call(self, module: nn.Module, inputs: tuple) -> None:
        """The script itself calls a module."""
        run, ddp = self.run, None
        if any(map(is_functorch_wrapped_tensor, module.parameters())):
            return  # in torch.func, a module only computes, with tensors of somebody else
        self.note_evaluated(module)
        for number, wrapped in enumerate(self.wrapped):
            if any(part is module for part in wrapped.modules()):
                ddp = run.record.ddps[number]
                if not module.training and run.record.steps and not ddp.buffers_at_evaluation:
                    ddp.buffers_at_evaluation = projected_buffers(wrapped.module)
                break
        trains = module.training and torch.is_grad_enabled()
        if not trains or next(module.parameters(), None) is None:
            return
        if not any(module is root for root in self.roots):
            self.roots.append(module)
            if is_divided(module):
                run.note(Note.MODEL_IS_DIVIDED)
            self.hold_by_hand(module)
        self.keep_start()
        if ddp and isinstance(module, DistributedDataParallel):
            ddp.forwards += 1
        elif ddp:
            ddp.forwards_around[where()] = ddp.forwards_around.get(where(), 0) + 1
        tensors = tensors_in(list(inputs))
        if len(run.record.model_calls) < MOST_CALLS and tensors:
            loader_run = run.current_loader_run
            batch = (loader_run.number, loader_run.given) if loader_run else (0, 0)
            rows, size = batch_size_of(inputs[0]), run.current_batch_size()
            run.record.model_calls.append(ModelCall(checksum(tensors[0]), rows, batch, size))

    def note_evaluated(self, module: nn.Module) -> None:
        """What a module holds that is called without being trained: averaged models, teachers.

        Written down after step 1, 2, 4, ..., because a copy may be the same until it is updated.
        """
        steps, evaluated = self.run.record.steps, self.run.record.evaluated
        if not steps or (module.training and torch.is_grad_enabled()):
            return
        name, last = self.evaluated.get(module, (f"{type(module).__name__} called at {where()}", 0))
        if steps < 2 * last or len(evaluated) >= MOST_EVALUATED:
            return
        if isinstance(module, DistributedDataParallel) or is_divided(module):
            return
        self.evaluated[module] = (name, steps)
        held = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        is_trained = any(id(p) in held for p in module.parameters())
        in_ddp = any(part is module for ddp in self.wrapped for part in ddp.modules())
        parameters = {} if is_trained else dict(module.named_parameters())
        buffers = {} if in_ddp or module.training else dict(module.named_buffers())
        tensors = {
            without_wrappers(name): project(tensor)
            for name, tensor in (parameters | buffers).items()
            if tensor.numel()
        }
        if tensors:
            names = [*map(without_wrappers, buffers)]
            evaluated.append(EvaluatedModule(name, steps, is_trained, tensors, names))

    def hold_by_hand(self, module: nn.Module) -> None:
        """Parameters that no optimizer holds: does the script itself change them?"""
        held = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        for p in module.parameters():
            if p.requires_grad and p.is_leaf and id(p) not in held and type(p) is nn.Parameter:
                self.by_hand.hold(p)
        if self.by_hand.addresses and self.by_hand not in self.optimizers:
            self.weights_by_hand = whole_copies(parameters_of(self.by_hand))
            self.weights_at_batch = [project(p) for p in parameters_of(self.by_hand)]


def watch_optimizers(run: RankRun, model: ModelWatcher) -> None:
    @wrap(Optimizer, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self not in model.optimizers:
            model.optimizers.append(self)
            is_adaptive = "betas" in self.defaults
            run.record.optimizers.append(OptimizerRecord(where(), is_adaptive))

    @wrap(Optimizer, "add_param_group")
    def add_group(original: Callable, self: Any, group: dict) -> None:
        original(self, group)
        for p in self.param_groups[-1]["params"]:
            model.watch(p)

    register_optimizer_step_pre_hook(model.before_step)
    register_optimizer_step_post_hook(model.after_step)


def watch_ddp(run: RankRun, model: ModelWatcher, source: Feeder | InputKeeper) -> None:
    """source: what it gives goes into DDP, in the place of what the script has given."""

    @wrap(DistributedDataParallel, "__init__")
    def init(original: Callable, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if run.settings.float64:
            module.double()
        original(self, module, *args, **kwargs)
        model.wrapped.append(self)
        if not run.record.steps:
            run.tensors.pop("start", None)  # DDP has just changed the weights
        run.record.ddps.append(DDPRecord(where()))
        for p in module.parameters():
            model.watch(p)

    @wrap(DistributedDataParallel, "forward")
    def forward(original: Callable, self: Any, *inputs: Any, **kwargs: Any) -> Any:
        model.keep_start()
        if self.module.training and torch.is_grad_enabled():
            with model.draws.paused():
                inputs, kwargs = source.inputs(inputs, kwargs)
            run.record.uses_autocast |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        with model.draws.in_model():
            result = original(self, *inputs, **kwargs)
        is_loss = [tensor.requires_grad and tensor.ndim == 0 for tensor in tensors_in([result])]
        run.record.model_returns_loss |= any(is_loss)
        return result


def watch_modules(run: RankRun, model: ModelWatcher) -> None:
    inside: list[nn.Module] = []

    def entered(module: nn.Module, inputs: tuple) -> None:
        run.note_event()
        if isinstance(module, nn.RNNBase) and not run.settings.dropout:
            module.dropout = 0.0
        is_repeated = torch._C._current_graph_task_id() != -1  # in backward, by a checkpoint
        if not inside and not is_repeated and (run.joined or run.replaying):
            with model.draws.paused():
                if run.settings.float64:
                    make_double(module)
                model.note_call(module, inputs)
        inside.append(module)

    def left(module: nn.Module, inputs: Any, outputs: Any) -> None:
        while inside and inside.pop() is not module:  # an error left the inner ones
            pass

    register_module_forward_pre_hook(entered)
    register_module_forward_hook(left, always_call=True)

    def remember(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(reference() is self for reference in model.modules[-1:]):
            model.modules.append(weakref.ref(self))

    wrap(nn.Module, "__init__")(remember)
    wrap(nn.Module, "__setstate__")(remember)  # of a copy


def make_double(module: nn.Module) -> None:
    """A model that came from a file, in float32; before DDP, the script may not have wrapped it."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(hasattr(tensor, "full_tensor") for tensor in tensors):
        return
    if any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in tensors):
        if any(map(accumulator_is_held, module.parameters())):
            raise TypeError("hooks that average gradients are lost if the model becomes float64")
        module.double()


def accumulator_is_held(p: Tensor) -> bool:
    """Does anybody hold the node that adds to p.grad? Megatron hangs its averaging on it, and torch
    makes a new one, without that hook, when p gets another dtype."""

    def metadata() -> Any:
        node: Any = p.view_as(p).grad_fn
        return node.next_functions[0][0].metadata

    with torch.enable_grad():
        if not p.requires_grad or not p.is_leaf:
            return False
        metadata()["prove"] = True  # it goes with its node, unless that stays alive
        return "prove" in metadata()


def watch_sharding(run: RankRun) -> None:
    """fully_shard divides float64 parameters, and nothing makes them smaller."""
    import torch.distributed.fsdp as fsdp

    @wrap_everywhere(fsdp, "fully_shard")
    def shard(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        if run.settings.float64:
            for part in module if isinstance(module, list | tuple) else [module]:
                make_double(part)
            kwargs.pop("mp_policy", None)
        return original(module, *args, **kwargs)


def watch_scaling(run: RankRun) -> None:
    """Of the loss, by a GradScaler, and the clipping of gradients that are still scaled."""
    unscaled = False

    @wrap(torch.amp.GradScaler, "scale")
    def scale(original: Callable, self: Any, outputs: Any) -> Any:
        nonlocal unscaled
        result = original(self, outputs)
        if self.is_enabled():
            run.record.loss_scale, unscaled = self.get_scale(), False
        return result

    @wrap(torch.amp.GradScaler, "unscale_")
    def unscale(original: Callable, self: Any, optimizer: Any) -> Any:
        nonlocal unscaled
        unscaled = True
        return original(self, optimizer)

    def watch_clipping(name: str) -> None:
        @wrap(nn.utils, name)
        def clip(original: Callable, *args: Any, **kwargs: Any) -> Any:
            scaled = run.record.loss_scale != 1 and not unscaled
            run.note(Note.CLIPS_SCALED if scaled else Note.CLIPS)
            return original(*args, **kwargs)

        setattr(nn.utils.clip_grad, name, clip)

    for name in CLIPPING:
        if hasattr(nn.utils, name):
            watch_clipping(name)


def watch_backward(run: RankRun, model: ModelWatcher) -> None:
    inside = False

    @wrap(Tensor, "backward")
    def backward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # --cpu: a mode of torch calls it once more
            return original(self, *args, **kwargs)
        model.backwards += 1
        if len(run.record.backwards) < MOST_CALLS:
            call = Backward(where(), run.record.steps, is_scaled(self))
            run.record.backwards.append(call)
        inside = True
        try:
            with model.draws.in_model():
                return original(self, *args, **kwargs)
        finally:
            inside = False


def is_scaled(loss: Tensor) -> bool:
    """Is the loss divided or multiplied in one of its last operations?"""
    node = loss.grad_fn
    for _ in range(4):
        if node is None:
            break
        if "Div" in node.name() or "Mul" in node.name():
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def install(run: RankRun, draws: Draws, source: Feeder | InputKeeper) -> ModelWatcher:
    model = ModelWatcher(run, draws, source if isinstance(source, Feeder) else None)
    run.at_end.append(model.finish)
    watch_optimizers(run, model)
    watch_ddp(run, model, source)
    watch_modules(run, model)
    watch_sharding(run)
    watch_scaling(run)
    watch_backward(run, model)
    return model
