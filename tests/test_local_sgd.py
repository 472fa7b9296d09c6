"""Local SGD: with H = 1 it is DDP, its rounds are those of plain lists, its bytes those counted."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import timing
from local_ranks import of_all_ranks, on_ranks, run_ranks
from refusals import ended, refused
from support import chapter, fresh_module

FILE = "local_sgd.py"
local = chapter("04", "local_sgd")
MEAN = {"lr": 1.0, "momentum": 0.0}
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a socket")


class Small(nn.Module):
    """Smooth, with BatchNorm, a frozen layer, and a weight that lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.linear = nn.BatchNorm2d(4), nn.Linear(64, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 2, 4, 4) -> (B, 3)
        return self.frozen(torch.tanh(self.linear(self.norm(self.conv(x)).flatten(1))))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().double()


def one_step(model, optimizer, step: int, rank: int) -> None:
    """Of a rank, with a batch of its own."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 2, 4, 4, generator=generator).double()
    labels = torch.randint(3, (6,), generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def momentum_sgd(parameters):
    return SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)


def plain_sgd(parameters):
    return SGD(parameters, 0.1)


def adam_w(parameters):
    return AdamW(parameters, 0.01)


def by_ddp(make, steps: int) -> torch.Tensor:
    model = small(seed=dist.get_rank())  # it begins with rank 0's weights
    wrapped, optimizer = DistributedDataParallel(model), make(model.parameters())
    for step in range(steps):
        one_step(wrapped, optimizer, step, dist.get_rank())
    return weights(model)


def by_local_sgd(make, steps: int, module=local, finish: bool = True, **options) -> torch.Tensor:
    model = small(seed=dist.get_rank())
    outer, optimizer = module.LocalSGD(model, **options), make(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step, dist.get_rank())
        outer.step()
    if finish:
        outer.finish()
    return weights(model)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().item()


SUM = ((FILE, "return message / dist.get_world_size()", "return message"),)
ALONE = ((FILE, "wait: Wait | None = self.start_mean(change)", "wait = lambda: change"),)


def h_1_is_ddp(rank: int) -> None:
    once = {"every": 1, **MEAN}
    for make in (plain_sgd, momentum_sgd):
        ddp = by_ddp(make, 8)
        assert far(by_local_sgd(make, 8, **once), ddp) < 1e-12
        assert far(by_local_sgd(make, 8, **{**once, "late": True}), ddp) > 1e-3
        controls = {"every": 2}, {"momentum": 0.9}, {"lr": 0.7}
        for control in controls:
            assert far(by_local_sgd(make, 8, **{**once, **control}), ddp) > 1e-3, control
        for change in (SUM, ALONE):
            module = fresh_module("04", FILE, change)
            assert far(by_local_sgd(make, 8, module, **once), ddp) > 1e-3, change
    # The mean of linear steps is the step of the mean. Adam's step is not linear.
    assert far(by_local_sgd(adam_w, 8, **once), by_ddp(adam_w, 8)) > 1e-3


@on_ranks(2)
def test_c44_h_1_with_sgd_is_ddp_on_2_ranks(rank):
    """To 1e-12 in float64, with and without momentum inside, which is linear as well."""
    h_1_is_ddp(rank)


@on_ranks(3)
def test_c44_h_1_with_sgd_is_ddp_on_3_ranks(rank):
    h_1_is_ddp(rank)


def in_one_process(ranks: int, rounds: list[int], lr: float, momentum: float, late: bool):
    """The weights that all ranks end with: the same rounds with plain lists and no messages."""
    models = [small() for _ in range(ranks)]
    optimizers = [momentum_sgd(model.parameters()) for model in models]
    shared, velocity, waiting, step = weights(models[0]), 0.0, None, 0

    def outer_step(mean):
        nonlocal shared, velocity
        velocity = momentum * velocity + mean
        shared = shared - lr * (mean + momentum * velocity)  # Nesterov

    for steps in rounds:
        begins = [weights(model) for model in models]
        for _ in range(steps):
            for rank in range(ranks):
                one_step(models[rank], optimizers[rank], step, rank)
            step += 1
        changes = [begin - weights(m) for begin, m in zip(begins, models, strict=True)]
        mean = sum(changes) / ranks
        arrived, waiting = (waiting, mean) if late else (mean, None)
        if arrived is not None:
            outer_step(arrived)
        for model, change in zip(models, changes, strict=True):
            trained = [p for p in model.parameters() if p.requires_grad]
            pieces = (shared - late * change).split([p.numel() for p in trained])
            for parameter, piece in zip(trained, pieces, strict=True):
                parameter.data.copy_(piece.view_as(parameter))
    if waiting is not None:
        outer_step(waiting)
    return shared


@on_ranks(3)
def test_rounds_are_those_of_plain_lists_in_time_and_late_with_a_last_short_one(rank):
    rounds, outer_steps = [3, 3, 3, 2], ({"lr": 0.7, "momentum": 0.9}, MEAN)
    for outer_step in outer_steps:
        expected = [in_one_process(3, rounds, **outer_step, late=late) for late in (False, True)]
        for late in (False, True):
            ours = by_local_sgd(momentum_sgd, sum(rounds), every=3, late=late, **outer_step)
            assert far(ours, expected[late]) < 1e-12
            assert far(ours, expected[not late]) > 1e-3, "the control: the other one"
    unfinished = by_local_sgd(momentum_sgd, sum(rounds), finish=False, every=3, **MEAN)
    assert far(unfinished, of_all_ranks(unfinished)[rank - 1]) > 1e-3, "the control"


@on_ranks(2)
def test_batch_norm_keeps_its_own_statistics_until_the_end_and_the_ranks_then_share_the_mean(rank):
    model = small()
    outer, optimizer = local.LocalSGD(model, every=2), momentum_sgd(model.parameters())
    for step in range(4):
        one_step(model, optimizer, step, rank)
        outer.step()
    own = of_all_ranks({name: b.clone() for name, b in model.named_buffers()})
    assert far(own[0]["norm.running_mean"], own[1]["norm.running_mean"]) > 1e-3, "a round is over"
    outer.finish()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, (own[0][name] + own[1][name]) / 2), name
    first, second = of_all_ranks({name: t.clone() for name, t in model.state_dict().items()})
    assert all(torch.equal(first[name], second[name]) for name in first)


def numbers(rank: int) -> torch.Tensor:
    """Some chunks, each a hundred times as small as the one before; the last is not full."""
    scales = (10.0 ** (-2 * torch.arange(5))).repeat_interleave(local.CHUNK)
    values = torch.randn(len(scales), generator=torch.Generator().manual_seed(rank))
    return (values * scales)[:-100]


def worst_of_a_chunk(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error of a chunk, in units of its largest number."""
    pairs = zip(found.split(local.CHUNK), truth.split(local.CHUNK), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@on_ranks(3)
def test_a_mean_has_the_digits_of_its_message_and_the_same_bits_on_all_ranks(rank):
    truth = sum(numbers(each).double() for each in range(3)) / 3
    errors = {}
    for name, start_mean in local.MESSAGES.items():
        found = start_mean(numbers(rank))()
        errors[name] = worst_of_a_chunk(found, truth)
        assert all(torch.equal(found, other) for other in of_all_ranks(found)), name
    assert errors["full"] < 1e-6 < 1e-4 < errors["bf16"] < 0.01 < 0.02
    assert errors["full"] < errors["int8"] < 0.02
    one_scale = fresh_module("04", FILE, ((FILE, "CHUNK = 1024", "CHUNK = 8192"),))
    control = one_scale.start_mean_in_int8(numbers(rank))()
    assert worst_of_a_chunk(control, truth) > 0.5, "the control: small chunks are lost"
    broken = numbers(rank)
    broken[7] = torch.nan if rank == 1 else 0
    assert local.start_mean_in_int8(broken)().isnan().any(), (
        "what has diverged must not look healthy"
    )


def counted_bytes(rank: int, ranks: int) -> dict[str, tuple[int, float]]:
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found, length = {}, 400_000
    for name, start_mean in local.WAYS.items():
        before = local.sent_bytes()
        start_mean(torch.randn(length))()
        found[name] = local.sent_bytes() - before, local.expected_bytes(name, length, ranks)
    return found


@linux
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bytes_that_linux_counts_are_those_of_the_formulas(ranks):
    """On 8 ranks, everyone's int8 is as long as fp32, and the two halves send a quarter of it."""
    for found in run_ranks(ranks, counted_bytes, ranks):
        for name, (sent, expected) in found.items():
            assert sent == pytest.approx(expected, rel=0.02), name
        sizes = {name: sent for name, (sent, _) in found.items()}
        assert sizes["fp32"] > 1.9 * sizes["bf16"] > 1.9 * 1.9 * sizes["int8"], "the controls"
        assert (sizes[local.NAIVE] > 0.98 * sizes["fp32"]) == (ranks == 8)


def test_a_step_on_paper_shares_one_ring_all_reduce_among_h_steps():
    paper, numbers, seconds = chapter("04", "alpha_beta"), 11_000_000, 0.3
    link = paper.Link(1e-3, 25e6)
    whole = paper.ring(4 * numbers, 2, link)
    for every in (1, 8, 32):
        found = local.step_seconds("fp32", every, seconds, numbers, link)
        assert every * (found - seconds) == pytest.approx(whole)
        for way, share in (("bf16", 1 / 2), ("int8", 1 / 4)):  # the control: they are no fp32
            found = local.step_seconds(way, every, seconds, numbers, link)
            assert every * (found - seconds) == pytest.approx(share * whole, rel=0.01)


@pytest.mark.parametrize("options", [{"message": "fp8", "every": 1}, {"every": 0}])
def test_options_that_would_send_nothing_are_refused(options):
    with pytest.raises(ValueError, match=r"expected message one of full, bf16, int8, and every at"):
        local.LocalSGD(small(), **options)


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "one rank talks to nobody: start two"), (("--every=1",), "--every: got '1'")],
)
def test_a_wrong_call_ends_in_one_line(flags, words):
    refused(ended(f"04_ddp_torchrun/{FILE}", *flags), words)


def test_the_page_says_what_was_measured():
    """Beside DDP on the same samples, by seed."""
    learned = timing.load("04_local_sgd")["trainings"]
    assert {(t["model"], t["ranks"]) for t in learned} == {
        (model, ranks) for model in ("net-bn", "resnet18") for ranks in (2, 4)
    }
    for training in learned:
        rows = training["methods"]
        for name in (n for n in rows if "H = 32" in n and "late" not in n):
            assert abs(rows[name]["points"]) < rows[name]["points_stdev"], (training["model"], name)
        for name in ("never", "mean, H = 32, late")[: 2 if training["ranks"] == 4 else 1]:
            assert rows[name]["points"] < -rows[name]["points_stdev"], "the controls fall out of it"
