"""prove calls the scripts of this repository right, and wrong without a line; its copy is equal."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest

from common.chapters import ROOT
from helpers.local_ranks import run_script
from helpers.prove_runs import TORCHRUN
from helpers.stage_files import LESSON_FOLDERS, NOT_COPIED, changed_source

OWN_SCRIPTS = {  # folder, how it is started, flags
    "03": ("03_ddp_manual_allreduce", [sys.executable], ["--world-size=2", "--batch-size=24"]),
    "04": ("04_ddp_torchrun", TORCHRUN, ["--batch-size=24"]),
    "05": ("05_amp_syncbn", TORCHRUN, ["--model=net-bn", "--amp=fp16"]),
    "survive": (
        "beyond/survive",
        TORCHRUN,
        ["--model=net-bn", "--accumulate=2", "--clip-norm=1", "--amp=fp16", "--batch-size=24"],
    ),
}


def verdicts(key: str, folder: Path, script: Path | None = None) -> dict[str, str]:
    """What prove says of each check of this script."""
    where, launcher, flags = OWN_SCRIPTS[key]
    common = [f"--data-dir={ROOT / 'data'}", "--epochs=3", f"--run-dir={folder / 'run'}"]
    call = [*launcher, str(script or f"{where}/train.py"), *flags, *common]
    rows = folder / "rows.json"
    run_script("packages/prove/src/prove/__main__.py", f"--json={rows}", *call, seconds=180)
    result = json.loads(rows.read_text())
    assert result["rows"], result["error"]
    return {row["check"]: row["verdict"] for row in result["rows"]}


@pytest.mark.parametrize("key", OWN_SCRIPTS)
def test_a_script_of_this_repository_is_right(key, tmp_path):
    verdict_of = verdicts(key, tmp_path)
    assert "WRONG" not in verdict_of.values(), verdict_of
    assert {verdict_of[check] for check in ("one rank", "samples", "evaluation")} == {"right"}
    assert not (tmp_path / "run").exists(), "what the runs have written is removed"


@pytest.mark.parametrize(
    ("key", "line", "check"),
    [
        ("03", "parameter.grad /= dist.get_world_size()", "one rank"),
        ("04", "sampler.set_epoch(epoch)", "order of an epoch"),
    ],
)
def test_without_a_line_of_a_script_it_is_wrong(key, line, check, tmp_path):
    script = tmp_path / OWN_SCRIPTS[key][0] / "train.py"
    shutil.copytree(ROOT / OWN_SCRIPTS[key][0], script.parent, ignore=NOT_COPIED)
    source = changed_source(LESSON_FOLDERS[key] / "train.py", (("train.py", line),))
    forks = 'mp.start_processes(start_method="fork", fn='  # ranks need not import torch again
    script.write_text(source.replace("mp.spawn(train, (", forks + "train, args=("))
    assert verdicts(key, tmp_path, script)[check] == "WRONG"


def test_the_smallest_script_computes_what_its_original_does(tmp_path):
    """The pair of the first page. The control: a step around DDP."""
    single, ddp = (ROOT / f"{stage}/minimal.py" for stage in ("01_single_gpu", "04_ddp_torchrun"))
    around = tmp_path / "around.py"
    around.write_text(ddp.read_text().replace("ddp(x", "model(x"))
    found = {}
    for script in (ddp, around):
        rows = tmp_path / f"{script.stem}.json"
        call = [f"--original={sys.executable} {single}", f"--json={rows}", *TORCHRUN, str(script)]
        run_script("packages/prove/src/prove/__main__.py", *call, where=tmp_path, seconds=180)
        verdicts = {row["check"]: row["verdict"] for row in json.loads(rows.read_text())["rows"]}
        found[script.stem] = verdicts
    names = ("one rank", "the original")
    assert [found["minimal"][row] for row in names] == ["right"] * 2
    assert "WRONG" not in found["minimal"].values()
    assert found["around"]["averaged gradients"] == "WRONG"


def definitions(source: str, error: str) -> dict[str, str]:
    """The functions and classes of a program without those that only its demonstration needs."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    texts = {node.name: ast.unparse(node).replace(error, "ValueError") for node in nodes}
    return {name: text for name, text in texts.items() if name not in ("compare", "main")}


def test_proves_copy_of_sync_batchnorm_is_that_of_stage_05():
    ours = (ROOT / "05_amp_syncbn" / "sync_batchnorm.py").read_text()
    copy = (ROOT / "packages" / "prove" / "src" / "prove" / "sync_batchnorm.py").read_text()
    assert definitions(ours, "UsageError") == definitions(copy, "UsageError")
    changed = copy.replace("count - 1", "count")  # the control
    assert definitions(ours, "UsageError") != definitions(changed, "UsageError")
