"""Stage 05's step: loss scaling, clipping, accumulation, the learning rate, formats and layouts."""

import math
import os
import shutil
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from unittest.mock import patch

import oracle
import pytest
import torch
import torch.distributed as dist
from support import (
    ROOT,
    Run,
    chapter,
    command,
    default_dtype,
    free_port,
    load_stage,
    run_ranks,
    scratch_folder,
    train,
    train_once,
)
from test_bad_input import SCRIPTS, launcher
from test_proof import FLAGS, SETTINGS
from test_stages import FP32, same_run
from torch import nn
from torch.optim import SGD

from common.options import UsageError

CLIP = 0.5  # below the norm of nearly every step of these runs


def worst(run: Run, **settings) -> float:
    """The largest difference of a loss or weight from a plain process that replays the batches."""
    losses, state = oracle.replay(oracle.whole_batches, **{**SETTINGS, **settings})
    weights = max((run.states[0][name] - each).abs().max().item() for name, each in state.items())
    return max((run.losses - losses).abs().max().item(), weights)


# --- the order: scale, backward, unscale, clip, step, update, schedule


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
    """A run whose loss scale is too large at first: of every step, whether SGD took it."""
    stage, taken = load_stage("05", without), []
    finish = stage.finish_step

    class Watched(SGD):
        def step(self, closure=None):
            taken[-1] = True
            return super().step(closure)

    def finish_watched(*args):
        taken.append(False)
        finish(*args)

    stage.SGD, stage.finish_step = Watched, finish_watched
    large = partial(torch.amp.GradScaler, init_scale=2.0**24)
    sys.argv = ["train.py", *flags]
    with patch.object(torch.amp, "GradScaler", large), redirect_stdout(StringIO()):
        stage.main()
    return taken


def overflowing(folder, *flags, without=()) -> tuple[list[list[bool]], Run]:
    fixed = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}", "--amp=fp16")
    flags = (*fixed, "--model=net-bn", *flags)
    return run_ranks(2, _overflow, flags, without), Run(folder, [], "")


def test_05_a_skipped_step_moves_neither_weights_nor_schedule(without=()):
    flags = ("--max-steps=40", "--warmup-epochs=2", "--lr=0.24")
    (taken, other), run = overflowing(scratch_folder(), *flags, without=without)
    skipped = round(24 - math.log2(run.checkpoint["scaler"]["scale"]))  # each halves the scale
    assert 0 < skipped < 40
    assert taken == other
    assert run.checkpoint["taken"] == sum(taken) == 40 - skipped
    # 24 steps of warm-up, by hundredths: the rate of a step tells how many were taken before it
    expected = [0.01 * min(24, 1 + sum(taken[:step])) for step in range(40)]
    assert [line["lr"] for line in run.metrics] == pytest.approx(expected, abs=1e-12)


def _always_inf(rank, flags) -> str:
    """A run whose loss is finite and whose gradient never is."""
    stage = load_stage("05")
    build = stage.build_model

    def build_broken(*args):
        model = build(*args)
        model.fc2.bias.register_hook(lambda gradient: gradient * torch.inf)
        return model

    stage.build_model = build_broken
    sys.argv = ["train.py", *flags]
    with redirect_stdout(StringIO()), pytest.raises(UsageError) as caught:
        stage.main()
    return str(caught.value)


def test_a_run_in_fp16_that_takes_no_step_any_more_ends_and_says_so(tmp_path):
    """On all ranks, as the scale is the same; before that it is halved 41 times, from 2^16."""
    flags = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}", "--amp=fp16")
    first, second = run_ranks(2, _always_inf, (*flags, "--model=net-bn", "--batch-size=12"))
    assert first == second
    assert "no step is taken: try --amp bf16" in first
    assert not (tmp_path / "checkpoint.pt").exists()


# --- accumulation


def _without_dropout(rank, flags, dtype, without) -> tuple[dict, int]:
    """Stage 05 with net's dropout off: last weights, all-reduces of DDP."""
    stage, reduced, models = load_stage("05", without), [], []
    build, wrap = stage.build_model, stage.wrap

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(1)
        return stage.default_hooks.allreduce_hook(None, bucket)

    def build_plain(*args):
        models.append(build(*args))
        for module in models[-1].modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d):
                module.p = 0.0
        return models[-1]

    def wrap_counted(*args):
        ddp = wrap(*args)
        ddp.register_comm_hook(None, count)
        return ddp

    stage.build_model, stage.wrap = build_plain, wrap_counted
    sys.argv = ["train.py", *flags]
    with default_dtype(dtype), redirect_stdout(StringIO()):
        stage.main()
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
    """What stage 05 says of its 24 steps of 2 epochs with a batch of 120 and a rate of 1."""
    return [line["lr"] for line in train_once("05", 1, *RATE_FLAGS, *flags, **FP32).metrics]


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


