"""Faults of many kinds, in real runs: they end in time, say why, and resume to the bit.

`make faults` injects hundreds of them. Here are one of each way to end, and what it must say.
Damaged files and kills in a save: test_survive_durable.py.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

import inject_faults
from helpers.small_data import few_digits
from helpers.small_disk import CANNOT_MOUNT, can_mount
from inject_faults import (
    DEFAULT_TIMEOUT_SECONDS,
    KINDS_OF_RANK_0,
    STEPS,
    STEPS_PER_CHECKPOINT,
    Fault,
    FaultOutcome,
    as_expected,
    reference,
    trial,
)

# A fifth of the digits: with a smaller batch, an epoch has 12 steps all the same.
inject_faults.FLAGS += (*few_digits(), "--batch-size=24")
# Step 12 is the last one of the epoch, so the others wait in the barrier behind it.
FAULTS = {
    "stop": Fault("stop", "net", 3, 2, 12),
    "sleep": Fault("sleep", "net", 2, 1, 12),
    "hang-loader": Fault("hang-loader", "net", 2, 1, 4, workers=1),  # the evaluation's loader
    "stop-keeper": Fault("stop-keeper", "net", 3, 0, 12),
    "skip": Fault("skip", "net", 2, 1, 12),
    "raise": Fault("raise", "net", 3, 1, 12),
    "term": Fault("term", "net", 3, 1, 8),
    "nan": Fault("nan", "net", 2, 0, STEPS_PER_CHECKPOINT),
    "tmpfs-full": Fault("tmpfs-full", "net", 2, 0, STEPS_PER_CHECKPOINT + 1),
    "term-loaders": Fault("term-loaders", "net", 2, 1, 4, workers=2),  # the evaluation's loaders
    "kill": Fault("kill", "net", 2, 1, 11, workers=1),
    "kill-keeper": Fault("kill-keeper", "net", 3, 0, 11),
    "disk-full": Fault("disk-full", "net", 2, 0, 11),
}
# A pause of 5 s is 250 beats here: more than the 80 after which a silent rank once ended all.
SHORT_BEATS = {"pause_seconds": 5, "beat_seconds": 0.02, "timeout_seconds": DEFAULT_TIMEOUT_SECONDS}
for kind in ("pause-keeper", "pause-torchrun", "hold"):
    FAULTS[kind] = Fault(kind, "net", 2, int(kind not in KINDS_OF_RANK_0), 11, **SHORT_BEATS)

TELLS = {  # how many ranks print an error, and what all of them say
    "stop": (2, r".+ `agreement\.barrier\(\)`: rank 2 did not arrive, last seen .+: killed.*"),
    "sleep": (2, r".+: rank 1 did not arrive, last seen at step 11, .+`scaler\.step\(optimizer\)`"),
    "hang-loader": (2, r".+: rank 1 did not arrive, last seen .+`for images, labels in loader:`"),
    "stop-keeper": (2, ".+: no answer from the store, which torchrun or rank 0 keeps: .+"),
    "skip": (2, r".+: the ranks wait in different collectives, .+`dist\.all_reduce\(totals\)`; .+"),
    "raise": (2, ".+: rank 1 ended at step 11, line .+ with ValueError: a bug"),
    "term": (0, ""),
    "nan": (1, "a weight is nan or inf after step 5: nothing is saved .+"),
}


def can_happen(fault: Fault) -> bool:
    return fault.kind != "tmpfs-full" or can_mount()


@cache
def outcomes() -> dict[Fault, FaultOutcome]:
    """Inject all faults side by side, because most of the time they wait."""
    possible = [fault for fault in FAULTS.values() if can_happen(fault)]
    for fault in possible:
        reference(fault)  # before two threads train the same one
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(possible, pool.map(trial, possible), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_in_time_and_resumes_to_the_bit_after(name):
    if not can_happen(FAULTS[name]):
        pytest.skip(CANNOT_MOUNT)
    outcome = outcomes()[FAULTS[name]]
    assert not any(outcome.bad().values()), outcome
    expected = {"term": [0], "nan": [STEPS_PER_CHECKPOINT]}
    assert outcome.lost_steps in expected.get(name, range(STEPS_PER_CHECKPOINT + 2)), outcome
    if name in TELLS:
        count, pattern = TELLS[name]
        errors = re.findall("^error: (.*)", outcome.output, re.M)
        assert len(errors) == count, outcome.output
        assert all(re.fullmatch(pattern, error) for error in errors), errors


def test_a_run_that_gets_sigterm_ends_soon_and_says_how_to_go_on():
    """A vote is under way for about a quarter of a second; after 30 s, torchrun sends SIGKILL."""
    outcome = outcomes()[FAULTS["term"]]
    [step] = set(re.findall(r"stops after step (\d+): --resume auto", outcome.output))
    assert 8 <= int(step) < STEPS
    assert outcome.seconds < 30


STOPS = "rank 0 stops after step 9\nrank 1 stops after step 9"
NAN = "error: the loss of rank 0\n"
WRONG = [  # the control of the test above, and of the campaign
    ("term", [0, 1], STOPS, 0),
    ("term", [0, 0], STOPS + "9", 0),
    ("term", [0, 0], STOPS, 1),
    ("kill", [-9, 0], "rank 1 gives up at `loss`: rank 0 did not arrive", 0),
    ("kill", [-9, 1], "nobody says a word", 0),
    ("nan", [2, 1], NAN, 0),
    ("nan", [2, 2], NAN + NAN, 0),
    ("pause", [0, 1], "", 0),
    ("pause", [0, 0], "error: rank 0 gives up at `loss`: rank 1 did not arrive", 0),
    ("pause-all", [0, 0], "", 1),
]


def test_a_wrong_end_is_seen():
    ends = [FaultOutcome(Fault(kind), *outcome, lost_steps=lost) for kind, *outcome, lost in WRONG]
    assert not any(map(as_expected, ends))
    right = FaultOutcome(Fault("pause"), [0, 0], "")
    assert as_expected(right)
    assert not as_expected(FaultOutcome(Fault("pause", pause_seconds=5), [0, 0], "", seconds=4))
