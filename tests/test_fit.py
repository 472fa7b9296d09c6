"""Stage 01's fit.py: what a step needs is rehearsed, found right by measuring, and advised on."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import chapter, command, fresh_module, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ledger: Any = chapter("01", "ledger")
peak: Any = chapter("01", "peak")
fit: Any = chapter("01", "fit")

MIB = 2**20
FIT = "01_single_gpu/fit.py"
LIKE_THIS = torch.backends.mkldnn.is_available() and (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
)
avx512 = pytest.mark.skipif(not LIKE_THIS, reason="without AVX-512, oneDNN's workspaces differ")
IMAGES = {"net": (28, 1), "net-bn": (28, 1), "resnet18": (64, 3), "resnet50": (64, 3)}


@pytest.fixture(autouse=True)
def one_thread():
    """With more, oneDNN has workspaces for each thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan(model="net", optimiser="sgd", device="cpu"):
    size, channels = IMAGES[model]
    return peak.Plan(model, size, optimiser, device, channels)


def allocations():
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    second = torch.empty(MIB, dtype=torch.uint8)
    del first
    return second, torch.empty(2 * MIB, dtype=torch.uint8)


# --- Counting


def test_the_allocator_and_the_ledger_know_a_known_peak():
    assert ledger.measure("cpu", allocations) == 4 * MIB
    with torch.device("meta"), ledger.Ledger("cpu") as count:
        kept = allocations()
    assert (count.peak, count.bytes) == (4 * MIB, 3 * MIB)
    del kept
    assert count.bytes == 0


def test_a_view_or_a_result_written_into_an_operand_takes_no_bytes():
    with torch.device("meta"), ledger.Ledger("cpu") as count:
        x = torch.zeros(1000, 10)
        x.T.add_(1).view(10, 1000)[3:].mul_(2)
    assert count.peak == x.nbytes


def test_on_a_gpu_a_block_is_rounded_up_to_512_bytes():
    with torch.device("meta"), ledger.Ledger("cuda") as count:
        kept = torch.empty(1), torch.empty(128), torch.empty(129)
    assert len(kept) == 3
    assert count.bytes == 512 + 512 + 1024


# --- Predicted and measured


@avx512
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("model", IMAGES)
def test_the_predicted_peak_is_within_5_percent_of_the_measured_one(model, optimiser):
    for batch in (1, 8, 64):
        predicted, moment = peak.rehearse(plan(model, optimiser), batch)
        measured = peak.run(plan(model, optimiser), batch)
        assert predicted == pytest.approx(measured, rel=0.05), (batch, moment)


@avx512
def test_with_accumulation_too():
    for each in (plan("net-bn", "momentum"), plan("resnet18", "adamw")):
        predicted, _ = peak.rehearse(each, 8, accumulate=3)
        assert predicted == pytest.approx(peak.run(each, 8, accumulate=3), rel=0.05)


@avx512
def test_without_the_workspaces_or_as_a_sum_it_would_be_wrong(monkeypatch):
    """The control: what the ledger adds to simpler counts is needed."""
    measured = peak.run(plan("net-bn"), 64)
    *fixed, sample = peak.parts_of(plan("net-bn")).values()
    assert sum(fixed) + 64 * sample < 0.9 * measured
    monkeypatch.setattr(ledger, "workspace", lambda *call: 0)
    peak.rehearse.cache_clear()
    assert peak.rehearse(plan("net-bn"), 64)[0] < 0.9 * measured
    peak.rehearse.cache_clear()


def test_at_the_end_of_forward_the_peak_is_the_sum_of_its_parts():
    each = plan("resnet18", "momentum", "cuda")
    *fixed, sample = peak.parts_of(each).values()
    predicted, moment = peak.rehearse(each, 64)
    assert moment == "forward"
    assert predicted == pytest.approx(sum(fixed) + 64 * sample, rel=0.01)


def test_zero_grad_before_forward_would_lower_the_peak_but_not_by_all_gradients():
    """Backward brings them again, those of the large last layers while most is still saved."""
    old = """        loss = plan.loss(model, batch)
        if micro_batch == 0:
            optimizer.zero_grad()"""
    new = """        optimizer.zero_grad()
        loss = plan.loss(model, batch)"""
    earlier = fresh_module("01", "peak.py", (("peak.py", old, new),))
    each = plan("resnet18", "momentum", "cuda")
    now, then = (module.rehearse(each, 64)[0] for module in (peak, earlier))
    assert 0.1 < (now - then) / peak.parts_of(each)["gradients"] < 0.9


