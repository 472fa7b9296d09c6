"""Each failure of stage 04's list happens on two ranks as the pages say, and its cure helps.

docs/troubleshooting.md lists each of them, with what failures.py prints.
"""

import re
import subprocess
import sys
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import nn

import failures
from helpers.machine import GLOO_TIMED_OUT, in_time
from helpers.outputs import output_of
from local_ranks.chapters import ROOT
from markers import fences

LATE = "Timed out waiting 2000ms"  # one rank says so; how the other ends is a matter of luck
PRIOR = "Expected to have finished reduction in the prior iteration"
INDICES = "indices which did not receive grad for rank 0: 2 3"
CONVERT_ALL = "need to convert all torch.Tensor to DTensor"
INPLACE = "needed for gradient computation has been modified by an inplace operation"
SHARED = "one element of the written-to tensor refers to a single memory location"
UNEXPECTED = "Unexpected key(s) in state_dict:"
SIZE = "can't allocate memory: you tried to allocate 4739020059159409007 bytes"
PART = "the weights are others on the other rank"  # which no rank reports by itself
FAILURES = {  # what is seen, and what both ranks say with the cure
    "rank-branch": (LATE, ["continues"] * 2),
    "evaluate-wrapped": (LATE, ["continues"] * 2),
    "busy-rank": (LATE, ["continues"] * 2),
    "unused-parameter": (f"{PRIOR} before starting a new one", ["two steps"] * 2),
    "ready-twice": ("Expected to mark a variable ready only once", ["two steps"] * 2),
    "early-step": (f"one of the variables {INPLACE}", ["stepped"] * 2),
    "expanded-buffer": (f"unsupported operation: more than {SHARED}", ["one forward"] * 2),
    "two-writers": ("FileNotFoundError", ["saved", "did not save"]),
    "module-prefix": (f'{UNEXPECTED} "module.weight", "module.bias"', ["loaded"] * 2),
    "sharded-weights": (
        f"got mixed torch.Tensor and DTensor, {CONVERT_ALL}",
        ["loaded, and gathered 2 tensors"] * 2,
    ),
    "no-interface": ("Unable to find address for: eth99", ["joined"] * 2),
    "object-size": (f"DefaultCPUAllocator: {SIZE}", ["has 683885907.2944773"] * 2),
    "late-flag": (PART, ["the weights are the same"] * 2),
    "one-scaler": (PART, ["the weights are the same"] * 2),
}


@cache
def answers_of_ranks(name: str, cured: bool = False, debug: str = "OFF") -> list[str]:
    with in_time():
        return failures.run_failure(name, cured, debug)


@pytest.mark.parametrize("name", FAILURES)
def test_c02_c36_c42_each_failure_happens_and_its_cure_helps(name):
    symptom, cured = FAILURES[name]
    assert symptom in " | ".join(answers_of_ranks(name)).replace(GLOO_TIMED_OUT, LATE)
    failed = [a for a in answers_of_ranks(name) if "Error: " in a or symptom in a]
    # Either of the two writers, because it is a race; and who sends the number does not notice.
    assert len(failed) == (1 if name in ("two-writers", "object-size") else 2)
    assert answers_of_ranks(name, cured=True) == cured


def test_troubleshooting_lists_every_entry_and_shows_what_the_failures_print():
    listed = [line.split()[0] for line in output_of("failures").splitlines()]
    with patch.object(failures, "run_failure", lambda *_: ["so", "so"]):
        assert "\ncure: only global rank 0 saves\n" in output_of("failures", "two-writers")
    contents, *entries = (ROOT / "docs/troubleshooting.md").read_text().split('\n<a id="')
    anchors = re.findall(r"^- .*\]\(#([\w-]+)\)", contents, re.M)
    assert anchors == [entry.split('"')[0] for entry in entries]
    commands = r"(?<!DETAIL )python 04_ddp_torchrun/failures\.py ([\w-]+)`"
    names = [re.findall(commands, entry) for entry in entries]
    assert listed == [name for of_entry in names for name in of_entry] == list(FAILURES)
    for of_entry, entry in zip(names, entries, strict=True):
        message = re.search(r"### `(.+?)`", entry)
        assert not (of_entry and message) or message[1] in FAILURES[of_entry[0]][0]


def test_detail_names_collectives_that_differ_and_info_unused_parameters():
    for rank, answer in enumerate(answers_of_ranks("rank-branch", debug="DETAIL")):
        own, other = ("ALLREDUCE", "BROADCAST") if rank == 0 else ("BROADCAST", "ALLREDUCE")
        assert "Detected mismatch between collectives on ranks" in answer
        assert re.search(rf"Rank {rank} is running .*?OpType={own}.*?OpType={other}", answer)
    text = "Parameters which did not receive grad for rank 0: spare.bias, spare.weight"
    for debug in ("OFF", "INFO"):
        assert f"Parameter {INDICES}" in answers_of_ranks("unused-parameter", debug=debug)[0]
        assert (text in answers_of_ranks("unused-parameter", debug=debug)[0]) == (debug == "INFO")


def test_troubleshooting_shows_what_becomes_of_a_function_that_stands_in_no_file():
    [fence] = [
        x for x in fences("bash", [ROOT / "docs/troubleshooting.md"]) if "mp.spawn" in x.text
    ]
    code = fence.text.split('"')[1]
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert "Can't get attribute 'train' on <module '__main__' (" in process.stderr


def test_a_checkpoint_remembers_the_gpu_of_rank_0_unless_it_is_loaded_to_the_cpu(
    tmp_path, monkeypatch
):
    """Every rank would load onto that GPU; where there is none, loading fails."""
    monkeypatch.chdir(tmp_path)
    with patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(nn.Linear(2, 2).state_dict(), "of rank 0.pt")
    if torch.cuda.is_available():
        assert torch.load("of rank 0.pt")["weight"].device == torch.device("cuda:0")
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load("of rank 0.pt")
    assert torch.load("of rank 0.pt", map_location="cpu")["weight"].device == torch.device("cpu")
