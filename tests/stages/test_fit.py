"""Stage 01's fit.py: what a step needs is rehearsed, found right by measuring, and advised on."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fit
import peak
from helpers.on_ranks import on_ranks
from helpers.outputs import output_of

MIB = peak.MIB
torch.set_num_threads(1)  # with more, oneDNN has workspaces for each thread


def allocations():
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    second = torch.empty(MIB, dtype=torch.uint8)
    del first
    return second, torch.empty(2 * MIB, dtype=torch.uint8)


def test_the_allocator_and_the_ledger_know_a_known_peak():
    assert peak.peak_of("cpu", allocations) == 4 * MIB
    with torch.device("meta"), peak.Ledger("cpu") as count:
        kept = allocations()
        kept[0].add_(1).view(1024, 1024)[3:].mul_(2)  # a view, a result written into an operand
    assert (len(kept), count.peaks, count.bytes) == (2, {"": 4 * MIB}, 3 * MIB)
    with torch.device("meta"), peak.Ledger("cuda") as count:
        kept = [torch.empty(numbers) for numbers in (1, 128, 129)]
    assert (len(kept), count.bytes) == (3, 512 + 512 + 1024), "in blocks of 512 bytes"


class Layers(peak.Plan):
    """Without convolutions: on a CPU, their workspaces depend on its instructions."""

    def build(self):
        sizes = (64, 512, 512, 8)
        layers = [nn.Sequential(nn.Linear(*each), nn.Tanh()) for each in pairwise(sizes)]
        model = nn.Sequential(*layers)
        return model, peak.OPTIMIZERS[self.optimizer](model.parameters(), lr=1e-3, foreach=False)

    def loss(self, model, batch):
        return model(torch.randn(batch, 64)).square().mean()


@pytest.mark.parametrize("optimizer", peak.OPTIMIZERS)
@pytest.mark.parametrize(("batch", "micro_batches"), [(1, 1), (64, 1), (2000, 1), (500, 3)])
def test_the_rehearsed_peak_is_within_2_percent_of_the_measured_one(
    optimizer, batch, micro_batches
):
    """The control: without what a moment needs besides, the sum of the parts is too little."""
    plan = Layers("", 0, optimizer, "cpu")
    predicted, moment = peak.rehearsed_peak(plan, batch, micro_batches)
    measured = peak.measured_peak(plan, batch, micro_batches)
    assert predicted == pytest.approx(measured, rel=0.02), moment
    if (optimizer, batch) == ("adam", 1):
        *fixed, sample = peak.parts_of(plan).values()
        assert sum(fixed) + sample < 0.9 * measured


@pytest.mark.parametrize("batch", [1, 7, 8, 60, 96])
@pytest.mark.parametrize("memory", [3, 10, 31])
def test_a_cut_is_even_fits_and_is_the_coarsest(batch, memory):
    def fits(micro_batch, accumulate, besides):
        return micro_batch + besides + (accumulate > 1) <= memory

    for least in (1, 2):
        cuts = fit.micro_batches_by_gpus(batch, least, fits, gradients=2)
        assert set(cuts) == {n for n in (1, 2, 4, 8) if batch % n == 0 and batch // n >= least}
        for gpus, parts in cuts.items():
            local, buckets = batch // gpus, 2 * (gpus > 1)
            cut = [k for k in range(1, local // least + 1) if local % k == 0]
            assert parts == next((k for k in cut if fits(local // k, k, buckets)), 0)


def test_what_fits_is_told_to_the_last_sample():
    text = output_of("fit", "--memory-limit=16MiB")
    assert "one GPU holds a batch of 120" in text
    assert "ways to cut" not in text
    most = int(re.search(r"largest batch at once: (\d+)\n", text)[1])
    at = [peak.rehearsed_peak(peak.Plan("net", 28, "momentum"), n)[0] for n in (most, most + 1)]
    assert at[0] <= 16 * MIB < at[1]
    text = output_of("fit", "--memory-limit=5MiB", "--batch-size=127")  # a prime number
    assert "accumulate 127 micro-batches of 1 on\none GPU.\n" in text
    assert "or more" in output_of("fit", "--memory-limit=9999GiB")


def test_without_a_limit_it_is_all_that_the_gpu_has_whatever_is_free_now(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * MIB, 16 * MIB))  # free, total
    free, total = (output_of("fit", f"--memory-limit={size}MiB") for size in (5, 16))
    assert output_of("fit") == total != free


def test_c41_if_a_batch_of_1_does_not_fit_data_parallelism_cannot_help():
    """The control has a little more memory, and one sample fits."""
    needed, _ = peak.rehearsed_peak(peak.Plan("net", 28, "adam"), 1)
    for limit, samples in ((needed - 2000, 0), (needed + 2000, 1)):
        flags = (f"--memory-limit={limit / MIB:.3f}MiB", "--optimizer=adam", "--batch-size=8")
        text = output_of("fit", *flags)
        assert f"largest batch at once: {samples}\n" in text
        assert ("Plain data parallelism cannot help" in text) == (samples == 0)
        assert ("sharded, each GPU needs for a batch of 1" in text) == (samples == 0)


def test_the_first_way_of_sharding_that_fits_is_advised():
    """ZeRO-2, FSDP on more GPUs, none: on both sides of what each needs."""
    plan = peak.Plan("net", 28, "adam")
    zero_2 = fit.bytes_if_sharded(plan, 1, "ZeRO-2", 2)
    fsdp = fit.bytes_if_sharded(plan, 1, "FSDP", 8)
    first = {zero_2: "With ZeRO-2 on 2 GPUs", zero_2 - 99: "With FSDP on 2", fsdp: "With FSDP on 8"}
    for limit, words in (first | {fsdp - 99: "on 8 GPUs is not enough"}).items():
        flags = (f"--memory-limit={(limit + 9) / MIB:.6f}MiB", "--optimizer=adam", "--batch-size=8")
        assert words in " ".join(output_of("fit", *flags).split())


@on_ranks(2)
def test_c41_with_fully_shard_each_of_two_ranks_holds_half(rank):
    """Bytes of parameters, gradients and momentum after a step, in multiples of the gradients'."""
    held = []
    for shard in (False, True):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        for layer in [*model, model] if shard else []:
            fully_shard(layer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
        tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
        held.append(sum((t.to_local() if shard else t).nbytes for t in tensors) / gradients)
    assert held == [3, 3 / 2]
