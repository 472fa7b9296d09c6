"""Each reducer gives the mean, whatever the model and the loop; a rank that dies is named."""

import gc
import os
import signal
import tempfile
import time
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.options import UsageError, make_parser
from support import ROOT, Line, chapter, default_dtype, load_stage, run_ranks, train_once
from test_collectives import of_all_ranks, on_ranks

NAMES = ("per-parameter", "flat", "bucketed", "ring", "shared-memory")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def new(name, model):
    return chapter("03", "reducers").REDUCERS[name](model)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight  # tied
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.rare = nn.Linear(6, 6)  # used for some samples only
        self.never = nn.Linear(6, 6)  # of no use
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
    optimizer, seen = torch.optim.SGD(trained, 0.05, 0.9, fused=True), []
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(2):
            x, rare = (t.chunk(ranks)[rank] for t in batches(step, micro))
            with reducer.no_sync() if reducer and micro == 0 else nullcontext():
                (model(x, rare).square().mean() / 2).backward()
        if reducer:
            reducer.finish()
        both = [tensor for p in model.parameters() for tensor in (p.grad, p)]
        seen += [tensor if tensor is None else tensor.detach().clone() for tensor in both]
        optimizer.step()
    return seen


def close(ours: list, truth: list) -> bool:
    return all(
        (a is None) == (b is None) and (b is None or (a - b).abs().max() <= TOLERANCE[b.dtype])
        for a, b in zip(ours, truth, strict=True)
    )


def _reduced(rank: int, ranks: int, without: tuple[Line, ...]) -> None:
    """All reducers in one process group; every rank begins with weights and a buffer of its own."""
    load_stage("03", without)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name, set_to_none in product(NAMES, (True, False)):
        model = mixed(seed=rank)
        reducer = new(name, model)
        ours = train_and_record(model, rank, ranks, set_to_none, reducer)
        truth = train_and_record(mixed(0), 0, 1, set_to_none)
        assert close(ours, truth), name
        alone = train_and_record(mixed(0), 0, ranks, set_to_none)
        assert close(alone, truth) == (ranks == 1), "the control: without a reducer"
        assert torch.equal(model.shift, mixed(0).shift), "of rank 0"
        first, *others = of_all_ranks([parameter.tolist() for parameter in model.parameters()])
        assert all(other == first for other in others), "the same bits on all ranks"
        reducer.close()


def test_03_reducers_do_what_one_process_does(without=()):
    for ranks in (2, 3, 1):
        run_ranks(ranks, _reduced, ranks, without)


def _late_gradient(rank: int, without: tuple[Line, ...]) -> list:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    load_stage("03", without)
    parameter = nn.Parameter(torch.zeros(4))
    reducer = new("shared-memory", nn.ParameterList([parameter]))
    time.sleep(0.3 * rank)
    (parameter * (rank + 1)).sum().backward()
    reducer.finish()
    dist.barrier()
    return parameter.grad.tolist()


def test_03_shared_memory_waits_for_the_gradients_of_a_late_rank(without=()):
    assert run_ranks(2, _late_gradient, without) == [[1.5] * 4] * 2


