"""Stage 02: DataParallel by hand, its memory, its threads, and what tutorials say about it."""

import importlib
import json
import operator
import sys
import threading
import types
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from support import ROOT, Line, fresh_module
from torch import nn
from torch.profiler import ProfilerActivity, profile

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="nn.DataParallel needs two GPUs")

CPU = torch.device("cpu")
CLOSE = {"rtol": 0, "atol": 1e-12}


def chapter(name: str, without: tuple[Line, ...] = ()) -> types.ModuleType:
    """Other tests do not see what is left out here."""
    return fresh_module("02", f"{name}.py", without)


by_hand, memory, autocast = (chapter(name) for name in ("from_scratch", "memory", "autocast"))


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
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return outputs.detach(), loss.detach(), gradients


class Tied(nn.Module):
    """Two layers that share one weight, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Recurrent(nn.LSTM):
    """It keeps a second list of its weights."""

    def forward(self, x):
        return super().forward(x[:, None])[0][:, 0]


def frozen() -> nn.Module:
    module = small()
    module[0].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("build", [small, frozen, Tied, lambda: Recurrent(6, 4, batch_first=True)])
def test_replicas_give_the_outputs_loss_and_gradients_of_one_device(build, replicas):
    torch.manual_seed(0)
    module = build().double()
    for number in (30, 2):
        one, many = (
            step(m, module, *samples(number)) for m in (module, parallel(module, replicas))
        )
        torch.testing.assert_close(many, one, **CLOSE)
    first, *others = by_hand.replicate(module, [CPU] * replicas)
    assert first is module
    for other in others:
        for own, copied in zip(module.parameters(), other.parameters(), strict=True):
            assert own.data_ptr() != copied.data_ptr()
            assert own.requires_grad == (copied.grad_fn is not None), "autograd knows the way back"
        if build is Tied:
            assert other.again is other.first
            assert other.second.weight is other.first.weight
        if isinstance(other, nn.LSTM):
            assert all(map(operator.is_, other._flat_weights, other.parameters()))


def test_c22_the_loss_of_30_samples_on_3_replicas_is_that_of_one_device_but_with_batchnorm():
    """BatchNorm, the control, looks at the whole batch that it sees."""
    for layer, same in ((nn.Identity(), True), (nn.BatchNorm1d(6).double(), False)):
        module = nn.Sequential(layer, small())
        one, three = (step(m, module, *samples(30))[1] for m in (module, parallel(module, 3)))
        assert abs(one - three) < 1e-12 if same else abs(one - three) > 1e-4


def test_only_the_first_replica_keeps_its_running_statistics():
    module, (first, second) = nn.BatchNorm1d(3), (nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    batch = torch.randn(8, 3)
    output = parallel(module, 2)(batch)
    torch.testing.assert_close(output, torch.cat([first(batch[:4]), second(batch[4:])]))
    torch.testing.assert_close(module.state_dict(), first.state_dict())
    assert module.num_batches_tracked == 1


def test_02_train_step_takes_the_steps_of_one_device(without=()):
    train_step = chapter("from_scratch", without).train_step
    one, many = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (one, many)]
    for number in (30, 30, 7):
        batch, targets = samples(number)
        _, loss, _ = step(one, one, batch, targets)
        optimizers[0].step()
        ours = train_step(many, optimizers[1], F.cross_entropy, (batch, targets), [CPU] * 3)
        torch.testing.assert_close(ours, loss, **CLOSE)
    torch.testing.assert_close(many.state_dict(), one.state_dict(), **CLOSE)


def test_02_an_error_in_a_replica_reaches_the_caller(without=()):
    module = chapter("from_scratch", without).DataParallel(nn.Linear(3, 2), [CPU, CPU])
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the text is compared below)
        module(torch.randn(4, 5))
    assert "shapes cannot be multiplied" in str(caught.value)


class Several(nn.Module):
    def forward(self, x, scale, *, shift):
        shift, more = shift
        return {"sum": x.sum(1) * scale, "pair": (x + shift, (x * x).mean() + more["deep"].sum())}


def test_forward_takes_and_returns_tensors_wherever_they_are():
    x, shift, deep = (torch.randn(6, n).double() for n in (2, 1, 1))
    output = parallel(Several(), 3)(x, 2, shift=(shift, {"deep": deep}))
    scalars = [(a * a).mean() + b.sum() for a, b in zip(x.chunk(3), deep.chunk(3), strict=True)]
    expected = {"sum": x.sum(1) * 2, "pair": (x + shift, torch.stack(scalars))}
    torch.testing.assert_close(output, expected)
    assert by_hand.scatter([CPU] * 3) == [((), {})], "a call without tensors: one replica works"


def test_threads_obey_no_grad_and_autocast_of_the_caller():
    model, batch = parallel(nn.Linear(3, 2), 2), torch.randn(4, 3)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype), torch.no_grad():
            assert (model(batch).dtype, model(batch).requires_grad) == (dtype, False)
    assert (model(batch).dtype, model(batch).requires_grad) == (torch.float32, True)


def test_c21_a_batch_smaller_than_the_replicas_leaves_some_idle():
    """30 over 8 is seven times 4 and once 2. And the backward runs in one thread."""
    for number, devices, sizes in [(30, 8, [4] * 7 + [2]), (30, 3, [10] * 3), (10, 8, [2] * 5)]:
        batch = torch.arange(number * 2.0).view(number, 2)
        parts = [args[0] for args, _ in by_hand.scatter([CPU] * devices, batch)]
        assert [len(part) for part in parts] == sizes
        assert torch.equal(torch.cat(parts), batch)
    forward, backward = [], set()

    class Watched(nn.Linear):
        def forward(self, x):
            forward.append(threading.current_thread().name)
            y = super().forward(x)
            y.register_hook(lambda _: backward.add(threading.current_thread().name))
            return y

    parallel(Watched(6, 4).double(), 8)(samples(2)[0]).sum().backward()
    assert sorted(forward) == ["replica 0", "replica 1"]
    assert backward == {"MainThread"}


@two_gpus
def test_from_scratch_equals_the_real_one():
    torch.manual_seed(0)
    devices = [torch.device("cuda", i) for i in range(2)]
    module = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).double().cuda()
    batch, targets = (tensor.cuda() for tensor in samples(30))
    models = by_hand.DataParallel(module, devices), nn.DataParallel(module, devices)
    ours, real = (step(model, module, batch, targets) for model in models)
    torch.testing.assert_close(ours, real, rtol=0, atol=1e-10)


def train_on(gpus: int, *flags: str, without: tuple[Line, ...] = ()) -> tuple[list, int, list]:
    """main of train.py, two epochs, on a machine that says it has so many GPUs.

    Returns the devices of the replicas, the batch for BatchNorm, and each epoch's seed of each GPU.
    """
    stage = fresh_module("02", "train.py", without)
    seed_of, current, seeds, wrap, build = {}, [], [], Mock(), Mock()
    build.return_value.to.return_value = nn.Linear(1, 1)  # it stays where it is
    stage.build_model, stage.DataParallel = build, wrap
    stage.train_epoch = lambda *_: seeds.append(list(seed_of.values()))
    stage.evaluate, stage.save_checkpoint = Mock(return_value=(0.0, 0.0)), Mock()
    stage.Recorder, stage.peak_memory_bytes = Mock(return_value=Mock(step=0)), Mock()
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "device": lambda gpu: current.append(gpu.index) or nullcontext(),
        "manual_seed": lambda seed: seed_of.update({current[-1]: seed}),
        # torch.manual_seed calls this one, for all GPUs:
        "manual_seed_all": lambda seed: seed_of.update(dict.fromkeys(range(gpus), seed)),
    }
    argv = ["train.py", "--device=cuda", "--epochs=2", f"--data-dir={ROOT / 'data'}", *flags]
    with (
        patch.object(sys, "argv", argv),
        patch.object(nn, "DataParallel", wrap),
        patch.multiple(torch.cuda, **fakes),
    ):
        stage.main()
    return wrap.call_args.args[1], build.call_args.args[2], seeds


def test_on_one_gpu_each_virtual_replica_has_a_device_with_an_index():
    """A replica's thread calls torch.cuda.set_device, which takes no device without an index."""
    assert train_on(1, "--replicas=3")[0] == [torch.device("cuda", 0)] * 3
    with pytest.raises(ValueError, match="index"):  # the control
        torch.cuda.set_device(torch.device("cuda"))


