"""SyncBatchNorm by hand: what one process computes on the whole batch. And claims C19 and C35."""

import copy
import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from support import chapter, fresh_module, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import UsageError

# Samples of each rank: uneven, one of them alone, and of four ranks one has none at all.
SIZES = {1: [5], 2: [1, 4], 3: [3, 1, 4], 4: [1, 5, 0, 2]}
BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
STEPS = 3
CLOSE = {"rtol": 0, "atol": 1e-10}


def join(rank, ranks):
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def convert(model):
    return chapter("05", "sync_batchnorm").convert(model)


def sync_batchnorm():
    return chapter("05", "sync_batchnorm").SyncBatchNorm


@dataclass(frozen=True)
class Case:
    """A layer and its use: sample is the shape of one sample, channels first."""

    sample: tuple[int, ...] = (3, 4, 5)
    settings: dict[str, Any] = field(default_factory=dict)  # of the layer
    layout: torch.memory_format = torch.contiguous_format
    frozen: tuple[str, ...] = ()
    evaluate: bool = False
    times: int = 1  # that the layer is used in one forward
    backward: bool = True
    input_grad: bool = True


CASES = {
    "2-D": Case((3,)),
    "3-D": Case((3, 5)),
    "4-D": Case(),
    "5-D": Case((3, 2, 3, 4)),
    "channels_last": Case(layout=torch.channels_last),
    "channels_last_3d": Case((3, 2, 3, 4), layout=torch.channels_last_3d),
    "momentum and eps": Case(settings={"momentum": 0.4, "eps": 0.1}),
    "cumulative average": Case(settings={"momentum": None}),
    "no affine": Case(settings={"affine": False}),
    "no running statistics": Case(settings={"track_running_stats": False}),
    "frozen weight": Case(frozen=("weight",)),
    "frozen": Case(frozen=("weight", "bias")),
    "eval mode": Case(evaluate=True),
    "twice in a step": Case(times=2),
    "no_grad": Case(backward=False),
    "input without gradient": Case(input_grad=False),
}


def layer_of(case):
    torch.manual_seed(9)
    layer = BATCHNORMS[1 + len(case.sample)](case.sample[0], **case.settings).double()
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter)
        parameter.requires_grad = name not in case.frozen
    if layer.running_mean is not None:
        layer.running_mean.normal_()
        layer.running_var.uniform_(1, 2)
    return layer.train(not case.evaluate)


def batches_of(case, ranks):
    """For each step, the whole batch, and what the loss multiplies the output with."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, sum(SIZES[ranks]), *case.sample)
    for _ in range(STEPS):
        rows, weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield (rows * 3 + 5).to(memory_format=case.layout), weights


def use(layer, case, rows, weights):
    """One step: output, gradient of the input, gradients of the parameters, and the state after."""
    rows = rows.clone().requires_grad_(case.input_grad)
    layer.zero_grad()
    output = rows
    with nullcontext() if case.backward else torch.no_grad():
        for _ in range(case.times):
            output = layer(output)
    if case.backward and output.requires_grad:
        (output * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert output.dtype == rows.dtype
    kept = output.is_contiguous(memory_format=case.layout)
    return output.detach(), rows.grad, gradients, copy.deepcopy(layer.state_dict()), kept


def _synced(rank, ranks):
    join(rank, ranks)
    results = {}
    for name, case in CASES.items():
        layer = convert(layer_of(case))
        parts = [(a.split(SIZES[ranks]), b.split(SIZES[ranks])) for a, b in batches_of(case, ranks)]
        results[name] = [use(layer, case, a[rank], b[rank]) for a, b in parts]
    return results


@cache
def synced(ranks):
    return run_ranks(ranks, _synced, ranks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", SIZES)
def test_it_is_one_process_on_the_whole_batch(ranks, name):
    """In float64. Gradients of parameters are those of the local batch, as DDP wants them: it adds
    them up and divides by the ranks, so that a mean of the ranks' losses has the right ones."""
    case, whole = CASES[name], layer_of(CASES[name])
    for step, (rows, weights) in enumerate(batches_of(case, ranks)):
        output, grad, gradients, state, _ = use(whole, case, rows, weights)
        parts = [results[name][step] for results in synced(ranks)]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), output, **CLOSE)
        if grad is not None:
            torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, **CLOSE)
        for part in parts:
            assert part[2].keys() == gradients.keys()
            torch.testing.assert_close(part[3], state, **CLOSE)
            assert part[4], "the output has another memory format"
        for key, gradient in gradients.items():
            torch.testing.assert_close(sum(part[2][key] for part in parts), gradient, **CLOSE)


