"""Stage 05's step: loss scaling, clipping, accumulation, the learning rate, formats."""

import math
from unittest.mock import patch

import oracle
import pytest
import torch
import torch.distributed as dist
from support import (
    ROOT,
    Run,
    chapter,
    default_dtype,
    load_stage,
    run_main,
    run_ranks,
    scratch_folder,
    train,
    train_once,
)
from test_proof import FLAGS, SETTINGS
from test_stages import FP32, same_run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import SGD

from common.options import UsageError

CLIP = 0.5  # below the norm of nearly every step of these runs


def worst(run: Run, **settings) -> float:
    """The largest difference of a loss or weight from a plain process that replays the batches."""
    losses, state = oracle.replay(oracle.whole_batches, **{**SETTINGS, **settings})
    weights = max((run.states[0][name] - each).abs().max().item() for name, each in state.items())
    return max((run.losses - losses).abs().max().item(), weights)


# --- the order: scale, backward, unscale, clip, step, update


@pytest.mark.parametrize(("ranks", "amp"), [(1, "off"), (2, "off"), (2, "fp16"), (3, "fp16")])
def test_clipping_equals_that_of_one_process_on_the_whole_batch(ranks, amp):
    """In float64, autocast changes nothing, and the loss is scaled all the same."""
    run = train_once("05", ranks, *FLAGS, f"--clip-norm={CLIP}", f"--amp={amp}")
    assert worst(run, clip=CLIP) < 1e-10


def test_clipping_does_something():
    run = train_once("05", 2, *FLAGS, f"--clip-norm={CLIP}", "--amp=off")
    assert worst(run) > 1e-3


def test_05_clips_gradients_not_scaled_ones(without=()):
    run = train_once("05", 2, *FLAGS, f"--clip-norm={CLIP}", "--amp=fp16", without=without)
    assert worst(run, clip=CLIP) < 1e-10


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_all_ranks_clip_alike(amp):
    first, *others = train_once("05", 3, *FLAGS, f"--clip-norm={CLIP}", f"--amp={amp}").states
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def _overflow(rank, flags, without) -> list[bool]:
    """A run whose loss scale is too large at first: for each step, whether SGD took it."""
    stage, taken = load_stage("05", without), []

    class Watched(SGD):
        def step(self, closure=None):
            taken[-1] = True
            return super().step(closure)

    class TooLarge(torch.amp.GradScaler):
        def __init__(self, device, enabled):
            super().__init__(device, init_scale=2.0**24, enabled=enabled)

        def step(self, optimizer):
            taken.append(False)  # unless SGD steps
            return super().step(optimizer)

    stage.SGD = Watched
    with patch.object(torch.amp, "GradScaler", TooLarge):
        run_main(stage, rank, *flags)
    return taken


def overflowing(folder, *flags, without=()) -> tuple[list[list[bool]], Run]:
    fixed = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}", "--amp=fp16")
    flags = (*fixed, "--model=net-bn", *flags)
    return run_ranks(2, _overflow, flags, without), Run(folder, [], "")


def rates_of(run: Run) -> list[float]:
    return [line["lr"] for line in run.metrics]


def test_05_a_step_that_overflows_is_skipped_on_all_ranks_and_counts_in_the_schedule(without=()):
    flags = ("--epochs=3", "--max-steps=30", "--warmup-epochs=2", "--lr=0.24")
    (taken, other), run = overflowing(scratch_folder(), *flags, without=without)
    skipped = round(24 - math.log2(run.checkpoint["scaler"]["scale"]))  # each halves the scale
    assert 0 < skipped < 30
    assert taken == other
    assert sum(taken) == 30 - skipped
    assert all(weight.isfinite().all() for weight in run.checkpoint["model"].values())
    # 24 steps of warm-up, by hundredths.
    assert rates_of(run) == pytest.approx([0.01 * min(24, 1 + step) for step in range(30)])
    counted = [0.01 * min(24, 1 + sum(taken[:step])) for step in range(30)]
    assert rates_of(run) != pytest.approx(counted), "the rates tell which steps count"


# --- accumulation


