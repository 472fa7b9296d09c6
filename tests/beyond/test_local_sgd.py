"""Local SGD: with H = 1 it is DDP, its rounds are those of plain lists, its bytes those counted."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import local_sgd as local
from helpers.on_ranks import gather_from_ranks, on_ranks, run_on_ranks
from helpers.refusals import assert_one_line, refusal
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module
from traffic import received_bytes

LOCAL_SGD = "local_sgd.py"
MEAN = {"lr": 1.0, "momentum": 0.0}
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a socket")


class Small(nn.Module):
    """Smooth, with BatchNorm, a frozen layer, and a weight that lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.linear = nn.BatchNorm2d(4), nn.Linear(64, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (B, 2, 4, 4) -> (B, 3)
        return self.frozen(torch.tanh(self.linear(self.norm(self.conv(images)).flatten(1))))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().double()


def one_step(model, optimizer, step: int, rank: int) -> None:
    """Make one step of a rank, with a batch of its own."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(6, 2, 4, 4, generator=generator).double()
    labels = torch.randint(3, (6,), generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


plain_sgd, adam_w = partial(SGD, lr=0.1), partial(AdamW, lr=0.01)
momentum_sgd = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def by_ddp(make_optimizer, steps: int) -> torch.Tensor:
    model = small(seed=dist.get_rank())  # it begins with rank 0's weights
    wrapped, optimizer = DistributedDataParallel(model), make_optimizer(model.parameters())
    for step in range(steps):
        one_step(wrapped, optimizer, step, dist.get_rank())
    return weights(model)


def by_local_sgd(
    make_optimizer, steps: int, module=local, finish: bool = True, **options
) -> torch.Tensor:
    model = small(seed=dist.get_rank())
    outer, optimizer = module.LocalSGD(model, **options), make_optimizer(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step, dist.get_rank())
        outer.step()
    if finish:
        outer.finish()
    return weights(model)


def distance(weights: torch.Tensor, other_weights: torch.Tensor) -> float:
    return (weights - other_weights).abs().max().item()


MEAN_OF_ALL = "message.to(change.dtype) / dist.get_world_size()"
SUM = (LOCAL_SGD, MEAN_OF_ALL, "message.to(change.dtype)")
ALONE = (LOCAL_SGD, MEAN_OF_ALL, "change")
STEPS = 8


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_c44_h_1_with_sgd_is_ddp(rank, world_size):
    """They agree to 1e-12 in float64, with and without momentum inside, which is linear as well."""
    once = {"every": 1, **MEAN}
    other_options = {"every": 2}, {"momentum": 0.9}, {"lr": 0.7}
    for make_optimizer in (plain_sgd, momentum_sgd):
        ddp = by_ddp(make_optimizer, STEPS)
        assert distance(by_local_sgd(make_optimizer, STEPS, **once), ddp) < 1e-12
        for other in other_options:
            control = by_local_sgd(make_optimizer, STEPS, **{**once, **other})
            assert distance(control, ddp) > 1e-3, other
        for change in (SUM, ALONE):
            changed = fresh_module(LESSON_FOLDERS["local_sgd"] / LOCAL_SGD, (change,))
            control = by_local_sgd(make_optimizer, STEPS, changed, **once)
            assert distance(control, ddp) > 1e-3, change
    # The mean of linear steps is the step of the mean. Adam's step is not linear.
    assert distance(by_local_sgd(adam_w, STEPS, **once), by_ddp(adam_w, STEPS)) > 1e-3


def in_one_process(ranks: int, rounds: list[int], lr: float, momentum: float):
    """The weights that all ranks end with: the same rounds with plain lists and no messages."""
    models = [small() for _ in range(ranks)]
    optimizers = [momentum_sgd(model.parameters()) for model in models]
    shared, velocity, step = weights(models[0]), 0.0, 0
    for steps in rounds:
        for _ in range(steps):
            for rank in range(ranks):
                one_step(models[rank], optimizers[rank], step, rank)
            step += 1
        mean = sum(shared - weights(model) for model in models) / ranks
        velocity = momentum * velocity + mean
        shared = shared - lr * (mean + momentum * velocity)  # Nesterov
        for model in models:
            trained = [p for p in model.parameters() if p.requires_grad]
            pieces = shared.split([p.numel() for p in trained])
            for parameter, piece in zip(trained, pieces, strict=True):
                parameter.data.copy_(piece.view_as(parameter))
    return shared


@on_ranks(3)
def test_rounds_are_those_of_plain_lists_with_a_last_short_one(rank):
    rounds, outer_steps = [3, 3, 3, 2], ({"lr": 0.7, "momentum": 0.9}, MEAN)
    expected = [in_one_process(3, rounds, **outer_step) for outer_step in outer_steps]
    for number, outer_step in enumerate(outer_steps):
        reached = by_local_sgd(momentum_sgd, sum(rounds), every=3, **outer_step)
        assert distance(reached, expected[number]) < 1e-12
        assert distance(reached, expected[1 - number]) > 1e-3, "the control: the other one"
    unfinished = by_local_sgd(momentum_sgd, sum(rounds), finish=False, every=3, **MEAN)
    assert distance(unfinished, gather_from_ranks(unfinished)[rank - 1]) > 1e-3, "the control"


@on_ranks(2)
def test_batch_norm_keeps_its_own_statistics_until_the_end_and_the_ranks_then_share_the_mean(rank):
    model = small()
    outer, optimizer = local.LocalSGD(model, every=2), momentum_sgd(model.parameters())
    for step in range(4):
        one_step(model, optimizer, step, rank)
        outer.step()
    own = gather_from_ranks({name: buffer.clone() for name, buffer in model.named_buffers()})
    first_mean, second_mean = (buffers["norm.running_mean"] for buffers in own)
    assert distance(first_mean, second_mean) > 1e-3, "a round is over"
    outer.finish()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, (own[0][name] + own[1][name]) / 2), name
    first, second = gather_from_ranks({name: t.clone() for name, t in model.state_dict().items()})
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_ranks(2)
def test_messages_in_bf16_leave_the_same_bits_on_all_ranks_and_few_digits(rank):
    exact, in_bf16 = (
        by_local_sgd(momentum_sgd, STEPS, every=2, **MEAN, dtype=dtype)
        for dtype in (None, torch.bfloat16)
    )
    assert 1e-6 < distance(in_bf16, exact) < 1e-3
    assert all(torch.equal(in_bf16, other) for other in gather_from_ranks(in_bf16))


NUMBERS = 400_000
BYTES_EACH = {torch.float32: 4, torch.bfloat16: 2}


def count_bytes(rank: int) -> dict[torch.dtype, int]:
    """What a rank receives for each mean of so many weights."""
    dist.init_process_group("gloo")
    counted = {}
    for dtype in BYTES_EACH:
        outer = local.LocalSGD(nn.ParameterList([torch.randn(NUMBERS)]), every=1, dtype=dtype)
        dist.barrier()  # the weights of rank 0 have arrived everywhere
        before = received_bytes()
        dist.barrier()  # no rank sends before all have counted
        outer.step()
        counted[dtype] = received_bytes() - before
    dist.barrier()  # a rank that ends closes its connections, which others still count
    return counted


@linux
@pytest.mark.parametrize("ranks", [2, 3])
def test_linux_counts_the_bytes_that_the_formula_says(ranks):
    """The control: a mean in bf16 is half as long."""
    for counted in run_on_ranks(ranks, count_bytes):
        for dtype, bytes_each in BYTES_EACH.items():
            expected = local.sent_bytes(NUMBERS, bytes_each, ranks)
            assert counted[dtype] == pytest.approx(expected, rel=0.02), dtype


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "one rank talks to nobody: start two"), (("--every=1",), "--every: got '1'")],
)
def test_a_wrong_call_ends_in_one_line(flags, words):
    assert_one_line(refusal(f"beyond/local_sgd/{LOCAL_SGD}", *flags), words)
