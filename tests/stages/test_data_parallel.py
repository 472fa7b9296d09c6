"""DataParallel by hand computes what one device does, and costs what its pages say."""

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import scatter_gather
from torch.nn.parallel.parallel_apply import parallel_apply

from benchmarks import result_files
from helpers.machine import scratch_folder
from helpers.stage_files import LESSON_FOLDERS, fresh_module
from helpers.train_stage import load_stage, run_main

CPU = torch.device("cpu")
CLOSE = {"rtol": 0, "atol": 1e-12}


FROM_SCRATCH, MEMORY = (LESSON_FOLDERS["02"] / name for name in ("from_scratch.py", "memory.py"))
by_hand, memory = fresh_module(FROM_SCRATCH), fresh_module(MEMORY)  # not seen by other tests


def parallel(module: nn.Module, replicas: int) -> nn.Module:
    return by_hand.DataParallel(module, [CPU] * replicas)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(number, 6).double(), torch.randint(4, (number,))


def step(model, module, batch, targets):
    module.zero_grad()
    outputs = model(batch)
    loss = F.cross_entropy(outputs, targets)
    loss.backward()
    return outputs.detach(), loss.detach(), [p.grad.clone() for p in module.parameters()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("build", [small, Tied])
def test_replicas_give_the_outputs_loss_and_gradients_of_one_device(build, replicas):
    torch.manual_seed(0)
    module = build().double()
    models = module, parallel(module, replicas)
    for number in (30, 2):
        expected, actual = (step(model, module, *samples(number)) for model in models)
        torch.testing.assert_close(actual, expected, **CLOSE)
    first, *others = by_hand.replicate(module, [CPU] * replicas)
    assert first is module
    own = {parameter.data_ptr() for parameter in module.parameters()}
    for other in others:
        assert own.isdisjoint(parameter.data_ptr() for parameter in other.parameters())
        if build is Tied:
            assert other.again is other.first
            assert other.second.weight is other.first.weight


@pytest.mark.parametrize(("layer", "is_same"), [(nn.Identity(), True), (nn.BatchNorm1d(6), False)])
def test_c22_the_loss_of_3_replicas_is_that_of_one_device_without_batchnorm(layer, is_same):
    """BatchNorm, the control, looks at the whole batch that it sees."""
    module = nn.Sequential(layer, small()).double()
    _, expected, _ = step(module, module, *samples(30))
    _, actual, _ = step(parallel(module, 3), module, *samples(30))
    difference = abs(actual - expected)
    assert difference < 1e-12 if is_same else difference > 1e-4


def test_only_the_first_replica_keeps_its_running_statistics():
    module, first, second = (nn.BatchNorm1d(3) for _ in range(3))
    batch = torch.randn(8, 3)
    output = parallel(module, 2)(batch)
    torch.testing.assert_close(output, torch.cat([first(batch[:4]), second(batch[4:])]))
    torch.testing.assert_close(module.state_dict(), first.state_dict())


def test_02_train_step_takes_the_steps_of_one_device(without=()):
    train_step = fresh_module(FROM_SCRATCH, without).train_step
    model, replicated = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, replicated)]
    for number in (30, 30, 7):
        batch, targets = samples(number)
        _, loss, _ = step(model, model, batch, targets)
        optimizers[0].step()
        devices = [CPU] * 3
        actual = train_step(replicated, optimizers[1], F.cross_entropy, (batch, targets), devices)
        torch.testing.assert_close(actual, loss, **CLOSE)
    torch.testing.assert_close(replicated.state_dict(), model.state_dict(), **CLOSE)


def test_02_an_error_in_a_replica_reaches_the_caller(without=()):
    module = fresh_module(FROM_SCRATCH, without).DataParallel(nn.Linear(3, 2), [CPU, CPU])
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the text is compared below)
        module(torch.randn(4, 5))
    assert "shapes cannot be multiplied" in str(caught.value)


def test_forward_takes_and_returns_tensors_wherever_they_are_and_none_as_torchs_own_does():
    class Several(nn.Module):
        def forward(self, x, scale, *, shift):
            shift, more = shift
            pair = x + shift, (x * x).mean() + more["deep"].sum()
            return {"sum": x.sum(1) * scale, "pair": pair, "loss": None}

    x, shift, deep = (torch.randn(6, n).double() for n in (2, 1, 1))
    output = parallel(Several(), 3)(x, 2, shift=(shift, {"deep": deep}))
    scalars = [(a * a).mean() + b.sum() for a, b in zip(x.chunk(3), deep.chunk(3), strict=True)]
    expected = {"sum": x.sum(1) * 2, "pair": (x + shift, torch.stack(scalars)), "loss": None}
    torch.testing.assert_close(output, expected)
    assert by_hand.scatter([CPU] * 3) == [((), {})], "a call without tensors: one replica works"
    assert scatter_gather.gather([{"loss": None}] * 3, CPU) == {"loss": None}


def test_threads_obey_no_grad_and_autocast_of_the_caller():
    model, batch = parallel(nn.Linear(3, 2), 2), torch.randn(4, 3)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype), torch.no_grad():
            assert (model(batch).dtype, model(batch).requires_grad) == (dtype, False)
    assert (model(batch).dtype, model(batch).requires_grad) == (torch.float32, True)


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


