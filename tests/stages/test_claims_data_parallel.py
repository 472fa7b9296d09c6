"""Claims about DataParallel: C11, C13, C20 to C24."""

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel.parallel_apply import parallel_apply

from benchmarks import result_files
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module
from replicas import CLOSE, CPU, DEVICE_IDS, by_hand, parallel, samples, small, step

memory = fresh_module(LESSON_FOLDERS["02"] / "memory.py")  # not seen by other tests


class NamesItsFormat(nn.Linear):
    """The cure: a decorator on forward, or a context inside it, is there in every thread."""

    @torch.autocast("cpu", torch.float16)
    def forward(self, x):
        return super().forward(x)


def replicas_of_torch(module, batch):
    """torch's own parallel_apply; here the CPU is its accelerator, and streams do nothing."""
    names = {
        "is_available": lambda: True,
        "current_accelerator": lambda: CPU,
        "current_stream": lambda device: nullcontext(),
        "device_index": lambda device: nullcontext(),
    }
    is_on = torch.is_autocast_enabled("cuda")  # the only one that parallel_apply asks for
    torch.set_autocast_enabled("cuda", torch.is_autocast_enabled("cpu"))
    try:
        with patch.multiple(torch.accelerator, **names):
            return parallel_apply([module, module], batch.chunk(2), devices=[0, 1])[0]
    finally:
        torch.set_autocast_enabled("cuda", is_on)


def in_a_plain_thread(module, batch):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(module, batch).result()


def test_c11_threads_take_on_that_autocast_is_enabled_but_not_its_dtype():
    """The caller asks for float16, and the default of the CPU is bfloat16."""
    ways = (nn.Module.__call__, in_a_plain_thread, replicas_of_torch)
    ways += (lambda module, batch: parallel(module, 2)(batch),)
    for layer, dtypes in {
        nn.Linear: [torch.float16, torch.float32, torch.bfloat16, torch.float16],
        NamesItsFormat: [torch.float16] * 4,
    }.items():
        with torch.autocast("cpu", torch.float16):  # new layers: it keeps the weights it has cast
            assert [way(layer(3, 2), torch.randn(4, 3)).dtype for way in ways] == dtypes


@pytest.mark.parametrize("ids", DEVICE_IDS)
def test_c11_on_gpus_an_outer_bfloat16_becomes_float16_in_the_replicas(ids):
    """The control: a single replica runs in the caller's thread."""
    for replicas, dtype in ((ids[:1], torch.bfloat16), (ids, torch.float16)):
        model = nn.DataParallel(nn.Linear(3, 2).to(f"cuda:{ids[0]}"), replicas)
        with torch.autocast("cuda", torch.bfloat16):
            assert model(torch.randn(4, 3)).dtype == dtype, replicas


def test_c13_the_main_device_holds_more_unless_the_loss_of_large_outputs_is_inside():
    counted, share = memory.count_all(), {}
    for name, counts_by_place in counted.items():
        for main, *others in counts_by_place.values():
            for other in others:
                extra = {kind: main[kind] - other[kind] for kind in memory.KINDS}
                assert extra["parameters"] == extra["activations"] == 0
                assert min(extra["gradients"], extra["optimizer"], sum(extra.values())) > 0
        main = counts_by_place["outside"][0]
        share[name] = (main["outputs"] + main["loss"]) / sum(main.values())
    assert share["words"] > 0.9
    assert share["net"] < 0.01 > share["resnet18"]
    inside, outside = (counted["words"][where][0].values() for where in ("inside", "outside"))
    assert sum(inside) < sum(outside) / 4


@pytest.mark.parametrize("device_ids", [[0, 1], [1, 0], [3, 2, 5]])
def test_c20_the_model_must_lie_on_the_first_of_device_ids_whichever_it_is(device_ids):
    """On a machine that just says it has GPUs, only the checks of torch's own forward run."""
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    fakes = {"_get_available_device_type": lambda: "cuda", "_check_balance": lambda ids: None}
    with patch.multiple(data_parallel, **fakes):
        model = nn.DataParallel(nn.Linear(3, 2), device_ids)
    with pytest.raises(RuntimeError, match=rf"on device cuda:{device_ids[0]} \(device_ids\[0"):
        model(torch.randn(4, 3))


def test_c21_a_batch_smaller_than_the_replicas_leaves_some_idle():
    for number, devices, sizes in [(30, 8, [4] * 7 + [2]), (30, 3, [10] * 3), (10, 8, [2] * 5)]:
        batch = torch.arange(number * 2.0).view(number, 2)
        parts = [args[0] for args, _ in by_hand.scatter([CPU] * devices, batch)]
        assert [len(part) for part in parts] == sizes
        assert torch.equal(torch.cat(parts), batch)
    module, names = small(), []
    module.register_forward_hook(lambda *_: names.append(threading.current_thread().name))
    parallel(module, 8)(samples(2)[0])
    assert sorted(names) == ["replica 0", "replica 1"]


