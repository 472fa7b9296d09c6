"""beyond/shard: each rank holds and sends what the paper's formulas say, and nothing besides: C41.

The controls are impostors, which reach the right weights and hold more.
"""

import sys
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fit
import levels
import peak
from benchmarks.measure import sharding
from helpers.on_ranks import run_on_ranks
from local_ranks.scripts import run_script
from shard_cases import (
    BY_HAND,
    FSDP,
    ZERO_1,
    ZERO_2,
    TrainingCase,
    all_distances,
    changed_levels,
    join,
)


def small() -> nn.Module:
    return sharding.build(width=64, layers=4)


def all_held(rank: int, cases: list) -> list[dict]:
    join("gloo")
    held = []
    for level, changes in cases:
        held.append(sharding.count_held(changed_levels(changes).by_hand, level, small))
    dist.destroy_process_group()
    return held


def unlike_the_paper(held: dict, level: str, ranks: int) -> set[str]:
    """The kinds of which a rank holds more than 1 % more or less than the formula says."""
    parameters = sum(parameter.nbytes for parameter in small().parameters())
    expected = levels.formula(level, ranks)
    expected["alive"] = sum(expected.values())
    off = {kind: abs(held[kind] / parameters - expected[kind]) for kind in expected}
    return {kind for kind in expected if off[kind] > 0.01 * expected[kind]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_shard_each_rank_holds_what_the_paper_says_and_nothing_besides(ranks):
    for held_by_level in run_on_ranks(ranks, all_held, [(level, ()) for level in levels.LEVELS]):
        for level, held in zip(levels.LEVELS, held_by_level, strict=True):
            assert unlike_the_paper(held, level, ranks) == set()


class Linears(peak.Plan):
    """The last layer, which FSDP leaves unsharded until backward, is small."""

    def build(self):
        sizes = (64, *[256] * 16, 4)
        pairs = pairwise(sizes)
        layers = [nn.Sequential(nn.Linear(before, after), nn.Tanh()) for before, after in pairs]
        model = nn.Sequential(*layers)
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    def loss(self, model, batch):
        return model(torch.randn(batch, 64)).square().mean()


LINEARS, SAMPLES = Linears("", 0, "adam", "cpu"), 48


def alive_after_forward(rank: int, predicted: dict[str, int]) -> dict[str, int]:
    """Bytes of all tensors of a rank, by level, when the second forward has ended."""
    join("gloo")
    alive = {}
    for level in levels.LEVELS:
        with peak.Ledger("cpu", counted="cpu") as ledger:
            model, _ = LINEARS.build()
            training = changed_levels().by_hand(level, model, torch.optim.Adam, foreach=False)
            for _ in range(2):
                loss = LINEARS.loss(training.model, SAMPLES)
                end = time.monotonic() + 5
                while ledger.bytes > 1.02 * predicted[level] and time.monotonic() < end:
                    time.sleep(0.01)  # a thread of gloo lets the last message go a moment later
                alive[level] = ledger.bytes
                training.optimizer.zero_grad()
                loss.backward()
                training.finish()
                training.optimizer.step()
    dist.destroy_process_group()
    return alive


@pytest.mark.parametrize("ranks", [2, 4])
def test_shard_fit_predicts_within_2_percent_what_ranks_hold_at_the_end_of_forward(ranks):
    """The control: the sum of another level is farther from what was counted."""
    unsharded, moment = peak.rehearsed_peak(LINEARS, SAMPLES)
    assert moment == "forward"
    sharded = [fit.bytes_if_sharded(LINEARS, SAMPLES, level, ranks) for level in fit.SHARDINGS]
    predicted = dict(zip(levels.LEVELS, [unsharded, *sharded], strict=True))
    for alive in run_on_ranks(ranks, alive_after_forward, predicted):
        assert alive == {level: pytest.approx(size, rel=0.02) for level, size in predicted.items()}
        for level, size in alive.items():
            others = [predicted[other] for other in levels.LEVELS if other != level]
            assert all(other != pytest.approx(size, rel=0.05) for other in others)


IMPOSTORS = {  # what reaches the right weights, and holds more: the change, and where that shows
    "no view is copied": (
        FSDP,
        ("fsdp.py", "self.shards.shard_of(flat).clone()", "self.shards.shard_of(flat)"),
        {"parameters", "alive"},
    ),
    "unsharded gradients stay": (
        ZERO_2,
        ("zero.py", "parameter.grad = None  # the bucket has it now", "pass"),
        {"gradients", "alive"},
    ),
    "a secret copy": (
        ZERO_1,
        (
            "zero.py",
            "self.parameters = parameters\n",
            "self.parameters, self.secret = parameters, [p + 0 for p in parameters]\n",
        ),
        {"alive"},
    ),
}


def test_shard_an_impostor_that_holds_more_is_found_though_its_weights_are_right():
    cases = [(level, (change,)) for level, change, _ in IMPOSTORS.values()]
    held_by_ddp, *held_by_impostors = run_on_ranks(2, all_held, [("none", ()), *cases])[1]
    for level, kind in zip(BY_HAND, levels.KINDS[::-1], strict=True):  # DDP under another name
        assert {kind, "alive"} <= unlike_the_paper(held_by_ddp, level, 2)
    for held, (level, _, kinds) in zip(held_by_impostors, IMPOSTORS.values(), strict=True):
        assert unlike_the_paper(held, level, 2) == kinds
    trainings = [TrainingCase(level, changes=changes) for level, changes in cases]
    assert max(run_on_ranks(2, all_distances, trainings)[0]) < 1e-10


def middle_sized() -> nn.Module:
    """Headers, and the last layer, which FSDP gathers only once, are about 1 % of it."""
    return sharding.build(width=128, layers=12)


def all_sent(rank: int, cases: list) -> list[float]:
    join("gloo")
    sent = []
    for library, level, changes in cases:
        changed = changed_levels(changes)
        make_training = changed.by_library if library else changed.by_hand
        sent.append(sharding.count_sent(make_training, level, middle_sized))
    dist.destroy_process_group()
    return sent


SENT = {  # bytes sent by two ranks, as multiples of the parameters' bytes
    (False, "none"): 1.0,  # an all-reduce of the gradients
    (False, ZERO_1): 1.5,  # adds an all-gather of the parameters
    (False, ZERO_2): 1.0,  # a reduce-scatter, an all-gather
    (False, FSDP): 1.5,  # two all-gathers, a reduce-scatter
    (True, FSDP): 2.0,  # gloo's reduce-scatter sends as much as an all-reduce
}
SAME_AS_GLOO = ("shards.py", 'dist.get_backend() == "gloo"', "False")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a socket")
def test_shard_each_rank_sends_what_the_paper_says():
    """C41, as Linux counts it. ZeRO-2 with gloo's own reduce_scatter_tensor is the control."""
    cases = [(*case, ()) for case in SENT] + [(False, ZERO_2, (SAME_AS_GLOO,))]
    *sent, control = run_on_ranks(2, all_sent, cases)[0]
    assert sent == [pytest.approx(expected, rel=0.02) for expected in SENT.values()]
    assert control == pytest.approx(1.5, rel=0.02)


def within(*flags: str) -> dict[str, str]:
    """How each level of training ends under a memory limit."""
    [(status, output)] = run_script("beyond/shard/memory_limit.py", *flags)
    assert status == 0, output
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in output.splitlines()[2:]}


def test_shard_four_ranks_that_cannot_train_with_ddp_can_with_fsdp():
    """The page runs it on two. The control: with 100 MiB more, DDP trains, too."""
    ends = within("--ranks=4", "--limit-mib=120")
    assert ends["DDP"].startswith("ends: can't allocate memory")
    assert ends["FSDP"].startswith("trains: losses")
    assert within("--limit-mib=265", "--levels=none")["DDP"].startswith("trains: losses")