@pytest.mark.parametrize("name", ["4-D", "cumulative average"])
def test_plain_batchnorm_is_not(name):
    """The control of the test above: each rank by itself."""
    case = CASES[name]
    rows, weights = next(batches_of(case, 2))
    whole = use(layer_of(case), case, rows, weights)
    parts = [
        use(layer_of(case), case, *each)
        for each in zip(rows.split([1, 4]), weights.split([1, 4]), strict=True)
    ]
    assert (torch.cat([part[0] for part in parts]) - whole[0]).abs().max() > 0.1
    assert (torch.cat([part[1] for part in parts]) - whole[1]).abs().max() > 0.1
    assert (parts[0][3]["running_mean"] - whole[3]["running_mean"]).abs().max() > 0.01


def _alone(rank):
    join(rank, 2)
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3, track_running_stats=False).double()
    sync = convert(copy.deepcopy(layer)).eval()
    for _ in range(1 + rank):  # rank 1 has a batch more: nobody would answer it
        rows = torch.randn(4 - rank, 3, dtype=torch.float64)
        off = (sync(rows) - layer.eval()(rows)).abs().max().item()
    return off


def test_eval_mode_without_running_statistics_asks_no_other_rank():
    """Evaluation may give the ranks unequal numbers of batches, so it must not wait for others."""
    assert run_ranks(2, _alone) == [0, 0]


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm1d).parameters,
    reason="this torch has no bias=False",
)
def test_it_may_have_a_weight_and_no_bias():
    case = Case(settings={"bias": False})
    whole, parts = layer_of(case), run_ranks(2, _one_case, case)
    rows, weights = next(batches_of(case, 2))
    output, grad, gradients, *_ = use(whole, case, rows, weights)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), output, **CLOSE)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, **CLOSE)
    assert list(gradients) == list(parts[0][2]) == ["weight"]


def _one_case(rank, case):
    join(rank, 2)
    layer = convert(layer_of(case))
    rows, weights = next(batches_of(case, 2))
    return use(layer, case, rows.split([1, 4])[rank], weights.split([1, 4])[rank])


def test_without_a_process_group_it_is_plain_batchnorm():
    rows, weights = next(batches_of(CASES["4-D"], 2))
    sync = convert(layer_of(CASES["4-D"]))
    ours = use(sync, CASES["4-D"], rows, weights)
    whole = use(layer_of(CASES["4-D"]), CASES["4-D"], rows, weights)
    assert torch.equal(ours[0], whole[0])
    assert torch.equal(ours[1], whole[1])


# --- 16-bit formats


HALVES = [
    (dtype, layout)
    for dtype in (torch.bfloat16, torch.float16)
    for layout in (torch.contiguous_format, torch.channels_last)
]


def _half(rank):
    join(rank, 2)
    mine, results = slice(6 * rank, 6 + 10 * rank), []  # 6 samples, and 10
    for dtype, layout in HALVES:
        rows, weights = half_batch(dtype, layout)
        with torch.autocast("cpu", dtype):
            results.append(half_use(convert(nn.BatchNorm2d(3)), rows[mine], weights[mine]))
    rows, weights = half_batch(*HALVES[0])
    model = convert(nn.BatchNorm2d(3).bfloat16())
    return results, half_use(model, rows[mine], weights[mine])


