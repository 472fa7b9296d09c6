"""`make gpu` finds its programs in a bare environment, and says of each command how it ended."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import gpu
from common.chapters import ROOT
from helpers.environments import make_environment
from repository_pages import TEST_FILES


def test_make_gpu_runs_every_test_that_needs_a_gpu_and_programs_that_exist(tmp_path):
    """With our packages where they lie, because they are not installed there."""
    python = make_environment(tmp_path, "torch", "torchvision", "tabulate")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(gpu.PACKAGES)}
    call = [python, "benchmarks/gpu.py", "--dry-run"]
    output = subprocess.check_output(call, cwd=ROOT, env=variables, text=True)
    [tests] = re.findall(r"^python -m pytest -v --tb=short -m gpu (.+)$", output, re.M)
    needing = [path for path in TEST_FILES if re.search(r"\bmark\.gpu\b", path.read_text())]
    assert needing
    assert {path.parent for path in needing} == {ROOT / tests}
    assert all((ROOT / name).exists() for name in re.findall(r"\S+\.py", output))


def test_what_failed_is_tried_again_and_each_call_says_where_and_how_the_commands_ended(
    tmp_path, monkeypatch
):
    commands, origin = ["-c pass", "-c 1/0"], {"hardware": "one GPU", "commit": "c8ab422"}
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py"])
    monkeypatch.chdir(tmp_path)  # main changes to ROOT
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(gpu, "list_commands", lambda: commands)
    monkeypatch.setattr(gpu, "provenance", lambda device, command: origin)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    for calls in (1, 2):
        with pytest.raises(SystemExit, match="1"):
            gpu.main()
        results = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
        assert results["provenance"] == origin
        statuses = {command: end["status"] for command, end in results["commands"].items()}
        assert statuses == dict(zip(commands, (0, 1), strict=True))
        log = (tmp_path / "gpu" / "log.txt").read_text()
        assert [log.count(f"\n$ python {command}\n") for command in commands] == [1, calls]
