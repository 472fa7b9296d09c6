"""Each reducer gives the mean, whatever the model and the loop; a rank that dies is named."""

import gc
import json
import os
import signal
import tempfile
import time
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from unittest import mock

import oracle
import pytest
import torch
import torch.distributed as dist
from support import (
    ROOT,
    Line,
    chapter,
    command,
    default_dtype,
    load_stage,
    run_ranks,
    train_once,
)
from torch import nn

from common.options import UsageError, make_parser

SCRIPT = "03_ddp_manual_allreduce/reducers.py"
NAMES = ("per-parameter", "flat", "bucketed", "ring", "shared-memory")
MICRO_BATCHES, STEPS, GLOBAL_BATCH = 2, 5, 12
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}


class Mixed(nn.Module):
    """Everything that a reducer may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight  # tied
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.rare = nn.Linear(6, 6)  # used for some samples only
        self.never = nn.Linear(6, 6)  # of no use
        self.single = nn.Parameter(torch.randn(6, dtype=torch.float32))
        self.brief = nn.Parameter(torch.randn(6).to(torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor, rare: torch.Tensor) -> torch.Tensor:
        """x: (B, 6); rare: (B,), which samples pass through the layer that others do not use."""
        y = self.decode(torch.tanh(self.frozen(self.encode(x)))) * self.scalar + self.shift
        if rare.any():
            y = y + rare[:, None] * self.rare(x)
        # Side by side: what is rounded in one must not leak into the float64 of another.
        return torch.cat([y, x * self.single.double(), x * self.brief.double()], dim=1)


def batches(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch. `rare` is used in the first third of it, nowhere, in the last, everywhere."""
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(9 * step + micro))
    rare = torch.zeros(GLOBAL_BATCH)
    third = GLOBAL_BATCH // 3
    where = [slice(0, third), slice(0, 0), slice(-third, None), slice(None), slice(0, 0)][step]
    if micro == 0:  # so that the backward that averages does not see it
        rare[where] = 1
    return x.double(), rare.double()


