"""DDP waits for every gradient: what each rank gets where one misses, and what no_sync holds back.

C17: only find_unused_parameters averages, whatever branch each rank takes, and it changes no bit
where a model uses all its parameters.
"""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train_stage
from local_ranks import gather_from_ranks, on_ranks
from stage_files import chapter

unused = chapter("04", "unused_parameters")

LATE = "Expected to have finished reduction in the prior iteration"
VERDICTS = [  # on each step of the chapter's cases: whether it was averaged, or the error
    [True, False, LATE],
    [True] * 5,  # find_unused_parameters, whatever branch each rank takes
    [True] * 3,  # static_graph: needs no search if each rank keeps its graph
    [True, True, "Your training graph has changed"],  # one branch more
    [True, True, False, LATE],  # one less
    [True, False, LATE],  # an output is not in the loss
]


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_c17_only_find_unused_parameters_averages_whatever_branch_each_rank_takes(rank, ranks):
    with train_stage.default_dtype(torch.float64):
        outcomes = [unused.gradients_after_steps(*case) for case in unused.CASES]
    total = torch.ones(())
    dist.all_reduce(total)  # after errors too, the process group is whole
    assert total == ranks
    for (_, steps), verdicts, case_outcomes in zip(unused.CASES, VERDICTS, outcomes, strict=True):
        for step, verdict, outcome in zip(steps, verdicts, case_outcomes, strict=True):
            if isinstance(verdict, str):
                assert str(outcome).startswith(verdict)
            else:
                expected = unused.expected_gradients(step, ranks)
                right = all(map(unused.equal_up_to_rounding, outcome, expected))
                assert all(gather_from_ranks(right)) == verdict
    assert "find_unused_parameters=True" in str(outcomes[0][2])
    assert outcomes[0][1] == [[2, 1, None], [4, 2, None], [6, 3, None]][rank], "each its own"
    assert not unused.equal_up_to_rounding(None, 1.0)


@on_ranks(2)
def test_c17_where_no_rank_uses_a_parameter_its_gradient_is_left_as_it_was(rank):
    """None: the optimizer leaves the weight alone. Zero: momentum and weight decay move it."""
    for set_to_none in (True, False):
        model, weights = unused.Branches(), []
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for branch in ("both", "both", "left"):
            optimizer.zero_grad(set_to_none)
            torch.stack(ddp(torch.ones(1, 1), branch)).sum().backward()
            optimizer.step()
            weights.append(model.right.weight.item())
        assert weights[0] != weights[1]
        assert (weights[1] == weights[2]) == set_to_none


@on_ranks(2)
def test_c17_on_a_model_that_uses_all_its_parameters_it_changes_no_bit(rank):
    searching = partial(DistributedDataParallel, find_unused_parameters=True)
    gradients = []
    for wrap in (DistributedDataParallel, searching, nn.Identity()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
        wrapped = wrap(model)
        torch.manual_seed(rank)
        wrapped(torch.randn(4, 9)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2]), "the control: without DDP"


@on_ranks(2)
def test_05_no_sync_on_one_rank_only_makes_the_other_wait(rank):
    """Both ranks are in no_sync; then only rank 0 is, so that rank 1 averages alone."""
    for both in (True, False):
        dist.barrier()  # ranks may start late; from here on, they need little time
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
        ddp(torch.ones(1, 2)).sum().backward()
        continues = both or rank == 0
        with ddp.no_sync() if continues else pytest.raises(RuntimeError):
            ddp(torch.ones(1, 2)).sum().backward()