def _train(rank: int, *flags: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    reducers = chapter("03", "reducers")
    reducers.REDUCERS["none"] = type("Idle", (reducers.Flat,), {"finish": lambda self: None})
    args = make_parser("03", "").parse_args([f"--data-dir={ROOT / 'data'}", *flags])
    return {name: reducers.train(name, args) for name in reducers.REDUCERS}


def test_only_training_with_a_reducer_gives_the_losses_of_train_py_and_to_the_bit():
    """reducers.md trains with one of them, and test_readmes.py runs that."""
    flags = ("--epochs=2", "--batch-size=500")
    expected = train_once("03", 2, *flags, dtype=torch.float32).losses.tolist()
    found, _ = run_ranks(2, _train, *flags)
    assert [name for name, losses in found.items() if losses == expected] == list(NAMES)


def test_a_bucket_is_closed_as_soon_as_it_holds_its_size():
    """The first at 1 MiB, the others at 25 MiB, each of one dtype; the last layer comes first."""
    kinds = [torch.float64] * 2 + [torch.float32] * 28
    sizes = [{"size": (2**20 // kind.itemsize,), "dtype": kind} for kind in kinds]
    parameters = [nn.Parameter(torch.empty(**size, device="meta")) for size in sizes]
    number = {parameter: place for place, parameter in enumerate(parameters)}
    groups = [[number[p] for p in group] for group in chapter("03", "buckets").by_size(parameters)]
    assert groups == [[29], list(range(28, 3, -1)), [3, 2], [1, 0]]


@on_ranks(2)
def test_after_an_exception_in_no_sync_and_after_close_all_is_as_before(rank):
    new("flat", nn.Linear(3, 2)).close()
    nn.Linear(3, 2)(torch.ones(1, 3)).sum().backward()  # whatever is opened only once is open now
    for name in NAMES:
        before, model = len([*Path("/proc/self").glob("fd/*")]), nn.Linear(3, 2)
        reducer = new(name, model)
        with suppress(ZeroDivisionError), reducer.no_sync(), reducer.no_sync():
            raise ZeroDivisionError
        assert reducer.synchronizing
        reducer.close()
        reducer.close()
        for _ in range(3):  # a hook that is still there would refuse the second
            model(torch.ones(1, 3)).sum().backward()
        assert model.bias.grad.tolist() == [3.0, 3.0]
        del reducer, model  # a mapped file stays open as long as a tensor lies in it
        gc.collect()
        assert len([*Path("/proc/self").glob("fd/*")]) == before, name


@on_ranks(2)
def test_a_bucket_refuses_sparse_gradients_and_a_second_backward_without_no_sync(rank):
    for name in ("bucketed", "shared-memory"):
        model = nn.Linear(3, 2)
        new(name, model)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
            model(torch.ones(1, 3)).sum().backward()
    for name in NAMES[1:]:
        words = nn.Embedding(5, 2, sparse=True)
        reducer = new(name, words)
        with pytest.raises(UsageError, match="sparse"):  # noqa: PT012
            words(torch.tensor([1])).sum().backward()
            reducer.finish()


@on_ranks(2)
def test_models_that_differ_between_ranks_or_train_nothing_are_refused_on_all_of_them(rank):
    frozen, turned = nn.Linear(3, 2), nn.Linear(3, 2)
    frozen.bias.requires_grad_(rank == 0)
    turned.weight = nn.Parameter(torch.randn(3, 2).T if rank else torch.randn(2, 3))
    longer = nn.Sequential(*(nn.Linear(3, 3) for _ in range(1 + rank)))
    models = {
        nn.Linear(3, 2 + rank): "weight [3, 3] F32, trained where rank 0 has weight [2, 3]",
        longer: "1.weight [3, 3] F32, trained where rank 0 has nothing",
        frozen: "bias [2] F32 where rank 0 has bias [2] F32, trained",
        nn.BatchNorm1d(1 + rank, affine=False): "running_mean [2] F32 where rank 0 has running_",
        [nn.Linear(3, 2), nn.Linear(3, 2).double()][rank]: "weight [2, 3] torch.float64 cpu, trai",
        turned: "weight [2, 3] F32, strides [1, 2], trained where rank 0 has weight [2, 3] F32,",
        nn.Linear(2, 2).requires_grad_(False): "the model has no parameter that is trained",
    }
    for (model, words), name in product(models.items(), NAMES):
        with pytest.raises(UsageError) as caught:
            new(name, model)
        said = str(caught.value).replace("torch.float32 cpu", "F32")
        assert said.removeprefix("rank 1 has ").startswith(words)


def _death(rank: int, name: str, moment: str) -> str | None:
    """Rank 1 dies, rank 2 notices and ends, and only then rank 0 comes."""
    dist.init_process_group("gloo", rank=rank, world_size=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600))
    reducer = new(name, model)
    try:
        for step in range(4):
            if (rank, step, moment) == (1, 2, "before backward"):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 4)).sum().backward()
            if (rank, step, moment) == (1, 2, "before finish"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.4 if (rank, step) == (0, 2) else 0)
            reducer.finish()
    except RuntimeError as error:
        return str(error)
    return None


DEATHS = [*((name, "before finish") for name in NAMES), ("bucketed", "before backward")]


@pytest.mark.parametrize(("name", "moment"), [*DEATHS, ("flat", "never")])
def test_a_rank_that_dies_is_named_by_the_others(name, moment):
    died = [f"rank 1 died while rank {rank} waited for it" for rank in (0, 2)]
    expected = [None] * 3 if moment == "never" else [died[0], None, died[1]]
    assert run_ranks(3, _death, name, moment, dying=(1,)) == expected


@on_ranks(2)
def test_a_rank_that_ends_a_step_early_or_does_not_come_is_named(rank):
    memory = chapter("03", "shared_memory")
    ends, sleeps = memory.Segment(8), memory.Segment(8, seconds=0.3)
    if rank == 1:
        ends.close()  # and lives, and posts nothing
    else:
        with pytest.raises(RuntimeError, match=r"ranks \[1\] ended while rank 0 waited for them"):
            ends.wait(memory.READY, 1)
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] are more than 0.3 s late"):
            sleeps.wait(memory.READY, 1)
    dist.barrier()


