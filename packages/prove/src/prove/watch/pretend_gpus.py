"""--cpu: a script written for GPUs runs on a laptop. CUDA calls become CPU calls, and nccl gloo."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # it lists the functions of torch, so it must see them as they are
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from prove.watch.rank_run import wrap, wrap_everywhere
from prove.watch.sync_batchnorm import convert_sync_batchnorm

CPU = torch.device("cpu")
CPU_PROPERTIES = SimpleNamespace(
    name="CPU", total_memory=1, major=0, minor=0, multi_processor_count=1
)
CUDA_ANSWERS: dict[str, Any] = {  # what functions of torch.cuda return, whatever they are asked
    "is_available": True, "is_initialized": False, "is_bf16_supported": True,
    "current_device": 0, "get_device_name": "CPU", "memory_stats": defaultdict(int),
    "get_device_properties": CPU_PROPERTIES, "synchronize": None, "set_device": None,
    "empty_cache": None, "reset_peak_memory_stats": None,
    "manual_seed": None, "manual_seed_all": None,
    "memory_allocated": 0, "memory_reserved": 0,
    "max_memory_allocated": 0, "max_memory_reserved": 0,
}  # fmt: skip
ACCELERATOR_ANSWERS = {
    "is_available": True, "synchronize": None, "current_accelerator": CPU,
    "current_device_index": 0, "set_device_index": None,
}  # fmt: skip


def always(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


def is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class OnCPU(TorchFunctionMode):
    """Every call of torch that names a GPU names the CPU instead."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if function is torch.device:
            device = function(*args, **kwargs)
            return CPU if is_gpu(device) else device
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "to" and len(args) > 1 and type(args[1]) is int:  # .to(0)
            args = (args[0], CPU, *args[2:])
        args = tuple(CPU if is_gpu(argument) else argument for argument in args)
        if is_gpu(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        return function(*args, **kwargs)


class Event:
    """A torch.cuda.Event that has always happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record = self.wait = self.synchronize = always(None)
        self.query, self.elapsed_time = always(True), always(1.0)  # ms


def install(gpus: int) -> None:
    answers: list[tuple] = [(torch.cuda, name, answer) for name, answer in CUDA_ANSWERS.items()]
    answers += [(torch.cuda, "device_count", gpus), (torch.accelerator, "device_count", gpus)]
    answers += [(torch.accelerator, name, answer) for name, answer in ACCELERATOR_ANSWERS.items()]
    answers += [(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None)]
    for owner, name, answer in answers:
        setattr(owner, name, always(answer))
    torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(  # type: ignore[method-assign]
        lambda module, process_group=None: convert_sync_batchnorm(module)
    )

    @wrap(torch.nn.Module, "cuda")
    def cuda(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    @wrap(torch, "load")
    def load(original: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"map_location": "cpu"})

    @wrap_everywhere(dist.distributed_c10d, "init_process_group")
    def begin(
        original: Callable, backend: Any = None, *args: Any, device_id: Any = None, **more: Any
    ) -> None:
        original("gloo", *args, **more)

    @wrap(torch.nn.parallel.DistributedDataParallel, "__init__")
    def init(
        original: Callable, self: Any, module: Any,
        device_ids: Any = None, output_device: Any = None, *args: Any, **more: Any,
    ) -> None:  # fmt: skip
        original(self, module, None, None, *args, **more)

    @wrap(DataLoader, "__init__")
    def loader(
        original: Callable, self: Any, *args: Any, pin_memory: bool = False, **more: Any
    ) -> None:
        original(self, *args, **more)

    OnCPU().__enter__()