def train_and_record(
    model: nn.Module, wrap, rank: int, ranks: int, set_to_none: bool
) -> list[dict]:
    """Train with accumulation; the gradients and weights after every step, by name."""
    forward, finish, no_sync = wrap(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(MICRO_BATCHES):
            x, rare = (t.chunk(ranks)[rank] for t in batches(step, micro))
            with no_sync() if micro < MICRO_BATCHES - 1 else nullcontext():
                (forward(x, rare).square().mean() / MICRO_BATCHES).backward()
        finish()
        seen.append(
            {
                name: (None if p.grad is None else p.grad.clone(), p.detach().clone())
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
    return seen


def mixed(seed: int) -> Mixed:
    torch.manual_seed(seed)
    with default_dtype(torch.float64):
        return Mixed()


def alone(model: nn.Module):
    return model, lambda: None, nullcontext


@cache
def one_process(set_to_none: bool) -> list[dict]:
    return train_and_record(mixed(0), alone, 0, 1, set_to_none)


def _reduced(
    rank: int, ranks: int, without_finish: bool = False, without: tuple[Line, ...] = ()
) -> dict:
    """All reducers in one process group; every rank begins with weights of its own."""
    load_stage("03", without)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    answers = {}
    for name in NAMES:
        for set_to_none in (True, False):
            model = mixed(seed=rank)
            reducer = chapter("03", "reducers").REDUCERS[name](model)

            def wrap(model, reducer=reducer):
                if without_finish:
                    reducer.synchronizing = False
                    return model, lambda: None, nullcontext
                return model, reducer.finish, reducer.no_sync

            answers[name, set_to_none] = (
                train_and_record(model, wrap, rank, ranks, set_to_none),
                model.shift.clone(),
            )
            reducer.close()
    dist.destroy_process_group()
    return answers


@cache
def reduced(ranks: int) -> list[dict]:
    return run_ranks(ranks, _reduced, ranks)


def close(ours: list[dict], truth: list[dict]) -> bool:
    for mine, theirs in zip(ours, truth, strict=True):
        for name, (gradient, weight) in theirs.items():
            tolerance = TOLERANCE[weight.dtype]
            if (gradient is None) != (mine[name][0] is None):
                return False
            pairs = [(mine[name][1], weight), (mine[name][0], gradient)]
            if any(b is not None and (a - b).abs().max() > tolerance for a, b in pairs):
                return False
    return True


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_weights_of_every_step_are_those_of_one_process(name, ranks, set_to_none):
    """Tied, frozen, unused and rarely used parameters, three dtypes, accumulation."""
    for answers in reduced(ranks):
        assert close(answers[name, set_to_none][0], one_process(set_to_none))


def test_03_reducers_do_what_one_process_does(without=()):
    """Once more and in one, for test_break_it: with lines left out it must fail."""
    for answers in run_ranks(2, _reduced, 2, False, without):
        for name in NAMES:
            for set_to_none in (True, False):
                assert close(answers[name, set_to_none][0], one_process(set_to_none)), name


def _late_gradient(rank: int, without: tuple[Line, ...]) -> list:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    load_stage("03", without)
    parameter = nn.Parameter(torch.zeros(4))
    model = nn.ParameterList([parameter])
    reducer = chapter("03", "reducers").REDUCERS["shared-memory"](model)
    time.sleep(0.3 * rank)
    (parameter * (rank + 1)).sum().backward()
    reducer.finish()
    dist.barrier()
    return parameter.grad.tolist()


def test_03_shared_memory_waits_for_the_gradients_of_a_late_rank(without=()):
    assert run_ranks(2, _late_gradient, without) == [[1.5] * 4] * 2


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_begin_with_the_weights_and_buffers_of_rank_0(name):
    for answers in reduced(3):
        assert torch.equal(answers[name, True][1], mixed(0).shift)
    assert not torch.equal(mixed(0).shift, mixed(1).shift), "the control: they began with others"


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_hold_the_same_bits(name):
    first, *others = reduced(3)
    for other in others:
        for ours, theirs in zip(first[name, True][0], other[name, True][0], strict=True):
            assert all(torch.equal(ours[key][1], theirs[key][1]) for key in ours)


def test_without_finish_the_ranks_do_not_agree():
    """The control of the above."""
    for answers in run_ranks(2, _reduced, 2, True):
        assert not any(close(answers[name, True][0], one_process(True)) for name in NAMES)


# --- Training with each of them

EXACT = ("--model=net-bn", "--batch-size=60", "--epochs=2", "--seed=7", "--lr=0.02")


def _train(
    rank: int, ranks: int, names: tuple, flags: tuple, dtype: torch.dtype, without: tuple
) -> dict[str, torch.Tensor]:
    """The losses of all steps, with each reducer."""
    load_stage("03", without)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    args = make_parser("03", "").parse_args([f"--data-dir={ROOT / 'data'}", *flags])
    train = chapter("03", "reducers").train
    with default_dtype(dtype):
        return {n: torch.tensor(train(n, args), dtype=torch.float64) for n in names}


@cache
def far_from_one_process(
    ranks: int, names: tuple = NAMES, without: tuple[Line, ...] = ()
) -> dict[str, float]:
    """The largest difference of a loss from a plain process that replays the same batches."""
    steps = oracle.fixed_shards(ranks)
    replayed, _ = oracle.replay(steps, batch=60, epochs=2, seed=7, lr=0.02, momentum=0.9)
    answers = run_ranks(ranks, _train, ranks, names, EXACT, torch.float64, without)
    return {n: max((a[n] - replayed).abs().max().item() for a in answers) for n in names}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_training_with_a_reducer_equals_one_process_that_replays_the_batches(name, ranks):
    assert far_from_one_process(ranks)[name] < 1e-10


def test_training_without_the_reducer_does_not():
    """The control."""
    old = "            reducer.finish()\n            optimizer.step()"
    line = ("reducers.py", old, "            optimizer.step()")
    assert far_from_one_process(2, ("flat",), (line,))["flat"] > 1e-3


def test_training_with_each_reducer_gives_the_losses_of_train_py():
    """To the bit on two ranks: with dropout, in fp32."""
    run = train_once("03", 2, "--epochs=2", dtype=torch.float32)
    found, _ = run_ranks(2, _train, 2, NAMES, ("--epochs=2",), torch.float32, ())
    assert [name for name in NAMES if not torch.equal(found[name], run.losses)] == []


def test_the_chapter_trains_with_the_reducer_that_is_named():
    [(status, output)] = command(SCRIPT, "--train=bucketed", "--epochs=1")
    assert status == 0, output
    rows = [line.split() for line in output.splitlines()]
    epoch, bucketed, per_parameter = rows[2]
    assert (epoch, bucketed) == ("1", per_parameter)
    assert output.endswith("12 steps; their losses differ by at most 0e+00\n")


def test_an_unknown_reducer_is_refused_in_one_line():
    [(status, output)] = command(SCRIPT, "--train=best")
    assert status == 2
    [line] = output.splitlines()
    assert all(name in line for name in ("'best'", *NAMES))


# --- A peer's tests, through an adapter of ten lines


class Adapter(nn.Module):
    """The interface that course assignments and libraries know: wrap, backward, finish, step."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.reducer = chapter("03", "reducers").REDUCERS[name](module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        self.reducer.finish()


class Toy(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.fixed = nn.Parameter(torch.ones(8), requires_grad=False)
        if tied:
            self.third.weight = self.second.weight

    def forward(self, x):
        return self.third(torch.relu(self.second(self.norm(self.first(x))))) + self.fixed


def _peers(rank: int) -> dict:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    wrong = {(name, tied): _peer(rank, name, tied) for name in NAMES for tied in (False, True)}
    dist.destroy_process_group()
    return wrong


@cache
def peers() -> list[dict]:
    return run_ranks(2, _peers)


def _peer(rank: int, name: str, tied: bool) -> list[str]:
    """What of the peer's claims does not hold."""
    torch.manual_seed(rank)
    wrapped = Adapter(Toy(tied).double(), name)
    torch.manual_seed(0)
    single = Toy(tied).double()
    wrong = []

    def compare(when: str) -> None:
        for (key, ours), theirs in zip(
            wrapped.module.named_parameters(), single.parameters(), strict=True
        ):
            if not torch.allclose(ours, theirs, 0, 1e-12):
                wrong.append(f"{key} {when}")
            if theirs.grad is not None and not torch.allclose(ours.grad, theirs.grad, 0, 1e-12):
                wrong.append(f"gradient of {key} {when}")

    compare("at the start")
    x, y = torch.randn(20, 10).double(), torch.randn(20, 8).double()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (wrapped, single)]
    for step in range(4):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(step))
        for model, optimizer, rows in (
            (wrapped, optimizers[0], order.chunk(2)[rank]),
            (single, optimizers[1], order),
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            if model is wrapped:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        compare(f"after step {step}")
    wrapped.reducer.close()
    return wrong


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_the_tests_of_a_peer_pass_through_an_adapter(name, tied):
    assert [wrong[name, tied] for wrong in peers()] == [[], []]


# --- What lies in memory in its own way


class Strided(nn.Module):
    """A channels_last convolution, and a parameter with gaps: a part of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.part = nn.Parameter(torch.randn(4, 6)[:, 1:4])

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3)) @ self.part


def _strided(rank: int, ranks: int) -> dict:
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    answers = {}
    for name in NAMES if ranks > 1 else ("alone",):
        torch.manual_seed(rank)
        model = Strided().double()
        reducer = chapter("03", "reducers").REDUCERS[name](model) if ranks > 1 else None
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        for step in range(3):
            x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            model(x.chunk(ranks)[rank]).square().mean().backward()
            if reducer:
                reducer.finish()
            optimizer.step()
        answers[name] = [p.detach().clone() for p in model.parameters()]
        if reducer:
            reducer.close()
    return answers


def test_other_strides_and_gaps_do_no_harm_not_even_with_a_fused_optimizer():
    [alone] = run_ranks(1, _strided, 1)
    for answers in run_ranks(2, _strided, 2):
        for name in NAMES:
            for ours, theirs in zip(answers[name], alone["alone"], strict=True):
                assert (ours - theirs).abs().max() < 1e-10, name


# --- How each of them works


def _calls(rank: int) -> dict:
    """Collectives and messages of one step, during backward and in finish()."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    counts = {}
    for name in NAMES:
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])  # 2.9 MB
        reducer = chapter("03", "reducers").REDUCERS[name](model)
        loss = model(torch.randn(4, 300)).square().mean()
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
            mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
            mock.patch.object(dist, "barrier", wraps=dist.barrier) as barrier,
        ):
            with reducer.no_sync():
                loss.backward(retain_graph=True)
            quiet = (all_reduce.call_count, isend.call_count)
            loss.backward()
            in_backward = all_reduce.call_count
            reducer.finish()
        others = isend.call_count + barrier.call_count
        counts[name] = (quiet, in_backward, all_reduce.call_count, others)
        reducer.close()
    dist.destroy_process_group()
    return counts


