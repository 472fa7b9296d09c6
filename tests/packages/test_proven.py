"""prove calls the scripts of this repository right, and wrong without a line; its copy is equal."""

import ast
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.small_data import few_digits
from local_ranks.chapters import ROOT
from local_ranks.stage_files import NOT_COPIED, changed_source, replace_once
from prove_runs import TORCHRUN, verdicts


class OwnScript(NamedTuple):
    folder: str
    launcher: list[str]
    flags: tuple[str, ...]


OWN_SCRIPTS = {
    "03": OwnScript("03_ddp_manual_allreduce", [sys.executable], ("--world-size=2",)),
    "04": OwnScript("04_ddp_torchrun", TORCHRUN, ()),
    "05": OwnScript("05_amp_syncbn", TORCHRUN, ("--model=net-bn", "--amp=fp16")),
    "survive": OwnScript(
        "beyond/survive",
        TORCHRUN,
        ("--model=net-bn", "--accumulate=2", "--clip-norm=1", "--amp=fp16"),
    ),
}


def verdicts_of(
    own: OwnScript, run_dir: Path, script: Path | None = None, hashes_differ: bool = False
) -> dict[str, str]:
    """What prove says of each check of this script."""
    flags = (*own.flags, *few_digits(), "--batch-size=24", "--epochs=3", f"--run-dir={run_dir}")
    call = (*own.launcher, str(script or f"{own.folder}/train.py"), *flags)
    return verdicts(ROOT, *call, hashes_differ=hashes_differ)


@pytest.mark.parametrize("key", OWN_SCRIPTS)
def test_a_script_of_this_repository_is_right(key, tmp_path):
    # Ranks whose hashes differ start anew, for seconds, so one script is judged that way.
    verdict_of = verdicts_of(OWN_SCRIPTS[key], tmp_path / "run", hashes_differ=key == "04")
    assert "WRONG" not in verdict_of.values(), verdict_of
    assert {verdict_of[check] for check in ("one rank", "samples", "evaluation")} == {"right"}
    assert not (tmp_path / "run").exists(), "what the runs have written is removed"


def test_a_script_without_one_of_its_lines_is_wrong(tmp_path):
    """The control: without set_epoch, each epoch of 04 has the same order."""
    own = OWN_SCRIPTS["04"]
    script = tmp_path / own.folder / "train.py"
    shutil.copytree(ROOT / own.folder, script.parent, ignore=NOT_COPIED)
    no_set_epoch = ("train.py", "sampler.set_epoch(epoch)")
    script.write_text(changed_source(ROOT / own.folder / "train.py", (no_set_epoch,)))
    assert verdicts_of(own, tmp_path / "run", script)["order of an epoch"] == "WRONG"


SINGLE, DDP = (f"{stage}/minimal.py" for stage in ("01_single_gpu", "04_ddp_torchrun"))


def verdicts_against_the_original(folder: Path, *changes: tuple[str, str]) -> dict[str, str]:
    """Judge the changed script. The original is a torchrun of one rank, which prove can fork.

    They train on 5,001 samples, not on 5,000, so the ranks do not have equally many.
    """
    single, ddp = folder / "single.py", folder / "ddp.py"
    for file, script, changed_by in ((SINGLE, single, ()), (DDP, ddp, changes)):
        source = replace_once((ROOT / file).read_text(), *changed_by)
        script.write_text(source.replace("6000", "6001").replace("5000", "5001"))
    original = f"torchrun --nproc-per-node=1 {single}"
    return verdicts(folder, f"--original={original}", *TORCHRUN, str(ddp))


def test_the_smallest_script_computes_what_its_original_does(tmp_path):
    """The pair of the first page."""
    verdict_of = verdicts_against_the_original(tmp_path)
    assert {"one rank", "the original", "the original's epoch"} <= {*verdict_of}
    assert {*verdict_of.values()} == {"right"}, verdict_of


@pytest.mark.parametrize(
    ("change", "check", "verdict"),
    [
        (("ddp(x", "model(x"), "averaged gradients", "WRONG"),
        (
            ("DistributedSampler(train_set", "DistributedSampler(train_set, drop_last=True"),
            "the original's epoch",
            "warning",
        ),
    ],
)
def test_the_smallest_script_is_not_right_after_a_change(change, check, verdict, tmp_path):
    """The control of the test above: around DDP, and with drop_last in one of two places."""
    assert verdicts_against_the_original(tmp_path, change)[check] == verdict


def definitions(source: str, error: str) -> dict[str, str]:
    """The functions and classes of a program without those of which prove has no copy."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    texts = {node.name: ast.unparse(node).replace(error, "ValueError") for node in nodes}
    not_copied = ("convert_sync_batchnorm", "compare", "main")
    return {name: text for name, text in texts.items() if name not in not_copied}


def test_proves_copy_of_sync_batchnorm_is_that_of_stage_05():
    ours = (ROOT / "05_amp_syncbn" / "sync_batchnorm.py").read_text()
    copy = (ROOT / "packages/prove/src/prove/watch/sync_batchnorm.py").read_text()
    assert definitions(ours, "UsageError") == definitions(copy, "UsageError")
    changed = copy.replace("count - 1", "count")  # the control
    assert definitions(ours, "UsageError") != definitions(changed, "UsageError")
