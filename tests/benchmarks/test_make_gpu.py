"""`make gpu` loses nothing: what a command leaves is stored, and none outlives its time."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_runner, variants
from benchmarks.gpu_steps import GpuStep, list_steps
from helpers.environments import make_environment
from helpers.machine import is_running
from local_ranks.chapters import ROOT
from repository_pages import TEST_FILES


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_it_runs_every_test_that_needs_a_gpu_and_programs_that_exist():
    steps = {step.name: step for step in list_steps("cuda")}
    folder = steps["tests"].command[-1]
    needing = [path for path in TEST_FILES if re.search(r"\bmark\.gpu\b", path.read_text())]
    assert needing
    assert {path.parent for path in needing} == {ROOT / folder}
    programs = re.findall(r"\S+\.py", " ".join(step.text for step in steps.values()))
    assert all((ROOT / name).exists() for name in programs)
    assert len(steps) == len(list_steps("cuda")), "each has a name of its own"


def test_it_needs_no_more_than_torch_torchvision_tabulate_and_tqdm_and_no_git(tmp_path):
    """Our packages are found where they lie, because they are not installed there."""
    python = make_environment(tmp_path, "torch", "torchvision", "tabulate", "tqdm")
    paths = os.pathsep.join(gpu_runner.PACKAGES)
    env = {"PYTHONPATH": paths, "PATH": str(tmp_path)}
    call = [python, "benchmarks/gpu.py", "--dry-run"]
    output = subprocess.check_output(call, cwd=ROOT, env={**os.environ, **env}, text=True)
    assert output.count("\npython ") == len(list_steps("cpu")) - 1


def python(*lines: str) -> tuple[str, ...]:
    return "-c", "\n".join(("import json, pathlib, subprocess, sys, time", *lines))


WRITE = "pathlib.Path('{folder}', 'found.json').write_text('[3]')"


ORIGIN = {"commit": "c8ab422", "hardware": "1 x GPU", "torch": "2.11.0"}


def run_steps(folder: Path, *steps: GpuStep, seconds: float = inf, **origin: str) -> dict:
    report = gpu.Report(folder, ORIGIN | origin)
    missing = [step for step in steps if report.is_missing(step)]
    gpu.run_all(missing, report, seconds)
    return json.loads((folder / "gpu.json").read_text())["steps"]


def test_each_command_leaves_its_status_its_results_and_its_output(tmp_path):
    good = GpuStep("good", python(WRITE, "print('hello')"), 60)
    refused = GpuStep("refused", python("sys.exit('no')"), 60, is_refused=True)
    steps = run_steps(tmp_path, good, refused, replace(refused, name="broken", is_refused=False))
    assert [(row["status"], row["good"]) for row in steps.values()] == [
        (0, True),
        (1, True),
        (1, False),
    ]
    assert steps["good"]["results"] == {"found": [3]}
    log = (tmp_path / "log.txt").read_text()
    assert [log.count(text) for text in ("hello\n", "no\n")] == [1, 2]


def test_what_is_done_is_not_done_again_unless_the_programs_have_changed(tmp_path):
    good, bad = GpuStep("good", python("0"), 60), GpuStep("bad", python("1/0"), 60)
    for commit, runs in (("c8ab422", [1, 1]), ("c8ab422", [1, 2]), ("another", [2, 3])):
        rows = run_steps(tmp_path, good, bad, commit=commit)
        assert rows["good"]["commit"] == commit
        log = (tmp_path / "log.txt").read_text()
        assert [log.count(f"\n$ {step.text}\n") for step in (good, bad)] == runs


GRANDCHILD = (
    "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "pathlib.Path('{folder}', 'pid.json').write_text(str(child.pid))",
)


@pytest.mark.skipif(sys.platform != "linux", reason="what is left is found in /proc")
def test_a_command_that_takes_too_long_ends_with_all_it_has_started_and_keeps_its_results(tmp_path):
    slow = GpuStep("slow", python(*GRANDCHILD, "time.sleep(1000)"), 5)
    began = time.monotonic()
    [row] = run_steps(tmp_path, slow).values()
    assert (row["status"], row["good"]) == (None, False)
    while is_running(row["results"]["pid"]):  # the kernel takes its time to end what was killed
        assert time.monotonic() - began < 500  # it has not slept to its end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("stage", "ranks", "gpus", "flags"),
    [
        ("03", 2, 1, []),
        ("03", 2, 2, ["--backend", "nccl"]),
        ("04", 2, 1, ["--backend", "gloo"]),
        ("05", 2, 2, []),
        ("01", 1, 1, []),
    ],
)
def test_ranks_that_share_a_gpu_talk_over_gloo_and_others_over_nccl(
    stage, ranks, gpus, flags, monkeypatch
):
    monkeypatch.setattr(variants.torch.cuda, "device_count", lambda: gpus)
    assert variants.backend_flags(stage, ranks, "cuda") == flags
    assert variants.backend_flags(stage, ranks, "cpu") == []
    words = variants.command_of(stage, ranks, "cuda")
    assert words[len(words) - len(flags) :] == flags
