"""Training in each precision, and with each speed switch of DDP: time, memory, bits, accuracy.

A step's batch already lies on the device. If its bits differ, a variant also trains on the digits:
no variant may win by learning less.
"""

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from common.data import load_dataset, loader_options
from common.models import Net, build_model
from common.options import UsageError, make_parser
from run_stage import ROOT
from step import start
from timing import SAME, Effort, Results, chapter, interleave, largest_of_ranks, summarize

FORMATS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPOCHS, SAMPLES = 3, 60  # of the training for an accuracy; and its global batch
HOOKS = {"bf16": default_hooks.bf16_compress_hook, "PowerSGD": powerSGD_hook.powerSGD_hook}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.02, momentum=0.9),
    "fused sgd": partial(SGD, lr=0.02, momentum=0.9, fused=True),
    "adam": partial(Adam, lr=1e-3),
    # Each rank keeps the state of its share: ZeRO's first stage.
    "zero adam": partial(ZeroRedundancyOptimizer, optimizer_class=Adam, lr=1e-3),
}

has_units = chapter("05", "machine").has_units
measure_bytes = chapter("01", "ledger").measure
size_of: Callable[..., int] = chapter("02", "memory").size  # of the storages of tensors, each once


@dataclass(frozen=True)
class Variant:
    precision: str = ""  # fp32, tf32, bf16 or fp16; without one, as torch has it: tf32 on a GPU
    channels_last: bool = False
    compiled: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    cudnn_benchmark: bool = False
    hook: str = ""
    optimizer: str = "sgd"
    idle_branch: bool = False  # the model has a layer that no step uses
    accumulate: int = 1
    in_place: bool = False  # zero_grad(set_to_none=False)
    baseline: str = "DDP"


