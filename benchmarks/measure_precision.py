"""Training in each number format: the images per second, and the peak.

A step's batch already lies on the device.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import UsageError
from ranks import run_ranks
from timing import Effort, Results, interleave, load_chapter, summarize

FORMATS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

has_units = load_chapter("05", "formats").has_units
measure_bytes = load_chapter("01", "peak").peak_of
# Of the storages of tensors, each once.
size_of: Callable[..., int] = load_chapter("02", "memory").size


@dataclass(frozen=True)
class FormatVariant:
    precision: str  # one of FORMATS
    channels_last: bool = False
    compiled: bool = False


FORMS = {
    "": {},
    ", channels_last": {"channels_last": True},
    ", channels_last, compile": {"channels_last": True, "compiled": True},
}
VARIANTS = {
    precision + form: FormatVariant(precision, **options)
    for precision in FORMATS
    for form, options in FORMS.items()
}


def choose(device: str, compile_too: bool) -> tuple[list[str], dict[str, str]]:
    """The variants that this device can show, and why each other one is left out."""
    skipped = {}
    for name, variant in VARIANTS.items():
        if not has_units(variant.precision, torch.device(device)):
            skipped[name] = f"no units of this {device} multiply in {variant.precision}"
        elif variant.compiled and not compile_too:
            skipped[name] = "compiling takes a minute: not with --quick or --brief"
    return [name for name in VARIANTS if name not in skipped], skipped


class Trainer:
    """A model, under DDP if there are ranks, and its optimizer; call it for one step."""

    def __init__(self, variant: FormatVariant, model: nn.Module, device: torch.device) -> None:
        self.precision = variant.precision
        self.layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        self.model = model.to(device).to(memory_format=self.layout).train()
        if variant.compiled:
            torch._dynamo.config.recompile_limit = 64  # of one forward, in many variants
            self.model.compile(dynamic=False)  # or shapes after the first are slower
        self.wrapped: Any = self.model
        if dist.is_initialized():
            self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = SGD(self.model.parameters(), lr=0.02, momentum=0.9, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        if images.is_cuda:  # names that torch.compile reads; newer ones must not mix with them
            is_tf32 = self.precision == "tf32"
            torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = is_tf32
            torch.backends.cudnn.benchmark = True
        dtype = DTYPES.get(self.precision)
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(self.wrapped(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def peak_bytes(self, step: Callable[[], None], device: str) -> int:
        """What stays between two steps, and the most that a step adds, without its batch."""
        self.optimizer.zero_grad()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *state]
        between_steps = size_of(tensor for tensor in held if tensor is not None)
        return between_steps + measure_bytes(device, step)


def time_model(name: str, variants: list[str], samples: int, effort: Effort) -> Results:
    """The step of each variant, and its ratio to fp32's; of one process, the peak too."""
    torch.set_default_device("cpu")
    ranks, rounds = dist.get_world_size() if dist.is_initialized() else 1, min(7, effort.rounds)
    torch.manual_seed(0)
    model, size = torchvision.models.get_model(name), 32 if effort.quick else 224
    images, labels = torch.randn(samples, 3, size, size), torch.randint(1000, (samples,))
    device = torch.device(effort.device)
    images, labels = images.to(device), labels.to(device)
    trainers, steps = {}, {}
    for variant in variants:
        trainer = Trainer(VARIANTS[variant], copy.deepcopy(model), device)
        in_layout = images.to(memory_format=trainer.layout)
        trainers[variant], steps[variant] = trainer, partial(trainer, in_layout, labels)
    rows = summarize(interleave(steps, rounds, 10 if images.is_cuda else 1))
    for row in rows.values():
        row["images_per_second"] = round(ranks * samples / row["step_ms"] * 1000, 2)
    if ranks == 1:
        for variant, trainer in trainers.items():
            rows[variant]["peak_bytes"] = trainer.peak_bytes(steps[variant], effort.device)
    about = {"ranks": ranks, "threads_a_rank": torch.get_num_threads(), "local_batch": samples}
    return {**about, "rounds": rounds, "variants": rows}


def measure_precision(effort: Effort) -> Results:
    """One process has all cores of a CPU; of N ranks each has one, and its share of the batch."""
    on_gpu, quick = effort.device == "cuda", effort.quick
    is_short, cores = quick or effort.brief, os.cpu_count() or 1
    ranks = 1 if effort.brief else torch.cuda.device_count() if on_gpu else cores
    samples = 2 if quick else 256 if on_gpu else 8  # of a rank
    for name in {*effort.models} - {*torchvision.models.list_models(module=torchvision.models)}:
        raise UsageError(f"torchvision has no model {name}: try --models resnet50")
    torch.set_num_threads(torch.get_num_threads() if quick else cores)  # OMP_NUM_THREADS is 1
    variants, skipped = choose(effort.device, compile_too=not is_short)
    models = dict[str, Any]()
    names = ["resnet50"] if on_gpu else ["resnet18"] if is_short else ["resnet18", "resnet50"]
    for name in effort.models or names:  # what one GPU does; or all cores, with the whole batch
        alone = time_model(name, variants, samples if on_gpu else samples * cores, effort)
        models[name] = {"one process": alone}
        if ranks > 1:
            not_compiled = [variant for variant in variants if not VARIANTS[variant].compiled]
            where: Any = {"backend": "nccl" if on_gpu else "gloo", "device": effort.device}
            first, *_ = run_ranks(
                ranks, time_model, name, not_compiled, samples, effort, quiet=True, **where
            )
            models[name][f"{ranks} ranks"] = first
    about = {"image_size": 32 if quick else 224, "skipped": skipped}
    return {**about, "models": models}
