"""Unused parameters, accumulation, switches of speed and their benchmarks: C09, C12, C17, C18."""

import importlib.util
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import (
    FOLDERS,
    ROOT,
    Line,
    Run,
    chapter,
    command,
    default_dtype,
    free_port,
    fresh_module,
    load_stage,
    run_main,
    run_ranks,
    scratch_folder,
    train_once,
)
from test_bad_input import launcher
from test_proof import FLAGS
from test_stages import FP32
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import UsageError

sys.path.append(str(ROOT / "benchmarks"))


def benchmark(name: str):
    """A program of benchmarks/: two of them have the name of a chapter of stage 05."""
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


precision, switches = benchmark("precision"), benchmark("switches")

LEFT, MIXED, RIGHT, BOTH, IDLE = (
    getattr(chapter("05", "unused"), name) for name in ("LEFT", "MIXED", "RIGHT", "BOTH", "IDLE")
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


def join(rank, world_size):
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)


def launched(script: str, ranks: int) -> list[tuple[int, str]]:
    """A chapter as torchrun starts it; what each rank prints, and what torch warns of."""
    env = {"RANK": "{RANK}", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return command(script, ranks=ranks, env=env | {"MASTER_PORT": str(free_port())})


# --- unused.py, and C17


def _attempt(rank, world_size, options, steps):
    join(rank, world_size)
    with default_dtype(torch.float64):
        done = chapter("05", "unused").attempt(options, steps)
    total = torch.ones(())
    dist.all_reduce(total)  # after an error too, the process group is whole
    assert total == world_size
    return [str(found) if isinstance(found, RuntimeError) else found for found in done]


def mean_with_zeros(step, world_size):
    """What a step should give, worked out by hand: weights 1, 2, 3; rank r has the input r + 1."""
    stem, left, right = [], [], []
    for rank in range(world_size):
        branch, x = step[rank % 2], rank + 1
        stem.append(x * {"left": 2, "right": 3, "both": 5, "idle": 2}[branch])
        left += [x] if branch != "right" else []
        right += [x] if branch in ("right", "both") else []
    return [sum(found) / world_size if found else None for found in (stem, left, right)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_c17_find_unused_parameters_averages_whatever_branch_each_rank_takes(world_size):
    steps = [BOTH, LEFT, MIXED, RIGHT, IDLE, MIXED]
    for rank in run_ranks(world_size, _attempt, world_size, FIND, steps):
        for found, step in zip(rank, steps, strict=True):
            assert found == pytest.approx(mean_with_zeros(step, world_size), abs=1e-12)


def test_c17_without_it_a_step_with_a_branch_left_out_is_not_averaged_and_the_next_one_fails():
    steps = [BOTH, LEFT, LEFT]
    for rank, (both, left, error) in enumerate(run_ranks(2, _attempt, 2, {}, steps)):
        assert both == pytest.approx(mean_with_zeros(BOTH, 2), abs=1e-12)
        assert left == [2 * (rank + 1), rank + 1, None]  # this rank's own
        assert left != mean_with_zeros(LEFT, 2)
        assert error.startswith("Expected to have finished reduction in the prior iteration")
        assert "find_unused_parameters=True" in error


def test_c17_a_static_graph_needs_no_search_if_each_rank_keeps_its_graph():
    for rank in run_ranks(2, _attempt, 2, STATIC, [MIXED] * 3):
        assert rank == [pytest.approx(mean_with_zeros(MIXED, 2), abs=1e-12)] * 3


@pytest.mark.parametrize(
    ("steps", "right", "message"),
    [
        ([LEFT, LEFT, BOTH], 2, "Your training graph has changed"),
        ([BOTH, BOTH, LEFT, LEFT], 2, "Expected to have finished reduction"),  # one step too late
        ([IDLE, IDLE, IDLE], 1, "Expected to have finished reduction"),
    ],
    ids=["one-more", "one-less", "output-not-in-the-loss"],
)
def test_c17_a_static_graph_that_changes_is_an_error_and_may_be_a_wrong_step_before(
    steps, right, message
):
    for rank in run_ranks(2, _attempt, 2, STATIC, steps):
        *done, error = rank
        assert error.startswith(message)
        assert done[:right] == [
            pytest.approx(mean_with_zeros(step, 2), abs=1e-12) for step in steps[:right]
        ]
        assert all(
            found != mean_with_zeros(step, 2)
            for found, step in zip(done[right:], steps[right:], strict=False)
        )


def _keep(rank, set_to_none):
    """Momentum from two steps that use both branches; then one that uses the left branch only."""
    join(rank, 2)
    unused = chapter("05", "unused")
    model = unused.Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, right = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), []
    for branch in ("both", "both", "left"):
        optimizer.zero_grad(set_to_none)
        outputs = ddp(torch.ones(1, 1), branch)
        torch.stack(outputs).sum().backward()
        optimizer.step()
        right.append(model.right.weight.item())
    return right


@pytest.mark.parametrize("set_to_none", [True, False])
def test_c17_where_no_rank_uses_a_parameter_its_gradient_is_left_as_it_was(set_to_none):
    """None: the optimizer leaves the weight alone. Zero: momentum and weight decay move it."""
    for right in run_ranks(2, _keep, set_to_none):
        assert right[0] != right[1]
        assert (right[1] == right[2]) == set_to_none


def _micro_batches(rank, options):
    """The first micro-batch uses the left branch, without averaging, the last one the right."""
    join(rank, 2)
    unused = chapter("05", "unused")
    model = unused.Branches().double()
    ddp = DistributedDataParallel(model, **options)
    x = torch.full((1, 1), rank + 1.0, dtype=torch.float64)
    with ddp.no_sync():
        ddp(x, "left")[0].sum().backward()
    ddp(x, "right")[0].sum().backward()
    return [p.grad.item() for p in model.parameters()]


def test_c17_a_parameter_of_an_earlier_micro_batch_counts_as_used():
    """Means over ranks 0 and 1 of stem 2 + 3, left 1, right 1, times the input 1 and 2."""
    assert run_ranks(2, _micro_batches, FIND) == [[7.5, 1.5, 1.5]] * 2
    alone = run_ranks(2, _micro_batches, {})
    assert alone[0] != alone[1]  # the control: not averaged


def test_c17_on_a_model_that_needs_it_not_torch_warns_once():
    answers = launched("05_amp_syncbn/unused.py", ranks=2)
    assert [status for status, _ in answers] == [0, 0]
    for _, output in answers:  # of five settings, one asks for the search, and begins with BOTH
        assert output.count("did not find any unused parameters") == 1


# --- accumulate.py


def _ways(rank, world_size, without):
    join(rank, world_size)
    return fresh_module("05", "accumulate.py", without).compare_ways()


def test_05_only_no_sync_around_forward_saves_collectives(without=()):
    accumulate = chapter("05", "accumulate")
    same, k = "that of one process", accumulate.MICRO_BATCHES
    for world_size in (2, 3):
        for rows in run_ranks(world_size, _ways, world_size, without):
            found = {way: (buckets, gradient) for way, buckets, gradient in rows}
            assert tuple(found) == accumulate.WAYS
            n, gradient = found[accumulate.BIG]
            assert n > 1
            assert gradient == same
            assert found[accumulate.EVERY] == (k * n, same)
            assert found[accumulate.LAST] == (n, same)
            assert found[accumulate.BACKWARD] == (k * n, same)  # the trap
            assert found[accumulate.FORWARD] == (n, same)
            assert found[accumulate.ALL] == (0, "each rank has its own")


def test_05_micro_batches_give_the_gradient_of_the_batch_unless_batchnorm_ties_its_samples():
    rows = dict(chapter("05", "accumulate").compare_models())
    assert rows == {
        "loss / K": "that of the batch",
        "loss not divided": "K times as large",
        "loss / K, with BatchNorm": "another",
    }


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 12])
def test_05_any_number_of_equal_micro_batches_gives_the_gradient_of_the_batch(k):
    accumulate = chapter("05", "accumulate")
    images, labels = accumulate.batch_of(0)
    model = accumulate.build(False)
    truth = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
    found = accumulate.accumulate(model, images, labels, k, k)
    assert (found - torch.cat([part.flatten() for part in truth])).abs().max() < 1e-12