@pytest.mark.gpu(2)
@pytest.mark.parametrize("ids", [[0, 1], [1, 0]])
def test_c20_c21_c22_c24_on_gpus_torchs_class_computes_what_from_scratch_does(ids):
    torch.manual_seed(0)
    devices = [torch.device("cuda", i) for i in ids]
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)
    module, (batch, targets) = nn.Sequential(*layers).double().to(devices[0]), samples(30)
    models = by_hand.DataParallel(module, devices), nn.DataParallel(module, ids)
    actual, expected = (step(model, module, batch, targets.to(devices[0])) for model in models)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    output = models[1].eval()(batch[:1])
    torch.testing.assert_close(output, module(batch[:1].to(devices[0])), **CLOSE)


@pytest.mark.parametrize(
    ("gpus", "flags", "wrapper", "devices"),
    [
        (3, [], "nn.DataParallel", range(3)),
        (3, ["--replicas=2"], "nn.DataParallel", range(2)),
        (2, ["--replicas=3"], "DataParallelOnOneDevice", [torch.device("cuda:0")] * 3),
        (1, [], "DataParallelOnOneDevice", [torch.device("cuda:0")] * 2),
    ],
)
def test_torchs_own_takes_a_gpu_for_each_replica_and_ours_shares_one(
    gpus, flags, wrapper, devices, monkeypatch
):
    """With torch's queries patched: nothing has trained yet where the model is wrapped."""
    stage, data_parallel = load_stage("02"), Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(nn.Module, "to", lambda model, _: model)
    owner = stage.nn if "." in wrapper else stage
    monkeypatch.setattr(owner, wrapper.removeprefix("nn."), data_parallel)
    with pytest.raises(KeyboardInterrupt):
        run_main(stage, 0, *flags, f"--run-dir={scratch_folder()}")
    assert data_parallel.call_args.args[1] == devices


def example(batch: int = 24, hidden: int = 7, classes: int = 50):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return model, torch.randn(batch, 5), torch.randint(classes, (batch,))


def test_the_count_is_what_one_tells_by_hand():
    (main, other), floats = memory.held_by_replica(example(), 2, inside=False), 4
    weights, outputs = (5 * 7 + 7 + 7 * 50 + 50) * floats, 24 * 50 * floats
    expected = {"parameters": weights, "batch": 12 * 5 * floats}
    expected["activations"] = 12 * 7 * floats  # what ReLU gives; it and the next layer save it
    assert other == dict.fromkeys(memory.KINDS, 0) | expected
    assert main == other | {
        "gradients": weights,
        "optimizer": weights,
        "batch": 24 * (5 * floats + 8),  # the targets are int64
        "outputs": outputs,
        "loss": outputs + 8,  # log-softmax, the sum of the class weights, the loss
    }
    # Inside, each replica keeps the log-softmax of its own half, and two losses are gathered.
    inside, elsewhere = memory.held_by_replica(example(), 2, inside=True)
    half = {"loss": outputs // 2 + floats}
    assert elsewhere == other | half | {"batch": 12 * (5 * floats + 8)}
    assert inside == main | {"outputs": 2 * floats, "loss": half["loss"] + floats}


def test_the_count_is_what_the_allocator_hands_out():
    """torch's profiler sees every allocation: those that are alive when the forward is done."""
    model, x, _ = memory.examples()["words"]
    counted = memory.CountingReplica(model)
    with torch.profiler.profile(profile_memory=True) as profiler:
        outputs = counted(x)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    kept = memory.size(counted.saved["activations"], [*model.parameters(), x])
    assert 0 < kept == allocated - memory.size([outputs])


@pytest.mark.gpu(2)
def test_the_count_is_what_the_real_one_allocates_on_each_gpu():
    model, x, targets = (each.cuda() for each in example(4096, 512, 1024))
    main, other = memory.held_by_replica((model, x, targets), 2, False)
    real, allocated = nn.DataParallel(model, [0, 1]), []
    memory.criterion(real(x), targets).backward()  # its gradients stay, before and after
    for forwards in (0, 1):
        outputs = [real(x) for _ in range(forwards)]
        losses = [memory.criterion(each, targets) for each in outputs]
        assert len(losses) == forwards  # they are kept while the memory is counted
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each thread
        allocated.append([torch.cuda.memory_allocated(gpu) for gpu in range(2)])
    main_bytes = main["activations"] + main["outputs"] + main["loss"]
    other_bytes = other["activations"] + other["parameters"] + other["batch"]
    added = [after - before for before, after in zip(*allocated, strict=True)]
    assert added == pytest.approx([main_bytes, other_bytes], rel=0.05)


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


@pytest.mark.gpu(2)
def test_c11_on_gpus_an_outer_bfloat16_becomes_float16_in_the_replicas():
    model = nn.DataParallel(nn.Linear(3, 2).cuda(), [0, 1])
    with torch.autocast("cuda", torch.bfloat16):
        assert model(torch.randn(4, 3).cuda()).dtype == torch.float16


@pytest.mark.parametrize("device_ids", [[0, 1], [1, 0], [3, 2, 5]])
def test_c20_the_model_must_lie_on_the_first_of_device_ids_whichever_it_is(device_ids):
    """Of torch's own class, on a machine that says it has GPUs, only the checks of forward run."""
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    fakes = {"_get_available_device_type": lambda: "cuda", "_check_balance": lambda ids: None}
    with patch.multiple(data_parallel, **fakes):
        model = nn.DataParallel(nn.Linear(3, 2), device_ids)
    with pytest.raises(RuntimeError, match=rf"on device cuda:{device_ids[0]} \(device_ids\[0"):
        model(torch.randn(4, 3))


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
