"""The tour leaves its report, its numbers and all files of the stages; it says what it measured."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from common.chapters import ROOT, load_chapter
from helpers.environments import make_environment
from helpers.local_ranks import launch_script, run_script
from repository_pages import TEST_FILES

gpu = load_chapter("benchmarks", "gpu")
result_files = load_chapter("benchmarks", "result_files")
measure_tour = load_chapter("benchmarks", "measure_tour")
stage_runs = load_chapter("benchmarks", "stage_runs")
tour = load_chapter("benchmarks", "tour")
tour_report = load_chapter("benchmarks", "tour_report")


def popen_by_fork(call: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
    """In place of Popen: ranks from the forkserver of the tests, there in a moment."""
    if call[1] == "-m":
        assert call[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = ["packages/shm/src/shm/__main__.py", *call[8:]] if call[6] == "-m" else call[6:]
        answers = launch_script(*script, env=env)
    else:
        answers = run_script(*call[1:], env=env)
    lines = "".join(output for _, output in answers).splitlines(keepends=True)
    status = max(status for status, _ in answers)
    return SimpleNamespace(stdout=lines, returncode=status, wait=lambda: status)


@pytest.fixture
def run_tour(monkeypatch):
    def run(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks/tour.py", "--device=cpu", *flags])
        tour.main()

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        stage_runs, "subprocess", SimpleNamespace(Popen=popen_by_fork, PIPE=0, STDOUT=0)
    )
    rows = result_files.load("tour")["rows"]
    counted = {stage_runs.VARIANTS[key].holds_as: row for key, row in rows.items()}
    monkeypatch.setattr(measure_tour, "count_memory", lambda keys, args: counted)
    monkeypatch.setattr(measure_tour, "time_apart", lambda *call: [0.5, 0.5])
    return run


def test_the_tour_runs_the_stages_and_compares_them(run_tour, tmp_path, capsys):
    """01 and 05 in both formats, a few steps each."""
    run_tour("--stages=01,05", "--epochs=1", "--batch-size=500", f"--run-dir={tmp_path}")
    keys = ("01", "01-cores", "05", "05-shm", "05-bf16")
    labels = {key: stage_runs.VARIANTS[key].label for key in keys}
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# The tour: net-bn on digits, 2 ranks\n")
    tables = {label: report.count(f"| {label} ") for label in labels.values()}
    assert tables == dict.fromkeys(tables, 3) | {"01 one process": 2}, (
        "three tables, and 01 stands in two"
    )
    assert re.search(r"^\| 05 DDP, SyncBN +\| yes ", report, re.M)
    assert re.search(r"^\| 05 in bf16 +\| no ", report, re.M)
    assert "a difference of a few percent shows nothing" in " ".join(report.split())
    for key in labels:
        summary = json.loads((tmp_path / key / "summary.json").read_text())
        assert (summary["world_size"], summary["steps"]) == (1 if key < "02" else 2, 3)
    output = capsys.readouterr().out
    assert "\nceiling: 2 processes that never talk: 2 × python 01_single_gpu/train.py" in output
    assert output.endswith("report.md\n")
    results = json.loads((tmp_path / "tour.json").read_text())
    assert list(results["rows"]) == list(labels)
    [ceiling] = results["ceiling"]
    assert ceiling["summary"]["samples_per_second"] == 500 / 0.5
    for key in labels:
        row = results["rows"][key]
        speed = row["summary"]["samples_per_second"]
        assert row.get("share") == (round(speed / 1000, 4) if key >= "05" else None)


REASONS = [
    ("05", 1.0 + 1e-7, "net-bn", 2, ("yes", "1e-07", "")),
    ("05", float("nan"), "net-bn", 2, ("no", "", "not finite")),
    ("04", 1.1, "net-bn", 2, ("no", "0.1", "BatchNorm")),
    ("03", 1.1, "net-bn", 2, ("no", "0.1", "BatchNorm")),
    ("04", 1.1, "net", 2, ("no", "0.1", "dropout")),
    ("04", 1.1, "net", 1, ("no", "0.1", "rounded otherwise")),
    ("05-bf16", 1.1, "net-bn", 2, ("no", "0.1", "bf16")),
]


@pytest.mark.parametrize(("key", "loss", "model", "ranks", "expected"), REASONS)
def test_the_reason_fits_what_was_measured(key, loss, model, ranks, expected):
    rows = {"01": {"losses": [2.0, 1.0, 3.0]}, key: {"losses": [2.0, loss, 9.0]}}
    about = {"model": model, "ranks": ranks, "device": "cpu", "epoch_steps": 2}
    found = tour_report.compare(key, {**about, "rows": rows})
    assert (found.answer, found.largest) == expected[:2]
    assert expected[2] in found.reason


def test_one_process_has_no_ceiling(run_tour, tmp_path):
    run_tour("--stages=01,03", "--ranks=1", "--max-steps=1", f"--run-dir={tmp_path}")
    assert json.loads((tmp_path / "tour.json").read_text())["ceiling"] == []


def test_a_stage_that_fails_ends_the_tour(run_tour, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run_tour(
            "--stages=01,04",
            "--dataset=imagefolder",
            "--data-dir=nowhere",
            f"--run-dir={tmp_path / 'run'}",
        )
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out.count("error: cannot read --dataset imagefolder in --data-dir nowhere") == 1
    assert captured.err == "error: 01 one process ended with status 2\n"


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
