"""The tour leaves its report, its numbers and all files of the stages; it says what it measured."""

import json
import multiprocessing
import random
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import result_files, tour
from benchmarks.measure import tour_runs, turns
from benchmarks.measure.timing import AA
from benchmarks.tables import tour_report
from benchmarks.variants import VARIANTS, Layout
from local_ranks.chapters import ROOT
from local_ranks.train_stage import FP32, train_once


def run_tour(*flags: str) -> None:
    """Run the tour without counting memory."""
    rows = result_files.load("tour")["rows"]
    counted = {VARIANTS[key].memory_key: row for key, row in rows.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["benchmarks/tour.py", "--device=cpu", *flags])
        patch.setattr(tour_runs, "count_memory", lambda *args: counted)
        tour.main()


RUN = ("01", "01-cores", "05", "05-shm", "05-bf16")


ON_CPU_ALONE = ("--model=net-bn", "--epochs=3", "--batch-size=500")


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
        run_tour("--stages=01,05", "--epochs=3", "--batch-size=500", f"--run-dir={folder}")
    results = json.loads((folder / "tour.json").read_text())
    return Tour(folder, output.getvalue(), (folder / "report.md").read_text(), results)


def test_the_tour_runs_each_stage_in_every_way_and_leaves_what_the_runs_leave(short_tour):
    assert tuple(short_tour.results["rows"]) == RUN
    for key in RUN:
        summary = json.loads((short_tour.folder / key / "summary.json").read_text())
        processes = 2 if VARIANTS[key].layout is Layout.RANKS else 1
        assert (summary["world_size"], summary["steps"]) == (processes, 9)


def test_the_report_has_every_stage_in_each_of_its_three_tables(short_tour):
    report = short_tour.report
    assert report.startswith("# The tour: net-bn on digits, 2 ranks\n")
    rows = {label: report.count(f"| {label} ") for label in (VARIANTS[key].label for key in RUN)}
    assert rows == dict.fromkeys(rows, 3), "01 is in two tables, and once more as the A/A pair"
    assert short_tour.output.endswith(f"\nwrote {short_tour.folder}/report.md\n")


def test_the_report_says_which_stages_repeat_01(short_tour):
    assert re.search(r"^\| 05 DDP, SyncBN +\| yes ", short_tour.report, re.M)
    assert re.search(r"^\| 05 in bf16 +\| no ", short_tour.report, re.M)


def test_each_program_trains_in_every_round_and_the_first_one_once_more(short_tour):
    seconds = short_tour.results["step_seconds"]
    assert tuple(seconds) == (*RUN, AA, "ceiling")
    assert {len(each) for each in seconds.values()} == {2}
    assert min(map(min, seconds.values())) > 0
    assert short_tour.results["labels"]["ceiling"] == "ceiling: 2 processes that never talk"


def test_the_losses_are_those_that_a_run_without_pauses_has(short_tour):
    rows = short_tour.results["rows"]
    alone = train_once("01", 1, *ON_CPU_ALONE, **FP32)
    assert rows["01"]["losses"] == pytest.approx(alone.losses.tolist(), abs=1e-5)
    assert len(rows["01"]["losses"]) == 9
    assert rows["05"]["losses"] == pytest.approx(rows["01"]["losses"], abs=1e-4)


class OnAMachine:
    """Stands in for a program, on a machine that is so many times slower in each further turn."""

    turns = 0

    def __init__(self, seconds: float, slower: Callable[[int], float]) -> None:
        self.seconds, self.slower = seconds, slower

    def take_turn(self, steps: int) -> list[float]:
        OnAMachine.turns += 1
        return [self.seconds * self.slower(OnAMachine.turns)] * steps


def speeds_on(
    slower: Callable[[int], float], rounds: int = 9, load: dict[str, float] | None = None
) -> str:
    """Measure programs on this machine; 02 is as fast as 01, and 04 over shm as the ceiling."""
    times = {"01": 0.02, "02": 0.02, "03": 0.04, "04-shm": 0.01, AA: 0.02, "ceiling": 0.01}
    programs = {name: OnAMachine(each, slower) for name, each in times.items()}
    OnAMachine.turns = 0
    seconds = turns.take_turns(programs, turns.Plan(epoch_steps=3, rounds=rounds))
    about = {"provenance": {"load_before": 0.0, "other_cores": 0.0, "cores": 2}}
    about["provenance"] |= load or {}
    about |= {"rows": {"01": {}}, "labels": {name: name for name in times}, "global_batch": 120}
    about |= {"ranks": 2, "device": "cpu", "step_seconds": seconds}
    return tour_report.speeds(about, "simple")


def line_of(name: str, table: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(f"{name} "))


def test_a_machine_that_is_steady_gets_no_warning_and_exact_ratios():
    table = speeds_on(lambda turn: 1.0)
    assert "busy" not in table
    assert line_of("02", table).split() == ["02", "6,000", "20.0", "1.00"]
    assert "0.50 (0.50 to 0.50)" in line_of("03", table)
    assert "2.00 (2.00 to 2.00)" in line_of("04-shm", table)
    assert line_of("04-shm", table).endswith(" 100%")


def test_a_machine_that_slows_down_in_the_middle_is_called_busy_in_the_first_line():
    table = speeds_on(lambda turn: 1.0 if turn <= 27 else 3.0)
    assert table.startswith("This machine was busy: ")
    assert "0.50 (0.50 to 0.50)" in line_of("03", table), "most rounds are all slow or all fast"


def test_beside_other_programs_no_ratio_is_printed():
    """They take from a process on each core more than from one that may move to the free core."""
    table = speeds_on(lambda turn: 1.0, load={"other_cores": 0.9})
    assert table.startswith("This machine was busy: other programs used 0.9 of 2 cores")
    assert "No ratio is printed" in table
    assert line_of("03", table).split() == ["03", "3,000", "40.0"]


def test_with_too_few_rounds_no_ratio_is_printed():
    table = speeds_on(lambda turn: 1.0, rounds=4)
    assert "4 rounds are too few for an interval. Take 6 epochs or more." in table
    assert line_of("03", table).split() == ["03", "3,000", "40.0"]


def test_on_a_machine_that_jumps_no_ratio_is_printed_that_may_be_1():
    noise = random.Random(0)
    table = speeds_on(lambda turn: noise.uniform(1, 4))
    assert table.startswith("This machine was busy: ")
    assert " ? (" in line_of("02", table)
    assert re.search(r" \? \(\d+% to \d+%\)$", line_of("04-shm", table)), "of the ceiling"
    assert "cannot be: nobody is faster for talking" in table


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


def test_a_stage_that_fails_ends_the_tour_and_leaves_no_process(tmp_path, monkeypatch, capsys):
    """The programs before it wait, stopped, when it fails."""
    command = (*VARIANTS["04"].command, "--no-such-flag")
    monkeypatch.setitem(VARIANTS, "04", replace(VARIANTS["04"], command=command))
    before = set(multiprocessing.active_children())
    with pytest.raises(SystemExit) as caught:
        run_tour("--stages=01,04", "--epochs=2", f"--run-dir={tmp_path}")
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "error: unrecognized arguments: --no-such-flag" in errors
    assert errors.endswith("error: 04 DDP ended with status 2\n")
    assert set(multiprocessing.active_children()) <= before
