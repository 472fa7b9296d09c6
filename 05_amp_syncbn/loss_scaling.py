"""Loss scaling by hand: it keeps small gradients from becoming zero in fp16.

    python 05_amp_syncbn/loss_scaling.py

A number closer to 0 than 2^-25 becomes 0 in fp16. The gradients of a mean over a batch are small,
and smaller for a larger batch. If the loss is multiplied, by the chain rule all gradients grow by
the same factor. The gradients of the weights are in fp32: divide them there, before the step.

Source: Micikevicius et al., Mixed precision training (2018, arXiv 1710.03740), section 3.2. The
scale starts and adapts as in torch.amp.GradScaler.
"""

import copy

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from common.data import load_dataset
from common.models import build_model
from common.options import Parser, UsageError, exit_on, make_parser

SCALE = 2.0**16  # a power of two changes no digit of a number
# The dtype of autocast, and the factor of the loss.
FORMATS = {"fp16": (torch.float16, 1.0), "fp16, loss × 65536": (torch.float16, SCALE)}
FORMATS |= {"bf16": (torch.bfloat16, 1.0)}
Gradients = dict[str, Tensor]


class LossScaler:
    """Use it in the order scale, backward, unscale_, clip, step, update.

    The scale is halved when a gradient is inf or nan, and doubled after growth_interval good steps
    in a row. Under DDP all ranks decide alike: an inf or nan of one rank is in the averaged
    gradients of all ranks.
    """

    def __init__(self, init_scale: float = SCALE, growth_interval: int = 2000) -> None:
        self.factor = init_scale
        self.growth_interval = growth_interval
        self.good_steps = 0  # good steps in a row
        self.overflow: bool | None = None  # None: the gradients are not divided yet

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients, and note whether one is inf or nan. Clip after this, not before."""
        if self.overflow is not None:
            raise RuntimeError("unscale_ has been called since the last update: once is enough")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / self.factor)
        self.overflow = not all(gradient.isfinite().all() for gradient in gradients)

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer step. If a gradient is inf or nan, skip this batch instead."""
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()

    def update(self) -> None:
        """Choose the scale of the next step."""
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.overflow:
            self.factor /= 2
        elif self.good_steps % self.growth_interval == 0:
            self.factor *= 2
        self.overflow = None


def example() -> tuple[nn.Module, Tensor, Tensor]:
    """net-bn with fresh weights, and all 1,500 digits as one batch with its labels."""
    torch.manual_seed(1)
    digits, _ = load_dataset(make_parser("05_amp_syncbn", None).parse_args([]))
    return build_model("net-bn", digits), *digits.__getitems__(range(len(digits)))


def gradients_of(
    model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype | None, scale: float = 1.0
) -> tuple[Gradients, Gradients]:
    """Compute the gradients of each layer's output, times scale, and those of its weight."""
    model, outputs = copy.deepcopy(model), {}
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    for module in layers.values():
        module.register_forward_hook(lambda layer, _, output: outputs.update({layer: output}))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    modules = layers.values()
    tensors = [outputs[module] for module in modules] + [module.weight for module in modules]
    gradients = torch.autograd.grad(loss * scale, tensors)
    weight_gradients = [gradient / scale for gradient in gradients[len(layers) :]]
    output_gradients = dict(zip(layers, gradients, strict=False))
    return output_gradients, dict(zip(layers, weight_gradients, strict=True))


def share_of_zeros(true: Tensor, rounded: Tensor) -> str:
    """Return how many of the values that are not 0 in fp32 are 0 here, in %."""
    nonzero = true != 0
    return f"{((rounded == 0) & nonzero).sum() / nonzero.sum() * 100:.0f}"


def distance(true: Tensor, rounded: Tensor) -> str:
    """Return the distance of a gradient from the fp32 gradient, in % of its length."""
    off = (rounded - true).norm() / true.norm() * 100
    return f"{off:.0f}" if off >= 1 else "<1"


def scales_and_weights(scaler: LossScaler | torch.amp.GradScaler) -> tuple[list[float], Tensor]:
    """Eight steps in fp16, two of which overflow: the scale after each, and the last weights."""
    torch.manual_seed(0)
    model, images = nn.Linear(8, 3), torch.randn(16, 8)
    optimizer, scales = SGD(model.parameters(), 0.1, 0.9), []
    for step in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images), torch.arange(16) % 3)
        optimizer.zero_grad()
        scaler.scale(loss * (torch.inf if step in (1, 4) else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.weight.detach()


def main() -> None:
    exact, *all_rounded = (
        gradients_of(*example(), *dtype_and_scale)
        for dtype_and_scale in [(None, 1.0), *FORMATS.values()]
    )
    tables = {"% of the gradients of its output that become 0": share_of_zeros}
    tables["% by which the gradient of its weight differs from fp32"] = distance
    for index, (title, measure) in enumerate(tables.items()):  # first outputs, then weights
        rows = [
            (name, *(measure(true, rounded[index][name]) for rounded in all_rounded))
            for name, true in exact[index].items()
        ]
        print(f"For each layer, {title}:")
        print(tabulate(rows, ["layer", *FORMATS], disable_numparse=True), end="\n\n")
    scales, weights = scales_and_weights(LossScaler(growth_interval=2))
    grad_scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    torch_scales, torch_weights = scales_and_weights(grad_scaler)
    print(f"scale by hand      {scales}\nscale, GradScaler  {torch_scales}")
    print(f"same weights       {weights.equal(torch_weights)}")


if __name__ == "__main__":
    with exit_on(UsageError):
        Parser(__doc__).parse_args()
        main()
