"""What tutorials say is as true as docs/claims.md says: C03 to C08, C14 to C17, C25 to C40.

Each test carries the number of its claim; the other claims are tested beside what they are about.
"""

import argparse
import builtins
import importlib
import io
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from common.chapters import load_chapter
from common.data import local_batch_size
from common.options import UsageError
from common.ranks import run_ranks
from helpers.local_ranks import gather_from_ranks, on_ranks, run_on_ranks, run_script


def test_c03_rank_modulo_gpus_is_the_local_rank_only_on_equal_nodes():
    verdict = load_chapter("04", "launch/rank_variables").verdict
    for first, gpus, right in ((8, 8, True), (4, 2, True), (3, 2, False), (4, 8, False)):
        assert verdict([*range(first, first + gpus)]) == (
            "the local rank" if right else "another GPU than LOCAL_RANK names"
        )


def descend(lr, steps, batches):
    """How far some steps of SGD lead, in float64: one batch a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    images, optimizer = torch.randn(64, 4).double(), SGD(model.parameters(), lr)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(steps):
        batch = images.chunk(batches)[step % batches]
        optimizer.zero_grad()
        F.mse_loss(model(batch)[:, 0], batch.sum(1)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def test_c04_for_small_steps_8_times_the_rate_on_8_batches_is_8_steps():
    """Goyal et al. 2017, section 2.1: the weights must hardly change meanwhile."""
    far = {}
    for lr in (1e-3, 1e-4):
        eight_steps, one_step = descend(lr, 8, 8), descend(8 * lr, 1, 1)
        far[lr] = ((one_step - eight_steps).norm() / eight_steps.norm()).item()
        unscaled = ((descend(lr, 1, 1) - eight_steps).norm() / eight_steps.norm()).item()
        assert unscaled > 0.8  # the control: an eighth of the way
    assert far[1e-4] < 0.02
    assert far[1e-3] / far[1e-4] == pytest.approx(10, rel=0.2)  # it goes with the rate
    assert descend(0.2, 50, 1).abs().max() < 10  # and a rate that works
    assert descend(8 * 0.2, 50, 1).abs().max() > 1e6  # may be too much 8 times


def test_c05_type_bool_takes_any_text_for_true():
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi_gpu", type=bool)
    parser.add_argument("--multi-gpu", action=argparse.BooleanOptionalAction, dest="right")
    for text, value in (("False", True), ("0", True), ("", False)):
        assert parser.parse_args(["--multi_gpu", text]).multi_gpu is value
    for flag, value in (("--multi-gpu", True), ("--no-multi-gpu", False)):
        assert parser.parse_args([flag]).right is value


def test_c06_32_on_each_of_2_times_8_ranks_is_a_global_batch_of_512():
    of_this_project = local_batch_size(32, 16)  # whose --batch-size is the global batch
    for batch_size, together in ((32, 512), (of_this_project, 32)):
        samplers = [DistributedSampler(range(4096), 2 * 8, rank) for rank in range(2 * 8)]
        loaders = [DataLoader(range(4096), batch_size, sampler=sampler) for sampler in samplers]
        assert len(set(chain(*(next(iter(loader)).tolist() for loader in loaders)))) == together
    with pytest.raises(UsageError, match="does not divide by 16: try 48"):
        local_batch_size(40, 16)


@pytest.mark.parametrize(("samples", "again"), [(10, 2), (12, 0), (297, 3)])
def test_c07_it_counts_samples_twice_unless_the_ranks_divide_their_number(samples, again):
    samplers = [DistributedSampler(range(samples), 4, rank, shuffle=False) for rank in range(4)]
    seen = list(chain(*samplers))
    assert len(seen) - len(set(seen)) == again
    right = torch.zeros(samples).double()
    right[0] = 1  # of these samples, one is classified right: and it is among those
    padded = torch.stack([right[list(sampler)].mean() for sampler in samplers]).mean()
    shards = [right[rank::4] for rank in range(4)]  # nor is the mean of the means of unequal ones
    for mean in (padded, torch.stack([shard.mean() for shard in shards]).mean()):
        assert (mean == right.mean()) == (again == 0)
    assert sum(shard.sum() for shard in shards) / samples == right.mean()  # sums and counts


def test_c08_a_process_is_told_3_and_4_and_counts_them_from_0(monkeypatch):
    """How torch reads it; which devices these are, only a machine with GPUs can show."""
    for text, devices in (("3,4", [3, 4]), ("4,3", [4, 3]), ("3,-1,4", [3]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert torch.cuda._parse_visible_devices() == devices  # at place i: what cuda:i is
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert torch.cuda._parse_visible_devices()[:5] == [0, 1, 2, 3, 4]


@pytest.mark.gpu(2)
def test_c08_on_gpus_the_second_alone_becomes_cuda_0():
    ask = "import torch; p = torch.cuda.get_device_properties(0); n = torch.cuda.device_count()"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    call = [sys.executable, "-c", f"{ask}; print(n, p.uuid)"]
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)]
    lines = subprocess.check_output(call, env=env, text=True).split()
    assert lines == ["1", uuids[1]] != ["1", uuids[0]]


def join_with_the_local_rank(rank):
    limit = timedelta(seconds=1)  # two nodes with two ranks each; with the rank: see C02
    with pytest.raises(dist.DistError, match=r"^wait timeout after 1000ms"):
        dist.init_process_group("gloo", rank=rank % 2, world_size=4, timeout=limit)


def test_c14_with_the_local_rank_two_nodes_never_meet():
    run_on_ranks(4, join_with_the_local_rank)


def test_c15_a_sampler_excludes_shuffle_and_a_batch_sampler_drop_last_too():
    data, sampler = range(10), RandomSampler(range(10))
    batches = BatchSampler(sampler, batch_size=4, drop_last=True)
    for loader, sizes in (
        (DataLoader(data, 4, sampler=sampler), [4, 4, 2]),
        (DataLoader(data, 4, sampler=sampler, drop_last=True), [4, 4]),
        (DataLoader(data, batch_sampler=batches), [4, 4]),
    ):
        assert [len(batch) for batch in loader] == sizes
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(data, 4, sampler=sampler, shuffle=True)
    for other in ({"batch_size": 4}, {"shuffle": True}, {"sampler": sampler}, {"drop_last": True}):
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            DataLoader(data, batch_sampler=batches, **other)


LAUNCHERS = [
    ("run", (), "has [] 0\n"),
    ("launch", ("--local-rank", "--local_rank"), "has ['--local-rank=0'] 0\n"),
    ("launch", ("--local_rank",), "unrecognized arguments: --local-rank=0\n"),
]


@pytest.mark.parametrize(("launcher", "names", "line"), LAUNCHERS)
def test_c16_c32_launch_passes_local_rank_with_a_dash_and_torchrun_does_not(
    launcher, names, line, tmp_path
):
    """The real ones: their one rank has a parser that knows a flag by these names, or none."""
    lines = ["import argparse, os, sys", "parser = argparse.ArgumentParser()"]
    lines += [f"parser.add_argument(*{names!r}, type=int)"] if names else []
    lines += ["parser.parse_args()", "print('has', sys.argv[1:], os.environ['LOCAL_RANK'])"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    flags = ("--standalone", "--nproc-per-node=1", str(tmp_path / "script.py"))
    script = importlib.import_module(f"torch.distributed.{launcher}").__file__
    [(status, output)] = run_script(script, *flags)
    assert line in output
    assert status == ("unrecognized" in line)
    assert ("torch.distributed.launch is deprecated" in output) == (launcher == "launch")


class Branches(nn.Module):
    """Two weights, of which a step may use only one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, inputs, branch):
        return getattr(self, branch)(inputs)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_c17_of_steps_that_leave_a_weight_out_it_gives_the_mean(rank, option):
    """Rank r feeds the number r + 1. A rank that does not use a weight counts as zero."""
    model = Branches()
    ddp = DistributedDataParallel(model, **{option: True})
    for _ in range(2):
        model.zero_grad()
        ddp(torch.full((1, 1), rank + 1.0), ("left", "right")[rank]).sum().backward()
        assert (model.left.weight.grad.item(), model.right.weight.grad.item()) == (0.5, 1.0)
    if option == "find_unused_parameters":  # no rank uses the right one: its gradient stays
        ddp(torch.full((1, 1), rank + 1.0), "left").sum().backward()
        assert (model.left.weight.grad.item(), model.right.weight.grad.item()) == (2.0, 1.0)