@on_ranks(2)
def test_memory_is_shared_where_there_is_no_memfd_and_not_between_machines(rank):
    memory = chapter("03", "shared_memory")
    here = mock.patch.object(tempfile, "tempdir", os.getcwd())
    with here, mock.patch.object(os, "memfd_create", create=True):
        del os.memfd_create
        segment = memory.Segment(16)
    numbers = segment.tensor(torch.int64, (2,), 0)
    numbers[rank] = rank + 5
    segment.post(memory.READY, 1)
    segment.wait(memory.READY, 1)
    assert numbers.tolist() == [5, 6]
    assert list(Path().glob("ranks-*")) == []
    said = r"ranks \[1\] cannot see the memory of rank 0: run all on"
    elsewhere = mock.patch.object(os.path, "realpath", return_value="another")
    with elsewhere, pytest.raises(UsageError, match=said):
        memory.Segment(16)


LENGTHS, DTYPES = (0, 1, 2, 3, 7, 64, 10_007), (torch.float64, torch.float16, torch.bfloat16)


def numbers(length: int, rank: int) -> torch.Tensor:
    return torch.arange(length).remainder(50) + rank  # their sums are exact in all dtypes


def _ring(rank: int, n: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=n)
    ring = chapter("03", "ring")
    ring.PIECE = 4096
    with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
        for length, dtype in product(LENGTHS, DTYPES):
            isend.reset_mock()
            ours = numbers(length, rank).to(dtype)
            sent = ring.ring_all_reduce(ours)
            assert torch.equal(ours, sum(numbers(length, each) for each in range(n)).to(dtype))
            # Twice round, without the chunk that it completes itself, and the next one's.
            laps, chunks = product(range(2), range(n - 1)), ours.tensor_split(n)
            sizes = [chunks[(rank + lap - step) % n].nbytes for lap, step in laps]
            assert sent == sum(sizes)
            assert isend.call_count == sum(-(-size // 4096) for size in sizes), "in pieces"
    ring.all_reduce(ours := torch.full((5, 3, 2), rank))
    assert ours.unique().tolist() == [sum(range(n))]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_ring_sums_any_length_and_dtype_and_sends_2_n_minus_1_nths_in_pieces(n):
    run_ranks(n, _ring, n)


@on_ranks(2)
def test_the_ring_refuses_unequal_tensors_on_every_rank(rank):
    f32, ring = "torch.float32", chapter("03", "ring")
    with pytest.raises(UsageError, match=rf"1 has \[4\] {f32} where rank 0 has \[3\] {f32}"):
        ring.all_reduce(torch.ones(3 + rank))
    with pytest.raises(UsageError, match=rf"1 has \[3\] {f32} with gaps where rank 0 has \[3\] t"):
        ring.all_reduce(torch.ones(6)[:: 1 + rank][:3])
    with pytest.raises(UsageError, match=r"without gaps: try .contiguous\(\)"):
        ring.all_reduce(torch.ones(6)[::2])