@cache
def half():
    """Of each rank: what each of HALVES gave, and what a layer whose weights are bf16."""
    return run_ranks(2, _half)


def half_batch(dtype, layout):
    generator = torch.Generator().manual_seed(2)
    rows, weights = (torch.randn(2, 16, 3, 8, 8, generator=generator) * 2 + 1).to(dtype)
    return rows.to(memory_format=layout), weights.to(memory_format=layout)


def half_use(layer, rows, weights):
    rows = rows.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(rows)
    output.backward(weights)
    gradients = [layer.weight.grad, layer.bias.grad]
    return output.detach(), rows.grad, gradients, layer.running_mean, layer.running_var


@pytest.mark.parametrize(("dtype", "layout"), HALVES)
def test_under_autocast_it_is_one_process_within_rounding(dtype, layout):
    """16 bits in and out; statistics and gradients of the parameters in fp32."""
    parts = [results[HALVES.index((dtype, layout))] for results, _ in half()]
    rows, weights = half_batch(dtype, layout)
    with torch.autocast("cpu", dtype):
        whole = half_use(nn.BatchNorm2d(3), rows, weights)
    exact = half_use(nn.BatchNorm2d(3).double(), rows.double(), weights.double())
    rounding = torch.finfo(dtype).eps  # 1/128 for bf16
    for place in (0, 1):  # output, gradient of the input
        ours = torch.cat([part[place] for part in parts])
        assert ours.dtype == dtype
        assert ours.is_contiguous(memory_format=layout)
        close = {"rtol": rounding, "atol": 2 * rounding}  # values up to 4: two roundings
        torch.testing.assert_close(ours, whole[place], **close)
        torch.testing.assert_close(ours.double(), exact[place], **close)
    for key in (0, 1):
        gradient = sum(part[2][key] for part in parts)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), exact[2][key], rtol=1e-4, atol=1e-2)
    for part in parts:
        for place in (3, 4):
            assert part[place].dtype == torch.float32
            torch.testing.assert_close(part[place].double(), exact[place], rtol=1e-5, atol=1e-6)
    in_half = 0.1 * rows.mean(dim=[0, 2, 3])  # the control: statistics of 16 bits
    assert (in_half.double() - exact[3]).abs().max() > 1e-5


def test_a_model_of_bf16_weights_works_too():
    for _, part in half():
        assert {tensor.dtype for tensor in (*part[:2], *part[2], *part[3:])} == {torch.bfloat16}
        assert all(tensor.isfinite().all() for tensor in part[:2])


# --- A large mean


