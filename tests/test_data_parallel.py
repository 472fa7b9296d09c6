"""Stage 02: DataParallel by hand, its memory, its threads, and what tutorials say about it."""

import importlib
import json
import sys
import threading
import types
from contextlib import contextmanager
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
    loss = F.cross_entropy(model(batch), targets)
    loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# --- The seven steps


@pytest.mark.parametrize(
    ("number", "devices", "sizes"),
    [
        (30, 3, [10, 10, 10]),
        (30, 8, [4, 4, 4, 4, 4, 4, 4, 2]),
        (2, 3, [1, 1]),
        (1, 4, [1]),
    ],
)
def test_scatter_cuts_the_batch_in_order(number, devices, sizes):
    batch = torch.arange(number * 2.0).view(number, 2)
    parts = [args[0] for args, _ in by_hand.scatter([CPU] * devices, batch)]
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), batch)


def test_scatter_cuts_tensors_wherever_they_are_and_hands_on_the_rest():
    ones, twos = torch.ones(4, 1), torch.full((4, 2), 2.0)
    parts = by_hand.scatter([CPU] * 2, ones, "text", pair=(twos, {"deep": ones}))
    assert len(parts) == 2
    for args, kwargs in parts:
        assert (args[0].shape, args[1]) == ((2, 1), "text")
        assert kwargs["pair"][0].shape == (2, 2)
        assert kwargs["pair"][1]["deep"].shape == (2, 1)
    assert by_hand.scatter([CPU] * 3) == [((), {})], "a call without tensors: one replica works"


@pytest.mark.parametrize(("number", "replicas"), [(30, 1), (30, 3), (30, 8), (2, 3)])
def test_replicas_give_the_outputs_loss_and_gradients_of_one_device(number, replicas):
    module, (batch, targets) = small(), samples(number)
    many = parallel(module, replicas)
    torch.testing.assert_close(many(batch), module(batch), **CLOSE)
    one, two = (step(model, module, batch, targets) for model in (module, many))
    torch.testing.assert_close(two, one, **CLOSE)


def test_replicas_are_really_used():
    """The control: a pass-through would satisfy the test above."""
    module = nn.BatchNorm1d(3)
    batch = torch.randn(8, 3)
    halves = [nn.BatchNorm1d(3)(half) for half in batch.chunk(2)]
    torch.testing.assert_close(parallel(module, 2)(batch), torch.cat(halves))
    assert not torch.allclose(parallel(module, 2)(batch), module(batch))


def test_02_train_step_takes_the_steps_of_one_device(without=()):
    train_step = chapter("from_scratch", without).train_step
    one, many = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (one, many)]
    for number in (30, 30, 7):
        batch, targets = samples(number)
        optimizers[0].zero_grad()
        loss = F.cross_entropy(one(batch), targets)
        loss.backward()
        optimizers[0].step()
        ours = train_step(many, optimizers[1], F.cross_entropy, (batch, targets), [CPU] * 3)
        torch.testing.assert_close(ours, loss.detach(), **CLOSE)
    torch.testing.assert_close(many.state_dict(), one.state_dict(), **CLOSE)


def test_02_an_error_in_a_replica_reaches_the_caller(without=()):
    module = chapter("from_scratch", without).DataParallel(nn.Linear(3, 2), [CPU, CPU])
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the text is compared below)
        module(torch.randn(4, 5))
    assert "shapes cannot be multiplied" in str(caught.value)


def test_replica_0_is_the_module_itself_and_the_others_are_copies():
    module = small()
    first, second = by_hand.replicate(module, [CPU, CPU])
    assert first is module
    for own, copied in zip(module.parameters(), second.parameters(), strict=True):
        assert own.data_ptr() != copied.data_ptr()
        assert copied.grad_fn is not None, "autograd knows the way back"


def test_only_the_first_replica_keeps_its_running_statistics():
    module, first = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    batch = torch.randn(8, 3)
    parallel(module, 2)(batch)
    first(batch[:4])
    torch.testing.assert_close(module.running_mean, first.running_mean)
    assert module.num_batches_tracked == 1


