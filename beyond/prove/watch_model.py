"""Watches the model: forward passes, gradients before and after averaging, weights, clipping.

A tensor is written down as two numbers, `project`: its product with a fixed vector, and its norm.
The first is linear, so the mean over ranks can be checked without sending a gradient anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prove.record import Run, digests_of_generators, where, wrap
from prove.watch_data import batch_size_of, checksum, copied, tensors_in

MOST_STEPS = 24  # of each optimizer are written down
MOST_FORWARDS = 64
STEPS_PER_BATCH = 3  # of --batches, if there is no loader that could be cut
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@cache
def direction(size: int, device: torch.device) -> Tensor:
    return torch.cos(torch.arange(size, dtype=torch.float64, device=device) * 1.7 + 0.3)


def project(x: Tensor) -> list[float]:
    """A linear function of a tensor, and its norm."""
    x = x.detach()
    flat = (x.to_dense() if x.is_sparse else x).reshape(-1).double()
    return [float(flat @ direction(len(flat), flat.device)), float(flat.norm())]


def projected(tensors: list) -> list:
    return [None if x is None else project(x) for x in tensors]


def buffers(module: nn.Module) -> list:
    return [[clean(name), *project(b)] for name, b in module.named_buffers() if b.numel()]


def clean(name: str) -> str:
    """Without the parts that wrappers add to a name."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def scheduled(optimizer: Optimizer) -> list[dict]:
    """What a scheduler may change: learning rates, and with OneCycleLR or CyclicLR, momentum."""
    names = ("lr", "momentum", "betas")
    return [{k: copied(g[k]) for k in names if k in g} for g in optimizer.param_groups]


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

    def __init__(self, run: Run) -> None:
        self.run = run
        self.optimizers: list[Optimizer] = []
        self.wrapped: list[DistributedDataParallel] = []
        self.roots: list[nn.Module] = []  # modules that the script calls in training
        self.local: dict[int, LocalGradient] = {}  # by the id of a parameter
        self.watched: dict[int, Tensor] = {}
        self.had_gradient: set[int] = set()
        self.scheduled: dict[int, list[list[dict]]] = {}  # of each optimizer, before each step
        self.depth = 0  # of nested calls of step()

    def watch(self, p: Tensor) -> None:
        if id(p) in self.watched or not p.requires_grad or not p.is_leaf:
            return
        self.watched[id(p)], self.local[id(p)] = p, LocalGradient()

        def arrived(gradient: Tensor) -> None:
            self.run.events += 1
            self.had_gradient.add(id(p))
            self.local[id(p)].arrived(gradient, p.grad)

        p.register_hook(arrived)

    def start(self) -> None:
        """At the first batch or forward: keep the weights of the start, or set them."""
        run = self.run
        if not self.optimizers or "start" in run.tensors or not (run.joined or run.replaying):
            return
        if run.replaying:
            run.feeder.set_start(self.optimizers, self.wrapped)
        run.tensors["start"] = [[copied(p) for p in parameters_of(o)] for o in self.optimizers]
        run.tensors["states"] = [copied(dict(ddp.module.state_dict())) for ddp in self.wrapped]

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1 or optimizer not in self.optimizers:
            return
        run, number, held = self.run, self.optimizers.index(optimizer), parameters_of(optimizer)
        steps = run.facts["optimizers"][number]["steps"]
        now = digests_of_generators()
        run.facts["random_in_step"] += now != (run.after_fetch or now)
        given = run.current_pass["given"] if run.current_pass else 0
        if len(steps) < MOST_STEPS:
            grads = [p.grad for p in held]
            local = [self.local.get(id(p), LocalGradient()) for p in held]
            kept = [g is not None and s.arrivals > 0 and not s.was_zero and bool(g.any())
                    for g, s in zip(grads, local, strict=True)]  # fmt: skip
            steps.append({
                "at": where(), "lr": rates_of(optimizer), "scale": run.facts["scale"],
                "before": projected(held), "grads": projected(grads),
                "local": [s.total if s.arrivals else None for s in local],
                "old_gradient": any(kept),
                "dtype": next((str(g.dtype) for g in grads if g is not None), ""), "batch": given,
                "size": run.current_pass["sizes"][given - 1 : given] if run.current_pass else [],
            })  # fmt: skip
            self.scheduled.setdefault(number, []).append(scheduled(optimizer))
            if len(steps) == 1:
                run.tensors[f"gradients.{number}"] = [g if g is None else copied(g) for g in grads]
        if run.replaying:
            run.feeder.use_recorded_schedule(optimizer, number, len(steps) - 1)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.depth or optimizer not in self.optimizers:
            return
        run, held = self.run, parameters_of(optimizer)
        step = run.facts["optimizers"][self.optimizers.index(optimizer)]["steps"][-1]
        if "after" not in step:
            step["after"] = projected(held)
            own = self.scheduled[self.optimizers.index(optimizer)][-1]
            for group, before in zip(optimizer.param_groups, own, strict=True):
                group.update(before if run.replaying else {})
        run.steps += 1
        run.events += 1
        if run.current_pass:
            run.current_pass["steps"] += 1
        for p in held:
            self.local[id(p)] = LocalGradient()
        enough = run.steps >= STEPS_PER_BATCH * run.limit and not run.replaying
        if enough and run.joined and run.has_no_loader():
            run.leave("epochs")

    def epoch_ended(self) -> None:
        """Another epoch begins: which learning rate does each rank have now?"""
        self.run.facts["lr_in_epochs"].append([r for o in self.optimizers for r in rates_of(o)])

    def finish(self) -> None:
        """Names of parameters, and which of them DDP and the optimizers hold."""
        names: dict[int, str] = {}
        for module in [*(ddp.module for ddp in self.wrapped), *self.roots]:
            for name, p in module.named_parameters():
                names.setdefault(id(p), clean(name))
        held = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        in_ddp = {id(p) for ddp in self.wrapped for p in ddp.module.parameters()}
        facts = self.run.facts
        for optimizer, found in zip(self.optimizers, facts["optimizers"], strict=True):
            mine = parameters_of(optimizer)
            found["names"] = [names.get(id(p), f"tensor {k}") for k, p in enumerate(mine)]
            found["outside"] = [k for k, p in enumerate(mine) if id(p) not in in_ddp]
        for ddp, found in zip(self.wrapped, facts["ddps"], strict=True):
            trained = {clean(k): p for k, p in ddp.module.named_parameters() if p.requires_grad}
            found["parameters"] = len(trained)
            found["in_no_optimizer"] = [k for k, p in trained.items() if id(p) not in held]
            found["no_gradient"] = [k for k, p in trained.items() if id(p) not in self.had_gradient]
            found["buffers_at_end"] = buffers(ddp.module)
        self.run.tensors["scheduled"] = self.scheduled

    def ddp_around(self, module: nn.Module) -> int | None:
        """The number of the DDP model that a module is, or is a part of."""
        for number, ddp in enumerate(self.wrapped):
            if any(part is module for part in ddp.modules()):
                return number
        return None

    def called(self, module: nn.Module, inputs: tuple) -> None:
        """The script itself calls a module."""
        run, number = self.run, self.ddp_around(module)
        ddp = {} if number is None else run.facts["ddps"][number]
        if number is not None and not module.training and run.steps:
            ddp["evaluation"] = ddp["evaluation"] or buffers(self.wrapped[number].module)
        trains = module.training and torch.is_grad_enabled()
        if not trains or not any(True for _ in module.parameters()):
            return
        if not any(module is root for root in self.roots):
            self.roots.append(module)
        self.start()
        if isinstance(module, DistributedDataParallel):
            ddp["forwards"] += 1
        elif ddp:
            ddp["direct"][where()] = ddp["direct"].get(where(), 0) + 1
        found = tensors_in(list(inputs))
        if len(run.facts["roots"]) < MOST_FORWARDS and found:
            p = run.current_pass
            size = p["sizes"][p["given"] - 1] if p and p["given"] <= len(p["sizes"]) else None
            rows, batch = batch_size_of(inputs[0]), run.counts["fetched"]
            run.facts["roots"].append([checksum(found[0]), rows, size, batch])