def large(rank):
    """Mean 1e4, variance about 1, as fp32 holds them: (B, C, H, W)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 2, 16, 16, generator=generator) + 1e4


def _large(rank):
    join(rank, 2)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        layer = sync_batchnorm()(2, momentum=1.0)
        output = layer(large(rank).to(memory_format=layout))
        results.append((layer.running_var, output))
    return results


def test_a_large_mean_does_not_hide_the_variance():
    batch = torch.cat([large(0), large(1)])
    exact = batch.double().var(dim=[0, 2, 3])
    for results in run_ranks(2, _large):
        for variance, output in results:
            assert ((variance - exact) / exact).abs().max() < 1e-3
            assert output.abs().max() < 10
    squares = batch.square().mean(dim=[0, 2, 3]) - batch.mean(dim=[0, 2, 3]).square()
    assert ((squares - exact) / exact).abs().max() > 1e-3  # the control


# --- One value for a channel


BATCHES = [  # samples of each rank, their shape, and whether that is enough
    ([1], (), False),
    ([1], (2,), True),
    ([1, 0], (), False),
    ([0, 1], (1, 1), False),
    ([1, 1], (), True),  # a local batch of one, which BatchNorm itself refuses
]


def _refused(rank, ranks):
    join(rank, ranks)
    answers, layer = [], sync_batchnorm()(3)
    for sizes, shape, _ in BATCHES:
        if len(sizes) == ranks:
            try:
                answers.append(layer(torch.randn(sizes[rank], 3, *shape)).shape)
            except UsageError as error:
                answers.append(str(error))
    return answers


def test_one_value_for_a_channel_from_all_ranks_is_refused_on_all():
    for ranks in (1, 2):
        batches = [batch for batch in BATCHES if len(batch[0]) == ranks]
        for rank, answers in enumerate(run_ranks(ranks, _refused, ranks)):
            for (sizes, shape, enough), answer in zip(batches, answers, strict=True):
                if enough:
                    assert answer == (sizes[rank], 3, *shape)
                else:
                    assert "got 1 value for each of 3 channels from all ranks together" in answer
                    assert "try a larger --batch-size" in answer
    with pytest.raises(ValueError, match="more than 1 value"):
        nn.BatchNorm1d(3)(torch.randn(1, 3))


# --- What it sends


def _collectives(rank, frozen):
    join(rank, 2)
    model = convert(torchvision.models.resnet18(num_classes=4))
    if frozen:
        model.conv1.weight.requires_grad = False
    counts = []
    images = torch.randn(2, 3, 32, 32)

    def count(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            result = function()
        names = [event.name for event in seen.events() if event.name.startswith("c10d::")]
        counts.append((len(names), set(names)))
        return result

    loss = count(lambda: model(images).sum())
    count(loss.backward)
    with torch.no_grad():
        count(lambda: model(images))
    model.eval()
    count(lambda: model(images))
    return counts


@pytest.mark.parametrize("frozen", [False, True])
def test_each_layer_sends_one_all_reduce_forward_and_one_backward(frozen):
    """resnet18 has 20 layers. If nothing before the first one learns, it need send none back."""
    layers = sum(isinstance(m, nn.BatchNorm2d) for m in torchvision.models.resnet18().modules())
    assert layers == 20
    every = {"c10d::allreduce_"}
    expected = [(20, every), (20 - frozen, every), (20, every), (0, set())]
    assert run_ranks(2, _collectives, frozen) == [expected] * 2


# --- In DDP


def small_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers, nn.BatchNorm1d(3)).double()


def images_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)


def loss_of(outputs):
    return (outputs - torch.arange(3)).pow(4).mean()


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_alone(micro_batches=1, steps=3):
    """One process with plain BatchNorm: micro-batches of 8 images, then an update."""
    model = small_model()
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro_batches):
            (loss_of(model(images_of(step * micro_batches + part))) / micro_batches).backward()
        optimizer.step()
    return state_of(model)


def _accumulate(rank, micro_batches):
    join(rank, 2)
    model = convert(small_model())
    ddp = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(micro_batches):
            last = part == micro_batches - 1
            with nullcontext() if last else ddp.no_sync():
                images = images_of(step * micro_batches + part)[4 * rank : 4 * rank + 4]
                (loss_of(ddp(images)) / micro_batches).backward()
        optimizer.step()
    return state_of(model)


def test_in_no_sync_every_micro_batch_is_normalised_over_all_ranks():
    one = train_alone(micro_batches=2)
    for state in run_ranks(2, _accumulate, 2):
        torch.testing.assert_close(state, one, **CLOSE)


def _compiled(rank):
    join(rank, 2)
    model = convert(small_model())
    compiled = torch.compile(model, backend="aot_eager")  # no compiler of C++ needed
    loss_of(compiled(images_of(0)[4 * rank : 4 * rank + 4])).backward()
    return [p.grad for p in model.parameters()], state_of(model)


def test_in_a_compiled_model_it_computes_the_same():
    model = small_model()
    loss_of(model(images_of(0))).backward()
    answers = run_ranks(2, _compiled)
    for index, parameter in enumerate(model.parameters()):
        mean = sum(gradients[index] for gradients, _ in answers) / 2
        torch.testing.assert_close(mean, parameter.grad, **CLOSE)
    for _, state in answers:
        torch.testing.assert_close(state, state_of(model), **CLOSE)


# --- convert


def test_its_state_has_the_keys_of_torchs():
    ours = convert(nn.BatchNorm2d(3))
    for other in (nn.BatchNorm2d(3), nn.SyncBatchNorm(3)):
        assert list(ours.state_dict()) == list(other.state_dict())
        other.running_mean.fill_(7)
        ours.load_state_dict(other.state_dict())
        other.load_state_dict(ours.state_dict())
        assert ours.running_mean.tolist() == [7] * 3
    bare = {"affine": False, "track_running_stats": False}
    assert list(convert(nn.BatchNorm2d(3, **bare)).state_dict()) == []


def test_convert_finds_every_layer_and_leaves_the_rest():
    inner = nn.ModuleDict({"one": nn.BatchNorm1d(2), "three": nn.BatchNorm3d(2)})
    model = nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), inner)
    model.append(nn.SyncBatchNorm(2))
    kinds = [type(layer) for layer in convert(model).modules()]
    ours = sync_batchnorm()
    assert kinds.count(ours) == 4
    assert not set(kinds) & set(BATCHNORMS.values())
    assert {nn.InstanceNorm2d, nn.GroupNorm} < set(kinds)
    again = list(model.modules())
    assert all(a is b for a, b in zip(again, convert(model).modules(), strict=True))
    assert type(convert(nn.BatchNorm2d(2))) is ours  # the whole model is one layer


def test_a_layer_that_is_used_twice_stays_one_layer():
    shared = nn.BatchNorm1d(3)
    model = convert(nn.Sequential(shared, nn.Linear(3, 3), shared))
    assert model[0] is model[2] is shared
    assert type(shared) is sync_batchnorm()
    assert len(list(model.parameters())) == 4


def test_convert_keeps_all_that_a_layer_holds():
    layer = nn.BatchNorm2d(3, eps=0.5, momentum=0.25, dtype=torch.float64).eval()
    layer.weight.requires_grad = False
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    held = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    optimizer = SGD(layer.parameters(), 0.1)
    model = convert(nn.Sequential(layer, nn.BatchNorm2d(3, track_running_stats=False)))
    assert {id(tensor) for tensor in (*model[0].parameters(), *model[0].buffers())} == held
    assert (model[0].eps, model[0].momentum, model[0].num_features) == (0.5, 0.25, 3)
    assert not model[0].training
    assert model[1].training
    assert model[1].running_mean is None
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert model[0].weight.dtype == torch.float64
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0](torch.zeros(2, 3, 1, 1, dtype=torch.float64))
    assert calls == ["hook"]


class BatchNormAct(nn.BatchNorm2d):
    """BatchNorm and an activation in one, as some libraries of models have it."""

    def forward(self, x):
        return torch.relu(super().forward(x))


@pytest.mark.parametrize("layer", [BatchNormAct(3), nn.LazyBatchNorm2d()])
def test_convert_refuses_a_layer_that_does_more_than_batchnorm(layer):
    with pytest.raises(UsageError, match=f"layer 1 is a {type(layer).__name__}: expected"):
        convert(nn.Sequential(nn.Identity(), layer))


def test_torchs_convert_drops_what_such_a_layer_does_more():
    """Why convert refuses: https://github.com/pytorch/pytorch/issues/187298"""
    x = torch.randn(4, 3, 2, 2)
    layer = BatchNormAct(3).eval()
    assert layer(x).min() == 0
    assert nn.SyncBatchNorm.convert_sync_batchnorm(layer)(x).min() < 0


