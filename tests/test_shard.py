"""shard/: whatever is divided, the weights are those of one process, and nothing is held twice.

Each case trains four steps in float64 on 2, 3 or 4 ranks, and so does one plain process. All cases
of a number of ranks share its processes, because starting them costs more than training.
"""

import copy
import io
import os
import time
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.optim import SGD, AdamW, NAdam

from local_ranks import command, launch_ranks, on_ranks, run_ranks
from support import (
    FOLDERS,
    chapter,
    different_functions,
    fresh_module,
    functions,
    train,
    train_once,
)

language = chapter("shard", "language")
FILES = ("shards.py", "zero.py", "fsdp.py", "full_state.py", "library_state.py", "shard_levels.py")
BY_HAND = ZERO_1, ZERO_2, FSDP = "optimizer", "gradients", "parameters"
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (NAdam, {"lr": 0.01}),  # it keeps two scalars of each parameter, not only a step
}
BATCH, STEPS = 24, 4  # a batch that divides by 2, 3 and 4 ranks, and then by 2 micro-batches


class Case(NamedTuple):
    """A training; by hand, since those by the library share no lines that could be changed."""

    level: str
    model: str = "transformer"
    optimizer: str = "sgd"
    micro_batches: int = 1
    clip: float | None = None
    changes: tuple = ()  # of lines, for a control
    fsdp_options: dict[str, Any] | None = None


class Odd(nn.Module):
    """Odd shapes, a frozen parameter, one tied inside a layer, a scalar outside of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5)
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.last = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second.bias.requires_grad_(False)
        self.twice[2].weight = self.twice[0].weight

    def forward(self, inputs):  # (B, 7) -> (B, 3)
        hidden = self.second(self.first(inputs).tanh())
        return self.last(self.twice(self.twice(hidden))) * self.scale


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (Odd() if name == "odd" else language.Transformer(8, layers=2)).double()


def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many as steps. Labels are missing here and there, and not as many on each rank."""
    torch.manual_seed(1)
    if name == "odd":
        return [(torch.randn(BATCH, 7).double(), torch.randint(3, (BATCH,))) for _ in range(STEPS)]
    steps = []
    for _ in range(STEPS):
        tokens, lengths = torch.randint(256, (BATCH, 7)), torch.randint(1, 7, (BATCH, 1))
        labels = tokens.roll(-1, dims=1).masked_fill(torch.arange(7) >= lengths, language.IGNORED)
        steps.append((tokens, labels))
    return steps


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, count: int):
    logits = model(inputs).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count


