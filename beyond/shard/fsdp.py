"""FSDP (ZeRO-3) by hand: each rank keeps 1/N of each layer, and all of it only while it computes.

    fsdp = FSDP(model)                             # its children, or the modules of a container
    optimizer = AdamW(fsdp.parameters(), lr=1e-3)  # sees only the parts that this rank owns
    fsdp(inputs).sum().backward()
    fsdp.finish()                                  # the parts now have their mean gradients
    optimizer.step()

Before a layer computes, an all-gather unshards its parameters, and meanwhile that of the next layer
is under way. What forward saves for backward are views of unsharded parameters, which would keep
them all in memory, so only their places are saved (saved_tensors_hooks), and backward gathers the
layer again. See Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.3.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import Parameter

from shards import (
    SentGradients,
    ShardingError,
    Shards,
    all_gather_single,
    clip_grad_norm,
    require_gradients,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Place = tuple[torch.Size, tuple[int, ...], int]  # size, stride, offset of a view in a flat tensor


class GatherParameters(torch.autograd.Function):
    """Forward: a layer's unsharded parameters. Backward: their gradients go to their owners."""

    @staticmethod
    def forward(ctx: Any, layer: "ShardedLayer", *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return tuple(layer.shards.views(layer.unshard()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.layer.send(gradients)
        return (None,) * (1 + len(gradients))  # the parts' gradients are under way: see finish()


class WithOriginalForward(nn.Module):
    """A module with the forward that it had, for functional_call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.compute = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


class CallOrder:
    """The order in which forward calls the layers.

    The first forward finds the order out, and each further one may change it.
    """

    def __init__(self) -> None:
        self.called: list[ShardedLayer] = []  # layers in the forward that runs
        self.layers: list[ShardedLayer] = []  # layers of the last forward that has ended
        self.places: dict[ShardedLayer, int] = {}  # places in that forward

    def begin(self) -> None:
        self.called.clear()

    def end(self) -> None:
        self.layers = list(dict.fromkeys(self.called))
        self.places = {layer: place for place, layer in enumerate(self.layers)}

    def before(self, layer: "ShardedLayer") -> "ShardedLayer | None":
        place = self.places.get(layer, 0)
        return self.layers[place - 1] if place else None

    def after(self, layer: "ShardedLayer") -> "ShardedLayer | None":
        place = self.places.get(layer, len(self.layers)) + 1
        return self.layers[place] if place < len(self.layers) else None

    def is_last(self, layer: "ShardedLayer") -> bool:
        return self.layers[-1:] == [layer]


class ShardedLayer:
    """A module whose trained parameters are unsharded only while it computes.

    It replaces the module's `forward`, and each parameter by the part that this rank owns. order
    and gradients are shared by all layers of a model.
    """

    def __init__(
        self, name: str, module: nn.Module, order: CallOrder, gradients: SentGradients
    ) -> None:
        self.name = name
        self.original = WithOriginalForward(module)
        self.order = order
        self.gradients = gradients
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names = list(trained)
        if len(formats := {parameter.dtype for parameter in trained.values()}) > 1:
            names = " and ".join(sorted(str(dtype) for dtype in formats))
            raise ShardingError(f"{name} has parameters in {names}: convert them to one format")
        self.shards = Shards([parameter.shape for parameter in trained.values()])
        flat = self.shards.lay_out([parameter.detach() for parameter in trained.values()])
        dist.broadcast(flat, src=0)  # every rank starts from rank 0's weights
        self.shard = self.shards.shard_of(flat).clone()
        self.owned = [Parameter(part) for part in self.shards.parts_of(self.shard)]
        part_of = dict(zip(trained.values(), self.owned, strict=True))
        for full_name, parameter in [*module.named_parameters(remove_duplicate=False)]:
            if parameter in part_of:  # two names of one parameter get the same part
                owner, _, leaf = full_name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, part_of[parameter])
        self.flat: Tensor | None = None  # all parameters, while they are unsharded
        self.gather_work: dist.Work | None = None
        self.backward_needs_it = False
        self.missing = set(self.names)  # those to which no backward has given a gradient yet
        module.forward = self.run

    def start_gather(self) -> None:
        """Begin to gather the parameters. Every rank must call it, in the same order of layers."""
        if self.flat is None:
            self.flat = self.shards.new_flat(like=self.shard)
            self.gather_work = all_gather_single(self.flat, self.shard, async_op=True)

    def unshard(self) -> Tensor:
        """Return the parameters of all ranks, side by side; gather them if they are not yet."""
        self.start_gather()
        self.wait()
        assert self.flat is not None
        return self.flat

    def wait(self) -> None:
        if self.gather_work:
            self.gather_work.wait()
            self.gather_work = None

    def free(self) -> None:
        self.wait()
        self.flat = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute. The model calls this as the module's forward."""
        self.order.called.append(self)
        parameters = GatherParameters.apply(self, *self.owned)
        named = {f"module.{n}": p for n, p in zip(self.names, parameters, strict=True)}
        if following := self.order.after(self):
            following.start_gather()  # meanwhile, this layer computes
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                return functional_call(self.original, named, args, kwargs)
        finally:
            if not self.order.is_last(self) or not torch.is_grad_enabled():
                self.free()  # backward begins with the last layer, which stays

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """Return what forward saves for backward: of this layer's parameters, only the place."""
        address = tensor.untyped_storage().data_ptr()
        if self.flat is None or address != self.flat.untyped_storage().data_ptr():
            return tensor
        self.backward_needs_it = True
        return tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """Return what backward reads: at a place, the parameter, which is gathered again."""
        if isinstance(saved, Tensor):
            return saved
        flat = self.unshard()
        previous = self.order.before(self)
        if previous and previous.backward_needs_it:
            previous.start_gather()  # meanwhile, this layer's backward computes
        return flat.as_strided(*saved)

    def send(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Send the mean of each shard of the gradient to its owner, while backward continues."""
        self.free()
        self.backward_needs_it = False
        flat = self.shards.new_flat(like=self.shard)
        views = self.shards.views(flat)
        for name, view, gradient in zip(self.names, views, gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
                self.missing.discard(name)
        self.gradients.send(self, flat)

    def add_gradient(self, mean: Tensor) -> None:
        """Add the mean over the ranks of this rank's shard, (length,), to its gradients."""
        parts = self.shards.parts_of(mean)
        for own, gradient in zip(self.owned, parts, strict=True):
            own.grad = gradient if own.grad is None else own.grad + gradient


def layers_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that have trained parameters; instead of a container, its own children."""
    for name, child in model.named_children():
        if isinstance(child, CONTAINERS):
            yield from layers_of(child, f"{prefix}{name}.")
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield prefix + name, child


def check_parameters(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise ShardingError for a parameter of more than one layer, or one that nothing fills."""
    users: dict[Parameter, list[tuple[str, str]]] = {}  # layer and full name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = next((key for key in layers if name.startswith(f"{key}.")), "the model itself")
        users.setdefault(parameter, []).append((layer, name))
    for parameter, places in users.items():
        layer, name = places[0]
        if parameter.is_meta and (layer == "the model itself" or len(places) > 1):
            why = f"{name} is on the meta device, and tied or in no layer, so nothing would fill it"
            raise ShardingError(f"{why}: build the model on a real device")
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.is_meta and not hasattr(owner, "reset_parameters"):
            why = f"{name} is on the meta device, and {type(owner).__name__} cannot fill it"
            raise ShardingError(f"{why}: give it a reset_parameters, or build it on a real device")
        if parameter.requires_grad and len({layer for layer, _ in places}) > 1:
            names = " and ".join(name for _, name in places)
            why = f"{names} are one parameter, in layers that are unsharded at different times"
            raise ShardingError(f"{why}: untie them, or put them into one module")


def materialize(module: nn.Module) -> None:
    """Give memory and new weights to a module that was built on the meta device."""
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device=torch.get_default_device())
        for submodule in module.modules():
            if callable(reset := getattr(submodule, "reset_parameters", None)):
                reset()


class FSDP(nn.Module):
    """A model of which each rank keeps 1/N.

    A model that was built on the meta device gets its memory here, on torch's default device, layer
    by layer, and its weights by each module's reset_parameters. Frozen parameters and those outside
    of all layers are not sharded. Every forward is a collective: every rank must call it. Raises
    ShardingError for a parameter that several layers share. Its optimizer must treat each element
    apart. A GradScaler would look at the gradients of one rank only, so train in bfloat16.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        modules = dict(layers_of(model))
        if not modules:
            why = f"{type(model).__name__} has no child with trained parameters: nothing to divide"
            raise ShardingError(f"{why}; put it into an nn.Sequential")
        check_parameters(model, modules)
        self.layers: list[ShardedLayer] = []
        self.order, self.gradients = CallOrder(), SentGradients()
        for name, module in modules.items():  # only one of them is unsharded at a time
            materialize(module)
            self.layers.append(ShardedLayer(name, module, self.order, self.gradients))
        owned = {part for layer in self.layers for part in layer.owned}
        self.replicated = {name: p for name, p in model.named_parameters() if p not in owned}
        for tensor in [*self.replicated.values(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.free()  # weights of before the last step, if no backward came
        self.order.begin()
        result = self.model(*args, **kwargs)
        self.order.end()
        return result

    @torch.no_grad()
    def finish(self) -> None:
        """Receive the last gradients, after each backward. Every rank must call it."""
        self.gradients.receive()
        missing: dict[str, bool] = {}
        for layer in self.layers:
            layer.free()
            missing |= {f"{layer.name}.{name}": name in layer.missing for name in layer.names}
            layer.missing = set(layer.names)
        trained = {name: p for name, p in self.replicated.items() if p.requires_grad}
        missing |= {name: parameter.grad is None for name, parameter in trained.items()}
        require_gradients(missing, like=self.layers[0].shard)
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

    def clip_grad_norm(self, limit: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `limit`."""
        parts = [p.grad for layer in self.layers for p in layer.owned if p.grad is not None]
        replicated = [p.grad for p in self.replicated.values() if p.grad is not None]
        return clip_grad_norm(parts, replicated, limit)