Variants = dict[str, Variant]
Batch = tuple[Tensor, Tensor]  # images and labels
FIND, VIEW = {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
TOGETHER: Any = {"channels_last": True, "optimizer": "fused sgd", "hook": "bf16"}
SWITCHES = {
    "DDP": Variant(),
    "channels_last": Variant(channels_last=True),
    "torch.compile": Variant(compiled=True),
    "cudnn.benchmark": Variant(cudnn_benchmark=True),
    "gradient_as_bucket_view": Variant(ddp=VIEW),
    "static_graph": Variant(ddp={"static_graph": True}),
    "fused optimizer": Variant(optimizer="fused sgd"),
    "bf16 autocast": Variant("bf16"),
    "bf16 hook": Variant(hook="bf16"),
    # With several buckets over gloo, PowerSGD aborts: see the section links. So it gets one.
    "PowerSGD hook": Variant(ddp={"bucket_cap_mb": 100}, hook="PowerSGD"),
    "all but compile": Variant("bf16", ddp={**VIEW, "static_graph": True}, **TOGETHER),
    "all together": Variant("bf16", compiled=True, ddp=VIEW, cudnn_benchmark=True, **TOGETHER),
    "find_unused_parameters": Variant(ddp=FIND),
    "the same, with an idle branch": Variant(ddp=FIND, idle_branch=True),
    "Adam": Variant(optimizer="adam"),
    "Adam, ZeroRedundancyOptimizer": Variant(optimizer="zero adam", baseline="Adam"),
}
FAST: Any = {"ddp": VIEW, "cudnn_benchmark": True, "optimizer": "fused sgd", "baseline": "fp32"}
FORMS = ["", ", channels_last", ", channels_last, compile"]
FORMS += [", compile"] * torch.cuda.is_available()  # on a CPU, each compilation takes a minute
PAIRS = [(precision, form) for precision in FORMATS for form in FORMS]
PRECISIONS = {p + form: Variant(p, "last" in form, "compile" in form, **FAST) for p, form in PAIRS}


def choose(variants: Variants, device: str, few: bool) -> tuple[Variants, dict[str, str]]:
    """The variants that this device can show, and why each other one is left out."""
    skipped = {}
    for name, variant in variants.items():
        if variant.precision and not has_units(variant.precision, torch.device(device)):
            skipped[name] = f"no units of this {device} multiply in {variant.precision}"
        elif variant.compiled and few:
            skipped[name] = "--quick or --brief"
        elif name == "cudnn.benchmark" and device == "cpu":
            skipped[name] = "cuDNN is for GPUs: on a CPU the switch does nothing"
    return {name: each for name, each in variants.items() if name not in skipped}, skipped


def watch_buckets(ddp: nn.Module, hook: Any = None, state: Any = None) -> dict[int, int]:
    """From now on: where each bucket begins, and its bytes."""
    buckets: dict[int, int] = {}

    def note(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # of the previous step: the layout may change
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return (hook or default_hooks.allreduce_hook)(state, bucket)

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(state, note)
    return buckets


def held_bytes(model: nn.Module, optimizer: Any, buckets: dict[int, int]) -> dict[str, int]:
    """Between two steps; gradients that are views of a bucket count as bucket."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    apart = [g for g in gradients if g.untyped_storage().data_ptr() not in buckets]
    update = getattr(optimizer, "optim", optimizer)  # ZeRO: the state of its share
    state = [value for each in update.state.values() for value in each.values()]
    held = {"parameters": size_of(model.parameters()), "buffers": size_of(model.buffers())}
    held |= {"gradients": size_of(apart), "buckets": sum(buckets.values())}
    return held | {"optimizer": size_of(value for value in state if isinstance(value, Tensor))}


class Training:
    """A model, under DDP if there are ranks, and its optimizer; call it for one step."""

    def __init__(self, variant: Variant, model: nn.Module, device: Any, watched: bool = False):
        self.variant, self.device, self.buckets = variant, device, dict[int, int]()
        self.layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        self.plain = model.to(device).to(memory_format=self.layout).train()
        if variant.compiled:  # in DDP, it cuts where a bucket ends
            torch._dynamo.config.recompile_limit = 64  # of one forward, in many variants
            self.plain.compile(dynamic=False)  # or shapes after the first are slower
        if variant.idle_branch:
            self.plain.add_module("idle", nn.Linear(512, 10, device=device))
        self.model: Any = self.plain
        self.power = powerSGD_hook.PowerSGDState(None, 1, 2)  # of rank 1, after 2 steps
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.plain, **variant.ddp)  # on every rank
            hook, state = HOOKS.get(variant.hook), self.power if "SGD" in variant.hook else None
            if watched:
                self.buckets = watch_buckets(self.model, hook, state)
            elif hook:
                self.model.register_comm_hook(state, hook)
        self.optimizer = OPTIMIZERS[variant.optimizer](self.plain.parameters())
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant.precision == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        precision, k = self.variant.precision, self.variant.accumulate
        if self.device.type == "cuda":  # names that torch.compile reads; newer ones must not mix
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = precision in ("", "tf32")
        torch.backends.cudnn.benchmark = self.variant.cudnn_benchmark
        autocast = partial(torch.autocast, self.device.type, DTYPES.get(precision))
        for part, (x, y) in enumerate(zip(images.chunk(k), labels.chunk(k), strict=True)):
            with nullcontext() if part == k - 1 else self.model.no_sync():
                with autocast(enabled=precision in DTYPES):
                    loss = nn.functional.cross_entropy(self.model(x), y) / k
                if part == 0:  # after forward, as in stage 04
                    self.optimizer.zero_grad(set_to_none=not self.variant.in_place)
                self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def time_variants(variants: Variants, model: nn.Module, batch: Batch, rounds: int) -> Results:
    """The step of each variant, and its ratio to its baseline; of one process, the peak too."""
    images, labels = batch
    made = {n: Training(v, copy.deepcopy(model), images.device) for n, v in variants.items()}
    layouts = {one.layout: images.to(memory_format=one.layout) for one in made.values()}
    steps = {name: partial(one, layouts[one.layout], labels) for name, one in made.items()}
    times = interleave(steps, rounds, 10 if images.is_cuda else 1, 4 if rounds > 1 else 1)
    rows: Results = {}
    for name, seconds in times.items():
        base = variants[name].baseline if name in variants else next(iter(times))
        rows[name] = {"baseline": base, **summarize({base: times[base], name: seconds})[name]}
    for name, one in {} if dist.is_initialized() else made.items():
        one.optimizer.zero_grad()
        held = sum(held_bytes(one.plain, one.optimizer, {}).values())
        rows[name]["peak_bytes"] = held + measure_bytes(images.device.type, steps[name])
    return rows


def learn(variant: Variant, seed: int, device: torch.device, steps: int | None) -> float:
    """The test accuracy after a short training on the digits: of net-bn, if only so many steps."""
    where = ["--dataset=digits", f"--data-dir={ROOT / 'data'}", f"--batch-size={SAMPLES}"]
    args = make_parser("precision", "").parse_args([*where, "--device=cpu"])
    train_set, test_set = load_dataset(args)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    training = Training(variant, build_model("net-bn" if steps else "resnet18", train_set), device)
    sampler = DistributedSampler(train_set, ranks, rank, seed=seed, drop_last=True)
    options = {"sampler": sampler, "drop_last": True, **loader_options(args)}
    loader = DataLoader(train_set, SAMPLES // ranks, **options)
    decay = LambdaLR(training.optimizer, lambda step: 1 - step / EPOCHS / len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in islice(loader, steps):
            training(images.to(device, memory_format=training.layout), labels.to(device))
            decay.step()
    images, labels = next(iter(DataLoader(test_set, len(test_set), **loader_options(args))))
    with torch.no_grad():  # in fp32, as train.py does, and not compiled
        outputs = training.plain.eval().forward(images.to(device))
    return round((outputs.argmax(dim=1).cpu() == labels).double().mean().item(), 4)


def time_model(name: str, variants: Variants, samples: int, effort: Effort) -> Results:
    torch.set_default_device("cpu")
    size, ranks = 32 if effort.quick else 224, dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model, rounds = torchvision.models.get_model(name), min(7, effort.rounds)
    images, labels = torch.randn(samples, 3, size, size), torch.randint(1000, (samples,))
    batch = images.to(effort.device), labels.to(effort.device)
    rows = time_variants(variants, model, batch, rounds)
    for row in rows.values():
        row["images_per_second"] = round(ranks * samples / row["step_ms"] * 1000, 2)
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
    kept = {n: v for n, v in PRECISIONS.items() if v.channels_last or not (few and v.compiled)}
    variants, skipped = choose(kept, effort.device, quick or (few and not gpu))
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


def count_and_compare(variants: Variants, model: nn.Module, batch: Batch, steps: int) -> Results:
    """What a rank holds; how far its weights are from the baseline's, as a part of their way."""
    (images, labels), rows = batch, dict[str, Any]()

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    weights = {"first": flat(model).to(images.device)}
    for name, variant in [*variants.items(), (SAME, SWITCHES["DDP"])]:
        one = Training(variant, copy.deepcopy(model), images.device, watched=True)
        for group in one.optimizer.param_groups:
            group["lr"] = 1e-3  # small steps: large ones would blow up the last bit of a number
        for _ in range(steps):
            one(images.to(memory_format=one.layout), labels)
        weights[name] = flat(one.plain)[: len(weights["first"])]  # without an idle branch
        base = weights["DDP" if name == SAME else variant.baseline]
        far = (weights[name] - base).norm() / (base - weights["first"]).norm()
        held = held_bytes(one.model, one.optimizer, one.buckets)
        tables = one.power.error_dict, one.power.p_memory_dict, one.power.q_memory_dict
        kinds = {"parameters": held["parameters"] + held["buffers"]}
        kinds["gradients and buckets"] = held["gradients"] + held["buckets"]
        kinds["optimizer"] = held["optimizer"]
        kinds["hook"] = size_of(tensor for table in tables for tensor in table.values())
        distance, *counts = largest_of_ranks([far.item(), *kinds.values()])
        kinds = dict(zip(kinds, map(int, counts), strict=True))
        rows[name] = {"distance": distance, "held_bytes": kinds}
    return rows


def try_switches(names: list[str], rounds: int, quick: bool) -> Results:
    device = torch.device(torch.get_default_device().type)
    torch.set_default_device("cpu")  # data sets are read there
    batch, size = (2, 32) if quick else (128, 224) if device.type == "cuda" else (32, 64)
    torch.manual_seed(0)
    model = Net(3, 32, 10, True) if quick else torchvision.models.resnet18(num_classes=10)
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randn(batch, 3, size, size).to(device), (torch.arange(batch) % 10).to(device)
    variants = {name: SWITCHES[name] for name in names}
    rows = time_variants(variants, model, data, min(15, rounds))
    seeds, steps = (1, 2) if quick else (3 if rounds >= 15 else 0, None)  # brief: no accuracy
    for name, found in count_and_compare(variants, model, data, min(5, rounds)).items():
        if found["distance"] or name == "DDP":
            each = [learn(SWITCHES[name], seed, device, steps) for seed in range(seeds)]
            found |= {"test_accuracies": each, "accuracy": median(each) if each else None}
        else:  # the same bits learn the same
            found["accuracy"] = rows[rows[name]["baseline"]]["accuracy"]
        rows[name] |= found
    about = {"model": "resnet18", "parameters": sum(p.numel() for p in model.parameters())}
    about |= {"ranks": dist.get_world_size(), "local_batch": batch, "image_size": size}
    return {**about, "variants": rows}


def measure_switches(effort: Effort) -> Results:
    """Two ranks of one thread over gloo; on GPUs, a rank on each of them over nccl."""
    gpu = effort.device == "cuda"
    chosen, skipped = choose(SWITCHES, effort.device, effort.quick or effort.brief)
    where: Any = {"device": effort.device, "backend": "nccl" if gpu else "gloo", "quiet": True}
    ranks, how = torch.cuda.device_count() if gpu else 2, (effort.rounds, effort.quick)
    first, *_ = start(ranks, try_switches, list(chosen), *how, **where)
    return {"provenance": {"world_size": ranks, "threads_a_rank": 1}, "skipped": skipped, **first}
