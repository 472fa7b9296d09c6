"""What can one GPU alone show? Formats, peaks of memory, messages of gloo and nccl.

Each section also runs on a CPU, in small, so that it can be rehearsed. The batch lies on the device
before the clock starts: a loader that is slower than the GPU would hide what a format gains.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import peak
from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort, interleave_steps, summarize, timed
from benchmarks.result_files import Results
from local_ranks.ranks import run_ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# By model: the batch, the pixels of a side, and the steps that are timed together.
MODELS = {"resnet50": (256, 224, 2), "resnet18": (512, 64, 10)}


@dataclass(frozen=True)
class Format:
    """Says how a step computes.

    tuned: cuDNN tries its algorithms first and keeps the fastest. own_norm: BatchNorm by PyTorch's
    kernels instead of cuDNN's, as PyTorch always does in bf16.
    """

    name: str  # fp32, tf32, bf16 or fp16
    layout: str
    tuned: bool = False
    own_norm: bool = False

    @property
    def label(self) -> str:
        tuned = ", cudnn.benchmark" if self.tuned else ""
        return f"{self.name}, {self.layout}{tuned}{', own BatchNorm' if self.own_norm else ''}"

    @contextmanager
    def switches(self) -> Iterator[None]:
        """Let what is inside compute in this format."""
        tf32 = self.name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=self.tuned, allow_tf32=tf32):
            yield


def formats_of(device: str) -> list[Format]:
    """List the formats of a device: TF32 and cuDNN are for GPUs.

    Pure fp32 is not tuned: that takes longest, and nobody trains in it.
    """
    names = ("fp32", "tf32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16")
    formats = [Format(name, layout) for name in names for layout in LAYOUTS]
    if device == "cuda":
        formats += [Format(name, layout, tuned=True) for name in names[1:] for layout in LAYOUTS]
        formats += [Format("fp16", layout, own_norm=True) for layout in LAYOUTS]
    return formats


def use_cudnn(enabled: bool, *_: object) -> None:
    """Turn cuDNN on or off, as a hook of a layer."""
    torch.backends.cudnn.enabled = enabled


class FormatStep:
    """A model of its own, its optimizer and a batch on the device; each call takes one step."""

    def __init__(self, model: str, batch: int, size: int, form: Format, device: str) -> None:
        torch.manual_seed(0)
        layout = LAYOUTS[form.layout]
        self.form, self.device = form, device
        self.model: nn.Module = getattr(torchvision.models, model)(num_classes=10).to(device)
        self.model.to(memory_format=layout)
        for layer in self.model.modules() if form.own_norm else ():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(partial(use_cudnn, False))
                layer.register_forward_hook(partial(use_cudnn, True))
        images = torch.randn(batch, 3, size, size, device=device)
        self.images: Tensor = images.to(memory_format=layout)
        self.labels = torch.arange(batch, device=device) % 10
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9)
        self.scaler = torch.amp.GradScaler(device, enabled=form.name == "fp16")

    def __call__(self) -> None:
        dtype = DTYPES.get(self.form.name)
        with self.form.switches():
            with torch.autocast(self.device, dtype, enabled=dtype is not None):
                loss = cross_entropy(self.model(self.images), self.labels)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def peak_bytes(self) -> int:
        """Measure the most that a step holds, without what the other formats hold."""
        self.optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        parts = (*self.model.parameters(), *self.model.buffers(), self.images, self.labels)
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        held = sum(tensor.nbytes for tensor in (*parts, *momenta))
        torch.cuda.reset_peak_memory_stats()
        self()
        return held + torch.cuda.max_memory_allocated() - before


@section("formats", seconds_on_gpu=150)
def measure_formats(effort: Effort) -> Results:
    """Measure images per second and the peak of a step in each format and memory layout."""
    on_gpu, results = effort.device == "cuda", Results()
    models = MODELS if on_gpu else {"resnet18": (2, 32, 1)}
    for name, (batch, size, together) in models.items():
        steps = {
            form.label: FormatStep(name, batch, size, form, effort.device)
            for form in formats_of(effort.device)
        }
        rows = summarize(interleave_steps(steps, min(5, effort.rounds), together))
        for label, row in rows.items():
            row["images_per_second"] = round(1000 * batch / row["step_ms"], 1)
            if on_gpu and label in steps:
                row["peak_bytes"] = steps[label].peak_bytes()
        results[name] = {"batch": batch, "image_size": size, "variants": rows}
        steps.clear()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return {"device": effort.device, "models": results}


@section("peaks", seconds_on_gpu=45)
def measure_peaks(effort: Effort) -> Results:
    """Compare the peak of a step as fit.py rehearses it with what the device's allocator counts."""
    models = [("net", 28), ("resnet18", 224), ("resnet50", 224)]
    rows = []
    for model, size in models[:1] if effort.device == "cpu" else models:
        for optimizer in ("sgd", "adam"):
            for batch in (1, 64):
                plan = peak.Plan(model, size, optimizer, effort.device)
                rehearsed, moment = peak.rehearsed_peak(plan, batch)
                row = {"model": model, "optimizer": optimizer, "batch": batch, "moment": moment}
                measured = peak.measured_peak(plan, batch)
                rows.append(row | {"rehearsed_bytes": rehearsed, "measured_bytes": measured})
    return {"device": effort.device, "rows": rows}


