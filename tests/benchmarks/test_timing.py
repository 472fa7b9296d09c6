"""How variants are compared: every ratio and interval on a page comes from these functions."""

import random

import pytest

from benchmarks.measure.timing import AA, interleave_runs, ratio_to, summarize

ROUNDS = 101


def _slow_machine(rounds: int) -> list[float]:
    """How many times slower than usual it is in each round: noise that all variants share."""
    noise = random.Random(1)
    return [noise.uniform(1, 3) for _ in range(rounds)]


def test_a_ratio_is_found_under_noise_that_all_variants_of_a_round_share():
    """The control: the same seconds in another order, as if the variants had not taken turns."""
    slower = _slow_machine(ROUNDS)
    baseline = [0.010 * factor for factor in slower]
    variant = [0.015 * factor * (1 + 0.01 * (-1) ** i) for i, factor in enumerate(slower)]
    ratio, (low, high) = ratio_to(baseline, variant)
    assert ratio == pytest.approx(1.5, abs=0.02)
    assert low <= ratio <= high
    assert high - low < 0.05
    random.Random(2).shuffle(variant)
    _, (low, high) = ratio_to(baseline, variant)
    assert high - low > 0.2


def test_a_summary_compares_with_the_first_variant_and_gives_milliseconds():
    summary = summarize({"first": [0.01, 0.02, 0.03], "second": [0.03, 0.06, 0.09]})
    assert summary["first"]["ratio"] == 1
    assert summary["second"]["ratio"] == 3
    assert summary["second"]["ratio_interval"] == [3, 3]
    assert summary["first"]["step_ms"] == 20
    assert summary["first"]["step_ms_quartiles"] == [10, 30]


def test_every_variant_runs_once_a_round_in_an_order_that_changes():
    ran: list[str] = []

    def run_of(name: str):
        def run() -> float:
            ran.append(name)
            return float(len(ran))

        return run

    times = interleave_runs({name: run_of(name) for name in ("a", "b", AA)}, rounds=20)
    assert times.keys() == {"a", "b", AA}
    rounds = [ran[start : start + 3] for start in range(0, len(ran), 3)]
    assert len(rounds) == 20
    assert all(sorted(each) == [AA, "a", "b"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "the order changes"