class Tied(nn.Module):
    """Two layers that share one weight, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))


def test_tied_weights_stay_tied_in_every_replica():
    torch.manual_seed(0)
    module, (batch, targets) = Tied().double(), samples(10)
    for replica in by_hand.replicate(module, [CPU] * 3):
        assert replica.again is replica.first
        assert replica.second.weight is replica.first.weight
    one, three = (step(m, module, batch, targets) for m in (module, parallel(module, 3)))
    torch.testing.assert_close(three, one, **CLOSE)


def test_frozen_parameters_get_no_gradient():
    module, (batch, targets) = small(), samples(10)
    module[0].weight.requires_grad_(False)
    one, three = (step(m, module, batch, targets) for m in (module, parallel(module, 3)))
    assert three[1][0] is None
    torch.testing.assert_close(three[1][1:], one[1][1:], **CLOSE)


def test_recurrent_weights_are_copied_too():
    """An LSTM keeps a second list of its weights."""
    torch.manual_seed(0)
    module = nn.LSTM(6, 3, batch_first=True).double()
    batch = torch.randn(9, 5, 6).double()
    _, second = by_hand.replicate(module, [CPU, CPU])
    assert all(a is b for a, b in zip(second._flat_weights, second.parameters(), strict=True))
    torch.testing.assert_close(second(batch)[0], module(batch)[0], **CLOSE)


class Several(nn.Module):
    def forward(self, x, scale, *, shift):
        return {"sum": x.sum(1) * scale, "pair": (x + shift, (x * x).mean())}


def test_forward_takes_several_arguments_and_returns_several_tensors():
    x, shift = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    output = parallel(Several(), 3)(x, 2, shift=shift)
    torch.testing.assert_close(output["sum"], x.sum(1) * 2)
    torch.testing.assert_close(output["pair"][0], x + shift)
    means = torch.stack([(part * part).mean() for part in x.chunk(3)])
    torch.testing.assert_close(output["pair"][1], means)  # a scalar of each: a vector


def test_threads_obey_no_grad_of_the_caller():
    model = parallel(nn.Linear(3, 2), 2)
    with torch.no_grad():
        assert not model(torch.randn(4, 3)).requires_grad
    assert model(torch.randn(4, 3)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_threads_obey_autocast_of_the_caller(dtype):
    model = parallel(nn.Linear(3, 2), 2)
    with torch.autocast("cpu", dtype):
        assert model(torch.randn(4, 3)).dtype == dtype
    assert model(torch.randn(4, 3)).dtype == torch.float32


@two_gpus
def test_from_scratch_equals_the_real_one():
    torch.manual_seed(0)
    devices = [torch.device("cuda", i) for i in range(2)]
    module = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).double().cuda()
    batch, targets = (tensor.cuda() for tensor in samples(30))
    models = by_hand.DataParallel(module, devices), nn.DataParallel(module, devices)
    ours, real = (step(model, module, batch, targets) for model in models)
    torch.testing.assert_close(ours, real, rtol=0, atol=1e-10)


# --- train.py on GPUs, without any: what it asks torch for


class Stays(nn.Linear):
    """A model for GPUs that do not exist."""

    def to(self, *_):
        return self


def train_on(gpus: int, *flags: str, without: tuple[Line, ...] = ()) -> types.SimpleNamespace:
    """main of train.py, two epochs, on a machine that says it has so many GPUs.

    Returns the devices of the replicas, the batch for BatchNorm, and each epoch's seed of each GPU.
    """
    stage = fresh_module("02", "train.py", without)
    found, now, current = types.SimpleNamespace(devices=[], norm_batch=0, seeds=[]), {}, []

    def build(name, dataset, norm_batch):
        found.norm_batch = norm_batch
        return Stays(1, 1)

    def wrap(model, devices):
        found.devices = devices
        return model

    @contextmanager
    def device(gpu):
        current.append(gpu.index)
        yield
        current.pop()

    stage.build_model, stage.DataParallel = build, wrap
    stage.train_epoch = lambda *_: found.seeds.append(list(now.values()))
    stage.evaluate = lambda *_: (0.0, 0.0)
    stage.Recorder, stage.save_checkpoint = (lambda *_: Mock(step=0)), Mock()
    stage.peak_memory_bytes = Mock()
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "device": device,
        "manual_seed": lambda seed: now.update({current[-1]: seed}),
        # torch.manual_seed calls this one, for all GPUs:
        "manual_seed_all": lambda seed: now.update(dict.fromkeys(range(gpus), seed)),
    }
    argv = ["train.py", "--device=cuda", "--epochs=2", f"--data-dir={ROOT / 'data'}", *flags]
    with (
        patch.object(sys, "argv", argv),
        patch.object(nn, "DataParallel", wrap),
        patch.multiple(torch.cuda, **fakes),
    ):
        stage.main()
    return found


def test_on_one_gpu_each_virtual_replica_has_a_device_with_an_index():
    """A replica's thread calls torch.cuda.set_device, which takes no device without an index."""
    assert train_on(1, "--replicas=3").devices == [torch.device("cuda", 0)] * 3
    with pytest.raises(ValueError, match="index"):  # the control
        torch.cuda.set_device(torch.device("cuda"))