def watch_backward(rank: int) -> Results:
    """Find out whether forward and backward return before the GPU is done."""
    ddp = DistributedDataParallel(nn.Linear(4096, 4096))
    batch = torch.randn(64, 4096)
    for _ in range(5):  # DDP rearranges its buckets after the first step, and then talks
        ddp(batch).sum().backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)  # cycles: about a second, in front of what comes now
    before = torch.cuda.Event()
    before.record()
    loss = ddp(batch).sum()
    early = {"forward": not before.query()}
    loss.backward()
    early["backward"] = not before.query()
    torch.cuda.synchronize()
    return {"returned_before_the_gpu_was_done": early}


def backward(layer: nn.Module, images: Tensor) -> None:
    layer(images).sum().backward()


def time_shapes(device: str) -> Results:
    """Time the first and the second step of each shape with cudnn.benchmark, in ms."""
    layer, rows = nn.Conv2d(64, 64, 3, padding=1).to(device), Results()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
        for size in (56, 28, 56):
            images = torch.randn(32, 64, size, size, device=device)
            step = timed(partial(backward, layer, images), 1)
            rows[f"{len(rows)}: {size} pixels"] = [round(1000 * step(), 3) for _ in range(2)]
    return rows


@section("nccl", seconds_on_gpu=90)
def measure_nccl(effort: Effort) -> Results:
    """Show the GPU's queue by one rank over nccl; on a CPU, time only the shapes."""
    results: Results = {"device": effort.device}
    if effort.device == "cuda":
        for backend in ("nccl", "gloo"):
            [results[backend]] = run_ranks(1, watch_backward, backend=backend, device="cuda")
    return results | {"first_and_second_ms": time_shapes(effort.device)}


def time_all_reduces(rank: int, rounds: int, sizes: tuple[int, ...], on_gpu: bool) -> Results:
    """Time an all-reduce of each size over gloo, of tensors on the CPU and on the GPU, in turns."""
    table = Results()
    for size in sizes:
        tensors = {"cpu": torch.zeros(size // 4, device="cpu")}
        if on_gpu:
            tensors["cuda"] = torch.zeros(size // 4, device="cuda")
        steps: dict[str, Callable[[], object]] = {
            name: partial(dist.all_reduce, tensor) for name, tensor in tensors.items()
        }
        table[str(size)] = summarize(interleave_steps(steps, rounds))
    return table


@section("gloo", seconds_on_gpu=60)
def measure_gloo(effort: Effort) -> Results:
    """Time an all-reduce between two ranks, which share a GPU where there is one."""
    sizes = (2**12,) if effort.quick else (2**12, 2**20, 2**26)
    rounds, on_gpu = min(50, effort.rounds), effort.device == "cuda"
    times, _ = run_ranks(2, time_all_reduces, rounds, sizes, on_gpu, device=effort.device)
    return {"device": effort.device, "all_reduce": times}
