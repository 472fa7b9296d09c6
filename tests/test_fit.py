"""Stage 01's fit.py: what a step needs is rehearsed, found right by measuring, and advised on."""

import re
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import chapter, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.options import usage_errors_exit

ledger: Any = chapter("01", "ledger")
peak: Any = chapter("01", "peak")
fit: Any = chapter("01", "fit")

MIB = 2**20
LIKE_THIS = torch.backends.mkldnn.is_available() and (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
)
avx512 = pytest.mark.skipif(not LIKE_THIS, reason="without AVX-512, oneDNN's workspaces differ")
IMAGES = {"net": (28, 1), "net-bn": (28, 1), "resnet18": (64, 3), "resnet50": (64, 3)}
torch.set_num_threads(1)  # with more, oneDNN has workspaces for each thread


def plan(model="net", optimiser="sgd", device="cpu"):
    size, channels = IMAGES[model]
    return peak.Plan(model, size, optimiser, device, channels)


def allocations():
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    second = torch.empty(MIB, dtype=torch.uint8)
    del first
    return second, torch.empty(2 * MIB, dtype=torch.uint8)


def test_the_allocator_and_the_ledger_know_a_known_peak():
    assert ledger.measure("cpu", allocations) == 4 * MIB
    with torch.device("meta"), ledger.Ledger("cpu") as count:
        kept = allocations()
    assert (count.peak, count.bytes) == (4 * MIB, 3 * MIB)
    del kept
    assert count.bytes == 0
    with torch.device("meta"), ledger.Ledger("cpu") as count:
        x = torch.zeros(1000, 10)
        x.T.add_(1).view(10, 1000)[3:].mul_(2)  # a view, a result written into an operand
    assert count.peak == x.nbytes
    with torch.device("meta"), ledger.Ledger("cuda") as count:
        kept = [torch.empty(numbers) for numbers in (1, 128, 129)]
    assert (len(kept), count.bytes) == (3, 512 + 512 + 1024), "in blocks of 512 bytes"


def workspace(x: tuple, weight: tuple) -> int:
    """Of a convolution of meta tensors of these shapes, forward or backward."""
    x, weight = torch.empty(x, device="meta"), torch.empty(weight, device="meta")
    y, aten = nn.functional.conv2d(x, weight), torch.ops.aten
    back = ledger.workspace(aten.convolution_backward.default, (y, x, weight), None)
    assert ledger.workspace(aten.convolution.default, (x, weight), y) == back
    return back


def test_a_convolution_copies_its_operands_with_channels_in_blocks_of_8():
    blocks = 2 * 16 * 12**2 + 2 * 24 * 8**2 + 24 * 16 * 5**2
    assert workspace((2, 10, 12, 12), (20, 10, 5, 5)) == 4 * blocks
    assert workspace((2, 3, 12, 12), (20, 3, 5, 5)) == 4 * 2 * 24 * 8**2  # images as they are
    assert workspace((1, 20, 32, 32), (4, 20, 3, 3)) == 0  # 20,480 numbers: too few for oneDNN
    blocks = 24 * 32 * 33 + 8 * 30 * 31 + 8 * 24 * 3**2
    assert workspace((1, 20, 32, 33), (4, 20, 3, 3)) == 4 * blocks
    assert workspace((1, 20, 32, 32), (4, 20, 4, 4)) > 0
    assert workspace((2, 1, 9, 9), (4, 1, 3, 3)) > 0
    x, norm = torch.empty(2, 3), torch.ops.aten.native_batch_norm_backward.default
    assert ledger.workspace(norm, (torch.empty(1), x, torch.empty(3)), None) == x.nbytes


@avx512
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("model", IMAGES)
def test_the_predicted_peak_is_within_5_percent_of_the_measured_one(model, optimiser):
    for batch in (1, 64) if model == "resnet50" else (1, 8, 64):
        predicted, moment = peak.rehearse(plan(model, optimiser), batch)
        measured = peak.run(plan(model, optimiser), batch)
        assert predicted == pytest.approx(measured, rel=0.05), (batch, moment)


@avx512
def test_with_accumulation_too_but_not_without_the_workspaces_or_as_a_sum():
    for each in (plan("net-bn", "momentum"), plan("resnet18", "adamw")):
        predicted, _ = peak.rehearse(each, 8, accumulate=3)
        assert predicted == pytest.approx(peak.run(each, 8, accumulate=3), rel=0.05)
    measured = peak.run(plan("net-bn"), 64)  # the control: what the ledger adds is needed
    *fixed, sample = peak.parts_of(plan("net-bn")).values()
    assert sum(fixed) + 64 * sample < 0.9 * measured
    with patch.object(ledger, "workspace", lambda *call: 0):
        assert peak.rehearse.__wrapped__(plan("net-bn"), 64)[0] < 0.9 * measured


def test_doubling_and_bisection_find_the_largest_batch_in_few_trials():
    for limit in (0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 2**16 - 1):
        for least in (1, 2):
            tried = []
            found = fit.largest(lambda batch: tried.append(batch) or batch <= limit, least)  # noqa: B023
            assert found == (limit if limit >= least else 0)
            assert len(tried) <= 2 * (limit + 1).bit_length() + 1
            assert len(set(tried)) == len(tried)
    assert fit.largest(lambda batch: True, 1) == 2**16


