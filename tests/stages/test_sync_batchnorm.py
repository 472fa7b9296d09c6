"""SyncBatchNorm by hand computes on all ranks what one process computes on the whole batch.

And claims C19 and C35: what plain BatchNorm does under DDP, and when layers may be converted.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sync_batchnorm
from common.options import UsageError
from helpers.on_ranks import on_ranks, run_on_ranks
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module

# Samples of each rank: uneven, one of them alone, and of four ranks one has none at all.
SIZES = {1: [5], 2: [1, 4], 4: [1, 5, 0, 2]}
BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CLOSE = {"rtol": 0, "atol": 1e-10}

convert = sync_batchnorm.convert_sync_batchnorm


@dataclass(frozen=True)
class LayerCase:
    """A layer and its input. sample: its shape, channels first; times: the layer in one forward."""

    sample: tuple[int, ...] = (3, 4, 5)
    settings: dict = field(default_factory=dict)
    layout: torch.memory_format = torch.contiguous_format
    dtype: torch.dtype = torch.float64
    frozen: tuple[str, ...] = ()
    evaluate: bool = False
    times: int = 1
    backward: bool = True
    input_grad: bool = True


LAYER_CASES = {
    "2-D": LayerCase(sample=(3,)),
    "4-D": LayerCase(),
    "channels_last_3d": LayerCase(sample=(3, 2, 3, 4), layout=torch.channels_last_3d),
    "momentum and eps": LayerCase(settings={"momentum": 0.4, "eps": 0.1}),
    "cumulative average": LayerCase(settings={"momentum": None}),
    "no affine": LayerCase(settings={"affine": False}),
    "no running statistics": LayerCase(settings={"track_running_stats": False}),
    "frozen weight": LayerCase(frozen=("weight",)),
    "frozen": LayerCase(frozen=("weight", "bias")),
    "eval mode": LayerCase(evaluate=True),
    "twice in a step": LayerCase(times=2),
    "no_grad": LayerCase(backward=False),
    "input without gradient": LayerCase(input_grad=False),
    "bf16": LayerCase(dtype=torch.bfloat16),
    "fp16, channels_last": LayerCase(dtype=torch.float16, layout=torch.channels_last),
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
    """Yield each of three steps' whole batch, and what the loss multiplies the output with."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, sum(SIZES[ranks]), *case.sample)
    for _ in range(3):
        rows, weights = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        yield (rows * 3 + 5).to(memory_format=case.layout), weights


def one_step(layer, case, rows, weights):
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


def run_all_cases(rank, ranks):
    dist.init_process_group("gloo")
    results = {}
    for name, case in LAYER_CASES.items():
        layer = convert(layer_of(case))
        if case.dtype != torch.float64:
            layer.float()
        parts = [(a.split(SIZES[ranks]), b.split(SIZES[ranks])) for a, b in batches_of(case, ranks)]
        with torch.autocast("cpu", enabled=case.dtype != torch.float64):
            results[name] = [one_step(layer, case, a[rank], b[rank]) for a, b in parts]
    return results


@cache
def results_of_ranks(ranks):
    return run_on_ranks(ranks, run_all_cases, ranks)


@pytest.mark.parametrize("name", LAYER_CASES)
@pytest.mark.parametrize("ranks", SIZES)
def test_sync_batchnorm_by_hand_computes_what_one_process_computes_on_the_whole_batch(ranks, name):
    """Both agree in float64, and with 16 bits in and out within their rounding. Gradients of
    parameters are of the local batch, as DDP wants them: it adds them and divides by the ranks."""
    case, whole = LAYER_CASES[name], layer_of(LAYER_CASES[name])
    half, rounding = case.dtype != torch.float64, torch.finfo(case.dtype).eps
    near = {"rtol": 2 * rounding, "atol": 8 * rounding, "check_dtype": False} if half else CLOSE
    wide = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False} if half else CLOSE
    for step, (rows, weights) in enumerate(batches_of(case, ranks)):
        output, grad, gradients, state = one_step(whole, case, rows.double(), weights.double())
        parts = zip(*(results[name][step] for results in results_of_ranks(ranks)), strict=True)
        outputs, grads, of_parameters, states = parts
        torch.testing.assert_close(torch.cat(outputs), output, **near)
        if grad is not None:
            torch.testing.assert_close(torch.cat(grads), grad, **near)
        torch.testing.assert_close(states, (state,) * ranks, **wide)
        sums = {key: sum(part[key] for part in of_parameters) for key in of_parameters[0]}
        torch.testing.assert_close(sums, gradients, **wide)
        assert {each.dtype for each in sums.values()} <= {torch.float32 if half else torch.float64}