def test_on_several_gpus_there_is_a_replica_for_each():
    found = train_on(4, "--replicas=2", "--batch-size=120")
    assert found.devices == [torch.device("cuda", index) for index in range(4)]
    assert found.norm_batch == 30, "what BatchNorm sees: a quarter, not a half"


def dropped(seed: int) -> tuple[bool, ...]:
    """Which of 50 numbers dropout drops with this seed."""
    torch.manual_seed(seed)
    return tuple((F.dropout(torch.ones(50)) == 0).tolist())


SEED_EACH = ("train.py", "torch.cuda.manual_seed(args.seed + epoch * len(devices) + index)")


def test_each_gpu_drops_other_units_in_each_epoch():
    seeds = train_on(3).seeds
    assert len({dropped(seed) for epoch in seeds for seed in epoch}) == 2 * 3
    together = train_on(3, without=(SEED_EACH,)).seeds  # the control: torch.manual_seed alone
    assert [len({dropped(seed) for seed in epoch}) for epoch in together] == [1, 1]


class DropsInTurn(nn.Dropout):
    """The replica of this number draws first."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.drawn = f"replica {first}", threading.Event()

    def __deepcopy__(self, memo):
        return self  # an event cannot be copied, and this module has no weights

    def forward(self, x):
        if threading.current_thread().name != self.first:
            assert self.drawn.wait(60)
        y = super().forward(x)
        self.drawn.set()
        return y


def test_the_masks_of_virtual_replicas_depend_on_which_thread_is_first():
    """So a run with dropout cannot be repeated there, as the docstring says."""

    def run(first):
        torch.manual_seed(0)
        return parallel(DropsInTurn(first), 2)(torch.ones(40, 5))

    assert torch.equal(run(0), run(0))  # the control
    assert not torch.equal(run(0), run(1))
    assert torch.equal(run(0)[:20], run(1)[20:])


# --- shapes.py


def test_the_shapes_are_those_of_the_samples_that_each_replica_got():
    shapes = chapter("shapes")
    assert [row[2:] for row in shapes.rows(3)] == [
        ("3 × (10, 5)", "3 × (10, 2)", (30, 2), 0),
        ("2 × (4, 5), 1 × (2, 5)", "2 × (4, 2), 1 × (2, 2)", (10, 2), 0),
    ]
    assert [row[5] for row in shapes.rows(8)] == [0, 3], "10 over 8 is 5 × 2: three are idle"
    assert [row[5] for row in shapes.rows(12)] == [2, 2]


# --- memory.py: the count


def example(batch: int = 24, hidden: int = 7, classes: int = 50):
    """A model of which the bytes can be told by hand, with its batch."""
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
    assert main == {
        "parameters": weights,
        "gradients": weights,
        "optimiser": weights,
        "batch": 24 * (5 * floats + 8),  # the targets are int64
        "activations": 12 * 7 * floats,
        "outputs": 24 * 50 * floats,
        "loss": 24 * 50 * floats + 8,  # log-softmax, the sum of the class weights, the loss
    }


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


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("name", ["net", "words"])
def test_the_activations_of_an_even_batch_add_up_to_those_of_one_device(name, replicas):
    (alone,) = memory.count(memory.examples()[name], 1, inside=False)
    held = memory.count(memory.examples()[name], replicas, inside=False)
    assert len({each["activations"] for each in held}) == 1
    assert sum(each["activations"] for each in held) == alone["activations"] > 0


def test_without_autograd_nothing_is_saved():
    """The control: the count is of what autograd saves."""
    with torch.no_grad():
        held = memory.count(example(), 2, inside=False)
    assert [each["activations"] for each in held] == [0, 0]


def total(held: dict[str, int]) -> int:
    return sum(held.values())


def test_moving_the_loss_inside_moves_exactly_outputs_and_loss():
    outside, inside = (memory.count(example(), 4, inside=where) for where in (False, True))
    kinds = ("parameters", "gradients", "optimiser", "activations")
    for before, after in zip(outside, inside, strict=True):
        assert {kind: before[kind] for kind in kinds} == {kind: after[kind] for kind in kinds}
    outputs, scalar = 24 * 50 * 4, 4
    # The outputs of the whole batch are gathered no more: four losses come instead. Each replica
    # keeps the log-softmax of its own quarter, and the sum of the class weights.
    assert total(outside[0]) - total(inside[0]) == (outputs + outputs * 3 // 4 - 4 * scalar)
    for before, after in zip(outside[1:], inside[1:], strict=True):
        assert after["loss"] - before["loss"] == outputs // 4 + scalar
        assert after["batch"] - before["batch"] == 6 * 8, "its targets"


@pytest.mark.parametrize(("optimiser", "times"), [("SGD", 0), ("momentum", 1), ("Adam", 2)])
def test_the_optimiser_adds_whole_copies_of_the_parameters_on_the_main_device(optimiser, times):
    held = memory.count(example(), 3, False, optimiser)
    steps = 4 * 4 if optimiser == "Adam" else 0  # Adam counts its steps for each parameter
    assert held[0]["optimiser"] == times * held[0]["parameters"] + steps
    assert [each["optimiser"] for each in held[1:]] == [0, 0]


def test_the_committed_bytes_are_those_counted_today():
    committed = json.loads((ROOT / "results" / "02_memory.json").read_text())
    assert committed["bytes"] == memory.count_all()
    assert (ROOT / "results" / "02_memory.png").is_file()


def allocated(gpu: int) -> int:
    """Bytes of tensors, without the work space that cuBLAS keeps for each thread."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(gpu)