def test_each_reducer_sends_what_it_says():
    for counts in run_ranks(2, _calls):
        assert counts["per-parameter"] == ((0, 0), 0, 17, 0), "16 parameters, and who is used"
        assert counts["flat"] == ((0, 0), 0, 1, 0)
        assert counts["bucketed"] == ((0, 0), 2, 2, 0), "1 MiB, and the rest; both in backward"
        assert counts["ring"] == ((0, 0), 0, 0, 2), "one half to add up, one to share"
        assert counts["shared-memory"] == ((0, 0), 0, 0, 0), "nothing is sent"


def _moments(rank: int) -> list[bool]:
    """Whether the first layer still has no gradient when a bucket leaves."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    reducer = chapter("03", "reducers").REDUCERS["bucketed"](model)
    early, send = [], dist.all_reduce

    def watch(*args, **kwargs):
        early.append(model[0].weight.grad is None)
        return send(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", watch):
        model(torch.randn(4, 300)).square().mean().backward()
        reducer.finish()
    dist.destroy_process_group()
    return early


def test_the_first_bucket_leaves_while_backward_is_still_at_work():
    assert run_ranks(2, _moments) == [[True, False]] * 2


def _demonstrate(rank: int, name: str, function: str) -> list:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return getattr(chapter("03", name), function)()


def test_the_chapter_on_overlap_shows_buckets_that_leave_while_gradients_are_still_to_come():
    for rows in run_ranks(2, _demonstrate, "overlap", "watch_backward"):
        numbers, _, _, complete, to_come = zip(*rows, strict=True)
        assert numbers == (0, 1, 2)
        assert to_come[0] > to_come[1] > to_come[2] == 0
        assert {sum(pair) for pair in zip(complete, to_come, strict=True)} == {62}


def test_the_chapter_on_flat_shows_one_message_instead_of_nine():
    for one_by_one, flat in run_ranks(2, _demonstrate, "flat", "messages"):
        assert len(one_by_one) == 1 + 8
        assert sum(one_by_one) == 4 * 21840 + 8, "and a byte for each parameter"
        assert flat == [4 * (21840 + 8)], "and a flag for each"


def test_buckets_go_from_the_last_layer_to_the_first():
    layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    parameters = list(layers.parameters())
    groups = chapter("03", "buckets").by_size(parameters)
    assert [len(group) for group in groups] == [6, 10]
    assert all(a is b for a, b in zip(chain(*groups), reversed(parameters), strict=True))


def _twice(rank: int) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=1)
    errors = []
    for name in ("bucketed", "shared-memory"):
        model = nn.Linear(3, 2)
        chapter("03", "reducers").REDUCERS[name](model)
        model(torch.ones(1, 3)).sum().backward()
        try:
            model(torch.ones(1, 3)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_second_backward_without_no_sync_is_refused():
    [errors] = run_ranks(1, _twice)
    assert len(errors) == 2
    assert all("no_sync()" in error for error in errors)


def _after_close(rank: int) -> dict:
    dist.init_process_group("gloo", rank=rank, world_size=1)
    found = {}
    chapter("03", "reducers").REDUCERS["flat"](nn.Linear(3, 2)).close()
    nn.Linear(3, 2)(torch.ones(1, 3)).sum().backward()  # whatever is opened only once is open now
    for name in NAMES:
        before = len(os.listdir("/proc/self/fd"))
        model = nn.Linear(3, 2)
        reducer = chapter("03", "reducers").REDUCERS[name](model)
        with pytest.raises(ZeroDivisionError), reducer.no_sync(), reducer.no_sync():
            raise ZeroDivisionError
        again = reducer.synchronizing
        reducer.close()
        reducer.close()
        for _ in range(3):  # a hook that is still there would refuse the second
            model(torch.ones(1, 3)).sum().backward()
        gradient = model.bias.grad.tolist()
        del reducer, model  # a mapped file stays open as long as a tensor lies in it
        gc.collect()
        found[name] = (again, len(os.listdir("/proc/self/fd")) - before, gradient)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_after_an_exception_in_no_sync_and_after_close_all_is_as_before():
    assert run_ranks(1, _after_close) == [{name: (True, 0, [3.0, 3.0]) for name in NAMES}]


def _unusual(rank: int) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=1)
    errors = []
    for name in NAMES[1:]:
        words = nn.Embedding(5, 2, sparse=True)
        reducer = chapter("03", "reducers").REDUCERS[name](words)
        try:
            words(torch.tensor([1])).sum().backward()
            reducer.finish()
        except UsageError as error:
            errors.append(str(error))
    for name in NAMES:  # complex numbers, and a gradient with a graph of its own
        model = nn.Linear(2, 2, dtype=torch.complex64)
        reducer = chapter("03", "reducers").REDUCERS[name](model)
        model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward(create_graph=True)
        reducer.finish()
    return errors


@pytest.mark.filterwarnings("ignore:Using backward")
def test_sparse_gradients_are_refused_and_unusual_ones_are_not():
    [errors] = run_ranks(1, _unusual)
    assert len(errors) == len(NAMES) - 1
    assert all("sparse" in error for error in errors)


# --- Wrong calls and deaths


class _Wrong(nn.Module):
    def __init__(self, rank: int, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2 + rank if kind == "shape" else 2)
        if kind == "more" and rank == 1:
            self.extra = nn.Linear(2, 2)
        if kind == "frozen" and rank == 1:
            self.layer.bias.requires_grad_(False)
        if kind == "strides" and rank == 1:
            self.layer.weight = nn.Parameter(torch.randn(3, 2).T)
        self.register_buffer("shift", torch.zeros(1 + rank if kind == "buffer" else 1))
        if kind == "dtype" and rank == 1:
            self.double()


def _mismatch(rank: int, kind: str) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    errors = []
    for name in NAMES:
        try:
            chapter("03", "reducers").REDUCERS[name](_Wrong(rank, kind))
        except UsageError as error:
            errors.append(str(error))
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "shape",
            "layer.weight [3, 3] torch.float32 cpu, trained where rank 0 has layer.weight [2, 3]",
        ),
        ("more", "extra.weight [2, 2] torch.float32 cpu, trained where rank 0 has shift [1]"),
        (
            "frozen",
            "layer.bias [2] torch.float32 cpu where rank 0 has layer.bias [2] torch.float32 cpu, t",
        ),
        ("buffer", "shift [2] torch.float32 cpu where rank 0 has shift [1] torch.float32"),
        (
            "dtype",
            "layer.weight [2, 3] torch.float64 cpu, trained where rank 0 has layer.weight [2, 3]",
        ),
        ("strides", "layer.weight [2, 3] torch.float32 cpu, strides [1, 2], trained where rank 0"),
        ("none", ""),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_all_of_them(kind, words):
    for errors in run_ranks(2, _mismatch, kind):
        assert len(errors) == (0 if kind == "none" else len(NAMES))
        assert all(error.startswith(f"rank 1 has {words}") for error in errors)


def _nothing_to_train(rank: int) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=1)
    errors = []
    for name in NAMES:
        try:
            chapter("03", "reducers").REDUCERS[name](nn.Linear(2, 2).requires_grad_(False))
        except UsageError as error:
            errors.append(str(error))
    return errors


def test_a_model_without_trained_parameters_is_refused():
    [errors] = run_ranks(1, _nothing_to_train)
    assert len(errors) == len(NAMES)
    assert all("no parameter that is trained" in error for error in errors)


def _death(rank: int, name: str, moment: str) -> str | None:
    dist.init_process_group("gloo", rank=rank, world_size=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600))
    reducer = chapter("03", "reducers").REDUCERS[name](model)
    try:
        for step in range(5):
            if (rank, step, moment) == (1, 2, "before backward"):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 4)).sum().backward()
            if (rank, step, moment) == (1, 2, "before finish"):
                os.kill(os.getpid(), signal.SIGKILL)
            reducer.finish()
    except RuntimeError as error:
        return str(error)
    return None


def nameless_files() -> set[str]:
    """What a rank could leave behind: in /dev/shm, and files for systems without memfd."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("ranks-*")}