def _one_sided(rank, both):
    """Only rank 0 is in no_sync, so that rank 1 averages alone."""
    join(rank, 2)
    dist.barrier()  # ranks may start late; from here on, they need little time
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
    loss = ddp(torch.ones(1, 2)).sum()
    loss.backward()
    try:
        if both or rank == 0:
            with ddp.no_sync():
                ddp(torch.ones(1, 2)).sum().backward()
        else:
            ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError:
        return "waits"
    return "continues"


def test_05_no_sync_on_one_rank_only_makes_the_other_wait():
    assert "waits" in run_ranks(2, _one_sided, False)
    assert run_ranks(2, _one_sided, True) == ["continues"] * 2


# --- switches.py: the lines that it tells the reader to add to train.py

PLACES = {  # what is added stands before this text of train.py
    "at the top": "import torch.distributed as dist\n",
    "before DDP": "    ddp = DistributedDataParallel(",
    "after DDP": "    sampler = DistributedSampler(",
    "for each batch": "        labels = labels.to(device, non_blocking=True)",
}


def with_switch(name: str, hook: str = "bf16") -> tuple[Line, ...]:
    """The changes to train.py. hook: another communication hook in the place of bf16's."""
    changes = []
    for line in chapter("05", "switches").LINES[name]:
        code, place = line.replace("bf16_compress", hook).split("  # ")
        old = PLACES[place]
        indent = " " * (len(old) - len(old.lstrip()))
        changes.append(("train.py", old, f"{indent}{code}\n{old}"))
    return tuple(changes)


