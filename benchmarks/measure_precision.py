"""Training in each number format: the images per second, and the peak.

A step's batch already lies on the device.
"""

import copy
import os
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.options import UsageError
from timing import Effort, Results, interleave, load_chapter, summarize
from training_step import Trainer, sgd

has_units = load_chapter("05", "formats").has_units
peak_of = load_chapter("01", "peak").peak_of
size_of: Any = load_chapter("02", "memory").size  # of the storages of tensors, each once
ddp_with_views = partial(DistributedDataParallel, gradient_as_bucket_view=True)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast
FORMATS = ("fp32", "tf32", "bf16", "fp16")
LAYOUTS = ("", ", channels_last", ", channels_last, compile")
VARIANTS = [number_format + layout for number_format, layout in product(FORMATS, LAYOUTS)]


def why_left_out(variant: str, effort: Effort) -> str:
    number_format, *_ = variant.split(", ")
    if not has_units(number_format, torch.device(effort.device)):
        return f"no units of this {effort.device} multiply in {number_format}"
    if "compile" in variant and (effort.quick or effort.brief):
        return "compiling takes a minute: not with --quick or --brief"
    return ""


class FormatTrainer(Trainer):
    """In the format and layout that a variant names, under DDP if there are ranks."""

    def __init__(self, variant: str, model: nn.Module, images: Tensor) -> None:
        number_format, *options = variant.split(", ")
        layout = torch.channels_last if "channels_last" in options else torch.contiguous_format
        model = copy.deepcopy(model).to(images.device).to(memory_format=layout).train()
        if "compile" in options:
            torch._dynamo.config.recompile_limit = 64  # of one forward, in many variants
            model.compile(dynamic=False)  # or shapes after the first are slower
        wrap = ddp_with_views if dist.is_initialized() else None
        images, dtype = images.to(memory_format=layout), DTYPES.get(number_format)
        super().__init__(model, images, wrap, optimizer=partial(sgd, fused=True), dtype=dtype)
        self.is_tf32 = number_format == "tf32"

    def __call__(self) -> None:
        if self.images.is_cuda:  # names that torch.compile reads; newer ones must not mix with them
            torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.is_tf32
            torch.backends.cudnn.benchmark = True
        super().__call__()

    def peak_bytes(self) -> int:
        """What stays between two steps, and the most that a step adds, without its batch."""
        self.optimizer.zero_grad()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *state]
        between_steps = size_of(tensor for tensor in held if tensor is not None)
        return between_steps + peak_of(self.images.device.type, self)


def time_model(name: str, variants: list[str], samples: int, effort: Effort) -> Results:
    """The step of each variant, and its ratio to fp32's; of one process, the peak too."""
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    model, size = torchvision.models.get_model(name), 32 if effort.quick else 224
    images = torch.randn(samples, 3, size, size).to(effort.device)
    trainers = {each: FormatTrainer(each, model, images) for each in variants}
    ranks, rounds = dist.get_world_size() if dist.is_initialized() else 1, min(7, effort.rounds)
    rows = summarize(interleave(trainers, rounds, 10 if images.is_cuda else 1))
    for row in rows.values():
        row["images_per_second"] = round(ranks * samples / row["step_ms"] * 1000, 2)
    if ranks == 1:
        for variant, trainer in trainers.items():
            rows[variant]["peak_bytes"] = trainer.peak_bytes()
    about = {"ranks": ranks, "threads_a_rank": torch.get_num_threads(), "local_batch": samples}
    return {**about, "rounds": rounds, "variants": rows}


def measure_precision(effort: Effort) -> Results:
    """One process has all cores of a CPU; of N ranks each has one, and its share of the batch."""
    for name in {*effort.models} - {*torchvision.models.list_models(module=torchvision.models)}:
        raise UsageError(f"torchvision has no model {name}: try --models resnet50")
    on_gpu, cores = effort.device == "cuda", os.cpu_count() or 1
    is_short = effort.quick or effort.brief
    ranks = 1 if effort.brief else torch.cuda.device_count() if on_gpu else cores
    local_batch = 2 if effort.quick else 256 if on_gpu else 8
    batch = local_batch if on_gpu else local_batch * cores  # of one GPU, or of all cores
    if not effort.quick:
        torch.set_num_threads(cores)  # OMP_NUM_THREADS is 1
    reasons = {variant: why_left_out(variant, effort) for variant in VARIANTS}
    variants = [variant for variant, reason in reasons.items() if not reason]
    not_compiled = [variant for variant in variants if "compile" not in variant]
    models = dict[str, Any]()
    defaults = ["resnet50"] if on_gpu else ["resnet18"] if is_short else ["resnet18", "resnet50"]
    for name in effort.models or defaults:
        models[name] = {"one process": time_model(name, variants, batch, effort)}
        if ranks > 1:
            where: Any = {"backend": "nccl" if on_gpu else "gloo", "device": effort.device}
            args = name, not_compiled, local_batch, effort
            models[name][f"{ranks} ranks"], *_ = run_ranks(
                ranks, time_model, *args, quiet=True, **where
            )
    skipped = {variant: reason for variant, reason in reasons.items() if reason}
    return {"image_size": 32 if effort.quick else 224, "skipped": skipped, "models": models}