DEATHS = [(name, "before finish") for name in NAMES]
DEATHS += [(name, "before backward") for name in ("bucketed", "shared-memory")]  # they have hooks


@pytest.mark.parametrize(("name", "moment"), DEATHS)
def test_a_rank_that_dies_is_named_by_the_others_and_leaves_nothing(name, moment):
    before = nameless_files()
    answers = run_ranks(3, _death, name, moment, dying=(1,))
    assert answers[1] is None
    for rank in (0, 2):
        assert f"rank 1 died while rank {rank} waited for it" in answers[rank]
    assert nameless_files() == before


def test_the_chapter_on_deaths_shows_that_the_others_name_the_rank():
    [(status, output)] = command("03_ddp_manual_allreduce/deaths.py")
    assert status == 0, output
    assert [line for line in output.splitlines() if line.startswith("rank")] == [
        "rank 0: rank 1 died while rank 0 waited for it",
        "rank 1: killed",
        "rank 2: rank 1 died while rank 2 waited for it",
    ]


def _slow_survivor(rank: int, name: str) -> str | None:
    """Rank 1 dies, rank 2 notices and ends, and only then rank 0 comes."""
    dist.init_process_group("gloo", rank=rank, world_size=3)
    model = nn.Linear(4, 4)
    reducer = chapter("03", "reducers").REDUCERS[name](model)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(1.5)
    try:
        reducer.finish()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["flat", "shared-memory"])
