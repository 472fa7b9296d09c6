"""SyncBatchNorm by hand: what one process computes on the whole batch. And claims C19 and C35."""

import copy
import inspect
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import chapter, fresh_module, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import UsageError

# Samples of each rank: uneven, one of them alone, and of four ranks one has none at all.
SIZES = {1: [5], 2: [1, 4], 3: [3, 1, 4], 4: [1, 5, 0, 2]}
BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CLOSE = {"rtol": 0, "atol": 1e-10}
ON_RANKS = []  # functions of a rank, and the numbers of ranks on which they run, in one start


def on_ranks(*numbers):
    return lambda function: ON_RANKS.append((function, numbers)) or function


def _on_ranks(rank, ranks):
    dist.init_process_group("gloo")
    return {function: function(rank, ranks) for function, worlds in ON_RANKS if ranks in worlds}


@cache
def started(ranks):
    return run_ranks(ranks, _on_ranks, ranks)


def seen(function, ranks=2):
    return [results[function] for results in started(ranks)]


sync_batchnorm = chapter("05", "sync_batchnorm")
convert = sync_batchnorm.convert
DEFAULTS = {"sample": (3, 4, 5), "settings": {}, "layout": torch.contiguous_format}
DEFAULTS |= {"dtype": torch.float64, "frozen": (), "evaluate": False, "times": 1}
DEFAULTS |= {"backward": True, "input_grad": True}


def case_of(**more) -> SimpleNamespace:
    """A layer with its settings, and its use. sample: the shape of one sample, channels first;
    times: how often the layer is used in one forward."""
    return SimpleNamespace(**{**DEFAULTS, **more})


CASES = {
    "2-D": case_of(sample=(3,)),
    "3-D": case_of(sample=(3, 5)),
    "4-D": case_of(),
    "5-D": case_of(sample=(3, 2, 3, 4)),
    "channels_last": case_of(layout=torch.channels_last),
    "channels_last_3d": case_of(sample=(3, 2, 3, 4), layout=torch.channels_last_3d),
    "momentum and eps": case_of(settings={"momentum": 0.4, "eps": 0.1}),
    "cumulative average": case_of(settings={"momentum": None}),
    "no affine": case_of(settings={"affine": False}),
    "no running statistics": case_of(settings={"track_running_stats": False}),
    "frozen weight": case_of(frozen=("weight",)),
    "frozen": case_of(frozen=("weight", "bias")),
    "eval mode": case_of(evaluate=True),
    "twice in a step": case_of(times=2),
    "no_grad": case_of(backward=False),
    "input without gradient": case_of(input_grad=False),
    "bf16": case_of(dtype=torch.bfloat16),
    "fp16, channels_last": case_of(dtype=torch.float16, layout=torch.channels_last),
}
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in older versions of torch
    CASES["no bias"] = case_of(settings={"bias": False})


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
    """For each of three steps, the whole batch, and what the loss multiplies the output with."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, sum(SIZES[ranks]), *case.sample)
    for _ in range(3):
        rows, weights = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
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
    assert output.is_contiguous(memory_format=case.layout)
    return output.detach(), rows.grad, gradients, copy.deepcopy(layer.state_dict())


@on_ranks(1, 2, 3, 4)
def synced(rank, ranks):
    results = {}
    for name, case in CASES.items():
        layer = convert(layer_of(case))
        if case.dtype != torch.float64:
            layer.float()
        parts = [(a.split(SIZES[ranks]), b.split(SIZES[ranks])) for a, b in batches_of(case, ranks)]
        with torch.autocast("cpu", enabled=case.dtype != torch.float64):
            results[name] = [use(layer, case, a[rank], b[rank]) for a, b in parts]
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", SIZES)
def test_it_is_one_process_on_the_whole_batch(ranks, name):
    """In float64. Gradients of parameters are those of the local batch, as DDP wants them: it adds
    them up and divides by the ranks, so that a mean of the ranks' losses has the right ones.

    Of 16 bits in and out, within their rounding; statistics and these gradients are in fp32."""
    case, whole = CASES[name], layer_of(CASES[name])
    half, rounding = case.dtype != torch.float64, torch.finfo(case.dtype).eps
    near = {"rtol": 2 * rounding, "atol": 8 * rounding, "check_dtype": False} if half else CLOSE
    wide = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False} if half else CLOSE
    for step, (rows, weights) in enumerate(batches_of(case, ranks)):
        output, grad, gradients, state = use(whole, case, rows.double(), weights.double())
        parts = [results[name][step] for results in seen(synced, ranks)]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), output, **near)
        if grad is not None:
            torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, **near)
        for part in parts:
            assert part[2].keys() == gradients.keys()
            torch.testing.assert_close(part[3], state, **wide)
        for key, gradient in gradients.items():
            assert parts[0][2][key].dtype == (torch.float32 if half else torch.float64)
            torch.testing.assert_close(sum(part[2][key] for part in parts), gradient, **wide)


def test_plain_batchnorm_is_not_and_without_a_process_group_it_is_plain_batchnorm():
    """The control of the test above: each rank by itself."""
    case = CASES["4-D"]
    rows, weights = next(batches_of(case, 2))
    whole = use(layer_of(case), case, rows, weights)
    alone = use(convert(layer_of(case)), case, rows, weights)
    assert all(torch.equal(alone[place], whole[place]) for place in (0, 1))
    parts = [
        use(layer_of(case), case, *each)
        for each in zip(rows.split([1, 4]), weights.split([1, 4]), strict=True)
    ]
    for place in (0, 1):
        assert (torch.cat([part[place] for part in parts]) - whole[place]).abs().max() > 0.1
    assert (parts[0][3]["running_mean"] - whole[3]["running_mean"]).abs().max() > 0.01


def large(rank):
    """Mean 1e4, variance about 1, as fp32 holds them: (B, C, H, W)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 2, 16, 16, generator=generator) + 1e4