def test_on_several_gpus_there_is_a_replica_for_each_that_drops_other_units_in_each_epoch():
    devices, norm_batch, seeds = train_on(3, "--replicas=2", "--batch-size=120")
    assert devices == [torch.device("cuda", index) for index in range(3)]
    assert norm_batch == 40, "what BatchNorm sees: a third, not a half"
    assert seeds == [[1234, 1235, 1236], [1237, 1238, 1239]]
    each = ("train.py", "torch.cuda.manual_seed(args.seed + epoch * len(devices) + index)")
    # The control: torch.manual_seed alone.
    assert train_on(3, without=(each,))[2] == [[1234] * 3, [1235] * 3]


def example(batch: int = 24, hidden: int = 7, classes: int = 50):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return model, torch.randn(batch, 5), torch.randint(classes, (batch,))


def test_the_count_is_what_one_tells_by_hand():
    (main, other), floats = memory.count(example(), 2, inside=False), 4
    weights = (5 * 7 + 7 + 7 * 50 + 50) * floats
    assert other == {
        "parameters": weights,
        "gradients": 0,
        "optimiser": 0,
        "batch": 12 * 5 * floats,
        "activations": 12 * 7 * floats,  # what ReLU gives, saved by it and by the layer after it
        "outputs": 0,
        "loss": 0,
    }
    outputs = 24 * 50 * floats
    assert main == other | {
        "gradients": weights,
        "optimiser": weights,
        "batch": 24 * (5 * floats + 8),  # the targets are int64
        "outputs": outputs,
        "loss": outputs + 8,  # log-softmax, the sum of the class weights, the loss
    }
    # Inside, each replica keeps the log-softmax of its own half, and two losses are gathered.
    inside, elsewhere = memory.count(example(), 2, inside=True)
    half = {"loss": outputs // 2 + floats}
    assert elsewhere == other | half | {"batch": 12 * (5 * floats + 8)}
    assert inside == main | {"outputs": 2 * floats, "loss": half["loss"] + floats}
    with torch.no_grad():  # the control: the count is of what autograd saves
        assert [each["activations"] for each in memory.count(example(), 2, False)] == [0, 0]


@pytest.mark.parametrize("name", ["net", "words"])
def test_the_count_is_what_the_allocator_hands_out(name):
    """torch's profiler sees every allocation: those that are alive when the forward is done."""
    model, x, _ = memory.examples()[name]
    counted = memory.Counted(model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = counted(x)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    kept = memory.size(counted.saved["activations"], [*model.parameters(), x])
    assert kept > 0
    assert kept + memory.size([outputs]) == allocated


def committed() -> dict[str, dict[str, list[dict[str, int]]]]:
    return json.loads((ROOT / "results" / "02_memory.json").read_text())["bytes"]


def test_the_committed_bytes_are_those_counted_today():
    assert committed() == memory.count_all()


def allocated(gpu: int) -> int:
    """Bytes of tensors, without the work space that cuBLAS keeps for each thread."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(gpu)


@two_gpus
def test_the_count_is_what_the_real_one_allocates_on_each_gpu():
    model, x, targets = (each.cuda() for each in example(4096, 512, 1024))
    main, other = memory.count((model, x, targets), 2, False)
    real = nn.DataParallel(model, [0, 1])
    memory.criterion(real(x), targets).backward()  # its gradients stay, before and after
    before = [allocated(gpu) for gpu in range(2)]
    outputs = real(x)
    loss = memory.criterion(outputs, targets)
    added = [allocated(gpu) - before[gpu] for gpu in range(2)]
    of_main = main["activations"] + main["outputs"] + main["loss"]
    of_other = other["activations"] + other["parameters"] + other["batch"]
    assert added == pytest.approx([of_main, of_other], rel=0.05)
    assert loss.requires_grad


def total(held: dict[str, int]) -> int:
    return sum(held.values())


def test_c13_the_main_device_holds_more_unless_the_loss_of_large_outputs_is_inside():
    share = {}
    for name, both in committed().items():
        for main, *others in both.values():
            for other in others:
                extra = {kind: main[kind] - other[kind] for kind in memory.KINDS}
                assert extra["parameters"] == extra["activations"] == 0
                assert min(extra["gradients"], extra["optimiser"], total(extra)) > 0
        main = both["outside"][0]
        share[name] = (main["outputs"] + main["loss"]) / total(main)
    assert share["words"] > 0.9
    assert share["net"] < 0.01 > share["resnet18"]
    words = committed()["words"]
    assert total(words["inside"][0]) < total(words["outside"][0]) / 4


def test_c11_torchs_threads_take_on_that_autocast_is_enabled_but_not_its_dtype_and_two_cures():
    plain = autocast.Plain  # a new one each time: the weights that autocast has cast are kept
    with torch.autocast("cpu", torch.float16):
        assert autocast.no_threads(plain()).dtype == torch.float16
        assert autocast.plain_threads(plain()).dtype == torch.float32  # what the tutorial says
        assert autocast.torchs_threads(plain()).dtype == torch.bfloat16  # the default of the CPU
    assert autocast.torchs_threads(plain()).dtype == torch.float32
    for run in autocast.WAYS.values():  # both name the dtype in forward
        for model in (autocast.Decorated(), autocast.Inside()):
            assert run(model).dtype == torch.float16


@two_gpus
def test_c11_on_gpus_an_outer_bfloat16_becomes_float16_in_the_replicas():
    assert autocast.on_gpus() == "torch.float16"


def test_c20_the_model_must_lie_on_the_first_of_device_ids_whichever_it_is():
    """Of torch's own class, on a machine that says it has GPUs, only the checks of forward run."""
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    fakes = {"_get_available_device_type": lambda: "cuda", "_check_balance": lambda ids: None}
    for device_ids in ([0, 1], [1, 0], [3, 2, 5]):
        with patch.multiple(data_parallel, **fakes):
            model = nn.DataParallel(nn.Linear(3, 2), device_ids)
        with pytest.raises(RuntimeError, match=rf"on device cuda:{device_ids[0]} \(device_ids\[0"):
            model(torch.randn(4, 3))


@two_gpus
def test_c20_c21_on_gpus_device_ids_may_begin_with_1_and_a_batch_of_1_works():
    module, batch = nn.Linear(6, 4).double().to("cuda:1"), samples(1)[0].to("cuda:1")
    output = nn.DataParallel(module, [1, 0])(batch)
    assert output.device == torch.device("cuda:1")
    torch.testing.assert_close(output, module(batch), **CLOSE)


def test_c23_threads_slow_down_small_operations_and_each_replica_more_makes_a_step_longer():
    """Of the committed run: the interpreter lock costs what a model's Python code holds it for."""
    measured = json.loads((ROOT / "results" / "02_data_parallel.json").read_text())
    small, big = (measured["lock"][f"{size} operations"]["forward"] for size in ("small", "big"))
    assert small["two threads"]["ratio_interval"][0] > 1
    assert small["two processes"]["ratio"] < small["two threads"]["ratio_interval"][0]
    assert big["two threads"]["ratio_interval"][1] < 1
    assert big["A/A"]["ratio"] == pytest.approx(1, abs=0.1), "the control"
    for result in measured["steps"].values():
        two, four = (result["parts_ms"][f"{n} replicas"] for n in (2, 4))
        assert all(two[part] < four[part] for part in ("replicate", "backward"))
        assert result["steps"]["4 replicas"]["ratio_interval"][0] > 1, "slower than one device"


def test_c24_the_batch_need_not_lie_on_the_devices_of_the_replicas():
    """`meta` stands for a GPU: a device that is not the batch's."""
    away = torch.device("meta")
    parts = by_hand.scatter([away, away], samples(10)[0])
    assert [args[0].device for args, _ in parts] == [away, away]
    assert by_hand.gather([args[0] for args, _ in parts], [away]).shape == (10, 6)


@one_gpu
def test_c24_on_gpus_the_real_one_takes_a_batch_from_the_cpu():
    model = nn.DataParallel(nn.Linear(6, 4).cuda(), list(range(GPUS)))
    assert model(samples(10)[0].float()).device == torch.device("cuda:0")