def test_who_ended_because_of_a_death_is_not_taken_for_dead(name):
    answers = run_ranks(3, _slow_survivor, name, dying=(1,))
    assert "rank 1 died while rank 0" in answers[0]
    assert "rank 1 died while rank 2" in answers[2]


def _one_step_less(rank: int) -> str | None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.Linear(4, 4)
    reducer = chapter("03", "reducers").REDUCERS["shared-memory"](model)
    try:
        for _ in range(3 - rank):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            reducer.finish()
        if rank == 1:
            reducer.close()
            dist.barrier()  # it stays alive
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return None


def test_a_rank_that_ends_a_step_early_is_named():
    assert run_ranks(2, _one_step_less) == ["ranks [1] ended while rank 0 waited for them", None]


def test_a_run_without_a_death_ends_without_an_error():
    """The control."""
    assert run_ranks(3, _death, "shared-memory", "never") == [None] * 3


def _late(rank: int) -> str:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    segment = chapter("03", "shared_memory").Segment(8, seconds=0.3)
    try:
        if rank == 0:
            segment.wait(0, 1)
    except TimeoutError as error:
        return str(error)
    finally:
        dist.barrier()  # rank 1 lives, but does not post
    return ""


def test_a_rank_that_lives_but_does_not_come_is_named_too():
    assert run_ranks(2, _late)[0] == "ranks [0, 1] are more than 0.3 s late"