@one_gpu
def test_the_count_is_what_a_gpu_allocates():
    """Both replicas on one GPU: the second one's parameters, activations, outputs and loss."""
    model, x, targets = (each.cuda() for each in example(4096, 512, 1024))
    main, other = memory.count((model, x, targets), 2, False)
    devices = [x.device] * 2
    before = allocated(0)
    replicas = by_hand.replicate(model, devices)
    parts = by_hand.scatter(devices, x)
    outputs = by_hand.gather(by_hand.apply(replicas, parts, devices), devices)
    loss = memory.criterion(outputs, targets)
    counted = other["parameters"] + main["outputs"] + main["loss"]
    counted += main["activations"] + other["activations"]
    assert allocated(0) - before == pytest.approx(counted, rel=0.02)
    assert loss.requires_grad


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
    expected = [
        main["activations"] + main["outputs"] + main["loss"],
        other["activations"] + other["parameters"] + other["batch"],
    ]
    assert added == pytest.approx(expected, rel=0.05)
    assert loss.requires_grad


# --- autocast.py: what reaches the threads


def seen_in_a_new_thread() -> tuple[bool, torch.dtype]:
    seen = []

    def look() -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0]


def test_autocast_belongs_to_a_thread():
    with torch.autocast("cpu", torch.float16):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert seen_in_a_new_thread() == (False, torch.bfloat16)


def test_both_cures_give_the_dtype_that_forward_names_in_whatever_thread():
    for run in autocast.WAYS.values():
        for model in (autocast.Decorated(), autocast.Inside()):
            assert run(model).dtype == torch.float16


# --- What tutorials say


def test_c11_torchs_threads_take_on_that_autocast_is_enabled_but_not_its_dtype():
    plain = autocast.Plain  # a new one each time: the weights that autocast has cast are kept
    with torch.autocast("cpu", torch.float16):
        assert autocast.no_threads(plain()).dtype == torch.float16
        assert autocast.plain_threads(plain()).dtype == torch.float32  # what the tutorial says
        assert autocast.torchs_threads(plain()).dtype == torch.bfloat16  # the default of the CPU
    assert autocast.torchs_threads(plain()).dtype == torch.float32


@two_gpus
def test_c11_on_gpus_an_outer_bfloat16_becomes_float16_in_the_replicas():
    assert autocast.on_gpus() == "torch.float16"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["net", "resnet18", "words"])
def test_c13_the_main_device_holds_more(name, inside):
    main, *others = memory.count(memory.examples()[name], 4, inside)
    for other in others:
        extra = {kind: main[kind] - other[kind] for kind in memory.KINDS}
        assert extra["parameters"] == extra["activations"] == 0
        assert extra["gradients"] > 0
        assert extra["optimiser"] > 0
        assert total(main) - total(other) == sum(extra.values()) > 0


def test_c13_large_outputs_fill_the_main_device_unless_the_loss_is_inside():
    counts = json.loads((ROOT / "results" / "02_memory.json").read_text())["bytes"]
    main = {name: both["outside"][0] for name, both in counts.items()}
    share = {name: (m["outputs"] + m["loss"]) / total(m) for name, m in main.items()}
    assert share["words"] > 0.9
    assert share["net"] < 0.01 > share["resnet18"]
    assert total(counts["words"]["inside"][0]) < total(main["words"]) / 4