def test_sync_batchnorm_without_a_process_group_is_plain_which_on_halves_is_not_the_whole():
    """The control of the test above: each rank by itself."""
    case = LAYER_CASES["4-D"]
    rows, weights = next(batches_of(case, 2))
    whole = one_step(layer_of(case), case, rows, weights)
    assert all(
        map(torch.equal, one_step(convert(layer_of(case)), case, rows, weights)[:2], whole[:2])
    )
    parts = (slice(1), slice(1, 5))
    halves = [one_step(layer_of(case), case, rows[part], weights[part]) for part in parts]
    for *of_halves, of_whole in zip(*(each[:2] for each in (*halves, whole)), strict=True):
        assert (torch.cat(of_halves) - of_whole).abs().max() > 0.1
    assert (halves[0][3]["running_mean"] - whole[3]["running_mean"]).abs().max() > 0.01


@on_ranks(2)
def test_a_large_mean_does_not_hide_the_variance(rank):
    """Mean 1e4, variance about 1, as fp32 holds them: (B, C, H, W)."""
    batch = torch.randn(16, 2, 16, 16, generator=torch.Generator().manual_seed(0)) + 1e4
    layer = sync_batchnorm.SyncBatchNorm(2, momentum=1.0)
    assert layer(batch[rank::2]).abs().max() < 10
    exact = batch.double().var(dim=[0, 2, 3])
    squares = batch.square().mean(dim=[0, 2, 3]) - batch.mean(dim=[0, 2, 3]).square()
    assert ((layer.running_var - exact) / exact).abs().max() < 1e-3
    assert ((squares - exact) / exact).abs().max() > 1e-3  # the control


@on_ranks(2)
def test_one_value_for_a_channel_from_all_ranks_is_refused_on_all(rank):
    layer = sync_batchnorm.SyncBatchNorm(3)
    assert layer(torch.randn(1, 3, 1)).shape == (1, 3, 1), "which BatchNorm itself refuses"
    error = "got 1 value for each of 3 channels from all ranks together.*try a larger --batch-size"
    with pytest.raises(UsageError, match=error):
        layer(torch.randn(rank, 3, 1))


def small_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers, nn.BatchNorm1d(3)).double()


@on_ranks(2)
def test_each_layer_sends_one_all_reduce_forward_and_one_backward(rank):
    """The model has two layers. In evaluation, no rank may wait: batch counts may be unequal."""
    sent, activities = [], [torch.profiler.ProfilerActivity.CPU]

    def watch(function, *args):
        with torch.profiler.profile(activities=activities) as profiler:
            result = function(*args)
        sent.append([e.name for e in profiler.events() if e.name.startswith("c10d::")])
        return result

    for frozen in (False, True):
        model, images = convert(small_model()), torch.randn(8, 1, 6, 6).double()
        model[0].requires_grad_(not frozen)
        model[1].track_running_stats = not frozen
        watch(watch(model, images).sum().backward)
        with torch.no_grad():
            watch(model, images)
        watch(model.eval(), images)
    assert sent == [["c10d::allreduce_"] * number for number in (2, 2, 2, 0, 2, 1, 2, 0)]


def test_convert_finds_every_layer_keeps_all_that_it_holds_and_leaves_the_rest():
    shared = nn.BatchNorm1d(3, eps=0.5, momentum=0.25).eval()
    shared.register_forward_hook(lambda *_: None)
    inner = nn.ModuleDict({"shared": shared, "three": nn.BatchNorm3d(2)})
    rest = nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.SyncBatchNorm(2)
    model = nn.Sequential(*rest, inner, shared)
    held = [(id(layer), dict(vars(layer))) for layer in model.modules()]
    assert convert(convert(model)) is model, "it may come twice"
    assert [(id(layer), vars(layer)) for layer in model.modules()] == held
    ours, instance = sync_batchnorm.SyncBatchNorm, nn.InstanceNorm2d
    kinds = [type(layer) for layer in model.modules()]
    assert kinds == [nn.Sequential, ours, instance, ours, nn.ModuleDict, ours, ours]


