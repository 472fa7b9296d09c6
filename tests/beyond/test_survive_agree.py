"""agree.py: all ranks vote in the same steps, stop after the same one, and decide alike."""

import os
import signal

import torch

import agree
from helpers.machine import stopped_clock
from helpers.on_ranks import gather_from_ranks, on_ranks
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module


def votes(rank: int, step_seconds: list[float], sigterm: int, changes: tuple = ()) -> tuple:
    """Return the steps in which this rank votes, and the one after which it stops.

    sigterm: the step in which rank 1 receives it.
    """
    module = fresh_module(LESSON_FOLDERS["survive"] / "agree.py", changes)
    module.time = time = stopped_clock()
    agreement, steps_with_a_vote = module.Agreement(30), []
    start_vote = agreement._start_vote
    agreement._start_vote = lambda: (start_vote(), steps_with_a_vote.append(step))
    for step, seconds in enumerate(step_seconds, 1):
        time.sleep(seconds)
        if rank == 1 and step == sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        agreement.vote()
        if agreement.stopped:
            break
    return steps_with_a_vote, step


@on_ranks(3)
def test_all_ranks_vote_in_the_same_steps_and_stop_after_the_same_one(rank):
    """Though their steps differ. The control: each takes its own proposal, not the vote's."""
    seconds = (1 / 48, 0.03, 0.001)[rank]
    first, *others = gather_from_ranks(votes(rank, [seconds] * 400, sigterm=300))
    assert others == [first, first]
    assert 300 < first[1] <= 300 + 2 * 12, "within two votes"
    of_its_own = "sigterm = votes.tolist()[0]\n            self.interval = 5 if self.rank else 9\n"
    change = ("agree.py", "sigterm, self.interval = votes.tolist()\n", of_its_own)
    zero, one, _ = gather_from_ranks(votes(rank, [0.02] * 400, 60, (change,)))
    assert zero != one


@on_ranks(1)
def test_there_are_about_four_votes_a_second_and_at_least_one_in_50_steps(rank):
    for step_seconds, expected in (
        ([1e-5] * 202, [1, 2, 52, 102, 152, 202]),
        ([0.0625] * 14, [1, 2, 6, 10, 14]),
        ([10.0] * 4, [1, 2, 3, 4]),
        ([1 / 64] * 64 + [0.125] * 29, [1, 2, 18, 34, 50, 66, 82, 91, 93]),
    ):
        assert votes(rank, step_seconds, sigterm=0) == (expected, len(step_seconds))


def outcome(function, *args: object) -> str:
    """What a call returns or raises, as text."""
    try:
        return str(function(*args))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


SILENT = "SystemExit: 2"
LOWER_LR = "nothing is saved from here on; try a lower --lr with --resume auto"


@on_ranks(3)
def test_if_a_rank_fails_all_end_and_the_lowest_that_failed_says_why(rank):
    agreement = agree.Agreement(30)

    def work() -> None:
        with agreement.fail_together():
            if rank in (1, 2):
                raise OSError(f"of rank {rank}")

    assert gather_from_ranks(outcome(work)) == [SILENT, "OSError: of rank 1", SILENT]
    value = 8 if rank == 1 else 7
    assert gather_from_ranks(outcome(agreement.require_same, value, "it")) == [
        SILENT,
        "AgreementError: it is 8 on rank 1, 7 on rank 0",
        SILENT,
    ]


@on_ranks(3)
def test_the_mean_loss_of_an_epoch_ends_all_ranks_if_it_cannot_be_saved(rank):
    """Because a loss or a weight is nan, or because no loss scale is small enough for fp16."""
    agreement, model = agree.Agreement(30), torch.nn.Linear(2, 1)
    losses = torch.arange(4.0) + rank  # losses of steps 7 to 10

    def mean(losses: torch.Tensor, scale: float = 1.0) -> list[float]:
        return agreement.mean_or_end(losses, model, 10, scale).tolist()

    assert gather_from_ranks(outcome(mean, losses, 2.0**-24)) == ["[1.0, 2.0, 3.0, 4.0]"] * 3
    no_scale, *others = gather_from_ranks(outcome(mean, losses, 2.0**-25))
    assert no_scale.startswith("AgreementError: gradients are inf or nan even with the loss scaled")
    assert others == [SILENT, SILENT]
    nan = f"AgreementError: the loss of rank 2 is nan in step 8: {LOWER_LR}"
    one_is_nan = losses.where(losses < 3, float("nan"))
    assert gather_from_ranks(outcome(mean, one_is_nan)) == [nan, SILENT, SILENT]
    if rank == 1:
        agreement.sigterm.set()
        model.weight.data[0, 1] = float("inf")
    agreement.vote()
    weight = f"AgreementError: a weight is nan or inf after step 10: {LOWER_LR}"
    assert gather_from_ranks(outcome(mean, losses)) == [SILENT, weight, SILENT]
    assert agreement.stopped, "a vote is read at the end of an epoch at the latest"