def watch_optimizers(run: Run, model: ModelWatcher) -> None:
    @wrap(Optimizer, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self not in model.optimizers:
            model.optimizers.append(self)
            adaptive = "betas" in self.defaults  # as Adam, it divides by small gradients
            run.facts["optimizers"].append({"at": where(), "steps": [], "adaptive": adaptive})

    @wrap(Optimizer, "add_param_group")
    def add_group(original: Callable, self: Any, group: dict) -> None:
        original(self, group)
        for p in self.param_groups[-1]["params"]:
            model.watch(p)

    register_optimizer_step_pre_hook(model.before_step)
    register_optimizer_step_post_hook(model.after_step)


def watch_ddp(run: Run, model: ModelWatcher) -> None:
    @wrap(DistributedDataParallel, "__init__")
    def init(original: Callable, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if run.double:
            module.double()
        original(self, module, *args, **kwargs)
        model.wrapped.append(self)
        if not run.steps:
            run.tensors.pop("start", None)  # DDP has just changed the weights
        run.facts["ddps"].append({"at": where(), "forwards": 0, "direct": {}, "evaluation": None})
        for p in module.parameters():
            model.watch(p)

    @wrap(DistributedDataParallel, "forward")
    def forward(original: Callable, self: Any, *inputs: Any, **kwargs: Any) -> Any:
        model.start()
        if self.module.training and torch.is_grad_enabled():
            inputs, kwargs = run.feeder.inputs(inputs, kwargs)
            run.facts["autocast"] |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        result = original(self, *inputs, **kwargs)
        outputs = tensors_in([result])
        run.facts["loss_inside"] |= any(x.requires_grad and x.ndim == 0 for x in outputs)
        return result


def watch_modules(run: Run, model: ModelWatcher) -> None:
    inside: list[nn.Module] = []

    def entered(module: nn.Module, inputs: tuple) -> None:
        run.events += 1
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if not inside and (run.joined or run.replaying):
            model.called(module, inputs)
        inside.append(module)

    def left(module: nn.Module, inputs: Any, outputs: Any) -> None:
        while inside and inside.pop() is not module:  # an error left the inner ones
            pass

    register_module_forward_pre_hook(entered)
    register_module_forward_hook(left, always_call=True)


def watch_clipping(run: Run, name: str) -> None:
    @wrap(nn.utils, name)
    def clip(original: Callable, *args: Any, **kwargs: Any) -> Any:
        scaled = run.facts["scale"] != 1 and not run.counts["unscaled"]
        run.note("clips scaled gradients" if scaled else "clips")
        return original(*args, **kwargs)

    setattr(nn.utils.clip_grad, name, clip)


def watch_scaling(run: Run) -> None:
    @wrap(torch.amp.GradScaler, "scale")
    def scale(original: Callable, self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        if self.is_enabled():
            run.facts["scale"], run.counts["unscaled"] = self.get_scale(), 0
        return result

    @wrap(torch.amp.GradScaler, "unscale_")
    def unscale(original: Callable, self: Any, optimizer: Any) -> Any:
        run.counts["unscaled"] = 1
        return original(self, optimizer)


def watch_backward(run: Run) -> None:
    inside = False

    @wrap(Tensor, "backward")
    def backward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # --cpu: a mode of torch calls it once more
            return original(self, *args, **kwargs)
        run.counts["backwards"] += 1
        if len(run.facts["backwards"]) < MOST_FORWARDS:
            call = {"at": where(), "step": run.steps, "scaled": is_scaled(self)}
            run.facts["backwards"].append(call)
        inside = True
        try:
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


def install(run: Run) -> None:
    run.model = model = ModelWatcher(run)
    watch_optimizers(run, model)
    watch_ddp(run, model)
    watch_modules(run, model)
    for name in CLIPPING:
        if hasattr(nn.utils, name):
            watch_clipping(run, name)
    watch_scaling(run)
    watch_backward(run)
