"""A script without a DataLoader: one rank gets what the loop of all ranks has read."""

import pytest

from prove_runs import one_line, verdict

FRAME = """
import queue, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data, labels, worth = torch.randn(96, 6), torch.randint(3, (96,)), torch.rand(96)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def batches(epoch):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        yield data[rows], labels[rows], worth[rows]

def ahead(source):
    ready = queue.Queue(2)
    threading.Thread(target=lambda: [*map(ready.put, source)], daemon=True).start()
    for _ in range(12):
        yield ready.get()

for x, y, weight in BATCHES:
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MEAN = "F.cross_entropy(model(x), y)"
WEIGHTED = "F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 3.0, 9.0]))"
OF_EACH = "F.cross_entropy(model(x), y, reduction='none')"

STEP_BY_HAND = """with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad"""


def script(loss: str, batches: str = "batches(0)") -> str:
    return FRAME.replace("LOSS", loss).replace("BATCHES", batches)


@pytest.mark.parametrize("batches", ["batches(0)", "ahead(batches(0))"], ids=["own", "by a thread"])
def test_one_rank_gets_the_targets_that_a_generator_gave_all_ranks(batches, prove_script):
    ended = prove_script(script(MEAN, batches))
    assert verdict(ended, "one rank") == "right"
    assert verdict(ended, "schedule") == "right"
    ended = prove_script(script(WEIGHTED, batches))
    assert verdict(ended, "one rank") == "WRONG", "the control: each rank has its own divisor"


def test_a_mean_over_the_samples_of_each_rank_is_named_with_its_line(prove_script):
    ended = prove_script(script(f"({OF_EACH} * (weight - weight.mean())).mean()"))
    assert verdict(ended, "one rank") == "WRONG"
    assert verdict(ended, "batch statistics") == "warning"
    assert "because the mean at train.py:" in one_line(ended.stdout)
    ended = prove_script(script(f"({OF_EACH} * (weight - 0.5)).mean()"))
    assert verdict(ended, "one rank") == "right", "the control: a number that all ranks share"


def test_numbers_that_numpy_has_centered_on_each_rank_are_named(prove_script):
    """prove does not see what NumPy computes, but nobody draws a mean of 0 by chance."""
    for mean, expected in (("of_rank.mean()", ("not seen", "warning")), ("0.5", ("right", ""))):
        own = "of_rank = weight.double().numpy()\n    "
        own += f"weight = torch.from_numpy(of_rank - {mean})\n    loss ="
        source = script(f"({OF_EACH} * weight).mean()").replace("loss =", own)
        ended = prove_script(source)
        assert verdict(ended, "one rank") == expected[0]
        assert ("have mean 0" in ended.stdout) == (expected[1] == "warning")


def test_a_number_that_may_be_that_of_the_samples_of_one_rank_is_no_mistake(prove_script):
    ended = prove_script(script(f"{OF_EACH}.sum() / 4"))
    assert (verdict(ended, "one rank"), ended.returncode) == ("not seen", 4)
    assert "x.shape[0]" in ended.stdout
    ended = prove_script(script(f"{OF_EACH}.sum() / len(x)"))
    assert verdict(ended, "one rank") == "right", "the control: one rank knows its own samples"


def test_a_step_that_the_loop_makes_by_hand_ends_where_the_next_forward_begins(prove_script):
    """It has no learning rate that could be compared, unlike the optimizer of the first test."""
    for loss, expected in ((MEAN, "right"), (WEIGHTED, "WRONG")):
        by_hand = script(loss).replace("optimizer = torch.optim.SGD(model.parameters(), 0.1)", "")
        by_hand = by_hand.replace("optimizer.zero_grad()", "model.zero_grad()")
        ended = prove_script(by_hand.replace("optimizer.step()", STEP_BY_HAND))
        assert verdict(ended, "one rank") == expected
        assert verdict(ended, "schedule").startswith("no row")


def test_a_policy_that_acts_is_not_trained_and_a_target_network_gets_the_rows_of_all(prove_script):
    acts = (
        "    action = model.module(data[rank]).argmax()  # with a gradient that nobody asks for\n"
    )
    for divisor, expected in (("", "right"), (" / world_size", "WRONG")):
        loss = f"F.mse_loss(model(x), target(x).detach()){divisor}"
        learns = script(loss).replace("optimizer =", "target = nn.Linear(6, 3)\noptimizer =")
        ended = prove_script(learns.replace("    loss =", f"{acts}    loss ="))
        assert verdict(ended, "one rank") == expected