# --- everything at once


EVERYTHING = (
    "--model=net-bn", "--accumulate=2", "--clip-norm=1", "--lr-rule=sqrt", "--base-batch-size=60",
    "--warmup-epochs=0.5", "--lr-decay=cosine", "--channels-last",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, ("--amp=fp16", "--comm-hook=fp16")), (3, ("--amp=bf16", "--comm-hook=bf16"))],
)
def test_resuming_inside_an_epoch_with_all_switches_equals_not_having_stopped(ranks, flags):
    flags = (*EVERYTHING, *flags, "--epochs=2")
    whole = train("05", ranks, *flags, **FP32)
    part = train("05", ranks, *flags, "--max-steps=7", **FP32)
    resumed = train("05", ranks, *flags, "--resume=auto", folder=part.folder, **FP32)
    assert same_run(whole, resumed)
    assert [line["lr"] for line in whole.metrics] == [line["lr"] for line in resumed.metrics]


def test_05_resumes_the_schedule_after_skipped_steps(without=()):
    """Their number is not the number of steps: it is saved."""
    folders = scratch_folder(), scratch_folder()
    flags = ("--warmup-epochs=3", "--epochs=3", "--lr=0.24")
    _, whole = overflowing(folders[0], *flags, without=without)
    overflowing(folders[1], *flags, "--max-steps=30", without=without)
    _, resumed = overflowing(folders[1], *flags, "--resume=auto", without=without)
    assert [line["lr"] for line in whole.metrics] == [line["lr"] for line in resumed.metrics]
    assert whole.checkpoint["taken"] == resumed.checkpoint["taken"] < 36


@pytest.mark.parametrize(("ranks", "k"), [(2, 3), (3, 2)])
def test_micro_batches_clipping_and_schedule_together_are_one_process(ranks, k):
    """The loss of every step and the last parameters, float64; one plain process with the same
    micro-batches clips once a step, the whole gradient, and changes its rate once a step."""
    flags = (f"--accumulate={k}", f"--clip-norm={CLIP}", "--lr-decay=cosine", "--warmup-epochs=0.5")
    run = train_once("05", ranks, *FLAGS, *flags, "--channels-last")
    rates = [0.02 * min(1, (n + 1) / 12.5) for n in range(13)]
    rates += [0.02 * math.cos(math.pi * (n - 12.5) / 75) ** 2 for n in range(13, 50)]
    settings = {**SETTINGS, "lr": rates.__getitem__, "clip": CLIP}
    losses, state = oracle.replay(oracle.micro_batches(ranks, k), **settings)
    assert (run.losses - losses).abs().max() < 1e-10
    parameters = [name for name in state if name.endswith((".weight", ".bias"))]
    assert max((run.states[0][n] - state[n]).abs().max().item() for n in parameters) < 1e-10