@on_ranks(2)
def test_c17_without_it_such_a_step_is_not_averaged_and_the_next_one_ends_in_an_error(rank):
    model = Branches()
    ddp = DistributedDataParallel(model)
    ddp(torch.full((1, 1), rank + 1.0), "left").sum().backward()
    assert (model.left.weight.grad.item(), model.right.weight.grad) == (rank + 1.0, None)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        ddp(torch.ones(1, 1), "left")


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


@on_ranks(2)
def test_c25_three_lines_of_the_published_script_are_refused_and_their_cures_are_not(rank):
    with pytest.raises(ValueError, match=r"positive integer value, but got batch_size=64\.0"):
        DataLoader(range(256), batch_size=128 / float(2))
    assert len(next(iter(DataLoader(range(256), batch_size=128 // 2)))) == 64
    with pytest.raises(AttributeError, match="'int' object has no attribute 'allreduce'"):
        dist.all_reduce(torch.ones(1), group=0)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    loss = nn.Linear(3, 1)(torch.ones(3)).sum()
    with pytest.raises(IndexError, match=r"Use `tensor\.item\(\)`"):
        loss.data[0]
    assert isinstance(loss.item(), float)


def test_c26_partitions_are_disjoint_and_drop_less_than_a_sample_for_each_rank():
    """Fractions must be rounded with care: int(1 / 49 * 49) is 0, so ours takes whole numbers."""
    cut = load_chapter("03", "partition").DataPartitioner
    for length, n in ((60000, 2), (60000, 7), (1500, 4), (10, 3), (49, 49)):
        parts = [list(cut(range(length), n, 5).use(rank)) for rank in range(n)]
        assert {len(part) for part in parts} == {length // n}
        assert len(set(chain(*parts))) == length // n * n
        assert int(1.0 / n * length) == (0 if n == 49 else length // n)
    one, other = (cut(range(100), 2, seed).use(seed) for seed in (0, 1))
    assert set(one) & set(other), "the control: of another seed, they overlap"


def gradient(samples, reduction):
    weight = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    F.mse_loss(samples[:, 1:] @ weight, samples[:, 0], reduction=reduction).backward()
    return weight.grad


@on_ranks(2)
def test_c27_the_mean_of_gradients_is_that_of_the_batch(rank):
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)).double()
    for sizes, reduction, weights, right in (
        ([6, 6], "mean", [1 / 2, 1 / 2], True),
        ([9, 3], "mean", [1 / 2, 1 / 2], False),
        ([9, 3], "mean", [9 / 12, 3 / 12], True),
        ([6, 6], "sum", [1 / 2, 1 / 2], False),
        ([9, 3], "sum", [1, 1], True),
    ):
        mean = weights[rank] * gradient(batch.split(sizes)[rank], reduction)
        dist.all_reduce(mean)
        assert torch.allclose(mean, gradient(batch, reduction), rtol=0, atol=1e-12) == right


@on_ranks(2)
def test_c28_the_published_guard_is_false_for_every_parameter(rank):
    guards = (lambda p: type(p) is torch.Tensor, lambda p: isinstance(p, torch.Tensor))
    for guard, passed, expected in zip(guards, (0, 12), (1.0 + rank, 1.5), strict=True):
        model = nn.Linear(3, 2)
        others = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2), nn.LSTM(2, 2)
        parameters = list(nn.ModuleList([model, *others]).parameters())
        assert (len(parameters), sum(map(guard, parameters))) == (12, passed)
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        for parameter in filter(guard, model.parameters()):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        assert model.weight.grad.unique().tolist() == [expected]


@on_ranks(2)
def test_c29_one_seed_gives_equal_weights_and_equal_dropout_masks(rank):
    for seed, same in ((1234, True), (1234 + rank, False)):
        torch.manual_seed(1234)
        weight = nn.Linear(5, 5).weight.tolist()
        torch.manual_seed(seed)
        mask = F.dropout(torch.ones(1000)).tolist()
        weights, masks = zip(*gather_from_ranks((weight, mask)), strict=True)
        assert weights[0] == weights[1]
        assert (masks[0] == masks[1]) == same
        assert 300 < mask.count(0.0) < 700


@pytest.mark.gpu
def test_c30_gloo_on_a_gpu_does_more_than_all_reduce_and_broadcast():
    play = load_chapter("03", "collectives").play
    gathered = run_ranks(2, play, "all_gather", device="cuda", seconds=60)
    assert [after for _, after in gathered] == [[1, 10]] * 2


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch was built with MPI")
def test_c30_mpi_needs_a_build_from_source():
    with pytest.raises(RuntimeError, match="only included if you build PyTorch from source"):
        join_alone("mpi")


def join_alone(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def test_c31_there_is_no_tcp_backend():
    with pytest.raises(AssertionError, match="Unknown backend type tcp"):
        join_alone("tcp")


def test_c33_without_set_epoch_every_epoch_has_the_same_order():
    """Stage 04 calls it: test_04_gradients_equal_one_process_on_the_whole_batch fails without."""
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0)
    first, again = list(sampler), list(sampler)
    assert first == again
    sampler.set_epoch(1)
    assert list(sampler) != first


@on_ranks(2)
def test_c34_backward_waits_for_the_other_ranks_and_the_optimizer_does_not(rank):
    """Rank 1 reaches `where` only when rank 0 has come back from there."""
    for where, answer in (("step", "continues"), ("backward", "waits")):
        group = dist.new_group(timeout=timedelta(seconds=2))
        store = dist.PrefixStore(where, dist.distributed_c10d._get_default_store())
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        optimizer, outcome = SGD(model.parameters(), lr=0.1), "continues"
        loss = model(torch.ones(1, 2)).sum()
        try:
            for name, call in (("backward", loss.backward), ("step", optimizer.step)):
                if rank == 1 and name == where:
                    store.wait(["rank 0 is back"], timedelta(seconds=1))
                call()
                if rank == 0 and name == where:
                    store.set("rank 0 is back", "")
        except (RuntimeError, dist.DistError):
            outcome = "waits"
        assert outcome == answer


@on_ranks(2)
def test_c34_after_the_last_batch_a_file_of_rank_0_needs_a_barrier(rank):
    store = dist.distributed_c10d._get_default_store()
    for barrier in (False, True):
        DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        path = Path(f"barrier {barrier}")
        if rank == 0:
            if not barrier:
                store.wait(["rank 1 has looked"])  # saving takes long
            path.touch()
        if barrier:
            dist.barrier()
        assert path.exists() == (barrier or rank == 0)
        if rank == 1:
            store.set("rank 1 has looked", "")


def test_c37_weights_must_be_the_batches_own_sizes():
    for samples, equal in ((10, False), (12, True)):
        losses = torch.arange(samples).double() ** 2
        batches = list(DataLoader(losses, batch_size=4))
        means = torch.stack([batch.mean() for batch in batches])
        own = sum(mean * len(batch) for mean, batch in zip(means, batches, strict=True)) / samples
        torch.testing.assert_close(own, losses.mean(), rtol=0, atol=1e-12)
        for other in (means.sum() * 4 / samples, means.mean()):  # by nominal sizes, and unweighted
            assert torch.isclose(other, losses.mean()) == equal


@pytest.mark.parametrize("is_rank_0", [False, True])
def test_c38_a_muted_rank_hides_its_tracebacks_and_files(is_rank_0):
    with pytest.raises(TypeError, match="force"):
        print("where print is not replaced", force=True)
    original, out = builtins.print, io.StringIO()

    def quiet_print(*args, force=False, **kwargs):
        if is_rank_0 or force:
            original(*args, **kwargs)

    with patch.object(builtins, "print", quiet_print):
        print("heard", file=out)
        print("forced", file=out, force=True)
        try:
            raise RuntimeError("the reason")
        except RuntimeError:
            traceback.print_exc(file=out)  # the standard library prints it with print
    lines = out.getvalue().splitlines()
    assert (lines[0] == "heard", "forced" in lines) == (is_rank_0, True)
    assert ("RuntimeError: the reason" in lines) == is_rank_0


def test_c39_tasks_dealt_in_turn_share_gpus_by_rank_modulo_gpus():
    """srun -m cyclic on two nodes with two GPUs: node 0 has ranks 0 and 2."""
    words = load_chapter("04", "launch/rank_variables")
    assert words.cyclic([1, 4, 2]) == [[0], [1, 3, 5, 6], [2, 4]]
    on_node_0 = words.cyclic([2, 2])[0]
    assert words.verdict(on_node_0) == "ranks share GPU 0"
    assert [rank % 2 for rank in on_node_0] == [0, 0]


def train_16(rank, world_size, local_batch, batchnorm):
    torch.manual_seed(1)
    layers = [nn.BatchNorm1d(4)] if batchnorm else []
    model = nn.Sequential(*layers, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    forward = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randn(16, 4).double().split(world_size * local_batch):
        optimizer.zero_grad()
        local_batch = batch[rank::world_size]
        F.mse_loss(forward(local_batch)[:, 0], local_batch.sum(1)).backward()
        optimizer.step()
    return model[-1].weight.data


@on_ranks(2)
def test_c40_half_the_batch_on_each_of_two_ranks_is_the_same_training(rank):
    for local_batch, batchnorm in ((4, False), (8, False), (4, True)):  # halved, kept, halved
        one, ours = train_16(0, 1, 8, batchnorm), train_16(rank, 2, local_batch, batchnorm)
        same = torch.allclose(one, ours, rtol=0, atol=1e-12)
        assert same == (local_batch == 4 and not batchnorm)
