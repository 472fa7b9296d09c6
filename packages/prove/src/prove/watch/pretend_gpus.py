"""Run a script written for GPUs on a laptop (--cpu): CUDA calls become CPU calls, and nccl gloo."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # lists torch's functions, so it is imported before they change
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from prove.watch.rank_run import wrap, wrap_everywhere
from prove.watch.sync_batchnorm import SyncBatchNorm

CPU = torch.device("cpu")


def always(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


class Event:
    """Stands in for a torch.cuda.Event that has always happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record = self.wait = self.synchronize = always(None)
        self.query, self.elapsed_time = always(True), always(1.0)  # ms


class Stream(nullcontext):
    """Stands in for a torch.cuda.Stream whose work is always done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)
        self.wait_stream = self.wait_event = self.synchronize = always(None)
        self.query, self.record_event = always(True), lambda event=None: event or Event()


GPU = SimpleNamespace(name="CPU", total_memory=1, major=8, minor=0, multi_processor_count=1)
PROFILER = SimpleNamespace(cudaProfilerStart=always(0), cudaProfilerStop=always(0))
CUDA, ACCELERATOR = (torch.cuda,), (torch.accelerator,)
BOTH = (torch.cuda, torch.accelerator)
# Modules, a constant that their functions return, and the names of these functions. CUDA graphs are
# missing, because their replay must compute. install() adds the values that depend on the machine.
ANSWERS: list[tuple[tuple, Any, tuple[str, ...]]] = [
    (BOTH, None, ("synchronize", "set_stream", "empty_cache")),
    (BOTH, None, ("reset_peak_memory_stats", "reset_accumulated_memory_stats")),
    (BOTH, Stream(), ("current_stream",)),
    (BOTH, defaultdict(int), ("memory_stats",)),
    (BOTH, 0, ("memory_allocated", "max_memory_allocated")),
    (BOTH, 0, ("memory_reserved", "max_memory_reserved")),
    (ACCELERATOR, CPU, ("current_accelerator",)),
    (ACCELERATOR, 0, ("current_device_index",)),
    (ACCELERATOR, None, ("set_device_index",)),
    (ACCELERATOR, nullcontext(), ("device_index",)),
    (ACCELERATOR, (GPU.total_memory, GPU.total_memory), ("get_memory_info",)),
    (CUDA, 0, ("current_device",)),
    (CUDA, nullcontext(), ("device", "device_of", "stream", "StreamContext")),
    (CUDA, Stream(), ("default_stream",)),
    (CUDA, GPU.name, ("get_device_name",)),
    (CUDA, GPU, ("get_device_properties",)),
    (CUDA, (GPU.major, GPU.minor), ("get_device_capability",)),
    (CUDA, (GPU.total_memory, GPU.total_memory), ("mem_get_info",)),  # free and total memory
    (CUDA, True, ("is_initialized", "is_bf16_supported", "is_tf32_supported")),
    (CUDA, False, ("is_current_stream_capturing", "can_device_access_peer")),
    (CUDA, None, ("init", "set_device", "ipc_collect", "check_error", "set_sync_debug_mode")),
    (CUDA, None, ("reset_max_memory_allocated", "reset_max_memory_cached")),
    (CUDA, None, ("set_per_process_memory_fraction",)),
    (CUDA, 1.0, ("get_per_process_memory_fraction",)),
    (CUDA, 0, ("memory_cached", "max_memory_cached", "device_memory_used", "memory_usage")),
    (CUDA, 0, ("get_sync_debug_mode", "utilization", "temperature", "power_draw", "clock_rate")),
    (CUDA, "", ("memory_summary", "list_gpu_processes", "get_gencode_flags")),
    (CUDA, [], ("memory_snapshot", "get_arch_list")),
    (CUDA, PROFILER, ("cudart",)),
    ((torch.cuda.profiler,), None, ("start", "stop")),
    ((torch.cuda.memory,), None, ("_record_memory_history", "_dump_snapshot")),
    ((torch.cuda.nvtx,), 0, ("range_push", "range_pop", "range_start")),
    ((torch.cuda.nvtx,), None, ("range_end", "mark")),
    ((torch.Tensor,), None, ("record_stream",)),
]


RANDOM_TENSORS = ("rand", "randn", "randint", "randperm", "normal")


def is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class GpuGenerator:
    """Stands in for the generator of the GPU.

    Until the script seeds the GPU alone, the CPU's generator serves for both. From then on, models
    and calls that name a GPU draw from a separate state, as on a real GPU.
    """

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.running: list[torch.nn.Module] = []  # the module whose forward draws from it

    def seed_alone(self, number: int) -> None:
        if self.state is None:
            nn_module = torch.nn.modules.module
            nn_module.register_module_forward_pre_hook(self.begin_forward)
            nn_module.register_module_forward_hook(self.end_forward, always_call=True)
        self.state = torch.Generator().manual_seed(number).get_state()

    def exchange(self) -> None:
        if self.state is not None:
            other_state, self.state = self.state, torch.get_rng_state()
            torch.set_rng_state(other_state)

    def begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        recomputes = torch._C._current_graph_task_id() != -1  # a checkpoint has restored the state
        if not self.running and not recomputes and next(module.parameters(), None) is not None:
            self.exchange()
            self.running.append(module)

    def end_forward(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self.running and self.running[0] is module:
            self.running.clear()
            self.exchange()


GPU_GENERATOR = GpuGenerator()


class OnCPU(TorchFunctionMode):
    """A mode in which every torch call that names a GPU runs on the CPU instead."""

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
            if name in RANDOM_TENSORS and not GPU_GENERATOR.running:
                GPU_GENERATOR.exchange()
                try:
                    return function(*args, **kwargs)
                finally:
                    GPU_GENERATOR.exchange()
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def sync_batchnorm(self: torch.nn.SyncBatchNorm, x: Tensor) -> Tensor:
    if not self.training or not dist.is_initialized():
        return _BatchNorm.forward(self, x)
    if self.process_group not in (None, dist.group.WORLD):
        raise ValueError("prove --cpu: a SyncBatchNorm with a process_group of some ranks")
    return SyncBatchNorm.forward(self, x)  # type: ignore[arg-type]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    torch.set_rng_state(next(iter(states)))


def install(gpus: int) -> None:
    """Let torch see this number of GPUs from now on, and use the CPU in their place."""
    answers = [(owner, name, answer) for owners, answer, names in ANSWERS
               for owner in owners for name in names]  # fmt: skip
    answers += [(owner, "device_count", gpus) for owner in BOTH]
    answers += [(owner, "is_available", gpus > 0) for owner in BOTH]
    answers += [(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None)]
    for owner, name, answer in answers:
        setattr(owner, name, always(answer))
    for name in dir(torch.cuda):
        if name.endswith("Tensor"):  # FloatTensor and the like
            setattr(torch.cuda, name, getattr(torch, name))
    replaced = {  # random numbers come from the CPU
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * gpus,
        "set_rng_state_all": set_rng_state_all,
        "initial_seed": torch.initial_seed,
        "manual_seed": GPU_GENERATOR.seed_alone,
        "manual_seed_all": GPU_GENERATOR.seed_alone,
        "seed": lambda: GPU_GENERATOR.seed_alone(torch.Generator().seed()),
        "seed_all": lambda: GPU_GENERATOR.seed_alone(torch.Generator().seed()),
        "make_graphed_callables": lambda callables, *args, **kwargs: callables,
        "Event": Event,
        "Stream": Stream,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    setattr(torch.nn.SyncBatchNorm, "forward", sync_batchnorm)  # noqa: B010  of another signature
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._passing_sync_batchnorm_handle = always(None)  # type: ignore[method-assign]  # DDP refuses CPUs

    @wrap(torch, "manual_seed")
    def manual_seed(original: Callable, seed: Any) -> Any:
        GPU_GENERATOR.state = None  # one seed for the CPU and all GPUs
        return original(seed)

    @wrap(torch.random, "fork_rng")
    def fork_rng(original: Callable, devices: Any = None, enabled: bool = True, **more: Any) -> Any:
        return original((), enabled)  # fork_rng always includes the CPU's generator

    @wrap(torch.nn.Module, "cuda")
    def cuda(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    @wrap(torch.nn.DataParallel, "__init__")
    def one_replica(original: Callable, self: Any, module: Any, *args: Any, **more: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.device_ids = module, []  # as on a machine that has no GPU

    @wrap(torch, "load")
    def load(original: Callable, f: Any, map_location: Any = None, *args: Any, **more: Any) -> Any:
        return original(f, "cpu", *args, **more)

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