@pytest.mark.parametrize("before", ["04", "05"])
@pytest.mark.parametrize("batch", [60, 120, 240])
def test_a_run_that_goes_on_with_another_batch_is_at_its_place_in_the_schedule(before, batch):
    """After one epoch of three, with another rate as well: the second third, whoever wrote it."""
    flags = ("--lr=0.3", "--lr-decay=step", "--epochs=3")[: 3 if before == "05" else 1]
    first = train_once(before, 1, "--model=net-bn", *flags, "--max-steps=12", **FP32)
    path = f"--resume={first.folder / 'checkpoint.pt'}"
    flags = ("--lr=0.001", "--lr-decay=step", "--epochs=3", f"--batch-size={batch}", path)
    run = train("05", 1, "--model=net-bn", *flags, **FP32)
    steps = 1500 // batch
    for epoch, factor in ((1, 0.1), (2, 0.01)):
        written = [line["lr"] for line in run.metrics if line["epoch"] == epoch]
        # Where 3 does not divide the steps, a third ends inside an epoch: look at its second half.
        assert written[steps // 2 :] == pytest.approx([0.001 * factor] * (steps - steps // 2))


def _look(rank, flags):
    """What reaches the first layer, in which format it computes, where the gradients are."""
    stage, seen, storages = load_stage("05"), set(), set()
    build, finish = stage.build_model, stage.finish_step

    def watch(layer, inputs, output):
        if layer.training:
            seen.add((inputs[0].is_contiguous(memory_format=torch.channels_last), output.dtype))

    def build_watched(*args):
        model = build(*args)
        model.conv1.register_forward_hook(watch)
        return model

    def finish_watched(model, *others):
        storages.add(len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}))
        finish(model, *others)

    stage.build_model, stage.finish_step = build_watched, finish_watched
    sent, reduce = set(), dist.all_reduce

    def reduce_watched(tensor, *others, **more):
        if more.get("async_op"):  # DDP's hooks; the stage's own wait
            sent.add(tensor.dtype)
        return reduce(tensor, *others, **more)

    sys.argv = ["train.py", *flags]
    with redirect_stdout(StringIO()), patch.object(dist, "all_reduce", reduce_watched):
        stage.main()
    return seen, sent, storages


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ({(False, torch.float32)}, set(), {1})),
        (("--channels-last",), ({(True, torch.float32)}, set(), {1})),
        (("--amp=bf16", "--comm-hook=fp16"), ({(False, torch.bfloat16)}, {torch.float16}, {1})),
        (("--amp=fp16", "--comm-hook=bf16"), ({(False, torch.float16)}, {torch.bfloat16}, {1})),
    ],
)
def test_each_switch_does_what_it_says_in_every_micro_batch(flags, expected):
    """Layout and format of all forward passes, format of what is sent; gradients in one bucket."""
    fixed = ("--dataset=synthetic", "--device=cpu", f"--run-dir={scratch_folder()}")
    fixed += ("--max-steps=2", "--accumulate=2", "--batch-size=16")
    assert run_ranks(2, _look, (*fixed, *flags)) == [expected] * 2


def _compiles(rank, flags):
    """Whether what trains is what was compiled; without compiling."""
    stage, asked, trained = load_stage("05"), [], []
    epoch, stage.refuse_no_compiler = stage.train_epoch, lambda device: None
    stage.train_epoch = lambda model, *others: trained.append(model) or epoch(model, *others)
    ddp = stage.DistributedDataParallel
    sys.argv = ["train.py", *flags]
    with (
        redirect_stdout(StringIO()),
        patch.object(ddp, "compile", lambda model: asked.append(model), create=True),
    ):
        stage.main()
    return len(trained), [id(model) for model in asked] == [id(trained[0])]


@pytest.mark.parametrize("compile", [True, False])
def test_compile_compiles_what_trains(compile):
    flags = (f"--run-dir={scratch_folder()}", f"--data-dir={ROOT / 'data'}", "--max-steps=1")
    flags += ("--device=cpu", "--compile" if compile else "--no-compile")
    assert run_ranks(2, _compiles, flags) == [(1, compile)] * 2


def test_channels_last_computes_the_same(tmp_path):
    plain = train_once("05", 2, *FLAGS)
    last = train_once("05", 2, *FLAGS, "--channels-last")
    assert (plain.losses - last.losses).abs().max() < 1e-10
    assert apart(plain.states[0], last.states[0]) < 1e-10
    strides = last.checkpoint["model"]["conv2.weight"].stride()
    assert strides == (250, 1, 50, 10)  # (20, 10, 5, 5): of a pixel, all channels together
    assert plain.checkpoint["model"]["conv2.weight"].stride() == (250, 25, 5, 1)


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
def test_a_hook_rounds_what_is_sent_and_the_ranks_stay_alike(hook):
    plain = train_once("05", 2, *FLAGS, **FP32)
    run = train_once("05", 2, *FLAGS, f"--comm-hook={hook}", **FP32)
    assert apart(run.states[0], run.states[1]) == 0
    assert 1e-6 < apart(plain.states[0], run.states[0]) < 0.05
    assert run.summary["test_accuracy"] > plain.summary["test_accuracy"] - 0.03


# --- torch.compile and the machine


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler: install g++")
def test_compiled_steps_compute_the_same(tmp_path):
    """Two ranks, and SyncBatchNorm by hand, under torch.compile."""
    flags = ("--model=net-bn", "--device=cpu", "--max-steps=3")
    losses = []
    for more in ((), ("--compile",)):
        folder = tmp_path / f"run{len(more)}"
        flags_of_run = (*flags, *more, f"--run-dir={folder}")
        env = launcher(free_port()) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers
        answers = command(SCRIPTS["05"], *flags_of_run, ranks=2, env=env, seconds=240)
        assert [status for status, _ in answers] == [0, 0], answers
        losses.append(Run(folder, [], "").losses)
        names = Run(folder, [], "").checkpoint["model"]
        assert "conv1.weight" in names, "no prefix of a wrapper"
    assert (losses[0] - losses[1]).abs().max() < 1e-4


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
