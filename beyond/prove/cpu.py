"""--cpu: a script written for GPUs runs on a laptop. CUDA calls become CPU calls, and nccl gloo."""

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # it lists the functions of torch, so it must see them as they are
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

CPU = torch.device("cpu")
SYNC_BATCHNORM = Path(__file__).parents[2] / "05_amp_syncbn" / "sync_batchnorm.py"
SILENT = ["set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"]
COUNTERS = [f"{kind}memory_{state}" for kind in ("", "max_") for state in ("allocated", "reserved")]


def is_gpu(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return isinstance(x, str) and x.split(":")[0] == "cuda"


class OnCPU(TorchFunctionMode):
    """Every call of torch that names a GPU names the CPU instead."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        to_number = name == "to" and len(args) > 1 and type(args[1]) is int
        args = tuple(CPU if is_gpu(x) or (to_number and k == 1) else x for k, x in enumerate(args))
        if is_gpu(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        return function(*args, **kwargs)


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def sync_batchnorm_by_hand() -> Any:
    """torch's SyncBatchNorm refuses CPU tensors; that of stage 05 computes the same."""
    spec = importlib.util.spec_from_file_location("prove_sync_batchnorm", SYNC_BATCHNORM)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"expected {SYNC_BATCHNORM}, for --cpu and SyncBatchNorm")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.convert_sync_batchnorm


def install(gpus: int) -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    for module in (cuda, accelerator):
        module.is_available = lambda: True  # type: ignore[attr-defined]
        module.device_count = lambda: gpus  # type: ignore[attr-defined]
        module.synchronize = nothing  # type: ignore[attr-defined]
    for name in SILENT:
        setattr(cuda, name, nothing)
    for name in COUNTERS:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.current_device = lambda: 0
    cuda.is_initialized = lambda: False
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.memory_stats = lambda *args: defaultdict(int)
    cuda.get_device_name = lambda *args: "CPU"
    cuda.get_device_properties = lambda *args: SimpleNamespace(  # type: ignore[assignment]
        name="CPU", total_memory=1, major=0, minor=0, multi_processor_count=1
    )
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    accelerator.set_device_index = nothing
    accelerator.current_device_index = lambda: 0
    torch.optim.Optimizer._accelerator_graph_capture_health_check = nothing  # type: ignore[method-assign]

    torch.nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(  # type: ignore[method-assign]
        lambda module, process_group=None: sync_batchnorm_by_hand()(module)
    )
    load, begin = torch.load, dist.init_process_group
    torch.load = lambda *args, **kwargs: load(*args, **kwargs | {"map_location": "cpu"})
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **more: Any):  # type: ignore[no-untyped-def]
        begin("gloo", *args, **more)

    dist.init_process_group = init_process_group
    ddp = torch.nn.parallel.DistributedDataParallel
    make_ddp, make_loader = ddp.__init__, DataLoader.__init__

    def ddp_init(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        make_ddp(self, module, None, None, *args, **more)

    def loader_init(self: Any, *args: Any, pin_memory: bool = False, **more: Any) -> None:
        make_loader(self, *args, **more)

    ddp.__init__ = ddp_init  # type: ignore[method-assign]
    DataLoader.__init__ = loader_init  # type: ignore[method-assign]
    OnCPU().__enter__()