def apart(one: Run, other: Run) -> float:
    """The largest difference of a weight."""
    (a, *_), (b, *_) = one.states, other.states
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_channels_last_trains_the_same_weights_in_another_layout():
    plain, last = (
        train_once("05", 2, *FLAGS, without=without)
        for without in ((), with_switch("channels_last"))
    )
    assert (plain.losses - last.losses).abs().max() < 1e-10
    assert apart(plain, last) < 1e-10
    strides = [run.checkpoint["model"]["conv2.weight"].stride() for run in (plain, last)]
    assert strides == [(250, 25, 5, 1), (250, 1, 50, 10)]  # (20, 10, 5, 5)


def _layouts(rank, flags, without):
    """Whether the first layer's weights, and each micro-batch that reaches it, have the layout."""
    stage, found = load_stage("05", without), set()
    build = stage.build_model

    def watch(layer, inputs):
        if layer.training:
            pair = layer.weight, inputs[0]
            found.add(tuple(t.is_contiguous(memory_format=torch.channels_last) for t in pair))

    def build_watched(*args):
        model = build(*args)
        model.conv1.register_forward_pre_hook(watch)
        return model

    stage.build_model = build_watched
    run_main(stage, rank, *flags)
    return found


@pytest.mark.parametrize("on", [True, False])
def test_with_channels_last_the_model_and_every_micro_batch_have_the_layout(on):
    flags = ("--dataset=synthetic", "--device=cpu", f"--run-dir={scratch_folder()}")
    flags += ("--max-steps=2", "--accumulate=2", "--batch-size=16")
    without = with_switch("channels_last") if on else ()
    assert run_ranks(2, _layouts, flags, without) == [{(on, on)}] * 2


