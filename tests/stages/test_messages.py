"""docs/troubleshooting.md is found by the messages that torch prints, word for word.

Each message of a heading and of the table of short answers must stand in one of the lists below,
which say where its words come from. If another version of torch words one of them differently, a
test fails here.
"""

import multiprocessing.reduction
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.on_ranks import on_ranks, run_on_ranks
from local_ranks.chapters import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
TORCH = Path(torch.__file__).parent
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def scaled_step() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    return scaler, optimizer


def unscale_twice() -> None:
    scaler, optimizer = scaled_step()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step() -> None:
    scaler, optimizer = scaled_step()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice() -> None:
    scaler, optimizer = scaled_step()
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_without_gradients() -> None:
    scaler, _ = scaled_step()
    scaler.step(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1))


def shuffle_beside_a_sampler() -> None:
    data = TensorDataset(torch.zeros(8))
    DataLoader(data, shuffle=True, sampler=DistributedSampler(data))


def one_step_too_many() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=32)
    for _ in range(33):
        optimizer.step()
        schedule.step()


def pickle_a_lambda() -> None:
    pickle.dumps(lambda step: step)


def synchronized_model() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    )


def load_names_of(wrapped: nn.Module) -> None:
    nn.Linear(2, 2).load_state_dict(wrapped.state_dict())


# What happens on one rank over gloo, and the words of its error.
PRODUCED: dict[str, Callable[[], Any]] = {
    "sampler option is mutually exclusive with shuffle": shuffle_beside_a_sampler,
    "unscale_() has already been called on this optimizer since the last update()": unscale_twice,
    "unscale_() is being called after step()": unscale_after_step,
    "step() has already been called since the last update()": step_twice,
    "No inf checks were recorded for this optimizer.": step_without_gradients,
    "Tried to step 33 times": one_step_too_many,
    "SyncBatchNorm expected input tensor to be on GPU": lambda: nn.SyncBatchNorm(2)(
        torch.ones(4, 2)
    ),
    "SyncBatchNorm layers only work with GPU modules": lambda: DistributedDataParallel(
        synchronized_model()
    ),
    "chunk expects at least a 1-dimensional tensor": lambda: torch.tensor(8).chunk(2),
    "Can't pickle local object": pickle_a_lambda,
    "Expected more than 1 value per channel when training": lambda: nn.BatchNorm1d(2)(
        torch.ones(1, 2)
    ),
    "'DistributedDataParallel' object has no attribute 'encode'": lambda: (
        DistributedDataParallel(nn.Linear(2, 2)).encode
    ),
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
    "a gradient": lambda: DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False)),
    'Unexpected key(s) in state_dict: "_orig_mod.weight"': lambda: load_names_of(
        torch.compile(nn.Linear(2, 2), backend="eager")
    ),
}
# What only a GPU, another machine or a death of a rank brings about: the words in torch's files.
IN_TORCH = {
    "Default process group has not been initialized": "distributed/distributed_c10d.py",
    "cannot be retrieved (gai error: ": "lib/libtorch_cpu.so",
    "The client socket has timed out after ": "lib/libtorch_cpu.so",
    "The client socket has failed to connect to any network address": "lib/libtorch_cpu.so",
    "The connection to the C10d store has failed": (
        "distributed/elastic/rendezvous/c10d_rendezvous_backend.py"
    ),
    "barrier(): using the device under current context": "distributed/distributed_c10d.py",
    "The server socket has failed to listen on any local network address": "lib/libtorch_cpu.so",
    "EADDRINUSE": "lib/libtorch_cpu.so",
    "Connection closed by peer": "lib/libtorch_cpu.so",
    "ChildFailedError": "distributed/elastic/multiprocessing/errors/__init__.py",
    "exitcode  : ": "distributed/elastic/multiprocessing/errors/__init__.py",
    "is killed by signal: ": "lib/libtorch_python.so",
    "unable to allocate shared memory(shm)": "lib/libtorch_cpu.so",
    "CUDA out of memory. Tried to allocate ": "lib/libc10_cuda.so",
    "Tried to allocate more than 1EB memory": "lib/libc10_cuda.so",
    "Too many open files. Communication with the workers is no longer possible": (
        "utils/data/dataloader.py"
    ),
    "Expected all tensors to be on the same device": "lib/libtorch_cpu.so",
    "DDP expects same model across all ranks, but Rank ": "lib/libtorch_cpu.so",
    "in replica ": "nn/parallel/parallel_apply.py",
    "First bucket should be smaller/equal to other buckets": "_dynamo/backends/distributed.py",
    "No backend type associated with device type ": "lib/libtorch_cpu.so",
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!": "lib/libtorch_cuda.so",
    "Cannot re-initialize CUDA in forked subprocess": "cuda/__init__.py",
    "Weights only load failed": "serialization.py",
    "NCCL error in: ": "lib/libtorch_cuda.so",
    "Gloo connectFullMesh failed": "lib/libtorch_cpu.so",
    "Guessing device ID based on global rank": "lib/libtorch_cuda.so",
    "unsupported gloo device": "lib/libtorch_cpu.so",
    "use_libuv was requested but PyTorch was built without libuv support": "lib/libtorch_cpu.so",
    "Error waiting on exit barrier. Elapsed: ": "distributed/elastic/agent/server/api.py",
    "destroy_process_group() was not called": "lib/libtorch_cuda.so",
    "Attempting to run cuBLAS, but there was no current CUDA context": "lib/libtorch_cuda.so",
    "Setting OMP_NUM_THREADS environment variable for each process to be ": "distributed/run.py",
    "Grad strides do not match bucket view strides": "lib/libtorch_cpu.so",
    "expect_autograd_hooks_ INTERNAL ASSERT FAILED": "lib/libtorch_cpu.so",
    "Watchdog caught collective operation timeout": "lib/libtorch_cuda.so",
    "is setting up NCCL communicator and retrieving ncclUniqueId from ": "lib/libtorch_cuda.so",
}
SINCE_2_15 = {  # and where older versions print something else, the page has that, too
    "NCCL operation timed out": "lib/libtorch_cuda.so",
    "Operation timed out after ": "lib/libtorch_cuda.so",
    "Aborting process on rank ": "lib/libtorch_cuda.so",
    "nccl2 requires at least one CUDA device": "distributed/distributed_c10d.py",
    "ProcessGroupNCCL is bound to device ": "lib/libtorch_cuda.so",
    "Failed to initialize NCCL communicator": "lib/libtorch_cuda.so",
}
IN_NCCL = {
    "unhandled system error",
    "unhandled cuda error",
    "Multiple Ranks are using the same GPU",
}
IN_CUDA = {"invalid device ordinal", "initialization error"}
# Why some words are not looked up here.
NOT_CHECKED = {
    "environment variable RANK expected, but not set": "test_launch_errors runs minimal.py so",
    "Signal 9 (SIGKILL)": "torch writes the number and the name by a pattern",
    "unrecognized arguments: --local-rank=0": "argparse says it, with an argument of torch's",
    "bdb.BdbQuit": "Python's debugger",
    "Can't get attribute 'train' on <module '__main__'": "test_failures.py runs the page's command",
    "received 0 items of ancdata": "Python's; the test below looks it up there",
    "but got": "the other ending of the message beside it",
    "using GPU 0 as device used by this process is currently unknown": "older than torch 2.11",
    "was build": "the older spelling of the message beside it",
    "terminate called without an active exception": "the C++ library",
    "Signal 11 (SIGSEGV) received by PID": "torchrun, by the same pattern as for 9",
    "get_model_state_dict": "a function",
    "nan": "a number",
    "--multi-gpu False": "a flag of the reader's",
}
FROM_TEST_FAILURES = re.compile(
    "Timed out waiting 2000ms|Expected to |one of the variables needed|unsupported operation: more"
    '|FileNotFoundError|"module.weight"|got mixed torch.Tensor|eth99|DefaultCPUAllocator'
)


