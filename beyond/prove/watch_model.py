"""Watches the model: forward passes, gradients before and after averaging, weights, clipping.

A tensor is written down as two numbers, `project`: its product with a fixed vector, and its norm.
The first is linear, so the mean over ranks can be checked without sending a gradient anywhere.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prove.record import Run, digests_of_generators, where
from prove.watch_data import batch_size_of, checksum, copied, tensors_in

MOST_STEPS = 24  # of each optimizer are written down
MOST_FORWARDS = 64

run: Run
optimizers: list[Optimizer] = []
wrapped: list[DistributedDataParallel] = []
roots: list[nn.Module] = []  # modules that the script calls
watched: dict[int, Tensor] = {}  # parameters by id
local: dict[int, "LocalGradient"] = {}
before_clip: dict[int, list[float]] = {}  # gradients as they were before they were clipped
had_gradient: set[int] = set()


@cache
def direction(size: int, device: torch.device) -> Tensor:
    return torch.cos(torch.arange(size, dtype=torch.float64, device=device) * 1.7 + 0.3)


def project(x: Tensor) -> list[float]:
    """A linear function of a tensor, and its norm."""
    x = x.detach()
    flat = (x.to_dense() if x.is_sparse else x).reshape(-1).double()
    return [float(flat @ direction(len(flat), flat.device)), float(flat.norm())]


class LocalGradient:
    """What backward gave one parameter on this rank, before anybody averaged it."""

    def __init__(self) -> None:
        self.since_zero = self.since_step = 0.0
        self.zeroed = True  # since the last step
        self.arrivals = 0  # since the last step

    def stepped(self) -> None:
        self.since_step, self.arrivals, self.zeroed = 0.0, 0, False


def watch_parameter(p: Tensor) -> None:
    if id(p) in watched or not p.requires_grad or not p.is_leaf:
        return
    watched[id(p)], local[id(p)] = p, LocalGradient()

    def arrived(gradient: Tensor) -> None:
        run.events += 1
        sums = local[id(p)]
        if p.grad is None or not p.grad.any():
            sums.since_zero, sums.zeroed = 0.0, True
        value = project(gradient)[0]
        sums.since_zero, sums.since_step = sums.since_zero + value, sums.since_step + value
        sums.arrivals += 1
        had_gradient.add(id(p))

    p.register_hook(arrived)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def start() -> None:
    """At the first batch or forward: keep the weights that training starts from, or set them."""
    if not optimizers or "start" in run.tensors or not (run.joined or run.replaying):
        return
    if run.replaying:
        run.set_start(optimizers, wrapped)
    run.tensors["start"] = [[copied(p) for p in parameters_of(o)] for o in optimizers]
    run.tensors["states"] = [copied(dict(ddp.module.state_dict())) for ddp in wrapped]


def facts_of(optimizer: Optimizer) -> dict:
    return run.facts["optimizers"][optimizers.index(optimizer)]


depth = 0  # of nested calls of step()


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global depth
    depth += 1
    if depth > 1 or optimizer not in optimizers:
        return
    number, held = optimizers.index(optimizer), parameters_of(optimizer)
    steps = facts_of(optimizer)["steps"]
    now = digests_of_generators()
    run.facts["random_in_step"] += now != (run.after_fetch or now)
    own_rates = [float(group["lr"]) for group in optimizer.param_groups]
    if len(steps) < MOST_STEPS:
        grads = [
            None if p.grad is None else before_clip.get(id(p)) or project(p.grad) for p in held
        ]
        sums = [local.get(id(p), LocalGradient()) for p in held]
        hooks = [len(getattr(p, "_backward_hooks", None) or ()) for p in held]
        steps.append({
            "at": where(), "lr": own_rates, "grads": grads, "scale": run.facts["scale"],
            "local": [[s.since_zero, s.since_step, s.zeroed, s.arrivals] for s in sums],
            "other_hooks": any(n > 1 for n in hooks), "before": [project(p) for p in held],
            "backwards": run.counts["backwards"], "clipped": bool(before_clip),
            "dtype": str(next((p.grad.dtype for p in held if p.grad is not None), "")),
            "batch": run.current_pass["given"] if run.current_pass else 0,
            "size": run.current_pass["sizes"][run.current_pass["given"] - 1 :][:1]
            if run.current_pass else [],
        })  # fmt: skip
        if len(steps) == 1:
            run.tensors[f"gradients.{number}"] = [
                None if p.grad is None else copied(p.grad) for p in held
            ]
    if run.replaying:
        run.use_recorded_rates(optimizer, number)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global depth
    depth -= 1
    if depth or optimizer not in optimizers:
        return
    steps = facts_of(optimizer)["steps"]
    if steps and "after" not in steps[-1]:
        steps[-1]["after"] = [project(p) for p in parameters_of(optimizer)]
        for group, rate in zip(optimizer.param_groups, steps[-1]["lr"], strict=False):
            group["lr"] = rate if run.replaying else group["lr"]
    run.steps += 1
    run.events += 1
    run.counts["backwards"] = 0
    before_clip.clear()
    if run.current_pass:
        run.current_pass["steps"] += 1
    for p in parameters_of(optimizer):
        if id(p) in local:
            local[id(p)].stepped()
    run.step_ended()


def epoch_ended() -> None:
    """Another epoch begins: which learning rate does each rank have now?"""
    rates = [[float(group["lr"]) for group in o.param_groups] for o in optimizers]
    run.facts["lr_in_epochs"].append(rates)


def clean(name: str) -> str:
    return name.replace("module.", "").replace("_orig_mod.", "")


def finish() -> None:
    """Names of parameters, and which of them DDP and the optimizers hold."""
    names: dict[int, str] = {}
    for module in [*(ddp.module for ddp in wrapped), *roots]:
        for name, p in module.named_parameters():
            names.setdefault(id(p), clean(name))
    held = {id(p) for o in optimizers for p in parameters_of(o)}
    in_ddp = {id(p) for ddp in wrapped for p in ddp.module.parameters()}
    for optimizer in optimizers:
        mine = parameters_of(optimizer)
        facts = facts_of(optimizer)
        facts["names"] = [names.get(id(p), f"tensor {k}") for k, p in enumerate(mine)]
        facts["outside"] = [k for k, p in enumerate(mine) if id(p) not in in_ddp]
    for ddp, facts in zip(wrapped, run.facts["ddps"], strict=True):
        trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        facts["parameters"] = len(trained)
        facts["in_no_optimizer"] = [clean(k) for k, p in trained.items() if id(p) not in held]
        facts["no_gradient"] = [clean(k) for k, p in trained.items() if id(p) not in had_gradient]
        facts["buffers_at_end"] = buffers(ddp.module)
    run.tensors["rates"] = [[s["lr"] for s in o["steps"]] for o in run.facts["optimizers"]]


def buffers(module: nn.Module) -> list:
    return [[clean(name), *project(b)] for name, b in module.named_buffers() if b.numel()]


def watch_optimizers() -> None:
    make, add_group = Optimizer.__init__, Optimizer.add_param_group

    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self not in optimizers:
            optimizers.append(self)
            run.facts["optimizers"].append(
                {"class": type(self).__name__, "at": where(), "steps": []}
            )

    def new_add_group(self: Any, group: dict) -> None:
        add_group(self, group)
        for p in self.param_groups[-1]["params"]:
            watch_parameter(p)

    Optimizer.__init__, Optimizer.add_param_group = new_init, new_add_group  # type: ignore
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def watch_ddp() -> None:
    make, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    comm_hook = DistributedDataParallel.register_comm_hook

    def new_init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if run.double:
            module.double()
        make(self, module, *args, **kwargs)
        wrapped.append(self)
        if not run.steps:
            run.tensors.pop("start", None)  # DDP has just changed the weights
        run.facts["ddps"].append({"at": where(), "forwards": 0, "direct": {}, "evaluation": None})
        for p in module.parameters():
            watch_parameter(p)

    def ddp_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        run.start()
        if self.module.training and torch.is_grad_enabled():
            inputs, kwargs = run.feed_forward(inputs, kwargs)
            for device in ("cpu", "cuda"):
                run.facts["autocast"] |= torch.is_autocast_enabled(device)
        result = forward(self, *inputs, **kwargs)
        outputs = tensors_in([result])
        run.facts["loss_inside"] |= any(x.requires_grad and x.ndim == 0 for x in outputs)
        return result

    def register_comm_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        run.note("comm hook")
        comm_hook(self, *args, **kwargs)

    DistributedDataParallel.__init__ = new_init  # type: ignore[method-assign]
    DistributedDataParallel.forward = ddp_forward  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def ddp_around(module: nn.Module) -> int | None:
    """The number of the DDP model that a module is a part of."""
    for number, ddp in enumerate(wrapped):
        if any(part is module for part in ddp.module.modules()):
            return number
    return None


def called(module: nn.Module, inputs: tuple) -> None:
    """The script itself calls a module."""
    training = module.training and torch.is_grad_enabled()
    number = wrapped.index(module) if module in wrapped else ddp_around(module)
    facts = run.facts["ddps"][number] if number is not None else None
    if facts is not None and not module.training and run.steps and facts["evaluation"] is None:
        facts["evaluation"] = buffers(wrapped[number or 0].module)
    if not training or not any(True for _ in module.parameters()):
        return
    if not any(module is root for root in roots):
        roots.append(module)
    run.start()
    if facts is not None and module in wrapped:
        facts["forwards"] += 1
    elif facts is not None:
        facts["direct"][where()] = facts["direct"].get(where(), 0) + 1
    found = tensors_in(list(inputs))
    if len(run.facts["roots"]) < MOST_FORWARDS and found:
        rows = batch_size_of(inputs[0] if inputs else [])
        given = (
            run.current_pass["sizes"][run.current_pass["given"] - 1 :] if run.current_pass else []
        )
        size, batch = given[0] if given else None, run.counts["fetched"]
        run.facts["roots"].append([checksum(found[0]), rows, size, batch])


def watch_modules() -> None:
    inside: list[nn.Module] = []

    def entered(module: nn.Module, inputs: tuple) -> None:
        run.events += 1
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if not inside and run.joined | run.replaying:
            called(module, inputs)
        inside.append(module)

    def left(module: nn.Module, inputs: Any, outputs: Any) -> None:
        while inside and inside.pop() is not module:  # an error left the inner ones
            pass

    register_module_forward_pre_hook(entered)
    register_module_forward_hook(left, always_call=True)


def watch_clipping_and_scaling() -> None:
    scaler = torch.amp.GradScaler
    scale, unscale = scaler.scale, scaler.unscale_

    def watched_clip(clip: Any) -> Any:
        def clip_and_note(*args: Any, **kwargs: Any) -> Any:
            scaled = run.facts["scale"] != 1 and not run.counts["unscaled"]
            if scaled:
                run.note("clips scaled gradients")
            if not before_clip:
                by = run.facts["scale"] if scaled else 1.0
                for key, p in watched.items():
                    if p.grad is not None:
                        before_clip[key] = [value / by for value in project(p.grad)]
            return clip(*args, **kwargs)

        return clip_and_note

    def watched_scale(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if self.is_enabled():
            run.facts["scale"], run.counts["unscaled"] = self.get_scale(), 0
        return result

    def watched_unscale(self: Any, optimizer: Any) -> Any:
        run.counts["unscaled"] = 1
        return unscale(self, optimizer)

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if hasattr(nn.utils, name):
            new = watched_clip(getattr(nn.utils, name))
            setattr(nn.utils, name, new)
            setattr(nn.utils.clip_grad, name, new)
    scaler.scale = watched_scale  # type: ignore[method-assign]
    scaler.unscale_ = watched_unscale  # type: ignore[method-assign]


def watch_backward() -> None:
    backward, inside = Tensor.backward, False

    def watched_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # --cpu: a mode of torch calls it once more
            return backward(self, *args, **kwargs)
        names, node = [], self.grad_fn
        for _ in range(4):  # is the loss divided or multiplied at its end?
            names.append(type(node).__name__ if node is not None else "")
            node = node.next_functions[0][0] if node is not None and node.next_functions else None
        if len(run.facts["backwards"]) < MOST_FORWARDS:
            run.facts["backwards"].append([where(), names, run.steps])
        run.counts["backwards"] += 1
        inside = True
        try:
            return backward(self, *args, **kwargs)
        finally:
            inside = False

    Tensor.backward = watched_backward  # type: ignore[method-assign]


def count_batchnorm(module: _BatchNorm, x: Tensor) -> None:
    """Each BatchNorm that normalizes the local batch: over how many values."""
    facts = run.facts["batchnorm"].setdefault(type(module).__name__, [0, x.numel() // x.shape[1]])
    facts[0] += 1
    facts[1] = min(facts[1], x.numel() // x.shape[1])


def install(this_run: Run) -> None:
    global run
    run = this_run
    run.start, run.epoch_ended = start, epoch_ended
    run.optimizers = lambda: optimizers
    watch_optimizers()
    watch_ddp()
    watch_modules()
    watch_clipping_and_scaling()
    watch_backward()