def _sent(rank, flags, hook):
    """The dtypes that DDP sends in five steps, and how many bytes."""
    stage, sent = load_stage("05", with_switch("bf16 hook", hook)), []
    reduce = dist.all_reduce

    def reduce_watched(tensor, *others, **more):
        if more.get("async_op"):  # DDP's hooks; those of the stage itself wait
            sent.append(tensor)
        return reduce(tensor, *others, **more)

    with patch.object(dist, "all_reduce", reduce_watched):
        run_main(stage, rank, *flags)
    return {tensor.dtype for tensor in sent}, sum(tensor.nbytes for tensor in sent)


def test_a_hook_sends_half_of_the_bytes():
    flags = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={scratch_folder()}")
    flags += ("--max-steps=5",)
    dtypes = {"allreduce": torch.float32, "bf16_compress": torch.bfloat16}
    dtypes["fp16_compress"] = torch.float16
    found = {hook: run_ranks(2, _sent, flags, hook) for hook in dtypes}
    for hook, dtype in dtypes.items():
        assert found[hook] == [({dtype}, 5 * dtype.itemsize * 21_840)] * 2  # parameters of net


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_hook_rounds_what_is_sent_and_the_ranks_stay_alike(dtype):
    changes = with_switch("bf16 hook", f"{dtype}_compress")
    plain, run = (train_once("05", 2, *FLAGS, **FP32, without=each) for each in ((), changes))
    first, second = run.states
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 1e-6 < apart(plain, run) < 0.05
    assert run.summary["test_accuracy"] > plain.summary["test_accuracy"] - 0.03


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def changed_script(folder, changes):
    """A train.py with these changes, which tells at its end how many graphs were compiled."""
    for path in FOLDERS["05"].glob("*.py"):
        (folder / path.name).symlink_to(path)
    source = (FOLDERS["05"] / "train.py").read_text()
    for _, old, new in changes:
        source = source.replace(old, new)
    script = folder / "changed.py"
    script.write_text(
        source + "    from torch._dynamo.utils import counters\n"
        "    print('graphs:', counters['stats']['unique_graphs'])\n"
    )
    return str(script)


@pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler: install g++")
def test_compiled_steps_compute_the_same(tmp_path):
    """Two ranks, and SyncBatchNorm by hand, under torch.compile."""
    flags = ("--model=net-bn", "--max-steps=3")
    plain = train_once("05", 2, *flags, **FP32)
    script = changed_script(tmp_path, with_switch("compile"))
    flags += ("--device=cpu", f"--run-dir={tmp_path}")
    env = launcher(free_port()) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers
    answers = command(script, *flags, ranks=2, env=env, seconds=240)
    assert [status for status, _ in answers] == [0, 0], answers
    assert all(re.search(r"^graphs: [1-9]", output, re.M) for _, output in answers), answers
    compiled = Run(tmp_path, [], "")
    assert (plain.losses - compiled.losses).abs().max() < 1e-4
    assert compiled.checkpoint["model"].keys() == plain.checkpoint["model"].keys(), "_orig_mod."


def _uncompiled(rank):
    with pytest.raises(UsageError) as caught:
        chapter("05", "machine").refuse_no_compiler(torch.device("cpu"))
    return str(caught.value)


def test_a_machine_without_a_compiler_is_told_so(tmp_path):
    [text] = run_ranks(1, _uncompiled, env={"CXX": "no-such-compiler", "PATH": str(tmp_path)})
    assert text.startswith("torch.compile does not work here")
    assert "install a C++ compiler" in text


def _table(rank):
    """What the chapter prints where there is no compiler, and with few steps."""

    def refuse(device):
        raise UsageError("no g++")

    module = chapter("05", "switches")
    few = patch.object(module, "ROUNDS", 1), patch.object(module, "refuse_no_compiler", refuse)
    with redirect_stdout(StringIO()) as output, few[0], few[1]:
        module.compare(rank, int(os.environ["MASTER_PORT"]))
    return output.getvalue()