def messages_of_the_page() -> list[str]:
    """Return what stands as code in the headings, and in the first column of the short answers."""
    table = PAGE.split('<a id="short-answers"></a>')[1].split("\n## ")[0]
    places = re.findall(r"^### (.+)", PAGE, re.M) + re.findall(r"^\| (.+?) \|", table, re.M)
    return [message for place in places for message in re.findall(r"`([^`]+)`", place)]


def test_it_is_known_where_each_message_comes_from():
    known = [*PRODUCED, *IN_TORCH, *SINCE_2_15, *IN_NCCL, *IN_CUDA, *NOT_CHECKED]
    messages = messages_of_the_page()
    assert len(messages) > 60
    unknown = [m for m in messages if not any(words in m for words in known)]
    assert [m for m in unknown if not FROM_TEST_FAILURES.search(m)] == []
    gone = [words for words in known if words not in PAGE]
    assert gone == []


def errors_on_one_rank(rank: int) -> dict[str, str]:
    dist.init_process_group("gloo")
    errors = {}
    for words, produce in PRODUCED.items():
        try:
            produce()
        except Exception as error:
            errors[words] = " ".join(str(error).split())
    dist.destroy_process_group()
    return errors


def test_torch_says_what_the_page_says_where_a_cpu_can_make_it_happen():
    [errors] = run_on_ranks(1, errors_on_one_rank)
    assert {words: words for words in PRODUCED if words in errors.get(words, "")} == {
        words: words for words in PRODUCED
    }, errors


@cache
def content(file: Path) -> bytes:
    return file.read_bytes()


def holds(file: Path, words: str) -> bool:
    """Does the file have these words? In Python, a string may go on in the next line."""
    data = content(file)
    if file.suffix == ".py":
        data = re.sub(rb'"\s+f?"', b"", data)
    return words.encode() in data