def test_out_of_memory_is_an_answer_and_leaves_nothing_behind():
    """As on a GPU, where a real step runs; here, something else is out of memory above 37."""
    alive = []

    def step(plan, batch, accumulate):
        held = torch.empty(1000)
        alive.append(ledger.weakref.ref(held))
        if batch * accumulate > 37:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with patch.object(fit, "train", step):
        assert fit.largest(lambda batch: fit.real_step_fits(plan(), batch, 1, 0), 1) == 37
    assert len(alive) > 5
    assert all(reference() is None for reference in alive)
    bug = patch.object(fit, "train", side_effect=RuntimeError("a bug"))
    with bug, pytest.raises(RuntimeError, match="a bug"):  # another error is no answer
        fit.real_step_fits(plan(), 1, 1, 0)


@pytest.mark.parametrize("batch", [1, 7, 8, 60, 96])
@pytest.mark.parametrize("memory", [3, 10, 31])
def test_a_cut_is_even_fits_and_is_the_coarsest(batch, memory):
    def fits(micro_batch, accumulate, besides):
        return micro_batch + besides + (accumulate > 1) <= memory

    for least in (1, 2):
        cuts = fit.cut(batch, least, fits, gradients=2)
        assert set(cuts) == {n for n in (1, 2, 4, 8) if batch % n == 0 and batch // n >= least}
        for gpus, parts in cuts.items():
            local, buckets = batch // gpus, 2 * (gpus > 1)
            cut = [k for k in range(1, local // least + 1) if local % k == 0]
            assert parts == next((k for k in cut if fits(local // k, k, buckets)), 0)


def answer(capsys, *flags: str) -> tuple[int, str]:
    """The exit status of fit.py, and what it prints."""
    try:
        with patch.object(sys, "argv", ["fit.py", *flags]), usage_errors_exit():
            fit.main()
        status = 0
    except SystemExit as end:
        status = end.code
    return status, "".join(capsys.readouterr())


def test_what_fits_is_told_to_the_last_sample(capsys):
    status, text = answer(capsys, "--memory-limit=16MiB")
    assert status == 0
    assert "one GPU holds a batch of 120" in text
    assert "ways to cut" not in text
    most = int(re.search(r"largest batch at once: (\d+)\n", text)[1])
    at = [peak.rehearse(peak.Plan("net", 28, "momentum"), n)[0] for n in (most, most + 1)]
    assert at[0] <= 16 * MIB < at[1]
    _, text = answer(capsys, "--memory-limit=5MiB", "--batch-size=127")  # a prime number
    assert "accumulate 127 micro-batches of 1 on\none GPU.\n" in text
    assert "or more" in answer(capsys, "--memory-limit=9999GiB")[1]


LIMIT = "--memory-limit=1GiB"
BAD = [
    (("--memory-limit=8GB",), ("--memory-limit", "'8GB'", "8GiB")),
    (("--memory-limit=0MiB",), ("--memory-limit", "above 0")),
    ((LIMIT, "--image-size=15"), ("--image-size 16 or more", "15")),
    ((LIMIT, "--model=resnet18", "--batch-size=1"), ("BatchNorm", "2")),
    ((LIMIT, "--optimizer=lion"), ("'lion'", "adamw")),
    (("--device=cpu",), ("there is no GPU", "--memory-limit 8GiB")),
    ((LIMIT, "--measure"), ("there is no GPU", "--device cpu")),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_call_ends_in_one_line(flags, words, capsys):
    with patch.object(torch.cuda, "is_available", lambda: False):
        status, output = answer(capsys, *flags)
    assert status == 2
    [line] = output.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def test_c41_if_a_batch_of_1_does_not_fit_data_parallelism_cannot_help(capsys):
    each = peak.Plan("net", 28, "adam")
    needed, gradients = peak.rehearse(each, 1)[0], peak.parts_of(each)["gradients"]

    def cuts(limit):
        def fits(micro_batch, accumulate, besides):
            return peak.rehearse(each, micro_batch, accumulate)[0] + besides <= limit

        return fit.cut(8, 1, fits, gradients)

    assert cuts(needed - 1) == {1: 0, 2: 0, 4: 0, 8: 0}  # not even one sample on each of 8 GPUs
    assert cuts(needed + gradients)[8] == 1  # the control
    limit = f"--memory-limit={(needed - 2000) / MIB:.3f}MiB"
    _, text = answer(capsys, limit, "--optimizer=adam", "--batch-size=8")
    assert "largest batch at once: 0" in text
    assert "Data parallelism cannot help" in text


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def held_by_rank(rank: int) -> dict[str, int]:
    """Bytes that a rank holds after three steps, with the buckets of DDP; each storage once."""
    dist.init_process_group("gloo")
    held = {}
    for how in ("alone", "ddp", "views", "shards"):
        model: nn.Module = layers()
        buckets: dict[int, torch.Tensor] = {}

        def keep(buckets: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buckets[bucket.index()] = bucket.buffer()
            return allreduce_hook(None, bucket)

        if how in ("ddp", "views"):
            model = DistributedDataParallel(model, gradient_as_bucket_view=how == "views")
            model.register_comm_hook(buckets, keep)
        for layer in [*model, model] if how == "shards" else []:
            fully_shard(layer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for _ in range(3):
            loss = model(torch.randn(8, 256)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *buckets.values()]
        tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
        parts = [t.to_local() if how == "shards" else t.untyped_storage() for t in tensors]
        sizes = {t.data_ptr(): t.nbytes if how == "shards" else t.nbytes() for t in parts}
        held[how] = sum(sizes.values())
    return held


def test_c41_a_replica_of_ddp_holds_as_much_as_one_process_and_its_buckets_and_a_shard_half():
    gradients = sum(parameter.nbytes for parameter in layers().parameters())
    for held in run_ranks(2, held_by_rank):
        held = {how: count / gradients for how, count in held.items()}
        # Parameters, gradients, momentum; with DDP, the buckets too, unless gradients are in them.
        assert held == {"alone": 3, "ddp": 4, "views": 3, "shards": 3 / 2}