@cache
def one_process(name: str, optimizer: str, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The weights that all others must reach."""
    model = build(name)
    optimizer_class, options = OPTIMIZERS[optimizer]
    plain = optimizer_class(model.parameters(), **options)
    for inputs, labels in batches(name):
        plain.zero_grad()
        loss_of(model, inputs, labels, int((labels >= 0).sum())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        plain.step()
    return model.state_dict()


def changed_levels(changes: tuple = ()) -> ModuleType:
    """shard_levels.py and what it imports, with changed lines."""
    return [fresh_module("shard", file, changes, register=True) for file in FILES][-1]


def train_steps(training, steps, micro_batches: int = 1, clip: float | None = None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for inputs, labels in steps:
        count = int((labels >= 0).sum())  # of all ranks
        training.optimizer.zero_grad()
        pieces = (tensor[rank::world_size].chunk(micro_batches) for tensor in (inputs, labels))
        for number, micro_batch in enumerate(zip(*pieces, strict=True), start=1):
            waits = number < micro_batches and hasattr(training.model, "no_sync")
            with training.model.no_sync() if waits else nullcontext():
                (loss_of(training.model, *micro_batch, count) * world_size).backward()
            training.finish()
        if clip:
            training.clip(clip)
        training.optimizer.step()


def states_of(training) -> tuple:
    return training.model_state, training.optimizer_state


def collect(training) -> tuple[dict, dict]:
    """The full state_dicts of model and optimizer, on rank 0."""
    for part in states_of(training):
        part.collect()
    return copy.deepcopy(tuple(part.state_dict() for part in states_of(training)))


def largest_difference(state: dict, reference_state: dict) -> float:
    assert state.keys() == reference_state.keys()
    return max((state[name] - reference_state[name]).abs().max().item() for name in state)


def distance(case: Case) -> float:
    """How far rank 0's weights are from those of one process; on the other ranks, 0."""
    model = build(case.model)
    if dist.get_rank() > 0:  # rank 0's weights must win
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    optimizer_class, options = OPTIMIZERS[case.optimizer]
    by_hand = changed_levels(case.changes).by_hand
    training = by_hand(case.level, model, optimizer_class, case.fsdp_options, **options)
    train_steps(training, batches(case.model), case.micro_batches, case.clip)
    state, _ = collect(training)
    if dist.get_rank() > 0:
        return 0.0
    return largest_difference(state, one_process(case.model, case.optimizer, case.clip))


CHOICES = (  # each pair of values occurs
    ("odd", "sgd", 1, None),
    ("odd", "adamw", 2, 0.1),
    ("transformer", "sgd", 2, 0.1),
    ("transformer", "adamw", 1, None),
)
CASES = [Case(level, *choice) for level in BY_HAND for choice in CHOICES]


def join(backend: str) -> None:
    if backend == "shm":
        import shm  # noqa: F401
    dist.init_process_group(backend)


def all_distances(rank: int, cases: list[Case], backend: str = "gloo") -> list[float]:
    join(backend)
    distances = [distance(case) for case in cases]
    dist.destroy_process_group()
    return distances


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shard_weights_equal_one_process(ranks):
    distances = run_ranks(ranks, all_distances, CASES)[0]
    assert [case for case, far in zip(CASES, distances, strict=True) if far > 1e-10] == []


def test_shard_two_ranks_compute_what_one_process_computes(without=()):
    cases = [Case(level, changes=without) for level in BY_HAND]
    assert max(run_ranks(2, all_distances, cases)[0]) < 1e-10


def test_shard_weights_equal_one_process_over_shm_too():
    cases = [Case(level, micro_batches=2, clip=0.1) for level in BY_HAND]
    assert max(run_ranks(3, all_distances, cases, "shm")[0]) < 1e-10


def test_shard_fsdp_may_recompute_and_gather_in_another_format():
    """float32 stands for bf16 here: beside float64, it too has about half the digits."""
    recompute, lower = {"recompute": True}, {"dtype": torch.float32}
    cases = [
        Case(FSDP, model, micro_batches=2, fsdp_options=options)
        for options in (recompute, lower, {**recompute, **lower})
        for model in ("odd", "transformer")
    ]
    distances = run_ranks(2, all_distances, cases)[0]
    in_float64, in_float32 = distances[:2], distances[2:]
    assert max(in_float64) < 1e-10
    assert all(1e-10 < far < 1e-5 for far in in_float32)


def in_bf16(rank: int) -> list[float]:
    join("gloo")
    model, (optimizer_class, options) = build("transformer").float(), OPTIMIZERS["adamw"]
    training = changed_levels().by_hand(
        FSDP, model, optimizer_class, {"dtype": torch.bfloat16}, **options
    )
    losses, gathered = [], training.model.layers[0].unshard().dtype
    inputs, labels = batches("transformer")[0]
    for _ in range(20):
        train_steps(training, [(inputs, labels)])
        with torch.no_grad():
            losses.append(loss_of(training.model, inputs, labels, int((labels >= 0).sum())).item())
    kept = {part.dtype for part in training.model.parameters()}
    dist.destroy_process_group()
    assert (gathered, kept) == (torch.bfloat16, {torch.float32})
    return losses


def test_shard_fsdp_learns_with_parameters_gathered_in_bf16():
    losses = run_ranks(2, in_bf16)[0]
    assert losses[-1] < 0.8 * losses[0]


def full_state_from_meta(rank: int) -> dict[str, torch.Tensor]:
    join("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = language.Transformer(8, layers=2)
    state, _ = collect(changed_levels().by_hand(FSDP, model, SGD, lr=0.1))
    dist.destroy_process_group()
    return state


def test_shard_a_model_made_layer_by_layer_has_the_weights_of_one_made_at_once():
    state = run_ranks(2, full_state_from_meta)[0]
    for seed, is_same in ((0, True), (1, False)):  # the control: another seed
        torch.manual_seed(seed)
        made_at_once = language.Transformer(8, layers=2).state_dict()
        assert (largest_difference(state, made_at_once) == 0) == is_same


def looked_at_before_the_step(rank: int, changes: tuple) -> float:
    """A loss is computed once more, and no backward follows: the last layer stays unsharded."""
    join("gloo")
    training = changed_levels(changes).by_hand(FSDP, build("odd"), SGD, lr=0.1)
    first, second, *_ = batches("odd")
    train_steps(training, [first])
    training.model(first[0])
    train_steps(training, [first])
    training.model(first[0])
    training.optimizer.step()  # the same gradients again
    after = training.model(second[0])
    state, _ = collect(training)
    dist.destroy_process_group()
    plain = build("odd")
    if rank == 0:
        plain.load_state_dict(state)
    return float((plain(second[0]) - after).abs().max()) if rank == 0 else 0.0


def test_shard_a_forward_without_backward_leaves_no_stale_weights():
    assert run_ranks(2, looked_at_before_the_step, ())[0] < 1e-12
    assert run_ranks(2, looked_at_before_the_step, (("fsdp.py", "layer.free()"),))[0] > 1e-3


CONTROLS = {  # what is left out or made wrong: where it is used, and the change
    "ZeRO-1: no all-gather": (
        ZERO_1,
        ("zero.py", "dist.all_gather_into_tensor(self.memory, ", "("),
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
        ("zero.py", "message.wait() / bucket.world_size", "message.wait()"),
    ),
    "ZeRO-2: a local norm": (ZERO_2, ("shards.py", "dist.all_reduce(square)", "pass")),
    "FSDP: no all-gather": (
        FSDP,
        (
            "fsdp.py",
            "dist.all_gather_into_tensor(self.flat, shard, async_op=True)",
            "dist.all_reduce(shard * 0, async_op=True)",
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
    "FSDP: no division": (FSDP, ("fsdp.py", ".div_(self.shards.world_size)", "")),
    "FSDP: a local norm": (FSDP, ("shards.py", "dist.all_reduce(square)", "pass")),
}


def test_shard_weights_differ_if_a_mechanism_is_left_out():
    """The controls of the claim above, on two ranks with SGD. Each changes the weights visibly."""
    cases = [
        Case(level, clip=0.1 if "norm" in what else None, changes=(change,))
        for what, (level, change) in CONTROLS.items()
    ]
    distances = run_ranks(2, all_distances, cases)[0]
    assert [what for what, far in zip(CONTROLS, distances, strict=True) if not far > 1e-3] == []


def test_shard_adamw_hides_a_missing_division():
    """Its step does not depend on the scale of the gradient, except through epsilon."""
    left_out = [CONTROLS[f"{name}: no division"] for name in ("ZeRO-2", "FSDP")]
    cases = [Case(level, optimizer="adamw", changes=(change,)) for level, change in left_out]
    assert all(1e-10 < far < 1e-3 for far in run_ranks(2, all_distances, cases)[0])


def resumed(
    rank: int, cases: list, name: str = "transformer", optimizer: str = "adamw"
) -> list[tuple]:
    """Two steps, from the start or from a saved state; returns the full state_dicts."""
    join("gloo")
    levels, (optimizer_class, options), states = changed_levels(), OPTIMIZERS[optimizer], []
    for level, library, state in cases:
        make_training = levels.by_library if library else levels.by_hand
        training = make_training(level, build(name), optimizer_class, **options)
        contents = torch.load(io.BytesIO(state), weights_only=True) if state else ()
        for part, content in zip(states_of(training), contents, strict=False):
            part.load_state_dict(content)
        half = slice(STEPS // 2, None) if state else slice(STEPS // 2)
        train_steps(training, batches(name)[half])
        states.append(collect(training))
    dist.destroy_process_group()
    return states


def saved(state: tuple) -> bytes:
    """As a file would hold it: a process takes only so many tensors as arguments."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@cache
def saved_on_two_ranks() -> dict[tuple, tuple]:
    """After two of four steps, by hand and by the library."""
    cases = [(level, library) for library in (False, True) for level in BY_HAND]
    states = run_ranks(2, resumed, [(*case, None) for case in cases])[0]
    return dict(zip(cases, states, strict=True))


def resumed_alone(state: tuple, name: str = "transformer", optimizer: str = "adamw") -> dict:
    model, (optimizer_class, options) = build(name), OPTIMIZERS[optimizer]
    plain = optimizer_class(model.parameters(), **options)
    model.load_state_dict(state[0])
    plain.load_state_dict(copy.deepcopy(state[1]))  # torch would go on in the same tensors
    for inputs, labels in batches(name)[STEPS // 2 :]:
        plain.zero_grad()
        loss_of(model, inputs, labels, int((labels >= 0).sum())).backward()
        plain.step()
    return model.state_dict()


def test_shard_a_run_saved_on_two_ranks_goes_on_on_three_and_in_a_plain_process():
    expected = one_process("transformer", "adamw")
    states = {
        level: state for (level, library), state in saved_on_two_ranks().items() if not library
    }
    cases = [(level, False, saved(state)) for level, state in states.items()]
    for state, (weights, _) in zip(states.values(), run_ranks(3, resumed, cases)[0], strict=True):
        weights_when_saved, _ = state
        assert largest_difference(weights_when_saved, expected) > 1e-3, "the control"
        assert largest_difference(weights, expected) < 1e-10
        assert largest_difference(resumed_alone(state), expected) < 1e-10


def test_shard_an_optimizer_that_keeps_other_scalars_than_a_step_goes_on_too():
    """NAdam, and a model with a scalar parameter, whose momentum looks like a step."""
    of = ("odd", "nadam")
    states = run_ranks(2, resumed, [(level, False, None) for level in BY_HAND], *of)[0]
    cases = [(level, False, saved(state)) for level, state in zip(BY_HAND, states, strict=True)]
    for state, (weights, _) in zip(states, run_ranks(3, resumed, cases, *of)[0], strict=True):
        weights_when_saved, _ = state
        assert largest_difference(weights_when_saved, one_process(*of)) > 1e-3, "the control"
        assert largest_difference(weights, one_process(*of)) < 1e-10
        assert largest_difference(resumed_alone(state, *of), one_process(*of)) < 1e-10


@on_ranks(2)
def test_shard_a_parameter_that_was_never_used_has_no_state_as_in_a_plain_optimizer(rank):
    """ZeRO-1 takes such parameters. The first one of each bucket is among them."""
    model, zero = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)), chapter("shard", "zero")
    optimizer = zero.ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
    plain = AdamW(copy.deepcopy(model).parameters(), lr=0.1)
    for stepped in (optimizer, plain):
        [_, bias, weight, last] = stepped.param_groups[0]["params"]
        (bias.sum() + weight.square().sum()).backward()
        stepped.step()
        assert last.grad is None
    full_state = chapter("shard", "full_state").FullOptimizerState(model, optimizer)
    full_state.collect()
    rows, plain_rows = full_state.state_dict()["state"], plain.state_dict()["state"]
    assert [*rows] == [*plain_rows] == [1, 2]
    if rank == 0:
        assert max(largest_difference(rows[number], plain_rows[number]) for number in rows) < 1e-6


def held_when_resumed(rank: int, state: bytes, changes: tuple) -> dict[str, int]:
    """Bytes of the optimizer's state."""
    join("gloo")
    held = {}
    for level in BY_HAND:
        training = changed_levels(changes).by_hand(level, build("transformer"), AdamW, lr=0.01)
        for part, content in zip(states_of(training), torch.load(io.BytesIO(state)), strict=True):
            part.load_state_dict(content)
        held[level] = measure.held_by_kind(training)["optimizer state"]
    dist.destroy_process_group()
    return held


def test_shard_a_resumed_rank_holds_only_its_part_of_the_state():
    """The control: a part that is no copy keeps all of its tensor alive."""
    state = saved_on_two_ranks()[ZERO_1, False]
    full_size = sum(value.nbytes for row in state[1]["state"].values() for value in row.values())
    for held in run_ranks(2, held_when_resumed, saved(state), ()):
        assert held == dict.fromkeys(BY_HAND, pytest.approx(full_size / 2, rel=0.02))
    no_copy = ("full_state.py", "[owned_slice].clone()", "[owned_slice]")
    for held in run_ranks(2, held_when_resumed, saved(state), (no_copy,)):
        assert min(held.values()) >= full_size


def test_shard_a_module_that_cannot_fill_its_weights_is_refused_on_the_meta_device():
    fsdp = chapter("shard", "fsdp")
    with torch.device("meta"):
        attention = nn.Sequential(nn.MultiheadAttention(4, 2))  # it has only _reset_parameters
        linear = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="in_proj_weight is on the meta device, and Multihead"):
        fsdp.check_parameters(attention, dict(fsdp.layers_of(attention)))
    fsdp.check_parameters(linear, dict(fsdp.layers_of(linear)))  # the control


def test_shard_the_rate_of_a_resumed_run_is_that_of_its_own_flags():
    """An optimizer that loads its state makes new groups, so they are asked for each time."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    old_groups = optimizer.param_groups
    full_state = chapter("shard", "full_state").FullOptimizerState(nn.Linear(1, 1), optimizer)
    full_state.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    full_state.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert old_groups[0]["lr"] == 0.1, "the control: they are others now"


def test_shard_the_library_reaches_the_same_weights_and_shares_its_checkpoints():
    """Saved by hand, resumed by PyTorch's classes, and the other way round."""
    states = saved_on_two_ranks().items()
    cases = [(level, not library, saved(state)) for (level, library), state in states]
    for weights, _ in run_ranks(2, resumed, cases)[0]:
        assert largest_difference(weights, one_process("transformer", "adamw")) < 1e-10


measure, traffic = chapter("shard", "measure"), chapter("shard", "traffic")


def small() -> nn.Module:
    return measure.build(width=64, layers=4)


def all_held(rank: int, cases: list) -> list[dict]:
    join("gloo")
    held = []
    for level, changes in cases:
        held.append(measure.count_held(changed_levels(changes).by_hand, level, small))
    dist.destroy_process_group()
    return held


def unlike_the_paper(held: dict, level: str, ranks: int) -> set[str]:
    """The kinds of which a rank holds more than 1 % more or less than the formula says."""
    parameters = sum(parameter.nbytes for parameter in small().parameters())
    expected = measure.formula(level, ranks)
    expected["alive"] = sum(expected.values())
    off = {kind: abs(held[kind] / parameters - expected[kind]) for kind in expected}
    return {kind for kind in expected if off[kind] > 0.01 * expected[kind]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_shard_each_rank_holds_what_the_paper_says_and_nothing_besides(ranks):
    for held_by_way in run_ranks(ranks, all_held, [(level, ()) for level in measure.LEVELS]):
        for level, held in zip(measure.LEVELS, held_by_way, strict=True):
            assert unlike_the_paper(held, level, ranks) == set()


peak, fit = chapter("01", "peak"), chapter("01", "fit")


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
    for level in measure.LEVELS:
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
    unsharded, moment = peak.rehearse(LINEARS, SAMPLES)
    assert moment == "forward"
    sharded = [fit.bytes_if_sharded(LINEARS, SAMPLES, level, ranks) for level in fit.WAYS]
    predicted = dict(zip(measure.LEVELS, [unsharded, *sharded], strict=True))
    for alive in run_ranks(ranks, alive_after_forward, predicted):
        assert alive == {level: pytest.approx(size, rel=0.02) for level, size in predicted.items()}
        for level, size in alive.items():
            others = [predicted[other] for other in measure.LEVELS if other != level]
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
    held_by_ddp, *held_by_impostors = run_ranks(2, all_held, [("none", ()), *cases])[1]
    for level, kind in zip(BY_HAND, measure.KINDS[::-1], strict=True):  # DDP under another name
        assert {kind, "alive"} <= unlike_the_paper(held_by_ddp, level, 2)
    for held, (level, _, kinds) in zip(held_by_impostors, IMPOSTORS.values(), strict=True):
        assert unlike_the_paper(held, level, 2) == kinds
    trainings = [Case(level, changes=changes) for level, changes in cases]
    assert max(run_ranks(2, all_distances, trainings)[0]) < 1e-10


def middle_sized() -> nn.Module:
    """Headers, and the last layer, which FSDP gathers only once, are about 1 % of it."""
    return measure.build(width=128, layers=12)


def all_sent(rank: int, cases: list) -> list[float]:
    """In a network namespace that only these ranks are in. Its first process is rank 0."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))  # opened in the old network
    if rank == 0:
        traffic.enter_private_network()
        store.set("process", str(os.getpid()))
    else:
        traffic.enter_private_network(int(store.get("process")))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sent = []
    for library, level, changes in cases:
        levels = changed_levels(changes)
        make_training = levels.by_library if library else levels.by_hand
        sent.append(measure.count_sent(make_training, level, middle_sized))
    dist.destroy_process_group()
    return sent


SENT = {  # by two ranks: multiples of the parameters' bytes
    (False, "none"): 1.0,  # an all-reduce of the gradients
    (False, ZERO_1): 1.5,  # and an all-gather of the parameters
    (False, ZERO_2): 1.0,  # a reduce-scatter, an all-gather
    (False, FSDP): 1.5,  # two all-gathers, a reduce-scatter
    (True, FSDP): 2.0,  # gloo's reduce-scatter sends as much as an all-reduce
}
SAME_AS_GLOO = ("shards.py", 'dist.get_backend() == "gloo"', "False")


@pytest.mark.skipif(not traffic.is_allowed(), reason="a network of its own needs root")
def test_shard_each_rank_sends_what_the_paper_says():
    """C41, counted by the kernel. ZeRO-2 with gloo's own reduce_scatter_tensor is the control."""
    cases = [(*case, ()) for case in SENT] + [(False, ZERO_2, (SAME_AS_GLOO,))]
    *sent, control = run_ranks(2, all_sent, cases)[0]
    assert sent == [pytest.approx(expected, rel=0.02) for expected in SENT.values()]
    assert control == pytest.approx(1.5, rel=0.02)


ON_DIGITS = ("--dataset=digits", "--model=net-bn", "--optimizer=sgd", "--lr=0.02", "--epochs=2")
ON_DIGITS += ("--batch-size=300", "--seed=7", "--max-steps=7")  # 5 in the first epoch


def test_shard_train_repeats_stage_04_and_04_resumes_its_checkpoint():
    """Saved after one epoch of two, resumed by stage 04's unchanged script and in other ways."""
    flags = [flag for flag in ON_DIGITS if "optimizer" not in flag]
    uninterrupted = train_once("04", 2, *flags)
    first_epoch = train("shard", 2, *ON_DIGITS, f"--shard={ZERO_2}", "--epochs=1")
    resume = f"--resume={first_epoch.folder / 'checkpoint.pt'}"
    others = [("shard", ("--optimizer=sgd", f"--shard={level}")) for level in (ZERO_1, FSDP)]
    for key, more in [("04", ()), *others]:
        resumed = train(key, 2, *flags, *more, resume)
        losses = torch.cat([first_epoch.losses, resumed.losses])
        assert (losses - uninterrupted.losses).abs().max() < 1e-10
        reference_state = uninterrupted.checkpoint["model"]
        assert largest_difference(resumed.checkpoint["model"], reference_state) < 1e-10


@pytest.mark.parametrize("level", ["none", ZERO_2])
def test_shard_a_checkpoint_of_the_other_optimizer_is_refused_in_one_line(level, tmp_path):
    flags = (*ON_DIGITS, f"--shard={level}", "--max-steps=1")
    path = train_once("shard", 2, *flags, "--optimizer=adamw").folder / "checkpoint.pt"
    flags = (*flags, "--device=cpu", f"--run-dir={tmp_path}", f"--resume={path}")
    for status, said in launch_ranks("beyond/shard/train.py", *flags):
        [line] = said.splitlines()
        assert (status, line[:7]) == (2, "error: ")
        assert line.endswith("eps, expected one with dampening, momentum, nesterov")


@pytest.mark.parametrize("level", [ZERO_2, FSDP])
def test_shard_evaluate_only_prints_what_the_run_found_last(level, tmp_path):
    """On more ranks and at another level. The control: after one step, the model is another."""
    flags = (*ON_DIGITS, f"--shard={ZERO_2}")
    one_step, two_steps = (train_once("shard", 2, *flags, f"--max-steps={n}") for n in (1, 2))
    loss, accuracy = (two_steps.summary[key] for key in ("test_loss", "test_accuracy"))
    expected = f"test loss {loss:.4f}  test accuracy {accuracy:.2%}\n"
    for trained, is_expected in ((two_steps, True), (one_step, False)):
        evaluate = f"--evaluate={trained.folder / 'checkpoint.pt'}"
        evaluated = train(
            "shard", 3, *ON_DIGITS, f"--shard={level}", evaluate, folder=tmp_path / "none"
        )
        assert not evaluated.folder.exists()
        assert (evaluated.output == expected) == is_expected


def test_shard_the_picture_is_not_older_than_what_draws_it():
    picture = chapter("shard", "plot_memory")
    with Image.open(picture.FILE) as file:
        assert file.text["made of"] == picture.picture_digest(), (
            "run: python beyond/shard/plot_memory.py"
        )
    with mock.patch.object(picture, "formula", measure.storages):
        assert file.text["made of"] != picture.picture_digest(), "the control"


def test_shard_the_language_model_learns_and_its_loss_does_not_depend_on_the_ranks():
    flags = ("--max-steps=8", "--width=8", "--layers=1", "--lr=0.01", "--batch-size=48")
    two, three = (train("shard", ranks, *flags) for ranks in (2, 3))
    assert (two.losses - three.losses).abs().max() < 1e-10
    assert two.losses[-1] < 0.95 * two.losses[0]
    state = two.checkpoint["model"]
    assert largest_difference(state, three.checkpoint["model"]) < 1e-10
    own_tokens = train("shard", 2, *flags, without=(("train.py", "dist.all_reduce(tokens)"),))
    assert largest_difference(state, own_tokens.checkpoint["model"]) > 1e-3, "the control: C43"


REFUSED = {
    "--width=30": "--width 30 is no multiple of 4",
    "--model=net": "--model net does not go with --dataset text",
    "--shard=all": "invalid choice: 'all'",
    "--clip-norm=0": "--clip-norm: got '0'",
    "--batch-size=33": "--batch-size 33 does not divide by 2: try 34",
    "--batch-size=99998": "--batch-size 99998 is more than the",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_shard_a_wrong_call_ends_in_one_line(flag, tmp_path):
    flags = ("--device=cpu", f"--run-dir={tmp_path}", flag)
    for status, said in launch_ranks("beyond/shard/train.py", *flags):
        [line] = said.splitlines()
        assert (status, line[:7]) == (2, "error: ")
        assert REFUSED[flag] in line


class Tied(nn.Module):
    """The usual tie of a language model, across two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def refusals(rank: int) -> list[str]:
    join("gloo")
    levels, said = changed_levels(), []
    untied = Tied()
    untied.head = nn.Linear(3, 5)
    mixed = nn.Sequential(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5).double()))
    with torch.device("meta"):
        unfilled = Odd()
    said_of_meta = "is on the meta device, and tied or in no layer"
    with pytest.raises(ValueError, match=said_of_meta):
        levels.by_hand(FSDP, unfilled, SGD, lr=0.1)
    optimizer = levels.by_hand(ZERO_1, Tied(), SGD, lr=0.1).optimizer
    for call in (optimizer.state_dict, partial(optimizer.load_state_dict, {})):
        with pytest.raises(ValueError, match="a rank holds only its parts"):
            call()
    cases = [(FSDP, Tied(), SGD), (ZERO_1, Tied(), torch.optim.Adafactor), (FSDP, mixed, SGD)]
    for level, model, optimizer_class in [*cases, (FSDP, untied, SGD), (ZERO_2, Tied(), SGD)]:
        try:
            training = levels.by_hand(level, model, optimizer_class, lr=0.1)
            training.model(torch.arange(5)).sum().backward()
            training.finish()
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return said


def test_shard_what_cannot_be_divided_is_refused_in_one_line_on_every_rank():
    lines, other_lines = run_ranks(2, refusals)
    assert lines == other_lines
    words = ("embedding.weight and head.weight are one", "Adafactor looks at whole parameters")
    words += ("0 has parameters in torch.float32 and torch.float64: convert",)
    words += ("gave no gradient to unused: freeze", "no gradient to 2 parameters, of shape (3,)")
    for expected, line in zip(words, lines, strict=True):
        assert line.startswith("ShardingError: ")
        assert expected in line
        assert "\n" not in line


@on_ranks(2)
def test_shard_zero_2_takes_one_backward_before_finish_and_no_step_before_it(rank):
    model, zero = nn.Linear(3, 2), chapter("shard", "zero")
    optimizer = zero.ShardedGradients(model.parameters(), SGD, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"step\(\) before finish\(\): call finish"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"a second backward before finish\(\): call finish"):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.finish()
    optimizer.zero_grad()
    for _ in range(2):  # the control: with finish() after each, gradients add up
        model(torch.ones(1, 3)).sum().backward()
        optimizer.finish()
    optimizer.give_gradients()
    assert {g for own in optimizer.owned.values() for g in own.grad.tolist()} == {2.0}


@on_ranks(2)
def test_shard_a_closure_is_called_before_the_step(rank):
    zero = chapter("shard", "zero")
    for make in (zero.ShardedOptimizer, zero.ShardedGradients):
        weight = nn.Parameter(torch.ones(3))
        optimizer = make([weight], SGD, lr=0.1)

        def closure(weight=weight, optimizer=optimizer):
            loss = weight.sum()
            loss.backward()
            getattr(optimizer, "finish", lambda: None)()
            return loss

        assert optimizer.step(closure) == 3
        assert torch.equal(weight, torch.full((3,), 0.9))


class Scaled(nn.Linear):
    def forward(self, inputs, *, scale):
        assert scale.dtype == inputs.dtype
        return super().forward(inputs) * scale


class TakesKeyword(nn.Module):
    def __init__(self, is_called: bool = True) -> None:
        super().__init__()
        self.layer, self.is_called = Scaled(3, 2), is_called

    def forward(self, inputs):
        if not self.is_called:
            return inputs.square()
        return self.layer(inputs, scale=inputs.new_ones(()))


@on_ranks(2)
def test_shard_fsdp_casts_keywords_and_refuses_a_model_without_layers(rank):
    FSDP = chapter("shard", "fsdp").FSDP  # noqa: N806
    outputs = FSDP(TakesKeyword(), dtype=torch.bfloat16)(torch.ones(1, 3))
    assert outputs.dtype == torch.float32
    with pytest.raises(ValueError, match="Linear has no child with trained parameters: nothing to"):
        FSDP(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"forward called no layer \(layer\)"):
        FSDP(TakesKeyword(is_called=False))(torch.ones(1, 3))


class TakesParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)})

    def forward(self, x):
        return self.parts["second"](self.parts["first"](x))


def assert_divided(model: nn.Module, layers: list[str]) -> None:
    """FSDP divides these layers, and computes what rank 0's model computes."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    inputs = torch.ones(1, 3)
    expected = model(inputs)
    fsdp = chapter("shard", "fsdp").FSDP(model)
    assert [layer.name for layer in fsdp.layers] == layers
    assert torch.allclose(fsdp(inputs), expected)


class TakesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.ModuleList([nn.Linear(3, 4)]), nn.ModuleList([nn.Linear(4, 2)])
        self.groups = nn.ModuleList([first, second])
        self.scales = nn.ParameterList([nn.Parameter(torch.full((2,), 2.0))])

    def forward(self, x):
        for group in self.groups:
            for layer in group:
                x = layer(x)
        return x * self.scales[0]


@on_ranks(2)
def test_shard_fsdp_divides_nested_lists_and_leaves_bare_parameters_whole(rank):
    assert_divided(TakesNested(), ["groups.0.0", "groups.1.0"])


@on_ranks(2)
def test_shard_clips_a_gradient_of_nan_as_torch_does(rank):
    gradients = [torch.tensor([float("nan")]), torch.ones(2)]
    chapter("shard", "shards").clip_grad_norm(gradients[:1], gradients[1:], 1.0)
    assert all(gradient.isnan().all() for gradient in gradients)


@on_ranks(2)
def test_shard_steps_after_a_load_do_not_change_what_was_loaded(rank):
    full_state, zero = chapter("shard", "full_state"), chapter("shard", "zero")
    model = nn.Linear(3, 2)
    optimizer = zero.ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
    moments = {"step": torch.tensor(5.0)}
    rows = {
        number: moments | {key: torch.ones(p.shape) for key in ("exp_avg", "exp_avg_sq")}
        for number, p in enumerate(model.parameters())
    }
    groups = [{**optimizer.param_groups[0], "params": [0, 1]}]
    saved = {"state": rows, "param_groups": groups}
    full_state.FullOptimizerState(model, optimizer).load_state_dict(saved)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert saved["state"][0]["step"] == 5


@on_ranks(2)
def test_shard_fsdp_divides_the_modules_of_a_module_dict(rank):
    assert_divided(TakesParts(), ["parts.first", "parts.second"])


def within(*flags: str) -> dict[str, str]:
    """How each level of training ends under a memory limit."""
    [(status, said)] = command("beyond/shard/memory_limit.py", *flags)
    assert status == 0, said
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines()[2:]}


def test_shard_four_ranks_that_cannot_train_with_ddp_can_with_fsdp():
    """The page runs it on two. The control: with 100 MiB more, DDP trains, too."""
    ends = within("--ranks=4", "--limit-mib=120")
    assert ends["DDP"].startswith("ends: can't allocate memory")
    assert ends["FSDP"].startswith("trains: losses")
    assert within("--limit-mib=265", "--levels=none")["DDP"].startswith("trains: losses")


def test_shard_what_the_script_does_not_teach_is_stage_04s():
    sharded, stage_04 = ((FOLDERS[key] / "train.py").read_text() for key in ("shard", "04"))
    assert "join_process_group" in functions(sharded)
    assert different_functions(sharded, stage_04) == {"train_epoch", "evaluate", "main"}
