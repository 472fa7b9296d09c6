"""Training in each number format: the images per second, the peak, and what the model learns.

A step's batch already lies on the device. Each variant also trains on the digits, because a variant
that is fast and learns less has won nothing.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from common.data import load_dataset, loader_options
from common.models import build_model
from common.options import UsageError, make_parser
from run_stage import ROOT
from step import start
from timing import Effort, Results, chapter, interleave, summarize

FORMATS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPOCHS, SAMPLES = 3, 60  # of the training for an accuracy, and its global batch

has_units = chapter("05", "machine").has_units
measure_bytes = chapter("01", "peak").measure
size_of: Callable[..., int] = chapter("02", "memory").size  # of the storages of tensors, each once


@dataclass(frozen=True)
class Variant:
    precision: str  # one of FORMATS
    channels_last: bool = False
    compiled: bool = False


FORMS = {"": {}, ", channels_last": {"channels_last": True}}
FORMS[", channels_last, compile"] = {"channels_last": True, "compiled": True}
VARIANTS = {p + form: Variant(p, **how) for p in FORMATS for form, how in FORMS.items()}


def choose(device: str, compile_too: bool) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants that this device can show, and why each other one is left out."""
    skipped = {}
    for name, variant in VARIANTS.items():
        if not has_units(variant.precision, torch.device(device)):
            skipped[name] = f"no units of this {device} multiply in {variant.precision}"
        elif variant.compiled and not compile_too:
            skipped[name] = "compiling takes a minute: not with --quick or --brief"
    return {name: each for name, each in VARIANTS.items() if name not in skipped}, skipped


class Trainer:
    """A model, under DDP if there are ranks, and its optimizer; call it for one step."""

    def __init__(self, variant: Variant, model: nn.Module, device: torch.device) -> None:
        self.precision = variant.precision
        self.layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        self.plain = model.to(device).to(memory_format=self.layout).train()
        if variant.compiled:
            torch._dynamo.config.recompile_limit = 64  # of one forward, in many variants
            self.plain.compile(dynamic=False)  # or shapes after the first are slower
        self.model: Any = self.plain
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        self.optimizer = SGD(self.plain.parameters(), lr=0.02, momentum=0.9, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        if images.is_cuda:  # names that torch.compile reads; newer ones must not mix with them
            is_tf32 = self.precision == "tf32"
            torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = is_tf32
            torch.backends.cudnn.benchmark = True
        dtype = DTYPES.get(self.precision)
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def peak_bytes(self, step: Callable[[], None], device: str) -> int:
        """What stays between two steps, and the most that a step adds, without its batch."""
        self.optimizer.zero_grad()
        state = [tensor for each in self.optimizer.state.values() for tensor in each.values()]
        held = [*self.plain.parameters(), *self.plain.buffers(), *state]
        return size_of(tensor for tensor in held if tensor is not None) + measure_bytes(
            device, step
        )


def learn(variant: Variant, seed: int, device: torch.device, steps: int | None) -> float:
    """The test accuracy after a short training on the digits: of net-bn, if only so many steps."""
    where = ["--dataset=digits", f"--data-dir={ROOT / 'data'}", f"--batch-size={SAMPLES}"]
    args = make_parser("precision", "").parse_args([*where, "--device=cpu"])
    train_set, test_set = load_dataset(args)
    torch.manual_seed(seed)
    trainer = Trainer(variant, build_model("net-bn" if steps else "resnet18", train_set), device)
    sampler = DistributedSampler(train_set, 1, 0, seed=seed, drop_last=True)
    options = {"sampler": sampler, "drop_last": True, **loader_options(args)}
    loader = DataLoader(train_set, SAMPLES, **options)
    decay = LambdaLR(trainer.optimizer, lambda step: 1 - step / EPOCHS / len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in islice(loader, steps):
            trainer(images.to(device, memory_format=trainer.layout), labels.to(device))
            decay.step()
    images, labels = next(iter(DataLoader(test_set, len(test_set), **loader_options(args))))
    with torch.no_grad():  # in fp32, as train.py does, and not compiled
        outputs = trainer.plain.eval().forward(images.to(device))
    return round((outputs.argmax(dim=1).cpu() == labels).double().mean().item(), 4)


def time_model(name: str, variants: dict[str, Variant], samples: int, effort: Effort) -> Results:
    """The step of each variant, and its ratio to fp32's; of one process, the peak too."""
    torch.set_default_device("cpu")
    ranks, rounds = dist.get_world_size() if dist.is_initialized() else 1, min(7, effort.rounds)
    torch.manual_seed(0)
    model, size = torchvision.models.get_model(name), 32 if effort.quick else 224
    images, labels = torch.randn(samples, 3, size, size), torch.randint(1000, (samples,))
    device = torch.device(effort.device)
    images, labels = images.to(device), labels.to(device)
    trainers = {n: Trainer(v, copy.deepcopy(model), device) for n, v in variants.items()}
    layouts = {each.layout: images.to(memory_format=each.layout) for each in trainers.values()}
    steps = {n: partial(each, layouts[each.layout], labels) for n, each in trainers.items()}
    rows = summarize(interleave(steps, rounds, 10 if images.is_cuda else 1))
    for row in rows.values():
        row["images_per_second"] = round(ranks * samples / row["step_ms"] * 1000, 2)
    for variant, trainer in {} if ranks > 1 else trainers.items():
        rows[variant]["peak_bytes"] = trainer.peak_bytes(steps[variant], effort.device)
    about = {"ranks": ranks, "threads_a_rank": torch.get_num_threads(), "local_batch": samples}
    return {**about, "rounds": rounds, "variants": rows}


def measure_precision(effort: Effort) -> Results:
    """One process has all cores of a CPU; of N ranks each has one, and its share of the batch."""
    device, gpu, quick = torch.device(effort.device), effort.device == "cuda", effort.quick
    few, cores = quick or effort.brief, os.cpu_count() or 1
    ranks = effort.ranks or (1 if effort.brief else torch.cuda.device_count() if gpu else cores)
    samples = 2 if quick else 256 if gpu else 8  # of a rank
    for name in {*effort.models} - {*torchvision.models.list_models(module=torchvision.models)}:
        raise UsageError(f"torchvision has no model {name}: try --models resnet50")
    torch.set_num_threads(torch.get_num_threads() if quick else cores)  # OMP_NUM_THREADS is 1
    variants, skipped = choose(effort.device, compile_too=not few)
    eager = {name: variant for name, variant in variants.items() if not variant.compiled}
    accuracy, models = dict[str, Any](), dict[str, Any]()
    for name, variant in variants.items():
        each = [learn(variant, s, device, 2 if quick else None) for s in range(quick if few else 3)]
        accuracy[name] = {"test_accuracies": each, "median": median(each) if each else None}
    names = ["resnet50"] if gpu else ["resnet18"] if few else ["resnet18", "resnet50"]
    for name in effort.models or names:  # what one GPU does; or all cores, with the whole batch
        alone = time_model(name, variants, samples if gpu else samples * cores, effort)
        models[name] = {"one process": alone}
        if ranks > 1:
            where: Any = {"backend": "nccl" if gpu else "gloo", "device": effort.device}
            first, *_ = start(ranks, time_model, name, eager, samples, effort, quiet=True, **where)
            models[name][f"{ranks} ranks"] = first
    about = {"image_size": 32 if quick else 224, "skipped": skipped}
    return {**about, "models": models, "accuracy": accuracy}