def _without_dropout(rank, flags, dtype, without) -> tuple[dict, int]:
    """Stage 05 with net's dropout off: last weights, all-reduces of DDP."""
    stage, reduced, models = load_stage("05", without), [], []
    build, ddp = stage.build_model, stage.DistributedDataParallel

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(1)
        return default_hooks.allreduce_hook(None, bucket)

    def build_plain(*args):
        models.append(build(*args))
        for module in models[-1].modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d):
                module.p = 0.0
        return models[-1]

    def wrap_counted(*args, **settings):
        wrapped = ddp(*args, **settings)
        wrapped.register_comm_hook(None, count)
        return wrapped

    stage.build_model, stage.DistributedDataParallel = build_plain, wrap_counted
    with default_dtype(dtype):
        run_main(stage, rank, *flags)
    return models[0].state_dict(), len(reduced)


def accumulated(k: int, model: str = "net", without=(), ranks: int = 2) -> list:
    flags = (
        f"--data-dir={ROOT / 'data'}",
        f"--run-dir={scratch_folder()}",
        "--device=cpu",
        "--max-steps=5",
    )
    flags += (f"--model={model}", f"--accumulate={k}", "--batch-size=120", "--lr=0.1")
    return run_ranks(ranks, _without_dropout, flags, torch.float64, without)


def apart(one: dict, other: dict) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(("ranks", "k"), [(1, 2), (2, 2), (2, 3), (2, 5), (3, 4)])
def test_gradients_of_micro_batches_add_up_to_those_of_the_whole_batch(ranks, k):
    """Weights after five steps, float64; each micro-batch's loss counts 1 / K."""
    (whole, _), (parts, _) = accumulated(1)[0], accumulated(k, ranks=ranks)[0]
    assert apart(whole, parts) < 1e-10


def test_batch_norm_sees_micro_batches():
    """The control: and what accumulation cannot do, with or without SyncBatchNorm."""
    (whole, _), (parts, _) = accumulated(1, "net-bn")[0], accumulated(3, "net-bn")[0]
    assert apart(whole, parts) > 1e-4


def test_05_ranks_meet_once_a_step_however_many_micro_batches(without=()):
    """net's gradients fill one bucket: five steps, five all-reduces, whether of 1 or 3 parts."""
    assert [reduced for _, reduced in accumulated(3, without=without)] == [5, 5]


# --- the learning rate


def rates(*flags: str) -> list[float]:
    """What stage 05 writes for its 24 steps, 2 epochs with a batch of 120."""
    return rates_of(train_once("05", 1, *RATE_FLAGS, *flags, **FP32))