def test_the_chapter_compares_each_switch_with_plain_ddp_and_compiles_where_it_can():
    table, nothing = run_ranks(2, _table)
    assert nothing == ""
    assert table.startswith("compile is left out: no g++")
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[4:]]
    found = {name: weights for name, _, weights in rows}
    assert list(found) == ["DDP", "DDP again", "channels_last", "bf16 hook"]
    assert found["DDP again"] == "same bits"
    assert float(found["bf16 hook"].removeprefix("off by ")) > 1e-7
    assert all(float(time) > 0 for _, time, _ in rows)


def test_compiling_in_place_keeps_the_names_of_the_model():
    names = list(nn.Sequential(nn.Linear(2, 2)).state_dict())
    model = nn.Sequential(nn.Linear(2, 2))
    assert chapter("05", "switches").compiled(model) is model
    assert list(model.state_dict()) == names
    control = torch.compile(model)  # not in place
    assert list(control.state_dict()) == [f"_orig_mod.{name}" for name in names]


# --- The chapters' and the benchmarks' command lines


@pytest.mark.parametrize("name", ["unused", "accumulate"])
def test_a_chapter_refuses_to_run_alone(name):
    [(status, output)] = command(f"05_amp_syncbn/{name}.py")
    assert status == 2
    assert output.count("\n") == 1
    assert "--nproc-per-node=2" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--models", "resnet17"), ("resnet17", "--models resnet50")),
        (("--batch-size", "15", "--ranks", "2"), ("--batch-size 15", "by 2", "try 16")),
        (("--image-size", "8"), ("'8'", "at least 32")),
    ],
)
def test_precision_refuses_what_it_cannot_time(flags, words):
    [(status, output)] = command("benchmarks/precision.py", "--device=cpu", *flags)
    assert status == 2
    assert output.count("\n") == 1
    assert all(word in output for word in words), output


def results_now() -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in (ROOT / "results").iterdir()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("name", ["precision", "switches"])
def test_the_benchmark_runs_and_a_quick_one_writes_nothing(name, device):
    before = results_now()
    [(status, output)] = command(f"benchmarks/{name}.py", "--quick", f"--device={device}")
    assert status == 0, output
    assert results_now() == before
    module = {"precision": precision, "switches": switches}[name]
    chosen, skipped = module.choose(torch.device(device) if name == "precision" else device, True)
    for variant in [*map(str, chosen), "A/A"]:
        assert re.search(rf"^{re.escape(variant)}  ", output, re.M), variant
    for what, why in skipped.items():
        assert f"left out: {what}: {why}" in output


# --- benchmarks/precision.py


def test_precision_leaves_out_formats_without_units_and_says_why(monkeypatch):
    monkeypatch.setattr(precision, "has_units", lambda *_: False)
    chosen, skipped = precision.choose(torch.device("cpu"), quick=False)
    assert {variant.precision for variant in chosen} == {"fp32"}
    assert {"tf32", "bf16", "fp16"} < skipped.keys()
    monkeypatch.setattr(precision, "has_units", lambda *_: True)
    chosen, skipped = precision.choose(torch.device("cuda"), quick=False)
    assert len(set(map(str, chosen))) == 4 * 2 * 2  # formats, layouts, compiled or not
    assert not skipped