@pytest.mark.parametrize(("layer", "is_same"), [(nn.Identity(), True), (nn.BatchNorm1d(6), False)])
def test_c22_the_loss_of_3_replicas_is_that_of_one_device_without_batchnorm(layer, is_same):
    """BatchNorm, the control, looks at the whole batch that it sees."""
    module = nn.Sequential(layer, small()).double()
    _, expected, _ = step(module, module, *samples(30))
    _, actual, _ = step(parallel(module, 3), module, *samples(30))
    difference = abs(actual - expected)
    assert difference < 1e-12 if is_same else difference > 1e-4


def turns_of_another_thread(operation: Callable[[], object]) -> int:
    """How often another thread gets the interpreter while this one is inside the operation."""
    turns, is_over, before = [], threading.Event(), sys.getswitchinterval()

    def take_turns() -> None:
        while not is_over.is_set():
            turns.append(1)
            time.sleep(1e-3)  # another turn needs the lock again

    sys.setswitchinterval(60)  # nobody is asked for the lock: it is given away, or kept
    with ThreadPoolExecutor(1) as other:
        other.submit(take_turns)
        try:
            time.sleep(0.01)
            first = len(turns)
            operation()
            last = len(turns)
        finally:
            is_over.set()
            sys.setswitchinterval(before)
    return last - first


def test_c23_inside_an_operation_of_torch_another_thread_can_work():
    """So threads help where a few operations take long. The control keeps the lock for as long."""
    matrix = torch.randn(2000, 2000)
    assert turns_of_another_thread(lambda: matrix @ matrix) > 0
    assert turns_of_another_thread(lambda: ctypes.PyDLL(None).usleep(100_000)) == 0


def test_c23_in_the_committed_run_threads_slow_down_small_operations_and_not_big_ones():
    """It is read, because a test asserts no time that it has measured."""
    measured = result_files.load("once/threads")
    small, big = (measured["models"][f"{size} operations"]["variants"] for size in ("small", "big"))
    assert small["two threads"]["ratio_interval"][0] > 1
    assert small["two processes"]["ratio"] < small["two threads"]["ratio_interval"][0]
    assert big["two threads"]["ratio_interval"][1] < 1
    assert big["A/A"]["ratio"] == pytest.approx(1, abs=0.1), "the control"


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_c23_every_step_copies_the_model_to_each_other_replica_and_adds_up_their_gradients(
    replicas,
):
    module, gradients, devices = small(), [], [CPU] * replicas
    first, *copies = by_hand.replicate(module, devices)
    for replica in (first, *copies):
        for parameter in replica.parameters():
            parameter.register_hook(gradients.append)
    batch, _ = samples(8)
    outputs = by_hand.apply([first, *copies], by_hand.scatter(devices, batch), devices)
    by_hand.gather(outputs, devices).sum().backward()
    copied_bytes = sum(p.nbytes for replica in copies for p in replica.parameters())
    assert copied_bytes == (replicas - 1) * sum(p.nbytes for p in module.parameters())
    assert len(gradients) == replicas * len(list(module.parameters()))


def test_c24_the_batch_need_not_lie_on_the_devices_of_the_replicas():
    """`meta` stands for a GPU: a device that is not the batch's."""
    away = torch.device("meta")
    parts = by_hand.scatter([away, away], samples(10)[0])
    assert [args[0].device for args, _ in parts] == [away, away]
    assert by_hand.gather([args[0] for args, _ in parts], [away]).shape == (10, 6)


@pytest.mark.parametrize("ids", DEVICE_IDS)
def test_c20_c21_c22_c24_on_gpus_torchs_class_computes_what_from_scratch_does(ids):
    """BatchNorm shows that the batch was cut, also where both replicas have one GPU."""
    torch.manual_seed(0)
    devices = [torch.device("cuda", i) for i in ids]
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)
    module, (batch, targets) = nn.Sequential(*layers).double().to(devices[0]), samples(30)
    assert batch.device == CPU
    models, parts = (by_hand.DataParallel(module, devices), nn.DataParallel(module, ids)), []
    module.register_forward_hook(lambda module, inputs, output: parts.append(len(output)))
    actual, expected = (step(model, module, batch, targets.to(devices[0])) for model in models)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert parts == [15, 15] * 2
    output = models[1].eval()(batch[:1])
    assert parts[4:] == [1], "the other replica is idle"
    torch.testing.assert_close(output, module(batch[:1].to(devices[0])), **CLOSE)