RATE_FLAGS = ("--epochs=2", "--lr=0.001", "--model=net-bn")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), [1.0] * 24),
        (("--lr-rule=linear", "--base-batch-size=30"), [4.0] * 24),
        (("--lr-rule=sqrt", "--base-batch-size=30"), [2.0] * 24),
        (("--base-batch-size=30",), [1.0] * 24),
        (("--warmup-epochs=0.5",), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6] + [1.0] * 19),
        (("--warmup-epochs=9",), [(n + 1) / 108 for n in range(24)]),
        (("--lr-decay=step",), [1.0] * 8 + [0.1] * 8 + [0.01] * 8),
        (("--lr-decay=cosine",), [math.cos(math.pi * n / 48) ** 2 for n in range(24)]),
        (
            ("--lr-decay=cosine", "--warmup-epochs=1", "--lr-rule=linear", "--base-batch-size=240"),
            [0.5 * (n + 1) / 12 for n in range(12)]
            + [0.5 * math.cos(math.pi * n / 24) ** 2 for n in range(12)],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_learning_rate_of_every_step(flags, expected):
    assert rates(*flags) == pytest.approx([0.001 * factor for factor in expected], rel=1e-9)


def test_the_rates_that_are_written_are_those_that_train():
    """One plain process with these rates reaches the same weights, float64."""
    flags = ("--lr-decay=cosine", "--warmup-epochs=1", "--lr-rule=sqrt", "--base-batch-size=15")
    run = train_once("05", 2, *FLAGS, *flags)
    written = [line["lr"] for line in run.metrics]
    assert max(written) == pytest.approx(0.04)
    assert worst(run, lr=lambda step: written[step]) < 1e-10
    assert worst(run) > 1e-3


@pytest.mark.parametrize(("key", "ranks"), [("01", 1), ("04", 2)])
@pytest.mark.parametrize("batch", [60, 240])
def test_a_run_that_another_stage_began_is_at_its_place_in_the_schedule(key, ranks, batch):
    """After one epoch with a batch of 120: the epoch is the place, whatever the batch is now."""
    resumed_where_an_unbroken_run_is(key, ranks, batch)


def resumed_where_an_unbroken_run_is(key, ranks, batch, without=()):
    first = train_once(key, ranks, "--model=net-bn", "--epochs=1", **FP32)
    flags = ("--model=net-bn", "--epochs=3", "--lr-decay=cosine", "--warmup-epochs=0.5")
    flags += (f"--batch-size={batch}",)
    unbroken = train_once("05", 1, *flags, **FP32)
    path = f"--resume={first.folder / 'checkpoint.pt'}"
    run = train("05", 1, *flags, path, **FP32, without=without)
    steps = 1500 // batch
    assert [line["epoch"] for line in run.metrics] == [1] * steps + [2] * steps
    assert rates_of(run) == rates_of(unbroken)[steps:]


def test_05_the_epoch_is_the_place_in_the_schedule(without=()):
    resumed_where_an_unbroken_run_is("04", 2, 60, without)


def test_a_count_of_steps_is_another_place_in_the_schedule():
    """The control: 12 steps of 120 samples are not half an epoch of 25 steps."""
    line = "rates = learning_rates(args, epoch, len(loader))"
    counted = line.replace("epoch,", "recorder.step // len(loader),")
    with pytest.raises(AssertionError):
        test_05_the_epoch_is_the_place_in_the_schedule((("train.py", line, counted),))


# --- everything at once


EVERYTHING = (
    "--model=net-bn", "--accumulate=2", "--clip-norm=1", "--lr-rule=sqrt", "--base-batch-size=60",
    "--warmup-epochs=0.5", "--lr-decay=cosine", "--epochs=2",
)  # fmt: skip


def stopped_and_resumed(ranks, *flags, **more) -> tuple[Run, Run]:
    """The same run twice: in one part, and ended after its first epoch and resumed."""
    whole = train("05", ranks, *EVERYTHING, *flags, **more)
    part = train("05", ranks, *EVERYTHING, *flags, "--max-steps=12", **more)
    more["folder"] = part.folder
    return whole, train("05", ranks, *EVERYTHING, *flags, "--resume=auto", **more)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_resuming_with_all_switches_equals_not_having_stopped(amp):
    """To the bit, the learning rates too."""
    whole, resumed = stopped_and_resumed(2, f"--amp={amp}", **FP32)
    assert same_run(whole, resumed)
    assert rates_of(whole) == rates_of(resumed)


def test_on_three_ranks_resuming_with_all_switches_is_the_same_up_to_rounding():
    """DDP sorts its buckets after its first step: then sums of three are rounded otherwise.

    In float64. survive/train.py resumes to the bit: tests/test_survive_resume.py
    """
    whole, resumed = stopped_and_resumed(3, "--amp=off")
    assert apart(whole.states[0], resumed.states[0]) < 1e-12
    assert rates_of(whole) == rates_of(resumed)


def test_05_resumes_after_skipped_steps(without=()):
    """The scale as it was, and the place in the schedule: skipped steps do not move it."""
    folders = scratch_folder(), scratch_folder()
    flags = ("--warmup-epochs=3", "--epochs=3", "--lr=0.24")
    _, whole = overflowing(folders[0], *flags, without=without)
    overflowing(folders[1], *flags, "--max-steps=24", without=without)
    _, resumed = overflowing(folders[1], *flags, "--resume=auto", without=without)
    assert whole.checkpoint["scaler"]["scale"] < 2.0**24
    assert whole.checkpoint["scaler"] == resumed.checkpoint["scaler"]
    assert rates_of(whole) == rates_of(resumed)


@pytest.mark.parametrize(("ranks", "k"), [(2, 3), (3, 2)])
def test_micro_batches_clipping_and_schedule_together_are_one_process(ranks, k):
    """The loss of every step and the last parameters, float64; one plain process with the same
    micro-batches clips once a step, the whole gradient, and changes its rate once a step."""
    flags = (f"--accumulate={k}", f"--clip-norm={CLIP}", "--lr-decay=cosine", "--warmup-epochs=0.5")
    run = train_once("05", ranks, *FLAGS, *flags)
    rates = [0.02 * min(1, (n + 1) / 12.5) for n in range(13)]
    rates += [0.02 * math.cos(math.pi * (n - 12.5) / 75) ** 2 for n in range(13, 50)]
    settings = {**SETTINGS, "lr": rates.__getitem__, "clip": CLIP}
    losses, state = oracle.replay(oracle.micro_batches(ranks, k), **settings)
    assert (run.losses - losses).abs().max() < 1e-10
    parameters = [name for name in state if name.endswith((".weight", ".bias"))]
    assert max((run.states[0][n] - state[n]).abs().max().item() for n in parameters) < 1e-10


# --- formats


def _look(rank, flags):
    """The formats in which the first layer computes; the memory blocks that hold all gradients."""
    stage, formats, blocks = load_stage("05"), set(), set()
    build = stage.build_model

    def build_watched(*args):
        model = build(*args)
        model.conv1.register_forward_hook(
            lambda layer, inputs, output: formats.add(output.dtype) if layer.training else None
        )
        return model

    class Watched(torch.amp.GradScaler):
        def step(self, optimizer):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            blocks.add(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
            return super().step(optimizer)

    stage.build_model = build_watched
    with patch.object(torch.amp, "GradScaler", Watched):
        run_main(stage, rank, *flags)
    return formats, blocks


@pytest.mark.parametrize(
    ("amp", "dtype"),
    [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_every_micro_batch_computes_in_the_format_and_gradients_lie_in_one_bucket(amp, dtype):
    flags = ("--dataset=synthetic", "--device=cpu", f"--run-dir={scratch_folder()}")
    flags += ("--max-steps=2", "--accumulate=2", "--batch-size=16", f"--amp={amp}")
    assert run_ranks(2, _look, flags) == [({dtype}, {1})] * 2


# --- the machine


def test_a_format_that_a_device_does_not_run_is_refused():
    machine, cpu = chapter("05", "machine"), torch.device("cpu")
    machine.refuse_format("fp16", cpu)  # the control

    def refuse(x, *args):
        raise RuntimeError("\"conv2d\" not implemented for 'Half'")

    with (
        patch.object(machine.F, "conv2d", refuse),
        pytest.raises(UsageError, match=r"--amp fp16 does not run on this cpu .*'Half'"),
    ):
        machine.refuse_format("fp16", cpu)


@pytest.mark.parametrize(
    ("capabilities", "units"),
    [
        ({"avx512_bf16": True, "avx512_fp16": False}, {"fp32", "bf16"}),
        ({"amx_bf16": True, "amx_fp16": True}, {"fp32", "bf16", "fp16"}),
        ({"avx2": True}, {"fp32"}),
    ],
)
def test_units_of_a_cpu_are_read_from_its_instructions(capabilities, units):
    machine, cpu = chapter("05", "machine"), torch.device("cpu")
    with patch.object(torch.cpu, "get_capabilities", lambda: capabilities):
        assert {name for name in machine.FORMATS if machine.has_units(name, cpu)} == units


@pytest.mark.parametrize(
    ("capability", "units"),
    [
        ((6, 1), {"fp32"}),
        ((7, 5), {"fp32", "fp16"}),
        ((9, 0), {"fp32", "tf32", "bf16", "fp16"}),
    ],
)
def test_units_of_a_gpu_are_read_from_its_compute_capability(capability, units):
    machine, gpu = chapter("05", "machine"), torch.device("cuda", 0)
    with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert {name for name in machine.FORMATS if machine.has_units(name, gpu)} == units
