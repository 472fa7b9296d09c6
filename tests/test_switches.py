"""Formats, and unused parameters, do what the pages of 05 and 04 say: C09, C12, C17, C18."""

import json
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import support
from local_ranks import ROOT, of_all_ranks, on_ranks, run_ranks
from support import chapter, train_once

unused, formats = chapter("04", "unused_parameters"), chapter("05", "formats")

LATE = "Expected to have finished reduction in the prior iteration"
VERDICTS = [  # on each step of the chapter's cases: whether it was averaged, or the error
    [True, False, LATE],
    [True] * 5,  # find_unused_parameters, whatever branch each rank takes
    [True] * 3,  # static_graph: needs no search if each rank keeps its graph
    [True, True, "Your training graph has changed"],  # one branch more
    [True, True, False, LATE],  # one less
    [True, False, LATE],  # an output is not in the loss
]


def _unused(rank, world_size):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with support.default_dtype(torch.float64):
        found = [unused.attempt(*case) for case in unused.CASES]
    total = torch.ones(())
    dist.all_reduce(total)  # after errors too, the process group is whole
    assert total == world_size
    for (_, steps), verdicts, of_case in zip(unused.CASES, VERDICTS, found, strict=True):
        for step, verdict, of_step in zip(steps, verdicts, of_case, strict=True):
            if isinstance(verdict, str):
                assert str(of_step).startswith(verdict)
            else:
                right = all(map(unused.same, of_step, unused.expected(step, world_size)))
                assert all(of_all_ranks(right)) == verdict
    assert "find_unused_parameters=True" in str(found[0][2])
    assert found[0][1] == [[2, 1, None], [4, 2, None], [6, 3, None]][rank], "each its own"
    assert not unused.same(None, 1.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_c17_only_find_unused_parameters_averages_whatever_branch_each_rank_takes(world_size):
    run_ranks(world_size, _unused, world_size)


@on_ranks(2)
def test_c17_where_no_rank_uses_a_parameter_its_gradient_is_left_as_it_was(rank):
    """None: the optimizer leaves the weight alone. Zero: momentum and weight decay move it."""
    for set_to_none in (True, False):
        model, weights = unused.Branches(), []
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for branch in ("both", "both", "left"):
            optimizer.zero_grad(set_to_none)
            torch.stack(ddp(torch.ones(1, 1), branch)).sum().backward()
            optimizer.step()
            weights.append(model.right.weight.item())
        assert weights[0] != weights[1]
        assert (weights[1] == weights[2]) == set_to_none


@on_ranks(2)
def test_05_no_sync_on_one_rank_only_makes_the_other_wait(rank):
    """Both ranks are in no_sync; then only rank 0 is, so that rank 1 averages alone."""
    for both in (True, False):
        dist.barrier()  # ranks may start late; from here on, they need little time
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
        ddp(torch.ones(1, 2)).sum().backward()
        continues = both or rank == 0
        with ddp.no_sync() if continues else pytest.raises(RuntimeError):
            ddp(torch.ones(1, 2)).sum().backward()


def test_what_the_machine_runs_and_has_units_for_is_told(capsys):
    """Of a machine without a GPU, whose CPU has units for bf16 and refuses fp16."""

    def conv(x, *_):
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return x

    units = patch.object(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "fp16": False})
    no_gpu = patch.object(torch.cuda, "is_available", lambda: False)
    with patch.object(formats.F, "conv2d", conv), units, no_gpu:
        formats.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[8:]]
    assert rows == [["fp32", "yes", "yes"], ["bf16", "yes", "yes"], ["fp16", "no", "no"]]
    with patch.object(torch.cuda, "get_device_capability", lambda device: (7, 5)):
        found = [formats.has_units(name, torch.device("cuda")) for name in formats.FORMATS]
    assert found == [True, False, False, True]


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def claim(name: str) -> str:
    lines = (ROOT / "docs/claims.md").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"| {name} ")).split("|")[3]


def test_c09_bf16_is_faster_wherever_it_was_measured_and_c12_there_is_no_one_number():
    faster = {}
    for name, both in results("05_precision")["models"].items():
        for where, place in both.items():
            rows = place["variants"]
            best, noise = (rows[v]["ratio_interval"] for v in ("bf16, channels_last", "A/A"))
            assert best[1] < min(noise[0], 1), "no more than noise"
            for variant in (each for each in rows if each.startswith("bf16")):
                plain = rows[variant.replace("bf16", "fp32")]["ratio"]
                faster[name, where, variant] = plain / rows[variant]["ratio"]
    smallest, largest = min(faster.values()), max(faster.values())
    assert largest / smallest > 1.2
    assert all(f"{number:.1f}" in claim("C12") for number in (smallest, largest))
    rows = results("05_precision")["models"]["resnet50"]["one process"]["variants"]
    for variant in ("bf16", "bf16, channels_last"):
        assert f"{rows['fp32']['ratio'] / rows[variant]['ratio']:.1f}" in claim("C09"), variant


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_c09_autocast_learns_as_well_as_fp32_on_the_digits(amp):
    """Runs on every CPU: formats without units are imitated."""
    flags = ("--model=net-bn", "--epochs=3", "--lr=0.05")
    plain, mixed = (
        train_once("05", 1, *flags, f"--amp={a}", dtype=torch.float32) for a in ("off", amp)
    )
    learned, other = (run.summary["test_accuracy"] for run in (plain, mixed))
    assert learned > 0.9
    assert abs(learned - other) < 0.03
    assert not torch.equal(plain.losses, mixed.losses)  # the control: it did compute otherwise
    assert mixed.checkpoint["model"]["fc1.weight"].dtype == torch.float32, "the weights stay fp32"


@on_ranks(2)
def test_c17_on_a_model_that_uses_all_its_parameters_it_changes_no_bit(rank):
    searching = partial(DistributedDataParallel, find_unused_parameters=True)
    gradients = []
    for wrap in (DistributedDataParallel, searching, nn.Identity()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
        wrapped = wrap(model)
        torch.manual_seed(rank)
        wrapped(torch.randn(4, 9)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2]), "the control: without DDP"


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_c18_cudnn_benchmark_changes_no_bit_on_a_cpu_and_few_on_a_gpu(device):
    torch.manual_seed(0)
    layer, outputs = nn.Conv2d(64, 64, 3, padding=1).to(device), []
    images = [torch.randn(32, 64, size, size, device=device) for size in (16, 8, 16)]
    for on in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=on, allow_tf32=True):
            outputs.append([layer(each) for each in images])
    near = 0 if device == "cpu" else 1e-2
    torch.testing.assert_close(*outputs, rtol=near, atol=near)
