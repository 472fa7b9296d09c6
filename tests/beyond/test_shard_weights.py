"""beyond/shard: whatever is divided, the weights are those of one process.

The controls leave out each mechanism, or make it wrong, and the weights differ visibly.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fsdp
import text_model
from helpers.on_ranks import gather_from_ranks, on_ranks, run_on_ranks
from shard_cases import (
    BY_HAND,
    FSDP,
    ZERO_1,
    ZERO_2,
    TrainingCase,
    all_distances,
    batches,
    build,
    changed_levels,
    collect,
    largest_difference,
    train_steps,
)

CHOICES = (  # each pair of values occurs
    ("odd", "sgd", 1, None),
    ("odd", "adamw", 2, 0.1),
    ("transformer", "sgd", 2, 0.1),
    ("transformer", "adamw", 1, None),
)
TRAINING_CASES = [TrainingCase(level, *choice) for level in BY_HAND for choice in CHOICES]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shard_weights_equal_one_process(ranks):
    distances = run_on_ranks(ranks, all_distances, TRAINING_CASES)[0]
    assert [case for case, far in zip(TRAINING_CASES, distances, strict=True) if far > 1e-10] == []


def test_shard_two_ranks_compute_what_one_process_computes(changes=()):
    cases = [TrainingCase(level, changes=changes) for level in BY_HAND]
    assert max(run_on_ranks(2, all_distances, cases)[0]) < 1e-10


def test_shard_weights_equal_one_process_over_shm_too():
    cases = [TrainingCase(level, micro_batches=2, clip=0.1) for level in BY_HAND]
    assert max(run_on_ranks(3, all_distances, cases, "shm")[0]) < 1e-10


@on_ranks(2)
def test_shard_a_model_made_layer_by_layer_has_the_weights_of_one_made_at_once(rank):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = text_model.Transformer(8, layers=2)
    state, _ = collect(changed_levels().by_hand(FSDP, model, SGD, lr=0.1))
    for seed, is_same in ((0, True), (1, False)):  # the control: another seed
        torch.manual_seed(seed)
        made_at_once = text_model.Transformer(8, layers=2).state_dict()
        assert rank > 0 or (largest_difference(state, made_at_once) == 0) == is_same


@on_ranks(2)
def test_shard_a_forward_without_backward_leaves_no_stale_weights(rank):
    """A loss is computed once more, and no backward follows: the last layer stays unsharded."""
    (inputs, labels), (other_inputs, _), *_ = batches("odd")
    for changes in ((), (("fsdp.py", "layer.free()"),)):  # the second one is the control
        training = changed_levels(changes).by_hand(FSDP, build("odd"), SGD, lr=0.1)
        for _ in range(2):
            train_steps(training, [(inputs, labels)])
            training.model(inputs)
        training.optimizer.step()  # the same gradients again
        outputs = training.model(other_inputs)
        state, _ = collect(training)
        if rank == 0:
            plain = build("odd")
            plain.load_state_dict(state)
            difference = (plain(other_inputs) - outputs).abs().max()
            assert difference > 1e-3 if changes else difference < 1e-12


CONTROLS = {  # what is left out or made wrong: where it is used, and the change
    "ZeRO-1: no all-gather": (
        ZERO_1,
        ("zero.py", "all_gather_single(self.memory, ", "("),
    ),
    "ZeRO-1: the wrong slice": (
        ZERO_1,
        ("zero.py", "p.grad.reshape(-1)[part]", "p.grad.reshape(-1)[: part.stop - part.start]"),
    ),
    "ZeRO-2: own gradients only": (
        ZERO_2,
        ("shards.py", "-1).sum(dim=0)", "-1)[dist.get_rank()] * dist.get_world_size()"),
    ),
    "ZeRO-2: no division": (
        ZERO_2,
        ("shards.py", "flat.div_(dist.get_world_size())", "flat"),
    ),
    "ZeRO-2: a local norm": (ZERO_2, ("shards.py", "dist.all_reduce(square)", "pass")),
    "FSDP: no all-gather": (
        FSDP,
        (
            "fsdp.py",
            "all_gather_single(self.flat, self.shard, async_op=True)",
            "dist.all_reduce(self.shard * 0, async_op=True)",
        ),
    ),
    "FSDP: the wrong slice": (
        FSDP,
        (
            "shards.py",
            "flat[self.rank * self.length :]",
            "flat[(self.rank + 1) % 2 * self.length :]",
        ),
    ),
    "FSDP: own gradients only": (
        FSDP,
        ("shards.py", "-1).sum(dim=0)", "-1)[dist.get_rank()] * dist.get_world_size()"),
    ),
    "FSDP: stale weights after the step": (FSDP, ("fsdp.py", "self.flat = None")),
    "FSDP: no division": (FSDP, ("shards.py", "flat.div_(dist.get_world_size())", "flat")),
    "FSDP: a local norm": (FSDP, ("shards.py", "dist.all_reduce(square)", "pass")),
}
NO_BUFFERS = ("levels.py", "dist.broadcast(buffer, src=0)", "pass")


def test_shard_weights_differ_if_a_mechanism_is_left_out():
    """The controls of the claim above, on two ranks with SGD. Each changes the weights visibly."""
    cases = [
        TrainingCase(level, clip=0.1 if "norm" in what else None, changes=(change,))
        for what, (level, change) in CONTROLS.items()
    ]
    cases.append(TrainingCase(ZERO_2, "odd", changes=(NO_BUFFERS,)))  # the one that has a buffer
    names = [*CONTROLS, "ZeRO-2: no buffers"]
    distances = run_on_ranks(2, all_distances, cases)[0]
    assert [what for what, far in zip(names, distances, strict=True) if not far > 1e-3] == []


def test_shard_adamw_hides_a_missing_division():
    """AdamW's step does not depend on the scale of the gradient, except through epsilon."""
    left_out = [CONTROLS[f"{name}: no division"] for name in ("ZeRO-2", "FSDP")]
    cases = [
        TrainingCase(level, optimizer="adamw", changes=(change,)) for level, change in left_out
    ]
    assert all(1e-10 < far < 1e-3 for far in run_on_ranks(2, all_distances, cases)[0])


@on_ranks(2)
def test_shard_a_grad_scaler_would_halve_the_scale_of_the_rank_that_sees_an_inf(rank):
    """So the page says to train in bfloat16. The control is DDP, where all ranks see it."""
    scales = {}
    for wrap in (DistributedDataParallel, fsdp.FSDP):
        model = wrap(nn.Sequential(nn.Linear(4, 1, bias=False)))
        optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 1024.0)
        largest = float("inf") if rank == 0 else 1.0  # of the input, so of the gradient, too
        scaler.scale(model(torch.tensor([[largest, 1.0, 1.0, 1.0]])).sum()).backward()
        if wrap is fsdp.FSDP:
            model.finish()  # rank 0 gets the mean of the first two gradients, rank 1 of the others
        scaler.step(optimizer)
        scaler.update()
        scales[wrap.__name__] = gather_from_ranks(scaler.get_scale())
    assert scales == {"DistributedDataParallel": [512.0, 512.0], "FSDP": [512.0, 1024.0]}