@pytest.mark.parametrize(("words", "file"), [*IN_TORCH.items(), *SINCE_2_15.items()])
def test_torch_has_the_words_of_what_it_cannot_say_here(words, file):
    if words in SINCE_2_15 and VERSION < (2, 15):
        pytest.skip("a message of torch 2.15")
    if not (TORCH / file).exists():
        pytest.skip(f"this build of torch has no {file}")
    assert holds(TORCH / file, words)


@pytest.mark.parametrize(("words", "folder", "pattern"), [
    *[(words, "nvidia/nccl/lib", "libnccl.so*") for words in sorted(IN_NCCL)],
    *[(words, "nvidia", "*/lib/libcudart.so*") for words in sorted(IN_CUDA)],
])  # fmt: skip
def test_the_libraries_of_nvidia_have_the_words_of_theirs(words, folder, pattern):
    libraries = [*(TORCH.parent / folder).glob(pattern)]
    if not libraries:
        pytest.skip("they are not installed")
    if words.startswith("Multiple Ranks") and VERSION < (2, 14):
        pytest.skip("the words of nccl 2.30; torch 2.11 comes with 2.28")
    assert any(holds(library, words) for library in libraries)


KEEPS_BATCHES = """
import resource, sys, torch
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 300
    def __getitem__(self, index): return torch.zeros(4)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
if sys.argv[1] == "file_system": torch.multiprocessing.set_sharing_strategy("file_system")
loader = DataLoader(Data(), batch_size=1, num_workers=1, multiprocessing_context="fork")
print(len([batch.clone() if sys.argv[1] == "clone" else batch for batch in loader]))
"""


@pytest.mark.parametrize("cure", ["", "file_system", "clone"])
def test_batches_that_are_kept_use_up_the_open_files_and_each_cure_helps(cure):
    command = [sys.executable, "-c", KEEPS_BATCHES, cure]
    process = subprocess.run(command, capture_output=True, text=True)
    lost = ("Too many open files", "items of ancdata")  # which of them, is a matter of luck
    assert any(words in process.stderr for words in lost) == (not cure), process.stderr
    assert process.stdout == ("300\n" if cure else "")
    source = Path(multiprocessing.reduction.__file__).read_text()
    assert "received %d items of ancdata" in source
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 128


class Deep(nn.Module):
    """Three buckets of DDP, if one holds a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def in_place(module: nn.Module, backend: Callable) -> nn.Module:
    module.compile(backend=backend)
    return module


@on_ranks(2)
def test_compile_cuts_at_the_buckets_in_each_order_and_adds_to_the_names(rank):
    graphs = []

    def backend(graph: Any, _: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    def wrap(model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, bucket_cap_mb=1)

    ways = {
        "_orig_mod.": lambda model: torch.compile(model, backend=backend),
        "_orig_mod.module.": lambda model: torch.compile(wrap(model), backend=backend),
        "module._orig_mod.": lambda model: wrap(torch.compile(model, backend=backend)),
        "module.": lambda model: in_place(wrap(model), backend),
    }
    gradients = []
    for prefix, way in ways.items():
        torch.manual_seed(0)
        model = Deep()
        wrapped = way(model)
        graphs.clear()
        torch._dynamo.reset()
        wrapped(torch.ones(1, 400)).sum().backward()
        gradients.append(model.layers[0].weight.grad)
        assert len(graphs) == (1 if prefix == "_orig_mod." else 3)
        names = list(model.state_dict())
        weights = wrapped.state_dict()
        assert list(weights) == [prefix + name for name in names]
        # The line of the page:
        plain = {n.replace("_orig_mod.", "").removeprefix("module."): v for n, v in weights.items()}
        assert list(plain) == names
    assert all(torch.allclose(gradient, gradients[0]) for gradient in gradients)
    assert '{name.replace("_orig_mod.", "").removeprefix("module."): value' in PAGE


@on_ranks(1)
def test_what_puts_other_parameters_into_a_model_after_its_optimizer_was_made(rank):
    def kept(change: Callable[[nn.Module], Any]) -> bool:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        parameters = {
            id(p) for p in torch.optim.SGD(model.parameters(), 0.1).param_groups[0]["params"]
        }
        changed = change(model) or model
        return {id(p) for p in changed.parameters()} == parameters

    assert kept(lambda model: model.to(torch.float64))
    assert kept(nn.SyncBatchNorm.convert_sync_batchnorm)
    assert not kept(lambda model: model.__setitem__(0, nn.Linear(2, 2)))
    assert not kept(lambda model: model.load_state_dict(model.state_dict(), assign=True) and None)
    assert not kept(lambda model: weight_norm(model[0]) and None)
    assert not kept(lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))) and None)
    linear = nn.Linear(2, 2)
    assert torch.optim.Adagrad(linear.parameters()).state[linear.weight]["sum"] is not None
    assert not torch.optim.Adam(linear.parameters()).state