def test_of_a_small_batch_the_peak_is_in_the_step_of_adam():
    parameters = peak.parts_of(plan("resnet18", "adam"))["parameters"]
    on_gpu, moment = peak.rehearse(plan("resnet18", "adam", "cuda"), 1)
    assert moment == "optimiser"
    assert on_gpu == pytest.approx(5 * parameters, rel=0.01)  # with gradients, state, temporaries
    on_cpu, moment = peak.rehearse(plan("resnet18", "adam"), 1)
    assert moment == "optimiser"
    assert 4 * parameters < on_cpu < 4.6 * parameters  # a temporary of the largest only


def test_the_parts_are_those_of_a_real_model():
    each = plan("resnet18", "adam")
    parts = peak.parts_of(each)
    model, _ = each.build()
    bytes_of = {
        name: sum(t.nbytes for t in found)
        for name, found in (("parameters", model.parameters()), ("buffers", model.buffers()))
    }
    assert {name: parts[name] for name in bytes_of} == bytes_of
    assert parts["gradients"] == parts["parameters"]
    assert parts["optimiser state"] == 2 * parts["parameters"]
    assert peak.parts_of(plan("resnet18", "sgd"))["optimiser state"] == 0
    assert peak.parts_of(plan("resnet18", "momentum"))["optimiser state"] == parts["parameters"]


# --- The largest batch


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 2**16 - 1])
@pytest.mark.parametrize("least", [1, 2])
def test_doubling_and_bisection_find_the_largest_batch_in_few_trials(limit, least):
    tried = []
    found = fit.largest(lambda batch: tried.append(batch) or batch <= limit, least)
    assert found == (limit if limit >= least else 0)
    assert len(tried) <= 2 * (limit + 1).bit_length() + 1
    assert len(set(tried)) == len(tried)


def test_the_search_ends_where_everything_fits():
    assert fit.largest(lambda batch: True, 1) == fit.MOST


def test_out_of_memory_is_an_answer_and_leaves_nothing_behind(monkeypatch):
    """As on a GPU, where a real step runs; here, something else is out of memory above 37."""
    alive = []

    def step(plan, batch, accumulate):
        held = torch.empty(1000)
        alive.append(ledger.weakref.ref(held))
        if batch * accumulate > 37:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fit, "train", step)
    assert fit.largest(lambda batch: fit.real_step_fits(plan(), batch, 1, 0), 1) == 37
    assert len(alive) > 5
    assert all(reference() is None for reference in alive)


def test_another_error_is_no_answer(monkeypatch):
    def step(plan, batch, accumulate):
        raise RuntimeError("a bug")

    monkeypatch.setattr(fit, "train", step)
    with pytest.raises(RuntimeError, match="a bug"):
        fit.real_step_fits(plan(), 1, 1, 0)


# --- The advice