# --- C19: without SyncBatchNorm, statistics are of the local batch


def _statistics(rank, sync):
    join(rank, 2)
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5)).double()
    ddp = DistributedDataParallel(convert(model) if sync else model)
    seen = []
    for step in range(2):
        ddp(torch.full((4, 1), 10.0 * rank + step, dtype=torch.float64)).sum().backward()
        seen.append(model[0].running_mean.item())
    return seen


def test_c19_without_it_each_rank_has_the_statistics_of_its_own_batch():
    """Rank 0 has zeros, then ones; rank 1 has tens, then elevens. The mean of all is 5, then 6."""
    [first, second] = run_ranks(2, _statistics, False)
    assert (first[0], second[0]) == (0, 5)  # half the way from 0 to the own mean: 0, and 10
    # Before each forward, DDP sends rank 0's statistics to all: what rank 1 had learned is lost.
    assert (first[1], second[1]) == (0.5, 0 + (11 - 0) / 2)
    assert run_ranks(2, _statistics, True) == [[2.5, 2.5 + (6 - 2.5) / 2]] * 2


# --- C35: convert before wrapping


def copies(model):
    """A convert that makes new layers with new parameters, as a careless one would."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            layer = sync_batchnorm()(child.num_features).double()
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
    return model


CONVERTERS = {
    "ours": lambda model: convert(model),
    "torch's": lambda model: convert(nn.SyncBatchNorm.convert_sync_batchnorm(model)),
    "copies": copies,
}


def train_converted(rank, how, late):
    """Three steps in DDP; how: what converts the model, before it is wrapped or after (late)."""
    model = small_model()
    if not late:
        model = how(model)
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    ddp = DistributedDataParallel(model)
    if late:
        how(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp(images_of(step)[4 * rank : 4 * rank + 4])).backward()
        optimizer.step()
    return state_of(model)


def _converted(rank):
    join(rank, 2)
    results = {}
    for how, late in ((how, late) for late in (False, True) for how in CONVERTERS):
        try:
            results[how, late] = train_converted(rank, CONVERTERS[how], late)
        except RuntimeError as error:
            results[how, late] = str(error)
    return results


@cache
def converted():
    return run_ranks(2, _converted)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["ours", "torch's"])
def test_c35_before_or_after_wrapping_it_is_the_same_training(how, late):
    """Of torch's, what convert_sync_batchnorm makes of the model; its layers cannot run on a CPU,
    so they become ours, which changes no parameter."""
    for results in converted():
        torch.testing.assert_close(results[how, late], train_alone(), **CLOSE)


def test_c35_torchs_layers_hold_the_parameters_and_buffers_of_those_they_replace():
    model = small_model()
    held = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    optimizer = SGD(model.parameters(), 0.1)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(layer) for layer in converted][1] is nn.SyncBatchNorm
    assert [id(tensor) for tensor in (*converted.parameters(), *converted.buffers())] == held
    held_by_optimizer = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert held_by_optimizer == {id(parameter) for parameter in converted.parameters()}


def test_c35_copies_made_after_wrapping_are_unknown_to_ddp_and_the_optimizer():
    """The control: made before, they train; made after, DDP waits for the gradients of the old."""
    for results in converted():
        torch.testing.assert_close(results["copies", False], train_alone(), **CLOSE)
        assert (
            "Expected to have finished reduction in the prior iteration" in results["copies", True]
        )


def _late(rank, without):
    join(rank, 2)
    module = fresh_module("05", "sync_batchnorm.py", without)
    return train_converted(rank, module.convert, late=True)


def test_05_layers_converted_after_wrapping_train_like_one_process(without=()):
    for state in run_ranks(2, _late, without):
        torch.testing.assert_close(state, train_alone(), **CLOSE)


def _wrap_torchs(rank):
    join(rank, 1)
    try:
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(small_model()))
    except ValueError as error:
        return str(error)


def test_c35_on_a_cpu_ddp_refuses_torchs_layers():
    assert run_ranks(1, _wrap_torchs) == ["SyncBatchNorm layers only work with GPU modules"]
