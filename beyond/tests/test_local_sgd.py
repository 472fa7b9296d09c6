"""Local SGD: with H = 1 it is DDP, its rounds are those of plain lists, its bytes those counted."""

import socket
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from common.chapters import load_chapter
from helpers.local_ranks import gather_from_ranks, launch_function, on_ranks
from helpers.refusals import ended, refused
from helpers.stage_files import chapter, fresh_module

timing = load_chapter("benchmarks", "timing")

LOCAL_SGD, ASYNC_MEAN = "local_sgd.py", "async_mean.py"
local, async_mean = chapter("local_sgd", "local_sgd"), chapter("local_sgd", "async_mean")
step_model, forecast, gradient_order = (
    chapter("forecast", name) for name in ("step_model", "forecast", "gradient_order")
)
START_MEAN_IN = async_mean.START_MEAN_IN
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
    """Of a rank, with a batch of its own."""
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


def changed_local_sgd(*change: str):
    """local_sgd.py and what it imports, with a changed line."""
    files = (ASYNC_MEAN, LOCAL_SGD)
    return [fresh_module("local_sgd", file, (change,), register=True) for file in files][-1]


SUM = (ASYNC_MEAN, "return total / dist.get_world_size()", "return total")
ALONE = (LOCAL_SGD, "wait: Wait | None = self.start_mean(change)", "wait = lambda: change")
STEPS = 8


def h_1_is_ddp(rank: int) -> None:
    once = {"every": 1, **MEAN}
    other_options = {"every": 2}, {"momentum": 0.9}, {"lr": 0.7}, {"late": True}
    for make_optimizer in (plain_sgd, momentum_sgd):
        ddp = by_ddp(make_optimizer, STEPS)
        assert distance(by_local_sgd(make_optimizer, STEPS, **once), ddp) < 1e-12
        for other in other_options:
            control = by_local_sgd(make_optimizer, STEPS, **{**once, **other})
            assert distance(control, ddp) > 1e-3, other
        for change in (SUM, ALONE):
            control = by_local_sgd(make_optimizer, STEPS, changed_local_sgd(*change), **once)
            assert distance(control, ddp) > 1e-3, change
    # The mean of linear steps is the step of the mean. Adam's step is not linear.
    assert distance(by_local_sgd(adam_w, STEPS, **once), by_ddp(adam_w, STEPS)) > 1e-3


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
            reached = by_local_sgd(momentum_sgd, sum(rounds), every=3, late=late, **outer_step)
            assert distance(reached, expected[late]) < 1e-12
            assert distance(reached, expected[not late]) > 1e-3, "the control: the other one"
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


def numbers(rank: int) -> torch.Tensor:
    """Some chunks, each a hundred times as small as the one before; the last is not full."""
    scales = (10.0 ** (-2 * torch.arange(5))).repeat_interleave(async_mean.CHUNK)
    values = torch.randn(len(scales), generator=torch.Generator().manual_seed(rank))
    return (values * scales)[:-100]


def worst_of_a_chunk(mean: torch.Tensor, exact_mean: torch.Tensor) -> float:
    """The largest error of a chunk, in units of its largest number."""
    chunks = zip(mean.split(async_mean.CHUNK), exact_mean.split(async_mean.CHUNK), strict=True)
    return max(((chunk - exact).abs().max() / exact.abs().max()).item() for chunk, exact in chunks)


@on_ranks(3)
def test_a_mean_has_the_digits_of_its_message_and_the_same_bits_on_all_ranks(rank):
    exact_mean = sum(numbers(each).double() for each in range(3)) / 3
    errors = {}
    for message, start_mean in START_MEAN_IN.items():
        mean = start_mean(numbers(rank))()
        errors[message] = worst_of_a_chunk(mean, exact_mean)
        assert all(torch.equal(mean, other) for other in gather_from_ranks(mean)), message
    assert errors["full"] < 1e-6 < 1e-4 < errors["bf16"] < 0.01 < 0.02
    assert errors["full"] < errors["int8"] < 0.02
    one_scale = ((ASYNC_MEAN, "CHUNK = 1024", "CHUNK = 8192"),)
    control = fresh_module("local_sgd", ASYNC_MEAN, one_scale).start_mean_in_int8(numbers(rank))()
    assert worst_of_a_chunk(control, exact_mean) > 0.5, "the control: small chunks are lost"


@on_ranks(2)
def test_a_mean_in_int8_of_what_has_diverged_does_not_look_healthy(rank):
    diverged, healthy = numbers(rank), numbers(rank)
    diverged[7] = torch.nan if rank == 1 else 0
    assert async_mean.start_mean_in_int8(diverged)().isnan().any()
    assert not async_mean.start_mean_in_int8(healthy)().isnan().any(), "the control"


