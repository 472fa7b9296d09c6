"""Unused parameters, accumulation, the machine, switches of speed: C09, C12, C17, C18."""

import json
import os
import re
import shutil
from contextlib import redirect_stdout
from datetime import timedelta
from functools import cache
from io import StringIO
from unittest.mock import Mock, patch

import pytest
import support
import torch
import torch.distributed as dist
from support import ROOT, Line, Run, chapter, command, load_stage, run_main, run_ranks, train_once
from test_stages import LOCAL
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import UsageError

unused, machine, switches = (chapter("05", name) for name in ("unused", "machine", "switches"))


def right_weights(set_to_none):
    """Momentum from two steps that use both branches; then one that uses the left branch only."""
    model = unused.Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, right = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), []
    for branch in ("both", "both", "left"):
        optimizer.zero_grad(set_to_none)
        torch.stack(ddp(torch.ones(1, 1), branch)).sum().backward()
        optimizer.step()
        right.append(model.right.weight.item())
    return right


def _unused(rank, world_size):
    """What each of the chapter's cases gives, and what becomes of a weight that no rank uses."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with support.default_dtype(torch.float64):
        found = [unused.attempt(*case) for case in unused.CASES]
    total = torch.ones(())
    dist.all_reduce(total)  # after errors too, the process group is whole
    assert total == world_size
    found = [[str(x) if isinstance(x, RuntimeError) else x for x in case] for case in found]
    return found, right_weights(set_to_none=True), right_weights(set_to_none=False)


@cache
def started(world_size):
    return run_ranks(world_size, _unused, world_size)


def mean(step, world_size):
    """What a step should give, worked out by hand: weights 1, 2, 3; rank r has the input r + 1."""
    stem, left, right = [], [], []
    for rank in range(world_size):
        branch, x = step[rank % 2], rank + 1
        stem.append(x * {"left": 2, "right": 3, "both": 5, "idle": 2}[branch])
        left += [x] if branch != "right" else []
        right += [x] if branch in ("right", "both") else []
    means = [sum(found) / world_size if found else None for found in (stem, left, right)]
    return pytest.approx(means, abs=1e-12)


LATE = "Expected to have finished reduction in the prior iteration"
VERDICTS = [  # on each step of the chapter's cases: whether it was averaged, or the error
    [True, False, LATE],
    [True] * 5,  # find_unused_parameters, whatever branch each rank takes
    [True] * 3,  # static_graph: needs no search if each rank keeps its graph
    [True, True, "Your training graph has changed"],  # one branch more
    [True, True, False, LATE],  # one less
    [True, False, LATE],  # an output is not in the loss
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_c17_only_find_unused_parameters_averages_whatever_branch_each_rank_takes(world_size):
    ranks = [found for found, *_ in started(world_size)]
    for number, (_, steps) in enumerate(unused.CASES):
        of_steps = list(zip(*(found[number] for found in ranks), strict=True))
        for step, verdict, found in zip(steps, VERDICTS[number], of_steps, strict=True):
            if isinstance(verdict, str):
                assert all(error.startswith(verdict) for error in found)
            else:
                assert all(each == mean(step, world_size) for each in found) == verdict
    assert "find_unused_parameters=True" in ranks[0][0][2]
    assert [found[0][1] for found in ranks][:2] == [[2, 1, None], [4, 2, None]], "each its own"


def test_c17_where_no_rank_uses_a_parameter_its_gradient_is_left_as_it_was():
    """None: the optimizer leaves the weight alone. Zero: momentum and weight decay move it."""
    for _, left_alone, moved in started(2):
        assert left_alone[0] != left_alone[1] == left_alone[2]
        assert moved[:2] == left_alone[:2]
        assert moved[1] != moved[2]


def test_c17_on_a_model_that_needs_it_not_torch_warns_once():
    env = {"RANK": "{RANK}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(support.free_port())}
    for status, output in command("05_amp_syncbn/unused.py", ranks=2, env=env):
        assert status == 0
        # Of its settings, one asks for the search, and begins with BOTH.
        assert output.count("did not find any unused parameters") == 1


def _one_sided(rank):
    """Both ranks are in no_sync; then only rank 0 is, so that rank 1 averages alone."""
    dist.init_process_group("gloo")
    answers = []
    for both in (True, False):
        dist.barrier()  # ranks may start late; from here on, they need little time
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
        ddp(torch.ones(1, 2)).sum().backward()
        try:
            if both or rank == 0:
                with ddp.no_sync():
                    ddp(torch.ones(1, 2)).sum().backward()
            else:
                ddp(torch.ones(1, 2)).sum().backward()
            answers.append("continues")
        except RuntimeError:
            answers.append("waits")
    return answers


def test_05_no_sync_on_one_rank_only_makes_the_other_wait():
    assert run_ranks(2, _one_sided) == [["continues"] * 2, ["continues", "waits"]]


PLACES = {  # what is added stands before this text of train.py
    "at the top": "import torch.distributed as dist\n",
    "before DDP": "    ddp = DistributedDataParallel(",
    "after DDP": "    sampler = DistributedSampler(",
    "for each batch": "        labels = labels.to(device, non_blocking=True)",
}


def with_switch(name: str, hook: str = "bf16") -> tuple[Line, ...]:
    changes = []
    for line in switches.LINES[name]:
        code, place = line.replace("bf16_compress", hook).split("  # ")
        old = PLACES[place]
        indent = " " * (len(old) - len(old.lstrip()))
        changes.append(("train.py", old, f"{indent}{code}\n{old}"))
    return tuple(changes)


def _seen(rank, flags, without):
    """Of the first layer, the layout of weights and micro-batches and the dtype of its output.

    In how many blocks of memory the gradients lie. What DDP sends: dtypes, bytes of two steps.
    """
    stage, found, blocks, sent = load_stage("05", without), set(), set(), []
    build, reduce = stage.build_model, dist.all_reduce

    def watch(layer, inputs, output):
        if layer.training:
            tensors, layout = (layer.weight, inputs[0]), torch.channels_last
            found.add((*(t.is_contiguous(memory_format=layout) for t in tensors), output.dtype))

    def build_watched(*args):
        model = build(*args)
        model.conv1.register_forward_hook(watch)
        return model

    def reduce_watched(tensor, *others, **more):
        if more.get("async_op"):  # DDP's hooks; those of the stage itself wait
            sent.append(tensor)
        return reduce(tensor, *others, **more)

    class Watched(torch.amp.GradScaler):
        def step(self, optimizer):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            blocks.add(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
            return super().step(optimizer)

    stage.build_model = build_watched
    flags += ("--dataset=synthetic", "--device=cpu", f"--run-dir={support.scratch_folder()}")
    watched = patch.object(dist, "all_reduce", reduce_watched)
    with watched, patch.object(torch.amp, "GradScaler", Watched):
        run_main(stage, rank, *flags, "--max-steps=2", "--accumulate=2", "--batch-size=16")
    return found, blocks, {tensor.dtype for tensor in sent}, sum(tensor.nbytes for tensor in sent)


HOOKS = [with_switch("bf16 hook", name) for name in ("allreduce", "bf16_compress")]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("flag", "change", "layouts", "dtype", "sent"),
    [
        ("--amp=off", (), (False, False), FP32, ()),
        ("--amp=bf16", (), (False, False), BF16, ()),
        ("--amp=fp16", (), (False, False), FP16, ()),
        ("--amp=off", with_switch("channels_last"), (True, True), FP32, ()),
        ("--amp=off", HOOKS[0], (False, False), FP32, (FP32,)),
        ("--amp=off", HOOKS[1], (False, False), FP32, (BF16,)),
    ],
    ids=["plain", "bf16", "fp16", "channels_last", "fp32 hook", "bf16 hook"],
)
def test_what_a_format_or_a_switch_changes_inside_a_step(flag, change, layouts, dtype, sent):
    """In each micro-batch. A hook sends once a step, and the gradients lie in one bucket."""
    numbers = 2 * 22_340  # parameters of net, for images in color
    expected = {(*layouts, dtype)}, {1}, set(sent), sum(each.itemsize * numbers for each in sent)
    assert run_ranks(1, _seen, (flag,), change) == [expected]


def _compiled(rank, flags):
    from torch._dynamo.utils import counters

    run_main(load_stage("05", with_switch("compile")), rank, *flags)
    return counters["stats"]["unique_graphs"]


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs g++ to compile")
def test_compiled_steps_compute_the_same(tmp_path):
    flags = ("--model=net-bn", "--max-steps=3")
    plain = train_once("05", 1, *flags, dtype=FP32)
    flags += (*LOCAL, f"--run-dir={tmp_path}")
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers
    with patch.object(support, "SECONDS", 240):
        assert run_ranks(1, _compiled, flags, env=env)[0] > 0
    compiled = Run(tmp_path, [], "")
    assert (plain.losses - compiled.losses).abs().max() < 1e-4
    assert compiled.checkpoint["model"].keys() == plain.checkpoint["model"].keys(), "_orig_mod."
    model = nn.Sequential(nn.Linear(2, 2))
    names = list(model.state_dict())
    assert list(switches.compiled(model).state_dict()) == names
    assert list(torch.compile(model).state_dict()) != names  # the control: not in place


def _table(rank):
    """What the chapter prints where there is no compiler, and with few steps."""
    few, none = patch.object(switches, "ROUNDS", 1), Mock(side_effect=UsageError("no g++"))
    without = patch.object(switches, "refuse_no_compiler", none)
    with redirect_stdout(StringIO()) as output, few, without:
        switches.compare(rank, int(os.environ["MASTER_PORT"]))
    return output.getvalue()


def test_the_chapter_compares_each_switch_with_plain_ddp_and_compiles_where_it_can():
    table, nothing = run_ranks(2, _table)
    assert nothing == ""
    assert table.startswith("compile is left out: no g++")
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[4:]]
    found = {name: text.removeprefix("off by ") for name, _, text in rows}
    assert found.pop("DDP") == found.pop("DDP again") == "same bits"
    assert list(found) == ["channels_last", "bf16 hook"]
    assert float(found["channels_last"]) < 1e-6 < float(found["bf16 hook"]) < 1e-3


def test_a_time_is_the_median_of_those_relative_to_ddp_in_the_same_round():
    steps, ticks = {"DDP": Mock(), "other": Mock()}, [5, 6, 5, 7, 5, 15, 5, 35, 5, 7, 5, 7]
    clock = patch.object(switches.time, "perf_counter", side_effect=ticks)
    with patch.object(switches, "ROUNDS", 3), patch.object(dist, "barrier"), clock:
        assert switches.relative_times(steps) == {"DDP": 1, "other": 2}
    assert steps["other"].call_count == 3 * switches.STEPS


UNITS = [
    ("cpu", {"avx512_bf16": True, "avx512_fp16": False}, {"bf16"}),
    ("cpu", {"amx_bf16": True, "amx_fp16": True}, {"bf16", "fp16"}),
    ("cpu", {"avx2": True}, set()),
    ("cuda", (6, 1), set()),
    ("cuda", (7, 5), {"fp16"}),
    ("cuda", (8, 0), {"tf32", "bf16", "fp16"}),
]


@pytest.mark.parametrize(("kind", "answer", "units"), UNITS)
def test_units_are_read_from_instructions_or_the_compute_capability(kind, answer, units):
    cpu = patch.object(torch.cpu, "get_capabilities", lambda: answer)
    gpu = patch.object(torch.cuda, "get_device_capability", lambda device: answer)
    with cpu, gpu:
        found = {name for name in machine.FORMATS if machine.has_units(name, torch.device(kind))}
    assert found == {"fp32"} | units


def test_the_table_tells_what_runs_and_what_does_not_is_refused(capsys):
    def conv(x, *_):
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == FP16:
            raise RuntimeError("not implemented for 'Half'")
        return x

    units, cpu = (
        patch.object(machine, "has_units", lambda name, _: name == "fp32"),
        torch.device("cpu"),
    )
    no_gpu = patch.object(torch.cuda, "is_available", lambda: False)
    no_compiler = patch.object(torch, "compile", side_effect=RuntimeError("no g++\n\nand more"))
    with patch.object(machine.F, "conv2d", conv), units, no_gpu, no_compiler:
        machine.main()
        with pytest.raises(UsageError, match=r"--amp fp16 does not run on this cpu .*'Half'"):
            machine.refuse_format("fp16", cpu)
        with pytest.raises(UsageError, match=r"does not work here \(no g\+\+\): install a C\+\+"):
            machine.refuse_no_compiler(cpu)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    expected = [["fp32", "yes", "yes"], ["bf16", "yes", "no"], ["fp16", "no", "no"]]
    assert rows == [*expected, ["torch.compile", "runs:", "no"]]


def results(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def claim(name: str) -> str:
    lines = (ROOT / "CLAIMS.md").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"| {name} ")).split("|")[4]


def test_c09_bf16_is_faster_wherever_it_was_measured_and_c12_there_is_no_one_number():
    """The rows tell how much faster it is, and the smallest and the largest number."""
    faster = {}
    for name, both in results("05_precision")["models"].items():
        for where, rows in ((where, place["variants"]) for where, place in both.items()):
            intervals = [rows[v]["ratio_interval"] for v in ("bf16, channels_last", "A/A")]
            assert intervals[0][1] < min(intervals[1][0], 1), "no more than noise"
            for variant in (each for each in rows if each.startswith("bf16")):
                plain = rows[variant.replace("bf16", "fp32")]["ratio"]
                faster[name, where, variant] = plain / rows[variant]["ratio"]
    smallest, largest = min(faster.values()), max(faster.values())
    assert largest / smallest > 1.2
    assert all(f"{number:.1f}" in claim("C12") for number in (smallest, largest))
    rows = results("05_precision")["models"]["resnet50"]["one process"]["variants"]
    for variant in ("bf16", "bf16, channels_last"):
        assert f"{rows['fp32']['ratio'] / rows[variant]['ratio']:.1f}" in claim("C09"), variant


def test_c09_no_variant_wins_by_learning_less():
    for variant, row in (accuracy := results("05_precision")["accuracy"]).items():
        assert len(row["test_accuracies"]) >= 3
        assert abs(row["median"] - accuracy["fp32"]["median"]) < 0.02, variant
    for name, row in (rows := results("05_switches")["variants"]).items():
        if name not in ("PowerSGD hook", "Adam", "Adam, ZeroRedundancyOptimizer"):
            assert row["accuracy"] > rows["DDP"]["accuracy"] - 0.03


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_c09_autocast_learns_as_well_as_fp32_on_the_digits(amp):
    """Runs on every CPU: formats without units are imitated."""
    plain, mixed = (
        train_once("05", 1, "--model=net-bn", "--epochs=4", f"--amp={each}", dtype=FP32)
        for each in ("off", amp)
    )
    learned, other = (run.summary["test_accuracy"] for run in (plain, mixed))
    assert learned > 0.9
    assert abs(learned - other) < 0.03
    assert not torch.equal(plain.losses, mixed.losses)  # the control: it did compute otherwise
    assert mixed.checkpoint["model"]["fc1.weight"].dtype == FP32, "the weights stay fp32"


def test_c17_it_never_changes_a_bit_and_the_row_tells_what_it_costs():
    rows = results("05_switches")["variants"]
    for name in ("find_unused_parameters", "the same, with an idle branch"):
        assert rows[name]["distance"] == 0
        assert rows[name]["ratio_interval"][1] > 0.97, "it cannot make a step faster"
    assert f"{rows['find_unused_parameters']['ratio']:.2f}" in claim("C17")


def convolved(on, device, *sizes):
    """With cudnn.benchmark on or off: 64 × 9 products of about 1, in TF32 on a GPU."""
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, padding=1).to(device)
    images = [torch.randn(32, 64, size, size, device=device) for size in sizes]
    with torch.backends.cudnn.flags(enabled=True, benchmark=on, allow_tf32=True):
        return [layer(each) for each in images]


def test_c18_on_a_cpu_cudnn_benchmark_changes_nothing():
    assert torch.equal(*(convolved(on, "cpu", 16)[0] for on in (False, True)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_c18_on_a_gpu_it_may_choose_other_algorithms():
    """Other bits perhaps, but the same numbers."""
    off, on = (convolved(on, "cuda", 56, 28, 56) for on in (False, True))
    torch.testing.assert_close(off, on, rtol=1e-2, atol=1e-2)
