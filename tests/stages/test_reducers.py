"""Each reducer gives every rank the mean gradients, whatever the model and the loop.

The oracle is one float64 process that trains on the whole batch. The ring has tests of its own.
"""

from functools import cache
from importlib import import_module
from inspect import signature
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compare
import reducers
import ring
from helpers.on_ranks import gather_from_ranks, on_ranks, run_on_ranks
from helpers.small_data import few_digits
from local_ranks.machine import scratch_folder
from local_ranks.run_files import Run
from local_ranks.stage_files import Change
from local_ranks.train_stage import default_dtype, load_stage, run_main, train_once

NAMES = ("per-parameter", "flat", "bucketed", "ring")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def new_reducer(name, model):
    return import_module("reducers").REDUCERS[name](model)  # the changed one, if there is one


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight  # tied
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.rare = nn.Linear(6, 6)  # used for some samples only
        self.never = nn.Linear(6, 6)  # forward does not use it
        self.filters = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.part = nn.Parameter(torch.randn(4, 9)[:, 2:8])  # with gaps
        self.single = nn.Parameter(torch.randn(6, dtype=torch.float32))
        self.brief = nn.Parameter(torch.randn(6).to(torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor, rare: torch.Tensor) -> torch.Tensor:
        """x: (B, 6); rare: (B,), which samples pass through the layer that others do not use."""
        y = self.decode(torch.tanh(self.frozen(self.encode(x)))) * self.scalar + self.shift
        y = y + self.filters(x.view(-1, 2, 3, 1) * x.view(-1, 2, 1, 3)).mean((2, 3)) @ self.part
        if rare.any():
            y = y + rare[:, None] * self.rare(x)
        # Side by side: what is rounded in one must not leak into the float64 of another.
        return torch.cat([y, x * self.single.double(), x * self.brief.double()], dim=1)


def mixed(seed: int) -> Mixed:
    torch.manual_seed(seed)
    with default_dtype(torch.float64):
        return Mixed()


def batches(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch. `rare` is used in the first third of it, nowhere, in the last, everywhere."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(9 * step + micro))
    rare = torch.zeros(12)
    if micro == 0:  # so that the backward that averages does not see it
        rare[[slice(0, 4), slice(0, 0), slice(8, 12), slice(None), slice(0, 0)][step]] = 1
    return x.double(), rare.double()


def train_and_record(model, rank: int, ranks: int, set_to_none: bool, reducer=None) -> list:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, snapshots = torch.optim.SGD(trained, 0.05, 0.9, fused=True), []
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(2):
            x, rare = (t.chunk(ranks)[rank] for t in batches(step, micro))
            if reducer:
                reducer.synchronize = micro == 1  # only `bucketed` looks at it
            (model(x, rare).square().mean() / 2).backward()
        if reducer:
            reducer.finish()
        tensors = [tensor for p in model.parameters() for tensor in (p.grad, p)]
        snapshots += [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        optimizer.step()
    return snapshots


def is_close(actual: list, expected: list) -> bool:
    return all(
        (a is None) == (b is None) and (b is None or (a - b).abs().max() <= TOLERANCE[b.dtype])
        for a, b in zip(actual, expected, strict=True)
    )


def check_all_reducers(rank: int, ranks: int, changes: tuple[Change, ...]) -> None:
    """All reducers in one process group; every rank begins with weights and a buffer of its own."""
    load_stage("03", changes)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name, set_to_none in product(NAMES, (True, False)):
        model = mixed(seed=rank)
        reducer = new_reducer(name, model)
        actual = train_and_record(model, rank, ranks, set_to_none, reducer)
        expected = train_and_record(mixed(0), 0, 1, set_to_none)
        assert is_close(actual, expected), name
        alone = train_and_record(mixed(0), 0, ranks, set_to_none)
        assert is_close(alone, expected) == (ranks == 1), "the control: without a reducer"
        assert torch.equal(model.shift, mixed(0).shift), "of rank 0"
        first, *others = gather_from_ranks([parameter.tolist() for parameter in model.parameters()])
        assert all(other == first for other in others), "the same bits on all ranks"


def test_03_reducers_do_what_one_process_does(changes=()):
    for ranks in (2, 3, 1):
        run_on_ranks(ranks, check_all_reducers, ranks, changes)


def train_with(rank: int, name: str, *flags: str) -> None:
    """Stage 03, but its average_gradients calls this reducer."""
    stage = load_stage("03")
    make = reducers.REDUCERS.get(name)
    reducer_of = cache(make or (lambda model: mock.Mock()))
    stage.average_gradients = lambda model: reducer_of(model).finish()
    run_main(stage, rank, *flags)


def losses_of_stage_03(name: str, *flags: str) -> list[float]:
    folder = scratch_folder()
    where = ("--device=cpu", f"--run-dir={folder}", "--world-size=2")
    run_on_ranks(2, train_with, name, *where, *flags)
    return Run(folder, [], "").losses.tolist()


def test_stage_03_learns_the_same_to_the_bit_with_each_reducer():
    flags = (*few_digits(), "--epochs=1", "--batch-size=60")
    expected = train_once("03", 2, *flags, dtype=torch.float32).losses.tolist()
    for name in NAMES:
        assert losses_of_stage_03(name, *flags) == expected, name
    assert losses_of_stage_03("none", *flags) != expected, "the control"


NEEDS_BATCHED_COPIES = pytest.mark.skipif(
    "batched_grad_copy" not in signature(DistributedDataParallel).parameters,
    reason="batched_grad_copy is new in torch 2.14",
)


@NEEDS_BATCHED_COPIES
@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks()
def test_batched_copies_divide_and_ddp_multiplies_so_three_ranks_round_otherwise(rank, world_size):
    gradients = []
    for options in ({}, {"batched_grad_copy": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 6))
        torch.manual_seed(rank)
        ddp, batch = DistributedDataParallel(model, **options), torch.randn(8, 6)
        for _ in range(2):  # after the first backward, DDP lays out its buckets again
            model.zero_grad()
            ddp(batch).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    pairs = [*zip(*gradients, strict=True)]
    assert all(torch.allclose(batched, plain, 1e-5, 1e-8) for plain, batched in pairs)
    assert all(torch.equal(plain, batched) for plain, batched in pairs) == (world_size != 3)


def test_a_bucket_is_closed_as_soon_as_it_holds_its_size():
    """The first at 1 MiB, the others at 25 MiB, each of one dtype; the last layer comes first."""
    kinds = [torch.float64] * 2 + [torch.float32] * 28
    sizes = [{"size": (2**20 // kind.itemsize,), "dtype": kind} for kind in kinds]
    parameters = [nn.Parameter(torch.empty(**size, device="meta")) for size in sizes]
    number = {parameter: place for place, parameter in enumerate(parameters)}
    groups = reducers.cut_into_buckets(parameters, reducers.FIRST_BYTES, reducers.BUCKET_BYTES)
    members_of_buckets = [[number[parameter] for parameter in members] for members in groups]
    assert members_of_buckets == [[29], list(range(28, 3, -1)), [3, 2], [1, 0]]


@on_ranks(2)
def test_the_first_bucket_is_on_its_way_while_most_gradients_are_still_to_come(rank):
    first, *_, last = compare.watch_backward(rank)
    assert first[-1] > 50
    assert last[-1] == 0, "the control: the last bucket can overlap with nothing"


@on_ranks(2)
def test_a_second_backward_before_finish_is_refused(rank):
    model = nn.Linear(3, 2)
    reducer = new_reducer("bucketed", model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="second backward before finish"):
        model(torch.ones(1, 3)).sum().backward()
    reducer.finish()


LENGTHS, DTYPES = (0, 1, 2, 3, 7, 64, 10_007), (torch.float64, torch.float16, torch.bfloat16)


def numbers(length: int, rank: int) -> torch.Tensor:
    return torch.arange(length).remainder(50) + rank  # sums are exact in all dtypes


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@on_ranks()
def test_the_ring_sums_any_length_and_dtype_and_sends_2_n_minus_1_nths_in_pieces(rank, world_size):
    n = world_size
    ring.PIECE_BYTES = 4096
    with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
        for length, dtype in product(LENGTHS, DTYPES):
            isend.reset_mock()
            total = numbers(length, rank).to(dtype)
            sent = ring.ring_all_reduce(total)
            assert torch.equal(total, sum(numbers(length, each) for each in range(n)).to(dtype))
            # Twice round, without the chunk that it completes itself, and the next one's.
            laps, chunks = product(range(2), range(n - 1)), total.tensor_split(n)
            sizes = [chunks[(rank + lap - step) % n].nbytes for lap, step in laps]
            assert sent == sum(sizes)
            assert isend.call_count == sum(-(-size // 4096) for size in sizes), "in pieces"
    ring.ring_all_reduce(total := torch.full((5, 3, 2), rank))
    assert total.unique().tolist() == [sum(range(n))]