def torchs_data_parallel(module: nn.Module, device_ids: list[int]) -> nn.DataParallel:
    """torch's own class on a machine that says it has GPUs; only the checks of forward run."""
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    with (
        patch.object(data_parallel, "_get_available_device_type", lambda: "cuda"),
        patch.object(data_parallel, "_check_balance", lambda device_ids: None),
    ):
        return nn.DataParallel(module, device_ids)


def test_c20_the_model_must_lie_on_the_first_of_device_ids_whichever_it_is():
    for device_ids in ([0, 1], [1, 0], [3, 2, 5]):
        model = torchs_data_parallel(nn.Linear(3, 2), device_ids)
        with pytest.raises(RuntimeError, match=rf"on device cuda:{device_ids[0]} \(device_ids\[0"):
            model(torch.randn(4, 3))


@two_gpus
def test_c20_on_gpus_device_ids_may_begin_with_1():
    output = nn.DataParallel(nn.Linear(3, 2).to("cuda:1"), [1, 0])(torch.randn(4, 3))
    assert output.device == torch.device("cuda:1")


def test_c21_a_batch_smaller_than_the_replicas_leaves_some_idle():
    used = []
    module = nn.Linear(6, 4).double()
    module.register_forward_hook(lambda *_: used.append(threading.current_thread().name))
    batch, _ = samples(2)
    torch.testing.assert_close(parallel(module, 8)(batch), module(batch), **CLOSE)
    assert sorted(name for name in used if name != "MainThread") == ["replica 0", "replica 1"]


def test_c21_30_samples_on_8_replicas_are_seven_times_4_and_once_2():
    parts = by_hand.scatter([CPU] * 8, torch.randn(30, 5))
    assert [len(args[0]) for args, _ in parts] == [4, 4, 4, 4, 4, 4, 4, 2]


@two_gpus
def test_c21_on_gpus_a_batch_of_1_works():
    module = nn.Linear(6, 4).double().cuda()
    batch = samples(1)[0].cuda()
    torch.testing.assert_close(nn.DataParallel(module, [0, 1])(batch), module(batch), **CLOSE)


def test_c22_the_loss_of_30_samples_on_3_replicas_is_that_of_one_device():
    module, (batch, targets) = small(), samples(30)
    one, three = (step(model, module, batch, targets) for model in (module, parallel(module, 3)))
    torch.testing.assert_close(three, one, **CLOSE)


def test_c22_with_batchnorm_it_is_another_loss():
    """The control: BatchNorm looks at the whole batch that it sees."""
    module, (batch, targets) = nn.Sequential(nn.BatchNorm1d(6).double(), small()), samples(30)
    losses = [step(model, module, batch, targets)[0] for model in (module, parallel(module, 3))]
    assert abs(losses[0] - losses[1]) > 1e-4


def measured() -> dict:
    return json.loads((ROOT / "results" / "02_data_parallel.json").read_text())


def test_c23_threads_help_large_operations_and_slow_down_small_ones():
    """Of the committed run: the interpreter lock costs what a model's Python code holds it for."""
    small, big = (measured()["lock"][f"{size} operations"]["forward"] for size in ("small", "big"))
    assert small["two threads"]["ratio_interval"][0] > 1
    assert small["two processes"]["ratio"] < small["two threads"]["ratio_interval"][0]
    assert big["two threads"]["ratio_interval"][1] < 1
    assert big["A/A"]["ratio"] == pytest.approx(1, abs=0.1), "the control"


def test_c23_each_replica_more_makes_replicate_and_backward_longer():
    for result in measured()["steps"].values():
        two, four = (result["parts_ms"][f"{n} replicas"] for n in (2, 4))
        assert two["replicate"] < four["replicate"]
        assert two["backward"] < four["backward"]
        assert result["steps"]["4 replicas"]["ratio_interval"][0] > 1, "slower than one device"


def test_the_backward_of_virtual_replicas_runs_in_one_thread():
    threads = {"forward": set(), "backward": set()}

    class Watched(nn.Linear):
        def forward(self, x):
            threads["forward"].add(threading.get_ident())
            y = super().forward(x)
            y.register_hook(lambda _: threads["backward"].add(threading.get_ident()))
            return y

    parallel(Watched(6, 4).double(), 3)(samples(30)[0]).sum().backward()
    assert threads["backward"] == {threading.get_ident()}
    assert threading.get_ident() not in threads["forward"]


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