@on_ranks(2)
def normalized(rank, _):
    layer = sync_batchnorm.SyncBatchNorm(2, momentum=1.0)
    return layer(large(rank)).detach(), layer.running_var


def test_a_large_mean_does_not_hide_the_variance():
    batch = torch.cat([large(0), large(1)])
    exact = batch.double().var(dim=[0, 2, 3])
    squares = batch.square().mean(dim=[0, 2, 3]) - batch.mean(dim=[0, 2, 3]).square()
    for output, variance in seen(normalized):
        assert ((variance - exact) / exact).abs().max() < 1e-3
        assert output.abs().max() < 10
        assert ((squares - exact) / exact).abs().max() > 1e-3  # the control


@on_ranks(2)
def refused(rank, _):
    """A local batch of one, which BatchNorm itself refuses; then one on rank 1 only."""
    answers, layer = [], sync_batchnorm.SyncBatchNorm(3)
    for samples in (1, rank):
        try:
            answers.append(layer(torch.randn(samples, 3, 1)).shape)
        except UsageError as error:
            answers.append(str(error))
    return answers


def test_one_value_for_a_channel_from_all_ranks_is_refused_on_all():
    for enough, error in seen(refused):
        assert enough == (1, 3, 1)
        assert "got 1 value for each of 3 channels from all ranks together" in error
        assert "try a larger --batch-size" in error


def small_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers, nn.BatchNorm1d(3)).double()


def images_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)


def loss_of(outputs):
    return (outputs - torch.arange(3)).pow(4).mean()


@on_ranks(2)
def collectives(rank, _):
    """How many, and which, in forward, backward, forward without autograd, and eval mode."""
    results = []

    def count(function, *args):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            result = function(*args)
        names = [e.name for e in profiler.events() if e.name.startswith("c10d::")]
        results.append((len(names), *set(names)))
        return result

    for frozen in (False, True):
        model, images = convert(small_model()), images_of(0)
        model[0].requires_grad_(not frozen)
        model[1].track_running_stats = not frozen
        count(count(model, images).sum().backward)
        with torch.no_grad():
            count(model, images)
        count(model.eval(), images)
    return results


def test_each_layer_sends_one_all_reduce_forward_and_one_backward():
    """Of two layers. If nothing before the first one learns, it need send none back.

    Evaluation may give the ranks unequal numbers of batches, so that no rank may wait for another.
    """
    one, two = ((number, "c10d::allreduce_") for number in (1, 2))
    assert seen(collectives) == [[two, two, two, (0,), two, one, two, (0,)]] * 2


def test_convert_finds_every_layer_keeps_all_that_it_holds_and_leaves_the_rest():
    shared = nn.BatchNorm1d(3, eps=0.5, momentum=0.25).eval()
    shared.register_forward_hook(lambda *_: None)
    inner = nn.ModuleDict({"shared": shared, "three": nn.BatchNorm3d(2)})
    rest = nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), nn.SyncBatchNorm(2)
    model = nn.Sequential(*rest, inner, shared)
    held = [(id(layer), dict(vars(layer))) for layer in model.modules()]
    assert convert(convert(model)) is model, "it may come twice"
    assert [(id(layer), vars(layer)) for layer in model.modules()] == held
    kinds = [type(layer) for layer in model.modules()]
    assert kinds.count(sync_batchnorm.SyncBatchNorm) == 4, "the shared one is one"
    assert not set(kinds) & set(BATCHNORMS.values())
    assert {nn.InstanceNorm2d, nn.GroupNorm} < set(kinds)


