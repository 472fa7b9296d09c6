"""Every GPU test comes as far as the GPU: no rank is forked from a process that has asked CUDA.

Where a library imitates NVML, torch counts GPUs that are not there, and its first real call of CUDA
finds no driver. Once a process has asked CUDA, if only by `torch.cuda.is_available()`, that call
says something else in its forks.
"""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest
import torch

from helpers import PRELOADED
from local_ranks.chapters import ROOT
from local_ranks.machine import patience
from local_ranks.scripts import SECONDS
from prove import processes

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="imitates NVML as Linux loads it"),
    pytest.mark.skipif(not COMPILER, reason="needs a C compiler"),
    pytest.mark.skipif(not torch.version.cuda, reason="needs a torch that was built for CUDA"),
]

NVML = "libnvidia-ml.so.1"
SOURCE = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(int *count) { *count = GPUS; return 0; }
"""
CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@pytest.fixture
def pretend_gpus(tmp_path, monkeypatch):
    """Make torch count so many GPUs in each Python that is started afterwards."""
    for name in (CHECK, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)

    def make_library(gpus: int) -> None:
        (tmp_path / "nvml.c").write_text(SOURCE)
        options = ("-shared", "-fPIC", f"-DGPUS={gpus}", "-o", NVML, "nvml.c")
        subprocess.run([COMPILER, *options], cwd=tmp_path, check=True)

    return make_library


def status_of_fork(function: Callable[[], object]) -> int:
    """What a fork of this process ends with: the answer, 0 or 1; or 2, with a traceback."""
    if (child := os.fork()) == 0:
        status = 2
        try:
            status = int(function() is True)
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_fork_spoiled() -> bool:
    """Whether CUDA could not start in a fork of this process."""
    return status_of_fork(torch.cuda._is_in_bad_fork) == 1


def forks_spoiled_by_imports(modules: list[str]) -> list[str]:
    """Find the imports after which a fork is spoiled; modules that are not here are left out."""
    sys.path.insert(0, str(ROOT))  # where a fork server begins
    spoiled = []
    for name in modules:
        if find_spec(name.partition(".")[0]):
            import_module(name)
        spoiled += [name] * is_fork_spoiled()
    processes.preload()  # what prove forks its ranks from
    return spoiled + ["prove"] * is_fork_spoiled()


def count_gpus() -> None:
    assert torch.cuda.device_count() == 2


def ask_nvml() -> None:
    os.environ[CHECK] = "1"
    assert torch.cuda.is_available()


def step_with(kind: type[torch.optim.Optimizer]) -> None:
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)  # no backward(), which may ask for GPUs itself
    kind([parameter], lr=0.1).step()


LEAVE_CUDA_ALONE = (count_gpus, ask_nvml, partial(step_with, torch.optim.SGD))
ASK_CUDA = (torch.cuda.is_available, partial(step_with, torch.optim.Adam))


def asked(question: Callable[[], object]) -> bool:
    question()
    return is_fork_spoiled()


def forks_spoiled_by(questions: tuple[Callable[[], object], ...]) -> list[int]:
    """Ask each question in a process of its own; return for each whether a fork is spoiled."""
    return [status_of_fork(partial(asked, question)) for question in questions]


def test_what_ranks_are_forked_from_has_not_asked_cuda(pretend_gpus):
    """The controls ask, and find what troubleshooting.md says."""
    pretend_gpus(2)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as new_python:
        assert new_python.submit(forks_spoiled_by, LEAVE_CUDA_ALONE).result() == [0, 0, 0]
        assert new_python.submit(forks_spoiled_by, ASK_CUDA).result() == [1, 1]
        assert new_python.submit(forks_spoiled_by_imports, PRELOADED).result() == []


AT_CUDA, SKIPPED = "at its first call of CUDA", "needs more GPUs"
NO_DRIVER = ("Found no NVIDIA driver", "CUDA driver version is insufficient")  # as torch says it


def how_it_ended(case: ElementTree.Element) -> str:
    [result] = case.findall("*") or [case]
    text = f"{result.get('message')}\n{result.text}"
    if result.tag == "skipped" and "needs GPUs" in text:
        return SKIPPED
    at_cuda = any(words in text for words in NO_DRIVER) and "in forked subprocess" not in text
    return AT_CUDA if at_cuda else text


def has_driver() -> bool:
    """Is there a driver of a GPU, as torch looks for it? What hides the GPUs does not hide it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="has a GPU's driver, so its calls do not fail")
def test_each_gpu_test_comes_as_far_as_its_first_call_of_cuda(pretend_gpus, tmp_path):
    pretend_gpus(1)
    report = tmp_path / "report.xml"
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/stages", f"--junitxml={report}"]
    options = ("--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider")
    ended = subprocess.run(
        [*call, *options], cwd=ROOT, capture_output=True, text=True, timeout=patience(5 * SECONDS)
    )
    assert report.exists(), ended.stdout + ended.stderr
    tests = ElementTree.parse(report).findall(".//testcase")
    endings = {f"{test.get('classname')} {test.get('name')}": how_it_ended(test) for test in tests}
    others = [f"{test}: {end}" for test, end in endings.items() if end not in (AT_CUDA, SKIPPED)]
    assert not others, "\n\n".join(others)
    assert AT_CUDA in endings.values()