def start_mean_in_everyones_int8(change: torch.Tensor):
    """The naive way: each rank receives all bytes of all ranks."""
    padding = -len(change) % async_mean.CHUNK
    message = async_mean.to_bytes(F.pad(change, (0, padding)).view(1, -1, async_mean.CHUNK))
    all_messages = message.expand(dist.get_world_size(), -1, -1).contiguous()
    work = async_mean.all_gather_single(all_messages, message, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return async_mean.from_bytes(all_messages).mean(dim=0).flatten()[: len(change)]

    return wait


def received_bytes() -> int:
    """Over TCP, by this process so far, as Linux counts it; see `man 7 tcp`.

    In the means below, a rank receives as many as it sends. But what is lost on a busy machine is
    sent again, and received once.
    """
    total = 0
    for path in Path("/proc/self/fd").glob("*"):
        if not path.is_socket():
            continue
        connection = socket.socket(fileno=int(path.name))
        if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
            tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (received,) = struct.unpack_from("Q", tcp_info, 128)  # tcpi_bytes_received, linux/tcp.h
            total += received
        connection.detach()  # it stays open, because it is not ours
    return total


NUMBERS = 400_000
NAIVE = "int8 of everyone"


def count_bytes(rank: int) -> dict[str, int]:
    """What a rank receives for each mean."""
    dist.init_process_group("gloo")
    counted = {}
    for message, start_mean in {**START_MEAN_IN, NAIVE: start_mean_in_everyones_int8}.items():
        before = received_bytes()
        dist.barrier()  # no rank sends before all have counted
        start_mean(torch.randn(NUMBERS))()
        counted[message] = received_bytes() - before
    dist.barrier()  # a rank that ends closes its connections, which others still count
    return counted


@linux
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_linux_counts_the_bytes_that_the_formula_says(ranks):
    """On 8 ranks, everyone's int8 is as long as fp32, and the two halves send a quarter of it."""
    for counted in launch_function(ranks, count_bytes):
        for message in START_MEAN_IN:
            expected = async_mean.sent_bytes(message, NUMBERS, ranks)
            assert counted[message] == pytest.approx(expected, rel=0.02), message
        assert counted["full"] > 1.9 * counted["bf16"] > 1.9 * 1.9 * counted["int8"], "the controls"
        assert (counted[NAIVE] > 0.98 * counted["full"]) == (ranks == 8)


def test_a_step_on_paper_shares_one_ring_all_reduce_among_h_steps():
    paper, seconds = chapter("forecast", "step_model"), 0.3
    computed = slowdowns(seconds, gbit=0.2)
    parameters = sum(p.numel() for p in torchvision.models.resnet18().parameters())
    all_reduce = paper.ring(4 * parameters, 2, paper.Link(50e-6, 25e6))
    for every in (8, 32):
        for message, share in (("fp32", 1), ("bf16", 1 / 2), ("int8", 1 / 4)):
            sending = (computed[f"H = {every}, {message}"] - 1) * seconds
            assert every * sending == pytest.approx(share * all_reduce, rel=0.01)


@pytest.mark.parametrize("options", [{"message": "fp8", "every": 1}, {"every": 0}])
def test_options_that_would_send_nothing_are_refused(options):
    with pytest.raises(ValueError, match=r"expected message one of full, bf16, int8, and every at"):
        local.LocalSGD(small(), **options)


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "one rank talks to nobody: start two"), (("--every=1",), "--every: got '1'")],
)
def test_a_wrong_call_ends_in_one_line(flags, words):
    refused(ended(f"beyond/local_sgd/{LOCAL_SGD}", *flags), words)


def slowdowns(seconds: float, gbit: float) -> dict[str, float]:
    """What step_model.py says of this link: a step of resnet18 on 2 ranks over its computing."""
    link = step_model.Link(50e-6, gbit * forecast.GBIT)
    all_reduce = partial(step_model.ring, ranks=2, link=link)  # of so many bytes: its seconds
    buckets = gradient_order.fill_buckets(gradient_order.gradients_of_classifier("resnet18", 64))
    job = step_model.Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    slowdown = {"DDP": step_model.step(job, all_reduce).seconds / seconds}
    numbers = int(sum(bucket.size for bucket in buckets) / 4)
    for message, name in (("full", "fp32"), ("bf16", "bf16"), ("int8", "int8")):
        for every in (8, 32):
            sending = all_reduce(async_mean.sent_bytes(message, numbers, ranks=2))
            slowdown[f"H = {every}, {name}"] = 1 + sending / every / seconds
    return slowdown


def test_the_page_says_what_was_measured():
    """Beside DDP on the same samples, by seed; and the time of a step over one without messages."""
    learned = timing.load("local_sgd")["trainings"]
    assert {(t["model"], t["ranks"]) for t in learned} == {
        (model, ranks) for model in ("net-bn", "resnet18") for ranks in (2, 4)
    }
    for training in learned:
        rows = training["methods"]
        for name in (n for n in rows if "H = 32" in n and "late" not in n):
            assert abs(rows[name]["points"]) < rows[name]["points_stdev"], (training["model"], name)
        for name in ("never", "mean, H = 32, late")[: 2 if training["ranks"] == 4 else 1]:
            assert rows[name]["points"] < -rows[name]["points_stdev"], "the controls fall out of it"
    for link in timing.load("local_sgd_links")["links"].values():
        variants, gbit = link["variants"], link["gbit_per_second"]
        assert variants["A/A"]["ratio"] == pytest.approx(1, abs=0.03), "the machine was quiet"
        computed = slowdowns(variants["no messages"]["step_ms"] / 1000, gbit)
        assert link["computed"] == pytest.approx(computed, abs=1e-4)
        measured = {name: variants[name]["ratio"] for name in computed if name in variants}
        assert len(measured) == 5
        assert all(measured[name] == pytest.approx(computed[name], rel=0.1) for name in measured)
        most = {0.2: 1.35, 1: 1.1}[gbit]
        assert all(each < most for name, each in measured.items() if "H = 32" in name)
        assert measured["DDP"] > 2, "the control"
