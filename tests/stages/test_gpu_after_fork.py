"""Every GPU test comes as far as the GPU: no rank is forked from a process that has asked CUDA.

Where a library imitates NVML, torch counts GPUs that are not there, and its first real call of CUDA
finds no driver. Once a process has asked CUDA, if only by `torch.cuda.is_available()`, that call
says something else in its forks.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

from local_ranks.chapters import ROOT
from local_ranks.machine import SECONDS, timeout_under_load


def has_driver() -> bool:
    """Is there a driver of a GPU, as torch looks for it? What hides the GPUs does not hide it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="imitates NVML as Linux loads it"),
    pytest.mark.skipif(not COMPILER, reason="needs a C compiler"),
    pytest.mark.skipif(not torch.version.cuda, reason="needs a torch that was built for CUDA"),
    pytest.mark.skipif(has_driver(), reason="has a GPU's driver, so its calls do not fail"),
]

NVML = "libnvidia-ml.so.1"
ONE_GPU = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(int *count) { *count = 1; return 0; }
"""
CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
FORKS_TOO_LATE = f"""
import multiprocessing, os, pytest, torch

@pytest.mark.gpu
def test_that_asks_cuda_and_forks():
    os.environ.pop("{CHECK}", None)
    torch.cuda.is_available()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(torch.zeros, (1,), {{"device": "cuda"}})
"""
AT_CUDA, SKIPPED = "at its first call of CUDA", "needs more GPUs"
NO_DRIVER = ("Found no NVIDIA driver", "CUDA driver version is insufficient")  # as torch says it


def how_it_ended(case: ElementTree.Element) -> str:
    [result] = case.findall("*") or [case]
    text = f"{result.get('message')}\n{result.text}"
    if result.tag == "skipped" and "needs GPUs" in text:
        return SKIPPED
    at_cuda = any(words in text for words in NO_DRIVER) and "in forked subprocess" not in text
    return AT_CUDA if at_cuda else text


def test_each_gpu_test_comes_as_far_as_its_first_call_of_cuda(tmp_path, monkeypatch):
    """The control is a test that asks CUDA before it forks."""
    (tmp_path / "nvml.c").write_text(ONE_GPU)
    compilation = (COMPILER, "-shared", "-fPIC", "-o", NVML, "nvml.c")
    subprocess.run(compilation, cwd=tmp_path, check=True)
    for name in (CHECK, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)
    control, report = tmp_path / "test_control.py", tmp_path / "report.xml"
    control.write_text(FORKS_TOO_LATE)
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/stages", control]
    options = (f"--junitxml={report}", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider")
    ended = subprocess.run(
        [*call, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_under_load(5 * SECONDS),
    )
    assert report.exists(), ended.stdout + ended.stderr
    tests = ElementTree.parse(report).findall(".//testcase")
    endings = [(test.get("name"), how_it_ended(test)) for test in tests]
    others = [(name, end) for name, end in endings if end not in (AT_CUDA, SKIPPED)]
    names = [name for name, _ in others]
    assert names == ["test_that_asks_cuda_and_forks"], "\n\n".join(end for _, end in others)
    assert "Cannot re-initialize CUDA in forked subprocess" in others[0][1]
    assert AT_CUDA in dict(endings).values()