class BatchNormAct(nn.BatchNorm2d):
    """BatchNorm and an activation in one, as some libraries of models have it."""

    def forward(self, x):
        return torch.relu(super().forward(x))


def test_convert_refuses_a_layer_that_does_more_than_batchnorm():
    """torch's own drops what it does more: https://github.com/pytorch/pytorch/issues/187298"""
    for layer in (nn.LazyBatchNorm2d(), BatchNormAct(3)):
        with pytest.raises(UsageError, match=f"layer 1 is a {type(layer).__name__}: expected"):
            convert(nn.Sequential(nn.Identity(), layer))
    x = torch.randn(4, 3, 2, 2)
    assert layer.eval()(x).min() == 0
    assert nn.SyncBatchNorm.convert_sync_batchnorm(layer)(x).min() < 0


@on_ranks(2)
def statistics(rank, _):
    means = []
    for change in (lambda model: model, convert):
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5)).double()
        ddp = DistributedDataParallel(change(model))
        for step in range(2):
            ddp(torch.full((4, 1), 10.0 * rank + step, dtype=torch.float64)).sum().backward()
            means.append(model[0].running_mean.item())
    return means


def test_c19_without_it_each_rank_has_the_statistics_of_its_own_batch():
    """Rank 0 has zeros, then ones; rank 1 has tens, then elevens. The mean of all is 5, then 6."""
    [first, second] = seen(statistics)
    assert (first[0], second[0]) == (0, 5)  # half the way from 0 to the own mean: 0, and 10
    # Before each forward, DDP sends rank 0's statistics to all: what rank 1 had learned is lost.
    assert (first[1], second[1]) == (0.5, 0 + (11 - 0) / 2)
    assert first[2:] == second[2:] == [2.5, 2.5 + (6 - 2.5) / 2]


def copies(model):
    """A convert that makes new layers with new parameters, as a careless one would."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            layer = sync_batchnorm.SyncBatchNorm(child.num_features).double()
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
    return model


def compiled(model):
    convert(model).compile(backend="aot_eager")  # no compiler of C++ needed
    return model


CONVERTERS = {
    "ours": convert,
    "torch's": lambda model: convert(nn.SyncBatchNorm.convert_sync_batchnorm(model)),
    "copies": copies,
    "ours, compiled": compiled,
}


def train_model(how, late=False, rank=None):
    """The state after three steps in DDP. how: what converts the model, before it is wrapped or
    after (late). Without a rank, one process trains on all images, with plain BatchNorm."""
    model = small_model() if late else how(small_model())
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    forward, mine = model, slice(None)
    if rank is not None:
        forward, mine = DistributedDataParallel(model), slice(4 * rank, 4 * rank + 4)
    if late:
        how(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(forward(images_of(step)[mine])).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def of_one_process():
    return train_model(lambda model: model)


@on_ranks(2)
def converted(rank, _):
    results = {}
    ways = [(how, late) for late in (False, True) for how in CONVERTERS]
    for how, late in ways[:-1]:  # compiled once: it takes seconds
        try:
            results[how, late] = train_model(CONVERTERS[how], late, rank)
        except RuntimeError as error:
            results[how, late] = str(error)
    return results


def test_c35_before_or_after_wrapping_it_is_the_same_training_unless_parameters_are_copied():
    """Of torch's, what convert_sync_batchnorm makes of the model; its layers cannot run on a CPU,
    so they become ours, which changes no parameter. Copies train if they are made before; made
    after, DDP waits for the gradients of the old: the control."""
    for results in seen(converted):
        error = results.pop(("copies", True))
        assert "Expected to have finished reduction in the prior iteration" in error
        assert len(results) == 6
        for state in results.values():
            torch.testing.assert_close(state, of_one_process(), **CLOSE)


def test_c35_torchs_layers_hold_the_parameters_and_buffers_of_those_they_replace():
    model = small_model()
    held = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    layers = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(layers[1]) is nn.SyncBatchNorm
    assert [id(tensor) for tensor in (*layers.parameters(), *layers.buffers())] == held


def _late(rank, without):
    dist.init_process_group("gloo")
    module = fresh_module("05", "sync_batchnorm.py", without)
    return train_model(module.convert, True, rank)


def test_05_layers_converted_after_wrapping_train_like_one_process(without=()):
    for state in run_ranks(2, _late, without):
        torch.testing.assert_close(state, of_one_process(), **CLOSE)


def test_c35_on_a_cpu_ddp_refuses_torchs_layers():
    """And they refuse the CPU, even in a world of one: why SyncBatchNorm is written by hand."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            nn.SyncBatchNorm(3)(torch.randn(4, 3))
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            DistributedDataParallel(nn.SyncBatchNorm(3))
    finally:
        dist.destroy_process_group()
