"""speed.py prints no ratio that noise could have made, and measures the limit in C."""

import pytest
import torch
import torch.distributed as dist

from shm import fast, speed
from shm_cases import needs_a_compiler
from shm_ranks import run_on_ranks

ROUNDS = 20
LOAD = {"load_before": 0.1, "other_cores": 0.0, "cores": 2}


def row_of(shm, again):
    """Return a row in which gloo takes 30 µs, and the limit is 1 µs."""
    columns = {"shm": shm, "shm_again": again, "gloo": [30.0] * ROUNDS, "limit": [1.0] * ROUNDS}
    return speed.summary({"call": "all_reduce", "ranks": 2, "bytes": 4096}, columns)


class Watch:
    def __init__(self, **others):
        self.others = others

    def load(self):
        return LOAD | self.others


def report_of(row, **others):
    results = {"rows": [row], "line": None, "python": [{"us": 1.0, "what": "torch"}]}
    return speed.report(speed.with_load(results, Watch(**others)), 2)


def test_a_steady_row_has_its_ratios_and_no_other_line():
    text = report_of(row_of([10.0, 10.4] * 10, [10.0, 10.4] * 10))
    assert text.startswith("2 cores, 0.0 used by others meanwhile, load 0.1 before")
    assert "| 2.9 (2.9 to 3.0) " in text
    assert "| 0.10 " in text


@pytest.mark.parametrize(
    ("shm", "again"), [([10.0] * ROUNDS, [12.0] * ROUNDS), ([5.0, 50.0] * 10, [5.0, 50.0] * 10)]
)
def test_a_row_that_varies_has_question_marks_instead_of_ratios(shm, again):
    line = report_of(row_of(shm, again)).splitlines()[-3]
    assert [cell.strip() for cell in line.split("|")[-3:-1]] == ["?", "?"]


def test_the_first_line_says_that_the_machine_was_busy():
    steady = [10.0] * ROUNDS
    for text in (
        report_of(row_of(steady, [12.0] * ROUNDS)),
        report_of(row_of(steady, steady), other_cores=1.0),
    ):
        assert text.startswith("This machine was busy: ")


@needs_a_compiler
def test_no_limit_is_measured_where_ranks_take_turns():
    assert speed.has_limit(2, 2)
    assert not speed.has_limit(3, 2)
    assert not speed.has_limit(1, 2)
    assert "so there is no limit to measure" in speed.line_about_limit(None, 10**6)


@needs_a_compiler
def test_the_limit_moves_the_bytes_that_it_says():
    functions, numbers = fast.library(), torch.arange(1000.0)
    target, before = torch.zeros(1000), numbers.clone()
    assert functions.copy(target.data_ptr(), numbers.data_ptr(), target.nbytes, 3) > 0
    assert functions.read_and_write(numbers.data_ptr(), 1000, 1.0, 3) > 0
    assert torch.equal(target, before)
    assert torch.equal(numbers, before + 3)


def exchange_a_line(rank, ranks_that_come):
    dist.init_process_group("shm")
    line = dist.group.WORLD.exchange.slots[0][:8]
    if rank == 0:
        line.zero_()
    dist.barrier()
    if rank < ranks_that_come:
        return fast.library().exchange_line(line.data_ptr(), rank, 5), line.view(torch.int64).item()
    return None


@needs_a_compiler
def test_two_ranks_write_to_a_cache_line_in_turns_and_one_alone_gives_up():
    (first, _), (second, turns) = run_on_ranks(2, exchange_a_line, 2)
    assert min(first, second) > 0
    assert turns == 10
    assert run_on_ranks(2, exchange_a_line, 1)[0] == (-1, 1)
