"""When a machine was too busy for a figure, and what a ratio may then say."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shm.busy import (
    LoadWatch,
    Ratio,
    busy_line,
    busy_seconds,
    median_interval,
    own_seconds,
    ratio_of,
    why_busy,
    why_loaded,
)

QUIET = {"load_before": 0.3, "other_cores": 0.05, "cores": 2}
ONE_SECOND = "import time\nwhile time.process_time() < 1: pass"
NO_PROC = "this system has no /proc/stat that counts"


@pytest.mark.skipif(busy_seconds() is None, reason=NO_PROC)
def test_what_a_child_uses_is_ours_while_it_lives_and_after_it_has_ended():
    before = own_seconds()
    child = subprocess.Popen([sys.executable, "-c", ONE_SECOND + "\ntime.sleep(600)"])
    while own_seconds() - before < 1:
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert own_seconds() - before >= 0.95


@pytest.mark.skipif(busy_seconds() is None, reason=NO_PROC)
def test_what_a_stranger_uses_is_counted_as_another_program():
    """The stranger is no child of this process: its parent has ended."""
    watch = LoadWatch()
    command = f"{sys.executable} -c '{ONE_SECOND}' & echo $!"
    found = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True)
    stranger = Path("/proc", found.stdout.strip())
    while stranger.exists():
        time.sleep(0.05)
    load = watch.load()
    seconds = time.monotonic() - watch.begin
    assert load["other_cores"] * seconds >= 0.8
    assert load["cores"] == len(os.sched_getaffinity(0))


def test_a_quiet_machine_has_no_reason():
    assert why_busy(QUIET, [1.0, 1.1, 1.0, 0.9, 1.0], [1.0, 1.0, 1.1, 1.0, 1.0]) == []


REASONS = [
    ("other programs used 0.9 of 2 cores", QUIET | {"other_cores": 0.9}, [1.0] * 5, [1.0] * 5),
    ("its load was 1.5 before", {"load_before": 1.5, "cores": 2}, [1.0] * 5, [1.0] * 5),
    ("took 1.20 times as long as itself", QUIET, [1.0] * 5, [1.2] * 5),
    ("took 1.25 times as long as itself", QUIET, [1.0] * 5, [0.8] * 5),
    ("its rounds differ", QUIET, [1.0, 1.0, 2.0, 3.0, 3.0], [1.0, 1.0, 2.0, 3.0, 3.0]),
]


@pytest.mark.parametrize(("reason", "load", "first", "again"), REASONS)
def test_a_busy_machine_says_why(reason, load, first, again):
    [found] = why_busy(load, first, again)
    assert reason in found
    assert busy_line([found]) == f"This machine was busy: {found}. Measure again when it rests."


def test_a_load_that_an_older_file_does_not_hold_is_no_reason():
    assert why_loaded({"cores": 2}) == []


def test_a_ratio_that_may_be_1_is_only_an_interval():
    ratio = ratio_of([2.0, 2.2, 1.8, 2.0, 2.1], [1.0] * 5)
    assert ratio == Ratio(2.0, 1.8, 2.2)
    assert ratio.text() == "2.00 (1.80 to 2.20)"
    assert ratio.inverse().text() == "0.50 (0.45 to 0.56)"
    assert ratio.widened(2).text() == "? (0.90 to 4.40)"
    assert Ratio(0.9, 0.8, 1.1).text(".0%") == "? (80% to 110%)"
    assert Ratio(1, 1, 1).text() == "1.00"
    assert Ratio(1.2, 1.004, 1.3).text() == "? (1.00 to 1.30)", "as it is printed"


@pytest.mark.parametrize(("n", "outside"), [(5, 0), (8, 0), (9, 1), (25, 7), (100, 39)])
def test_the_interval_of_a_median_holds_the_ranks_of_the_binomial_distribution(n, outside):
    values = [float((7 * k) % 101) for k in range(n)]
    low, high = median_interval(values)
    assert (low, high) == (sorted(values)[outside], sorted(values)[n - 1 - outside])
