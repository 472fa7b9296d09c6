"""Watch the steps of a rank, by an optimizer or by hand: gradients and weights."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prove.comparable import comparable
from prove.rank_record import OptimizerRecord, OptimizerStep, Projection
from prove.watch.model_tensors import (
    full_copies,
    momenta_of,
    parameters_of,
    project,
    rates_of,
    schedule_settings,
)
from prove.watch.operations import OptimizerByHand
from prove.watch.places import Places
from prove.watch.rank_run import RankRun, callers, source_line, wrap

MAX_STEPS = 24  # limit of recorded steps per optimizer


class FunctionalParameters:
    """Stands in for the optimizer of a script that steps tensors in a dict.

    Such a script passes the dict to torch.func.functional_call as the parameters of a module.
    """

    def __init__(self, named: dict[str, Tensor], batch: tuple[int, int]) -> None:
        self.names, self.batch = list(named), batch
        self.param_groups: list[dict] = [{"params": list(named.values())}]  # and no learning rate


@dataclass
class LocalGradient:
    """The gradient of one parameter on this rank, before any averaging."""

    total: float = 0.0  # sum of projections since p.grad was zero or None
    arrivals: int = 0  # number of gradients from backward since the last step
    was_zero: bool = False  # was p.grad zero or None at one of these arrivals?
    has_imaginary: bool = False

    def add(self, gradient: Tensor, old: Tensor | None) -> None:
        if old is None or not project(old)[1]:
            self.total, self.was_zero = 0.0, True
        self.total += project(gradient)[0]
        self.has_imaginary |= has_imaginary(gradient)
        self.arrivals += 1


class StepWatcher:
    """Watches the optimizers of this rank, the oldest first, and records their steps."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.optimizers: list[Any] = []  # torch optimizers, and stand-ins for steps by hand
        self.by_hand = OptimizerByHand()
        self.places = Places()
        self.weights_by_hand: list[Tensor] = []  # weights before the first step by hand
        self.local: dict[int, LocalGradient] = {}  # by the id of a parameter
        self.parameters: dict[int, Tensor] = {}  # parameters with watched gradients, by id
        self.had_gradient: set[int] = set()  # ids of parameters that ever got a gradient
        self.schedule_settings: dict[int, list[list[dict]]] = {}  # by optimizer, before each step
        self.depth = 0  # depth of nested calls of step()
        self.exchanges_before = 0  # number of calls to other ranks before this step
        self.ends_inside_step = False  # True: the run stops in step(), so nothing later is seen
        self.without_gradient: set[int] = set()  # ids without a gradient in the last step
        self.in_step_by_hand = False
        self.weights_at_batch: list[Projection] = []
        self.steps_at_batch = 0
        self.functional: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by module
        self.numbers_of_functional: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def optimizers_of_torch(self) -> list[Optimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Optimizer)]

    def held_parameters(self) -> set[int]:
        """Return the ids of the parameters that an optimizer holds."""
        return {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}

    def in_model(self, optimizer: Any) -> list[Tensor]:
        """List an optimizer's parameters; where the script has replaced one, what the model has."""
        return [self.places.now(p) for p in parameters_of(optimizer)]

    def held_places(self) -> set[int]:
        """Return the ids of the parameters in whose places an optimizer holds one."""
        in_models = {id(p) for optimizer in self.optimizers for p in self.in_model(optimizer)}
        return self.held_parameters() | in_models

    def watch_gradient(self, p: Tensor) -> None:
        if id(p) in self.parameters or not p.requires_grad or not p.is_leaf:
            return
        if hasattr(p, "full_tensor"):  # no hook fires for the gradient of a divided tensor
            return
        self.parameters[id(p)], self.local[id(p)] = p, LocalGradient()

        def arrived(gradient: Tensor | None) -> None:
            self.run.note_event()
            if gradient is None:  # another hook has taken it
                return
            self.had_gradient.add(id(p))
            self.local[id(p)].add(gradient, p.grad)

        p.register_hook(arrived)

    def begin_batch(self, batch: tuple[int, int], sizes: list[int], sources: list[dict]) -> None:
        """Assign draws and changes from here on to this batch, until its end."""
        self.note_weights_at_batch()
        self.run.draws.begin_batch(batch, sizes, sources)

    def end_batch(self) -> None:
        """End a batch, and with it a step that the script makes by hand."""
        self.run.draws.end_batch()
        self.end_step_by_hand()

    def begin_forward(self) -> None:
        """Let a forward stand for a batch, if there is no loader."""
        if self.run.has_no_loader():
            self.end_step_by_hand()
            self.note_weights_at_batch()

    def note_weights_at_batch(self) -> None:
        self.steps_at_batch = self.run.record.step_count
        if self.by_hand.addresses:
            self.weights_at_batch = [project(p) for p in parameters_of(self.by_hand)]

    def end_step_by_hand(self) -> None:
        if not self.in_step_by_hand and self.by_hand.addresses and self.by_hand.exchanged():
            self.begin_step_by_hand()
            steps = self.run.record.optimizers[self.optimizers.index(self.by_hand)].steps
            steps[-1].weights_before = self.weights_at_batch
        if self.in_step_by_hand:
            self.in_step_by_hand = False
            self.depth = 1
            self.after_step(self.by_hand, (), {})

    def begin_step_by_hand(self) -> None:
        """Begin a step when the script itself first writes to a parameter."""
        if self.depth or self.in_step_by_hand:
            return
        with self.run.draws.paused():
            if self.by_hand not in self.optimizers:
                self.optimizers.append(self.by_hand)
                self.run.record.optimizers.append(
                    OptimizerRecord(source_line(), False, is_by_hand=True)
                )
            self.before_step(self.by_hand, (), {})
            self.depth, self.in_step_by_hand = 0, True

    def watch_for_steps_by_hand(self, module: nn.Module) -> None:
        """Watch whether the script itself changes parameters that no optimizer holds."""
        held = self.held_places()
        if any(hasattr(part, "unshard") for part in module.modules()):
            return  # fully_shard lends whole parameters for a forward, which no optimizer holds
        for p in module.parameters():
            if p.requires_grad and p.is_leaf and id(p) not in held and type(p) is nn.Parameter:
                self.by_hand.hold(p)
        if self.by_hand.addresses and self.by_hand not in self.optimizers:
            self.weights_by_hand = full_copies(parameters_of(self.by_hand))
            self.weights_at_batch = [project(p) for p in parameters_of(self.by_hand)]

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record the gradients; with a closure, after its first call."""
        self.depth += 1
        if self.depth > 1 or optimizer not in self.optimizers or makes_state():
            return None
        closure = next(
            (each for each in (*args[1:], kwargs.get("closure")) if callable(each)), None
        )
        if closure is None:
            self.record_step(optimizer)
            return None
        is_first = True

        def watched_closure() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                is_first = False
                self.record_step(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": watched_closure}

    def record_step(self, optimizer: Any) -> None:
        run, optimizer_index = self.run, self.optimizers.index(optimizer)
        steps = run.record.optimizers[optimizer_index].steps
        with self.run.draws.paused():
            if len(steps) < MAX_STEPS:
                steps.append(self.step_of(optimizer))
                self.schedule_settings.setdefault(optimizer_index, []).append(
                    schedule_settings(optimizer)
                )
                if len(steps) == 1:
                    run.gradients[optimizer_index] = full_copies(
                        [p.grad for p in parameters_of(optimizer)]
                    )
            if self.run.feeder:
                self.run.feeder.use_recorded_schedule(optimizer, optimizer_index, len(steps) - 1)
        self.exchanges_before = run.exchanges

    def step_of(self, optimizer: Optimizer) -> OptimizerStep:
        parameters, loader_pass = parameters_of(optimizer), self.run.current_loader_pass
        gradients = [None if p.grad is None else project(p.grad) for p in parameters]
        local = [self.local.get(id(p), LocalGradient()) for p in parameters]
        return OptimizerStep(
            source_line=source_line(),
            batch=loader_pass.batches_given if loader_pass else 0,
            epoch=loader_pass.epoch if loader_pass else 0,
            batch_size=self.run.current_batch_size(),
            learning_rates=rates_of(optimizer),
            momenta=momenta_of(optimizer),
            loss_scale=self.run.record.loss_scale,
            dtype=next((str(p.grad.dtype) for p in parameters if p.grad is not None), ""),
            weights_before=[project(p) for p in self.in_model(optimizer)],
            gradients=gradients,
            local_gradients=[own.total if own.arrivals else None for own in local],
            has_old_gradient=any(
                gradient is not None and own.arrivals and not own.was_zero and gradient[1] != 0
                for gradient, own in zip(gradients, local, strict=True)
            ),
            lost_imaginary=[
                number
                for number, (p, own) in enumerate(zip(parameters, local, strict=True))
                if own.has_imaginary and p.grad is not None and not has_imaginary(p.grad)
            ],
        )

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.depth or optimizer not in self.optimizers or makes_state():
            return
        run = self.run
        with self.run.draws.paused():
            self.record_weights_after(optimizer)
        run.note_event()
        # The script may only copy master weights, which an optimizer has stepped.
        copies = optimizer is self.by_hand and run.record.step_count > self.steps_at_batch
        if not copies:
            run.record.step_count += 1
            if run.current_loader_pass:
                run.current_loader_pass.step_count += 1
        for p in parameters_of(optimizer):
            if id(p) in self.local and not self.local[id(p)].arrivals:
                self.without_gradient.add(id(p))
            else:
                self.without_gradient.discard(id(p))
            self.local[id(p)] = LocalGradient()
        enough = run.record.step_count >= run.most_steps() and not run.replaying
        if enough and run.joined and run.has_no_loader():
            self.ends_inside_step = True
            run.end_early()

    def record_weights_after(self, optimizer: Any) -> None:
        """Record the weights after the step.

        In a replay, set the script's own learning rates again.
        """
        optimizer_index = self.optimizers.index(optimizer)
        own_record = self.run.record.optimizers[optimizer_index]
        step = own_record.steps[-1] if own_record.steps else None
        if step is None or step.weights_after:
            return
        step.weights_after = [project(p) for p in self.in_model(optimizer)]
        if not own_record.is_by_hand:
            step.exchanges_inside = self.run.exchanges - self.exchanges_before
        if step.exchanges_inside:
            step.moments = [moments_of(optimizer, p) for p in parameters_of(optimizer)]
        if self.run.replaying:
            own_schedule = self.schedule_settings[optimizer_index][-1]
            for group, settings in zip(optimizer.param_groups, own_schedule, strict=True):
                group.update(settings)
        if own_record.is_by_hand and len(own_record.steps) == 1 and not any(step.gradients):
            self.save_changes(optimizer_index, own_record)

    def note_functional_call(self, module: nn.Module, named: dict[str, Tensor]) -> None:
        """Record a step if the weights of a batch's first call differ from the last batch's."""
        loader_pass = self.run.current_loader_pass
        if loader_pass is None or any(tensor.grad_fn is not None for tensor in named.values()):
            return  # other weights within one batch: an inner loop
        batch = loader_pass.pass_index, loader_pass.batches_given
        before, now = self.functional.get(module), FunctionalParameters(named, batch)
        if before is None:
            self.functional[module] = now
        elif before.batch != batch and before.names == now.names:
            self.functional[module] = now
            self.record_functional_step(module, before, now)
            loader_pass.step_count += 1

    def record_functional_step(
        self, module: nn.Module, before: FunctionalParameters, now: FunctionalParameters
    ) -> None:
        run, old, new = self.run, parameters_of(before), parameters_of(now)
        weights_before, weights_after = [*map(project, old)], [*map(project, new)]
        if weights_before == weights_after:
            return
        optimizer_index = self.numbers_of_functional.get(module)
        if optimizer_index is None:
            optimizer_index = self.numbers_of_functional[module] = len(self.optimizers)
            record = OptimizerRecord(source_line(), False, is_by_hand=True, compares_changes=True)
            run.record.optimizers.append(record)
            self.optimizers.append(now)
            run.gradients[optimizer_index] = full_copies(
                [after.detach() - earlier.detach() for after, earlier in zip(new, old, strict=True)]
            )
        nothing: list = [None] * len(new)
        epoch = run.current_loader_pass.epoch if run.current_loader_pass else 0
        step = OptimizerStep(
            source_line(), before.batch[1], epoch, run.current_batch_size(), [], 1.0, "",
            weights_before, nothing, nothing, False, weights_after,
        )  # fmt: skip
        if len(run.record.optimizers[optimizer_index].steps) < MAX_STEPS:
            run.record.optimizers[optimizer_index].steps.append(step)
        run.record.step_count += 1
        run.note_event()

    def save_changes(self, optimizer_index: int, own_record: OptimizerRecord) -> None:
        """Let the change of the weights stand for gradients that were never in p.grad.

        Gradients of autograd.grad are an example.
        """
        after = full_copies(parameters_of(self.by_hand))
        pairs = zip(after, self.weights_by_hand, strict=True)
        self.run.gradients[optimizer_index] = [new - old for new, old in pairs]
        own_record.compares_changes = True

    def record_rates(self) -> None:
        """Record the learning rates of this rank at the end of an epoch."""
        rates = [rate for optimizer in self.optimizers_of_torch() for rate in rates_of(optimizer)]
        self.run.record.rates_after_epochs.append(rates)


def makes_state() -> bool:
    """Does torch.distributed.checkpoint make this step, so that the optimizer gets a state?

    Its get_state_dict steps with a rate of 0: torch.distributed.checkpoint.state_dict.
    """
    return any(function == "_init_optim_state" for *_, function in callers())


def has_imaginary(tensor: Tensor) -> bool:
    return tensor.is_complex() and bool(comparable(tensor)[1::2].any())


def moments_of(optimizer: Any, p: Tensor) -> dict[str, Projection]:
    """Project the optimizer's state of a parameter.

    The first moment is linear in the gradient that step() used, so it shows a factor in it.
    """
    kept = getattr(optimizer, "state", {}).get(p, {})
    pairs = kept.items() if isinstance(kept, dict) else ()
    return {
        str(name): project(value)
        for name, value in pairs
        if isinstance(value, Tensor) and value.shape == p.shape
    }


def install(run: RankRun) -> StepWatcher:
    steps = StepWatcher(run)

    @wrap(Optimizer, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self not in steps.optimizers:
            steps.optimizers.append(self)
            is_adaptive = "betas" in self.defaults
            run.record.optimizers.append(OptimizerRecord(source_line(), is_adaptive))
        steps.places.note(parameters_of(self), run.models.alive())

    @wrap(Optimizer, "add_param_group")
    def add_group(original: Callable, self: Any, group: dict) -> None:
        original(self, group)
        for p in self.param_groups[-1]["params"]:
            steps.watch_gradient(p)
        if self in steps.optimizers:  # else it is being made
            steps.places.note(self.param_groups[-1]["params"], run.models.alive())

    register_optimizer_step_pre_hook(steps.before_step)
    register_optimizer_step_post_hook(steps.after_step)
    return steps
