"""Claims about DDP's options, and about where it waits: C17, C34. So does no_sync() on one rank."""

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from helpers.on_ranks import on_ranks


class Branches(nn.Module):
    """Two weights, of which a step may use only one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, inputs, branch):
        return getattr(self, branch)(inputs)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_c17_find_unused_parameters_and_static_graph_average_steps_that_leave_a_weight_out(
    rank, option
):
    """Rank r feeds the number r + 1. A rank that does not use a weight counts as zero."""
    model = Branches()
    ddp = DistributedDataParallel(model, **{option: True})
    for _ in range(2):
        model.zero_grad()
        ddp(torch.full((1, 1), rank + 1.0), ("left", "right")[rank]).sum().backward()
        assert (model.left.weight.grad.item(), model.right.weight.grad.item()) == (0.5, 1.0)
    if option == "find_unused_parameters":  # no rank uses the right one: its gradient stays
        ddp(torch.full((1, 1), rank + 1.0), "left").sum().backward()
        assert (model.left.weight.grad.item(), model.right.weight.grad.item()) == (2.0, 1.0)


@on_ranks(2)
def test_c17_without_find_unused_parameters_nothing_is_averaged_and_the_next_step_fails(rank):
    model = Branches()
    ddp = DistributedDataParallel(model)
    ddp(torch.full((1, 1), rank + 1.0), "left").sum().backward()
    assert (model.left.weight.grad.item(), model.right.weight.grad) == (rank + 1.0, None)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        ddp(torch.ones(1, 1), "left")


@on_ranks(2)
def test_c17_find_unused_parameters_changes_no_bit_of_a_model_that_uses_all_of_them(rank):
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
def test_c34_backward_waits_for_the_other_ranks_and_the_optimizer_does_not(rank):
    """Rank 1 reaches `where` only when rank 0 has come back from there."""
    for where, answer in (("step", "continues"), ("backward", "waits")):
        group = dist.new_group(timeout=timedelta(seconds=2))
        store = dist.PrefixStore(where, dist.distributed_c10d._get_default_store())
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        optimizer, outcome = SGD(model.parameters(), lr=0.1), "continues"
        loss = model(torch.ones(1, 2)).sum()
        try:
            for name, call in (("backward", loss.backward), ("step", optimizer.step)):
                if rank == 1 and name == where:
                    store.wait(["rank 0 is back"], timedelta(seconds=1))
                call()
                if rank == 0 and name == where:
                    store.set("rank 0 is back", "")
        except (RuntimeError, dist.DistError):
            outcome = "waits"
        assert outcome == answer


@on_ranks(2)
def test_c34_after_the_last_batch_a_file_of_rank_0_needs_a_barrier(rank):
    store = dist.distributed_c10d._get_default_store()
    for barrier in (False, True):
        DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        path = Path(f"barrier {barrier}")
        if rank == 0:
            if not barrier:
                store.wait(["rank 1 has looked"])  # saving takes long
            path.touch()
        if barrier:
            dist.barrier()
        assert path.exists() == (barrier or rank == 0)
        if rank == 1:
            store.set("rank 1 has looked", "")


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