def test_convert_refuses_a_layer_that_does_more_than_batchnorm():
    """torch's own drops what it does more: https://github.com/pytorch/pytorch/issues/187298"""

    class BatchNormAct(nn.BatchNorm2d):  # with an activation, as in some libraries of models
        def forward(self, x):
            return torch.relu(super().forward(x))

    for layer in (nn.LazyBatchNorm2d(), BatchNormAct(3)):
        with pytest.raises(UsageError, match=f"layer 1 is a {type(layer).__name__}: expected"):
            convert(nn.Sequential(nn.Identity(), layer))


@on_ranks(2)
def test_convert_refuses_a_layer_that_normalizes_over_some_ranks_only(rank):
    convert(nn.SyncBatchNorm(3, process_group=dist.group.WORLD))
    group = dist.new_group([0])
    if rank == 0:
        with pytest.raises(UsageError, match="layer 0 has a process_group of its own"):
            convert(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)))


@on_ranks(2)
def test_c19_without_sync_batchnorm_each_rank_has_the_statistics_of_its_own_batch(rank):
    """Rank 0 has zeros, then ones; rank 1 tens, then elevens. Each step goes half the way to the
    mean, and before it DDP sends rank 0's statistics to all: what rank 1 had learned is lost."""
    for change, means in ((nn.Identity(), [5 * rank, 0.5 + 5 * rank]), (convert, [2.5, 4.25])):
        norm = nn.BatchNorm1d(1, momentum=0.5).double()
        ddp = DistributedDataParallel(change(nn.Sequential(norm)))
        for step, mean in enumerate(means):
            ddp(torch.full((4, 1), 10.0 * rank + step, dtype=torch.float64)).sum().backward()
            assert norm.running_mean == mean


def convert_to_copies(model):
    """A convert that makes new layers with new parameters, as a careless one would."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            layer = sync_batchnorm.SyncBatchNorm(child.num_features).double()
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
    return model


def convert_torchs(model):
    return convert(nn.SyncBatchNorm.convert_sync_batchnorm(model))


def train_model(how=nn.Identity(), late=False, rank=None):  # noqa: B008
    """The state after three steps in DDP. how: what converts the model, before it is wrapped or
    after (late). Without a rank, one process trains on all images, with plain BatchNorm."""
    model = small_model() if late else how(small_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    forward, local_batch = model, slice(None)
    if rank is not None:
        forward, local_batch = DistributedDataParallel(model), slice(4 * rank, 4 * rank + 4)
    if late:
        how(model)
    torch.manual_seed(1)
    for images in torch.randn(3, 8, 1, 6, 6).double():
        optimizer.zero_grad()
        outputs = forward(images[local_batch])
        (outputs - torch.arange(3)).pow(4).mean().backward()
        optimizer.step()
    return model.state_dict()


@on_ranks(2)
def test_c35_converting_before_or_after_wrapping_is_the_same_training(rank):
    """torch's become ours, for a CPU. The control, late copies: DDP waits for the old layers."""
    early = [(how, False) for how in (convert, convert_torchs, convert_to_copies)]
    for how, late in [*early, (convert_torchs, True)]:  # ours, late: the next test
        torch.testing.assert_close(train_model(how, late, rank), train_model(), **CLOSE)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iter"):
        train_model(convert_to_copies, True, rank)


@on_ranks(2)
def test_05_layers_converted_after_wrapping_train_like_one_process(rank, changes=()):
    program = LESSON_FOLDERS["05"] / "sync_batchnorm.py"
    changed = fresh_module(program, changes).convert_sync_batchnorm
    torch.testing.assert_close(train_model(changed, True, rank), train_model(), **CLOSE)


def test_c35_on_a_cpu_ddp_refuses_torchs_layers():
    """torch's layers refuse the CPU even in a world of one, so SyncBatchNorm is written by hand."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            nn.SyncBatchNorm(3)(torch.randn(4, 3))
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            DistributedDataParallel(nn.SyncBatchNorm(3))
    finally:
        dist.destroy_process_group()