class Dtypes(nn.Module):
    """Notes what arrives at it, and in which layout."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Conv2d(3, 8, 3), []

    def forward(self, x):
        y = self.layer(x)
        last = y.is_contiguous(memory_format=torch.channels_last)
        self.seen.append((y.dtype, last and not y.is_contiguous()))
        return y.mean((2, 3))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_variant_computes_in_its_precision_and_layout(name, channels_last):
    variant = precision.Variant(name, channels_last)
    training = precision.Training(variant, Dtypes(), torch.device("cpu"))
    before = training.plain.layer.weight.clone()
    assert before.is_contiguous(memory_format=variant.layout)
    images = torch.randn(4, 3, 8, 8).to(memory_format=variant.layout)
    training(images, torch.arange(4))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    assert training.plain.seen == [(dtype, channels_last)]
    assert training.plain.layer.weight.dtype == torch.float32
    assert not torch.equal(training.plain.layer.weight, before)


def test_the_peak_counts_what_stays_and_what_a_step_adds():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))
    training = precision.Training(precision.Variant("fp32"), model, torch.device("cpu"))
    peaks = []
    for batch in (2, 2, 512):
        images, labels = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
        training(images, labels)
        peaks.append(training.peak_bytes(images, labels))
    parameters = sum(p.nbytes for p in model.parameters())
    assert peaks[0] == peaks[1]
    assert 3 * parameters < peaks[0] < 3.2 * parameters  # weights, momentum, gradients
    assert peaks[2] >= peaks[0] + 510 * 256 * 4  # the hidden layer's outputs


# --- benchmarks/switches.py


def _held(rank, names):
    join(rank, 2)
    torch.manual_seed(0)
    model, device = nn.Sequential(nn.Flatten(), nn.Linear(192, 64)), torch.device("cpu")
    batch = torch.randn(4, 3, 8, 8), torch.arange(4)
    chosen = {name: switches.VARIANTS[name] for name in names}
    rows = switches.count_and_compare(chosen, model, batch, device)
    return {name: (row["held_bytes"], row["distance"]) for name, row in rows.items()}


def test_switches_count_what_a_rank_holds():
    """Of one matrix and its bias: gradients, DDP's buckets, the optimizer's state."""
    view, zero = "gradient_as_bucket_view", "Adam, ZeroRedundancyOptimizer"
    size = 4 * (192 * 64 + 64)
    names = ("DDP", view, "Adam", zero, "PowerSGD hook", "bf16 hook")
    for found in run_ranks(2, _held, names):
        held = {name: row for name, (row, _) in found.items()}
        assert all(row["parameters"] == size for row in held.values())
        gradients = {name: row["gradients and buckets"] for name, row in held.items()}
        assert gradients.pop(view) == size
        assert set(gradients.values()) == {2 * size}
        assert held["DDP"]["optimiser"] == size  # momentum
        assert held["Adam"]["optimiser"] == 2 * size + 2 * 4  # and two counters
        assert held[zero]["optimiser"] == 2 * 4 * 192 * 64 + 4  # the larger share: the matrix
        assert held["DDP"]["hook"] == 0
        assert size <= held["PowerSGD hook"]["hook"] < 1.1 * size  # what it has not sent yet


def test_switches_tell_the_same_bits_from_others():
    names = ("DDP", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    names += ("Adam", "Adam, ZeroRedundancyOptimizer", "bf16 hook", "PowerSGD hook")
    for found in run_ranks(2, _held, names):
        distances = {name: distance for name, (_, distance) in found.items()}
        assert distances.pop("Adam") > 0.1
        assert 0 < distances.pop("bf16 hook") < 0.1
        assert distances.pop("PowerSGD hook") > 0
        assert set(distances.values()) == {0.0}


# --- C09 and C12: what was measured, and what it learns


def results(name: str) -> dict:
    path = ROOT / "results" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path.name} has not been measured yet: make campaigns")
    return json.loads(path.read_text())


def claim(name: str) -> str:
    lines = (ROOT / "CLAIMS.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith(f"| {name} ")]
    return row.split("|")[4]  # what is true


def speed_up(rows: dict, variant: str, baseline: str = "fp32") -> float:
    return rows[baseline]["ratio"] / rows[variant]["ratio"]


def measured_places() -> dict[str, dict]:
    models = results("05_precision")["models"]
    return {
        f"{name}, {place}": found["variants"]
        for name, both in models.items()
        for place, found in both.items()
    }


def test_c09_bf16_is_faster_wherever_it_was_measured_and_the_row_tells_how_much():
    places = measured_places()
    if not any("bf16" in rows for rows in places.values()):
        pytest.skip("measured on a machine without bf16 units")
    for place, rows in places.items():
        low, high = rows["bf16, channels_last"]["ratio_interval"]
        assert low <= high < 1, place
        again, end = rows["A/A"]["ratio_interval"]
        assert high < again <= end, f"{place}: no more than noise"
    best = places["resnet50, one process"]
    for variant in ("bf16", "bf16, channels_last"):
        assert f"{speed_up(best, variant):.1f}" in claim("C09"), variant


def test_c09_no_variant_wins_by_learning_less():
    accuracy = results("05_precision")["accuracy"]
    assert all(len(row["test_accuracies"]) >= 3 for row in accuracy.values())
    for variant, row in accuracy.items():
        assert abs(row["median"] - accuracy["fp32"]["median"]) < 0.02, variant
    for name, row in results("05_switches")["variants"].items():
        if name not in ("PowerSGD hook", "Adam", "Adam, ZeroRedundancyOptimizer"):
            assert row["accuracy"] > results("05_switches")["variants"]["DDP"]["accuracy"] - 0.03


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_c09_autocast_learns_as_well_as_fp32_on_the_digits(amp):
    """Runs on every CPU: formats without units are imitated."""
    flags = ("--model=net-bn", "--epochs=4")
    plain, mixed = (
        train_once("05", 1, *flags, *more, dtype=torch.float32).summary
        for more in ((), (f"--amp={amp}",))
    )
    assert plain["test_accuracy"] > 0.9
    assert abs(plain["test_accuracy"] - mixed["test_accuracy"]) < 0.03
    assert plain["train_loss"] != mixed["train_loss"]  # the control: it did compute otherwise


def test_c12_there_is_no_one_number():
    """What bf16 alone gives, in the same memory format: the row tells the smallest and largest."""
    found = [
        speed_up(rows, f"bf16{more}", f"fp32{more}")
        for rows in measured_places().values()
        for more in ("", ", channels_last", ", channels_last, compile")
        if f"bf16{more}" in rows
    ]
    if not found:
        pytest.skip("measured on a machine without bf16 units")
    assert max(found) / min(found) > 1.2
    for number in (min(found), max(found)):
        assert f"{number:.1f}" in claim("C12")


# --- C17 and C18: what was measured


def test_c17_it_never_changes_a_bit_and_the_row_tells_what_it_costs():
    rows = results("05_switches")["variants"]
    for name in ("find_unused_parameters", "the same, with an idle branch"):
        assert rows[name]["distance"] == 0
        assert rows[name]["ratio_interval"][1] > 0.97, "it cannot make a step faster"
    assert f"{rows['find_unused_parameters']['ratio']:.2f}" in claim("C17")


def test_c18_on_a_cpu_cudnn_benchmark_changes_nothing():
    torch.manual_seed(0)
    layer, images = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    outputs = []
    for on in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=on):
            assert torch.backends.cudnn.benchmark == on
            outputs.append(layer(images))
    assert torch.equal(*outputs)
    assert "cudnn.benchmark" in switches.choose("cpu", quick=False)[1]


@needs_gpu
def test_c18_on_a_gpu_it_may_choose_other_algorithms():
    """Other bits perhaps, but the same numbers: 64 × 9 products of about 1, in TF32."""
    torch.manual_seed(0)
    layer, outputs = nn.Conv2d(64, 64, 3, padding=1).cuda(), []
    images = [torch.randn(32, 64, size, size, device="cuda") for size in (56, 28, 56)]
    for on in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=on, allow_tf32=True):
            outputs.append([layer(each) for each in images])
    for off, on in zip(*outputs, strict=True):
        torch.testing.assert_close(off, on, rtol=1e-2, atol=1e-2)