def _without_memfd(rank: int) -> list[int]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    memory = chapter("03", "shared_memory")
    with mock.patch.object(os, "memfd_create", create=True):
        del os.memfd_create
        segment = memory.Segment(16)
    numbers = segment.tensor(torch.int64, (2,), 0)
    numbers[rank] = rank + 5
    segment.post(memory.READY, 1)
    segment.wait(memory.READY, 1)
    return numbers.tolist()


def test_memory_is_shared_where_there_is_no_memfd_and_its_file_is_gone():
    before = nameless_files()
    assert run_ranks(2, _without_memfd) == [[5, 6], [5, 6]]
    assert nameless_files() == before


def _other_machine(rank: int) -> str:
    """Rank 1 finds another file at the path that rank 0 tells, as on another machine."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    memory = chapter("03", "shared_memory")
    with mock.patch.object(os.path, "realpath", return_value="another"):
        try:
            memory.Segment(16)
        except UsageError as error:
            return str(error)
    return ""


def test_ranks_on_two_machines_are_refused():
    for answer in run_ranks(2, _other_machine):
        assert answer == "ranks [1] cannot see the memory of rank 0: run all on one machine"


# --- The ring

LENGTHS = (0, 1, 2, 3, 7, 64, 100_003)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _ring(rank: int, ranks: int) -> tuple[list, list]:
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    ring = chapter("03", "ring")
    ring.PIECE = 4096  # bytes: many pieces
    sums, sent = [], []
    with (
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError("not by hand")),
        mock.patch.object(dist, "isend", wraps=dist.isend) as messages,
    ):
        for length in LENGTHS:
            for dtype in DTYPES:
                messages.reset_mock()
                numbers = torch.arange(length).remainder(50).add(rank).to(dtype)
                sent.append(ring.ring_all_reduce(numbers))
                sums.append(numbers)
        many = 2 * (ranks - 1) * (length // ranks * dtype.itemsize // 4096)
        assert messages.call_count >= many, "a chunk goes in pieces"
        folded = torch.full((5, 3, 2), rank)
        ring.all_reduce(folded)
        simple = torch.arange(7) + rank
        steps = []
        ring.simple_ring(simple, lambda tensor: steps.append(tensor.tolist()))
    assert len(steps) == 2 * (ranks - 1)
    return [*sums, folded, simple], sent


@cache
def ring_sums(ranks: int) -> list[tuple[list, list]]:
    return run_ranks(ranks, _ring, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_ring_sums_any_length_and_dtype(ranks):
    for sums, _ in ring_sums(ranks):
        expected = [
            sum(torch.arange(length).remainder(50).add(rank) for rank in range(ranks)).to(dtype)
            for length in LENGTHS
            for dtype in DTYPES  # whole numbers below 257: exact in all of them
        ]
        assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=False))
        assert torch.equal(sums[-2], torch.full((5, 3, 2), sum(range(ranks))))
        assert torch.equal(sums[-1], torch.arange(7) * ranks + sum(range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_rank_sends_2_n_minus_1_nths_of_the_tensor(ranks):
    cases = [(length, dtype) for length in LENGTHS for dtype in DTYPES]
    all_sent = [sent for _, sent in ring_sums(ranks)]
    for (length, dtype), *sent in zip(cases, *all_sent, strict=True):
        whole = length * dtype.itemsize
        assert sum(sent) == 2 * (ranks - 1) * whole, "all ranks together, to the byte"
        if length > 1000:
            share = 2 * (ranks - 1) / ranks * whole
            assert all(abs(each - share) <= 0.03 * share for each in sent)


def _unequal(rank: int) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    errors = []
    for tensor in (torch.ones(3 + rank), torch.ones(6)[:: 1 + rank][:3]):
        try:
            chapter("03", "ring").all_reduce(tensor)
        except UsageError as error:
            errors.append(str(error))
    return errors


def test_the_ring_refuses_unequal_tensors_on_every_rank():
    for shapes, gaps in run_ranks(2, _unequal):
        assert "rank 1 has [4] torch.float32 where rank 0 has [3] torch.float32" in shapes
        assert "rank 1 has [3] torch.float32 with gaps where rank 0 has [3] torch.float32" in gaps


# --- What the README says of the measurement


def test_the_measured_step_times_are_as_the_readme_says():
    """No timing here: it reads the committed file."""
    results = json.loads((ROOT / "results" / "03_reducers.json").read_text())
    for name, found in results["models"].items():
        ratio = {variant: row["ratio"] for variant, row in found["variants"].items()}
        every_ddp = [value for variant, value in ratio.items() if variant.startswith("DDP")]
        assert len(every_ddp) == 4
        assert ratio["per-parameter"] > max(ratio[n] for n in NAMES[1:]), name
        assert ratio["DDP"] / ratio["bucketed"] >= 0.98, f"{name}: throughput"
        assert ratio["shared-memory"] < min(every_ddp), name
    net = results["models"]["net"]["variants"]
    assert net["per-parameter"]["ratio"] > 2
    assert net["shared-memory"]["ratio"] <= 1.08
    large = [row for row in results["ring"] if row["bytes"] >= 2**22]
    assert len(large) == 5
    assert all(row["ring_to_gloo"] >= 0.8 for row in large)
