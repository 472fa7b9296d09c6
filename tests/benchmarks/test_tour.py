"""The tour leaves its report, its numbers and all files of the stages; it says what it measured."""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from benchmarks import result_files, tour
from benchmarks.measure import stage_runs, tour_runs
from benchmarks.tables import tour_report
from benchmarks.variants import VARIANTS, Layout
from helpers.scripts import launch_script, run_script
from local_ranks.chapters import ROOT


def popen_by_fork(call: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
    """Stand in for Popen with ranks from the forkserver of the tests, which start in a moment."""
    if call[1] == "-m":
        assert call[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = ["packages/shm/src/shm/__main__.py", *call[8:]] if call[6] == "-m" else call[6:]
        answers = launch_script(*script, env=env)
    else:
        answers = run_script(*call[1:], env=env)
    lines = "".join(output for _, output in answers).splitlines(keepends=True)
    status = max(status for status, _ in answers)
    return SimpleNamespace(stdout=lines, returncode=status, wait=lambda: status)


def run_tour(*flags: str) -> None:
    """Run the tour without counting memory; processes that never talk are made up."""
    rows = result_files.load("tour")["rows"]
    counted = {VARIANTS[key].memory_key: row for key, row in rows.items()}
    popen = SimpleNamespace(Popen=popen_by_fork, PIPE=0, STDOUT=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["benchmarks/tour.py", "--device=cpu", *flags])
        patch.setattr(stage_runs, "subprocess", popen)
        patch.setattr(tour_runs, "count_memory", lambda keys, args: counted)
        patch.setattr(tour_runs, "time_without_messages", lambda *call: [0.5, 0.5])
        tour.main()


RUN = ("01", "01-cores", "05", "05-shm", "05-bf16")


class Tour(NamedTuple):
    folder: Path
    output: str
    report: str
    results: dict


@pytest.fixture(scope="module")
def short_tour(tmp_path_factory) -> Tour:
    """Run the tour of 01 and 05 in both formats, a few steps each."""
    folder, output = tmp_path_factory.mktemp("tour"), StringIO()
    with redirect_stdout(output):
        run_tour("--stages=01,05", "--epochs=1", "--batch-size=500", f"--run-dir={folder}")
    results = json.loads((folder / "tour.json").read_text())
    return Tour(folder, output.getvalue(), (folder / "report.md").read_text(), results)


def test_the_tour_runs_each_stage_in_every_way_and_leaves_what_the_runs_leave(short_tour):
    assert tuple(short_tour.results["rows"]) == RUN
    for key in RUN:
        summary = json.loads((short_tour.folder / key / "summary.json").read_text())
        processes = 2 if VARIANTS[key].layout is Layout.RANKS else 1
        assert (summary["world_size"], summary["steps"]) == (processes, 3)


def test_the_report_has_every_stage_in_each_of_its_three_tables(short_tour):
    report, first = short_tour.report, VARIANTS["01"].label
    assert report.startswith("# The tour: net-bn on digits, 2 ranks\n")
    rows = {label: report.count(f"| {label} ") for label in (VARIANTS[key].label for key in RUN)}
    assert rows == dict.fromkeys(rows, 3) | {first: 2}, "one compares the others with it"
    assert "a difference of a few percent shows nothing" in " ".join(report.split())
    assert short_tour.output.endswith(f"\nwrote {short_tour.folder}/report.md\n")


def test_the_report_says_which_stages_repeat_01(short_tour):
    assert re.search(r"^\| 05 DDP, SyncBN +\| yes ", short_tour.report, re.M)
    assert re.search(r"^\| 05 in bf16 +\| no ", short_tour.report, re.M)


def test_speeds_of_several_ranks_are_shares_of_what_processes_reach_that_never_talk(short_tour):
    command = "\nceiling: 2 processes that never talk: 2 × python 01_single_gpu/train.py"
    assert command in short_tour.output
    [ceiling] = short_tour.results["ceiling"]
    assert ceiling["summary"]["samples_per_second"] == 500 / 0.5
    for key, row in short_tour.results["rows"].items():
        share = round(row["summary"]["samples_per_second"] / 1000, 4)
        assert row.get("share") == (share if VARIANTS[key].layout is Layout.RANKS else None)


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


def test_a_stage_that_fails_ends_the_tour(tmp_path, capsys):
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