@pytest.mark.parametrize("batch", [1, 7, 8, 60, 96])
@pytest.mark.parametrize("memory", [3, 10, 31])
def test_a_cut_is_even_fits_and_is_the_coarsest(batch, memory):
    def fits(micro_batch, accumulate, besides):
        return micro_batch + besides + (accumulate > 1) <= memory

    cuts = fit.cut(batch, 1, fits, gradients=2)
    assert set(cuts) == {n for n in (1, 2, 4, 8) if batch % n == 0}
    for gpus, parts in cuts.items():
        local, buckets = batch // gpus, 2 * (gpus > 1)
        good = [k for k in range(1, local + 1) if local % k == 0 and fits(local // k, k, buckets)]
        assert parts == (good[0] if good else 0)


def answer(*flags):
    [(status, output)] = command(FIT, *flags)
    assert status == 0, output
    return " ".join(output.split())


def test_it_fits():
    text = answer("--memory-limit=16MiB")
    assert "one GPU holds a batch of 120" in text
    assert "accumulate" not in text
    most = int(re.search(r"largest batch at once: (\d+)", text)[1])
    at = [peak.rehearse(peak.Plan("net", 28, "momentum"), n)[0] for n in (most, most + 1)]
    assert at[0] <= 16 * MIB < at[1]


def test_accumulate_or_go_data_parallel():
    text = answer("--memory-limit=5MiB", "--batch-size=120", "--image-size=28")
    assert re.search(r"accumulate 2 micro-batches of 60 on one GPU, or go data-parallel on 2", text)


def test_a_prime_batch_cannot_be_cut_but_into_single_samples():
    text = answer("--memory-limit=5MiB", "--batch-size=127")
    assert "accumulate 127 micro-batches of 1 on one GPU" in text
    assert "data-parallel" not in text


BAD = [
    (("--memory-limit=8GBB",), ("--memory-limit", "'8GBB'", "8GiB")),
    (("--memory-limit=8GB",), ("--memory-limit", "'8GB'", "8GiB")),
    (("--memory-limit=0MiB",), ("--memory-limit", "above 0")),
    (("--memory-limit=-1GiB",), ("--memory-limit", "above 0")),
    (("--memory-limit=1GiB", "--image-size=15"), ("--image-size 16 or more", "15")),
    (("--memory-limit=1GiB", "--model=resnet18", "--batch-size=1"), ("BatchNorm", "2")),
    (("--memory-limit=1GiB", "--optimizer=lion"), ("'lion'", "adamw")),
    (("--device=cpu",), ("--memory-limit 8GiB",)),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_call_ends_in_one_line(flags, words):
    [(status, output)] = command(FIT, *flags)
    assert status == 2
    [line] = output.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to try it on")
@pytest.mark.parametrize("flags", [(), ("--memory-limit=1GiB", "--measure")])
def test_without_a_gpu_there_is_none_to_try_it_on(flags):
    [(status, output)] = command(FIT, *flags)
    assert status == 2
    assert output.startswith("error: there is no GPU")
    assert len(output.splitlines()) == 1


# --- C41: if a batch of 1 does not fit, data parallelism cannot help


def test_c41_if_a_batch_of_1_does_not_fit_data_parallelism_cannot_help():
    each = peak.Plan("net", 28, "adam")
    needed, gradients = peak.rehearse(each, 1)[0], peak.parts_of(each)["gradients"]

    def cuts(limit):
        def fits(micro_batch, accumulate, besides):
            return peak.rehearse(each, micro_batch, accumulate)[0] + besides <= limit

        return fit.cut(8, 1, fits, gradients)

    assert cuts(needed - 1) == {1: 0, 2: 0, 4: 0, 8: 0}  # not even one sample on each of 8 GPUs
    assert cuts(needed + gradients)[8] == 1  # the control
    limit = f"--memory-limit={(needed - 2000) / MIB:.3f}MiB"
    text = answer(limit, "--optimizer=adam", "--batch-size=8")
    assert "largest batch at once: 0" in text
    assert "Data parallelism cannot help" in text
    assert "fully_shard" in text
    assert "accumulate" not in text


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def train_layers(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for _ in range(steps):
        loss = model(torch.randn(8, 256)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def join() -> None:
    dist.init_process_group("gloo")


def held_by_rank(rank: int, how: str) -> int:
    """Bytes that a rank holds after three steps, with the buckets of DDP; each storage once."""
    join()
    model: nn.Module = layers()
    buckets: dict[int, torch.Tensor] = {}

    def keep(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)

    if how != "alone":
        model = DistributedDataParallel(model, gradient_as_bucket_view=how == "views")
        model.register_comm_hook(None, keep)
    optimizer = train_layers(model)
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *buckets.values()]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
    held = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    dist.destroy_process_group()
    return sum(held.values())


def test_c41_a_replica_of_ddp_holds_as_much_as_one_process_and_its_buckets():
    gradients = sum(parameter.nbytes for parameter in layers().parameters())
    alone, ddp, views = (run_ranks(2, held_by_rank, how)[0] for how in ("alone", "ddp", "views"))
    assert alone == 3 * gradients  # parameters, gradients, momentum
    assert ddp == 4 * gradients
    assert views == alone


def shard_of_rank(rank: int) -> int:
    join()
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = train_layers(model)
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
    held = sum(tensor.to_local().nbytes for tensor in tensors)
    dist.destroy_process_group()
    return held


def test_c41_sharding_does_help():
    gradients = sum(parameter.nbytes for parameter in layers().parameters())
    assert run_ranks(2, shard_of_rank) == [3 * gradients / 2] * 2
