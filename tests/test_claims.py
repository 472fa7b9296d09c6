"""Claims C01 to C08, C14 to C16, C25 to C34, C36 to C40 and C42: see CLAIMS.md."""

import argparse
import builtins
import io
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.launch
import torch.distributed.run
import torch.nn.functional as F
from support import chapter, command, free_port, load_stage, run_ranks
from test_collectives import of_all_ranks, on_ranks
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from common.options import UsageError, cut_batch

RUN, LAUNCH = torch.distributed.run.__file__, torch.distributed.launch.__file__


def test_c01_two_nodes_of_8_have_ranks_0_to_15_and_local_ranks_0_to_7():
    """As two real torchruns give them, one for each node, both on this machine."""
    meet = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    tell = ("sh", "-c", "echo $GROUP_RANK $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE")
    flags, env = (*meet, "--nproc-per-node=8", "--no-python", *tell), {"PET_NODE_RANK": "{RANK}"}
    for node, (status, output) in enumerate(command(RUN, *flags, ranks=2, env=env)):
        assert status == 0, output
        told = sorted(tuple(map(int, line.split())) for line in output.splitlines()[-8:])
        assert told == [(node, 8 * node + i, i, 16, 8) for i in range(8)]


def test_c03_rank_modulo_gpus_is_the_local_rank_only_if_nodes_are_equal_or_it_is_luck():
    """Ranks as torchrun deals them, node after node; see the test of words.py."""
    verdict, other = chapter("04", "words").verdict, "another GPU than LOCAL_RANK names"
    for first, gpus, right in ((8, 8, True), (4, 2, True), (3, 2, False), (4, 8, False)):
        assert verdict(list(range(first))) == "the local rank"
        second = list(range(first, first + gpus))
        assert verdict(second) == ("the local rank" if right else other)


@on_ranks(4)
def test_c02_on_two_nodes_two_ranks_have_local_rank_0(rank):
    for name, number in (("local", rank % 2), ("global", rank)):  # two nodes with two ranks each
        if number == 0:
            Path(f"{name} {rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in Path().iterdir()) == ["global 0", "local 0", "local 2"]


def _descend(lr, steps, batches):
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


def test_c04_for_small_steps_one_of_8_times_the_rate_on_8_batches_is_8_steps():
    """Goyal et al. 2017, section 2.1: the weights must hardly change meanwhile."""
    far = {}
    for lr in (1e-3, 1e-4):
        eight_steps, one_step = _descend(lr, 8, 8), _descend(8 * lr, 1, 1)
        far[lr] = ((one_step - eight_steps).norm() / eight_steps.norm()).item()
        unscaled = ((_descend(lr, 1, 1) - eight_steps).norm() / eight_steps.norm()).item()
        assert unscaled > 0.8  # the control: an eighth of the way
    assert far[1e-4] < 0.02
    assert far[1e-3] / far[1e-4] == pytest.approx(10, rel=0.2)  # it goes with the rate


def test_c04_a_rate_that_works_may_be_too_much_8_times():
    assert _descend(0.2, 50, 1).abs().max() < 10
    assert _descend(8 * 0.2, 50, 1).abs().max() > 1e6


def test_c04_32_is_the_batch_of_one_recipe_not_of_yours():
    assert 0.001 * 1 * 32 / 32 == 0.001
    assert 0.1 * 8 * 32 / 256 == 0.1  # a recipe for 256, on 256 in all
    assert 0.1 * 8 * 32 / 32 == 8 * 0.1  # the same run, by the published rule


def test_c05_type_bool_takes_any_text_for_true_but_the_empty_one():
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi_gpu", type=bool, default=True)
    for text, value in (("False", True), ("0", True), ("", False)):
        assert parser.parse_args(["--multi_gpu", text]).multi_gpu is value


def test_c05_boolean_optional_action_turns_it_off():
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi-gpu", action=argparse.BooleanOptionalAction, default=True)
    assert parser.parse_args([]).multi_gpu is True
    assert parser.parse_args(["--no-multi-gpu"]).multi_gpu is False


def first_step(batch_size, world_size):
    """The samples that all ranks together take in their first step."""
    samplers = [DistributedSampler(range(4096), world_size, rank) for rank in range(world_size)]
    loaders = [DataLoader(range(4096), batch_size, sampler=sampler) for sampler in samplers]
    return {sample for loader in loaders for sample in next(iter(loader)).tolist()}


def test_c06_32_on_each_of_2_times_8_ranks_is_a_global_batch_of_512():
    assert len(first_step(32, 2 * 8)) == 512
    local_batch = cut_batch(32, 16)  # this project's flag is global
    assert (local_batch, len(first_step(local_batch, 16))) == (2, 32)
    with pytest.raises(UsageError, match="does not divide by 16: try 48"):
        cut_batch(40, 16)


@pytest.mark.parametrize(("samples", "again"), [(10, 2), (12, 0), (297, 3)])
def test_c07_it_counts_samples_twice_unless_the_ranks_divide_their_number(samples, again):
    samplers = [DistributedSampler(range(samples), 4, rank, shuffle=False) for rank in range(4)]
    seen = list(chain(*samplers))
    assert len(seen) - len(set(seen)) == again
    right = torch.zeros(samples).double()
    right[0] = 1  # of these samples, one is classified right: and it is among those
    padded = torch.stack([right[list(sampler)].mean() for sampler in samplers]).mean()
    assert (padded == right.mean()) == (again == 0)
    ours = torch.stack([right[rank::4].sum() for rank in range(4)]).sum() / samples
    assert ours == right.mean()  # sums and counts over unequal shards


def test_c07_the_mean_of_the_means_of_unequal_shards_is_not_the_mean():
    right = torch.tensor([1.0, 0, 0, 0, 1])
    assert torch.stack([right[0::2].mean(), right[1::2].mean()]).mean() != right.mean()
    assert (right[0::2].sum() + right[1::2].sum()) / 5 == right.mean()


def test_c08_a_process_is_told_3_and_4_and_counts_them_from_0(monkeypatch):
    """How torch reads it; which devices these are, only a machine with GPUs can show."""
    for text, devices in (("3,4", [3, 4]), ("4,3", [4, 3]), ("3,-1,4", [3]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert torch.cuda._parse_visible_devices() == devices  # at place i: what cuda:i is
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert torch.cuda._parse_visible_devices()[:5] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c08_on_gpus_the_second_alone_becomes_cuda_0():
    ask = "import torch; p = torch.cuda.get_device_properties(0); n = torch.cuda.device_count()"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    told = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(n, p.uuid)"], env=env, capture_output=True, text=True
    )
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)]
    assert told.stdout.split() == ["1", uuids[1]] != ["1", uuids[0]]


def _init(rank):
    limit = timedelta(seconds=1)  # two nodes with two ranks each; with the rank: see C02
    with pytest.raises(dist.DistError, match=r"^wait timeout after 1000ms"):
        dist.init_process_group("gloo", rank=rank % 2, world_size=4, timeout=limit)


def test_c14_with_the_local_rank_two_nodes_never_meet():
    """Ranks 2 and 3 of 4 never come: each other waits for them until the time limit."""
    assert run_ranks(4, _init) == [None] * 4


def test_c15_a_sampler_excludes_shuffle_but_not_drop_last():
    data = range(10)
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(data, 4, sampler=RandomSampler(data), shuffle=True)
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        loader = DataLoader(data, 4, sampler=RandomSampler(data), drop_last=drop_last)
        assert [len(batch) for batch in loader] == sizes


def test_c15_a_batch_sampler_excludes_all_of_them():
    data = range(10)
    batches = BatchSampler(RandomSampler(data), batch_size=4, drop_last=True)
    assert [len(batch) for batch in DataLoader(data, batch_sampler=batches)] == [4, 4]
    others = {"batch_size": 4, "shuffle": True, "sampler": RandomSampler(data), "drop_last": True}
    for option, value in others.items():
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            DataLoader(data, batch_sampler=batches, **{option: value})


def launched(launcher, folder, *names):
    """Exit status and output of the real launcher; its one rank takes a flag by these names."""
    lines = ["import argparse, os, sys", "parser = argparse.ArgumentParser()"]
    lines += [f"parser.add_argument(*{names!r}, type=int)"] if names else []
    lines += ["parser.parse_args()", "print('has', sys.argv[1:], os.environ['LOCAL_RANK'])"]
    (folder / "script.py").write_text("\n".join(lines))
    flags = ("--standalone", "--nproc-per-node=1", str(folder / "script.py"))
    return command(launcher, *flags)[0]


def test_c32_torchrun_needs_no_argument_it_sets_local_rank(tmp_path):
    status, output = launched(RUN, tmp_path)
    assert (status, output.splitlines()[-1]) == (0, "has [] 0")


def test_c16_torch_distributed_launch_passes_local_rank_with_a_dash(tmp_path):
    """A parser that knows both names takes it."""
    status, output = launched(LAUNCH, tmp_path, "--local-rank", "--local_rank")
    assert (status, output.splitlines()[-1]) == (0, "has ['--local-rank=0'] 0")
    assert "torch.distributed.launch is deprecated" in output


def test_c16_a_script_that_knows_only_the_underscore_is_refused(tmp_path):
    status, output = launched(LAUNCH, tmp_path, "--local_rank")
    assert status == 1
    assert "unrecognized arguments: --local-rank=0" in output


def test_c25_a_loader_refuses_a_batch_size_that_is_a_float():
    with pytest.raises(ValueError, match=r"positive integer value, but got batch_size=64\.0"):
        DataLoader(range(256), batch_size=128 / float(2))
    assert len(next(iter(DataLoader(range(256), batch_size=128 // 2)))) == 64


def test_c25_reduce_op_still_works_with_a_warning():
    with pytest.warns(FutureWarning, match="please use `torch.distributed.ReduceOp`"):
        assert dist.reduce_op.SUM == dist.ReduceOp.SUM


@on_ranks(2)
def test_c25_group_0_is_no_group(rank):
    with pytest.raises(AttributeError, match="'int' object has no attribute 'allreduce'"):
        dist.all_reduce(torch.ones(1), group=0)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)  # the control


def test_c25_a_loss_has_no_element_0():
    loss = nn.Linear(3, 1)(torch.ones(3)).sum()
    with pytest.raises(IndexError, match=r"Use `tensor\.item\(\)`"):
        loss.data[0]
    assert isinstance(loss.item(), float)


def test_c25_a_variable_is_a_tensor():
    tensor = torch.ones(2)
    assert type(Variable(tensor)) is torch.Tensor
    assert Variable(tensor).data_ptr() == tensor.data_ptr()


def test_c25_log_softmax_without_dim_warns_and_guesses():
    with pytest.warns(UserWarning, match="Implicit dimension choice for log_softmax"):
        matrix = F.log_softmax(torch.arange(6.0).view(2, 3))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        cube = F.log_softmax(torch.arange(12.0).view(2, 3, 2))
    torch.testing.assert_close(matrix.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(cube.exp().sum(0), torch.ones(3, 2))  # not the last, nor 1


def test_c26_partitions_are_disjoint_and_drop_less_than_one_sample_for_each_rank():
    for length, n in ((60000, 2), (60000, 7), (1500, 4), (10, 3), (49, 49)):
        partitioner = chapter("03", "partition").DataPartitioner(range(length), [1 / n] * n, 5)
        parts = [list(partitioner.use(rank)) for rank in range(n)]
        assert {len(part) for part in parts} == {length // n}
        assert len(set(chain(*parts))) == length // n * n == length - length % n


def test_c26_rounded_down_as_published_it_can_drop_a_sample_for_each_rank():
    """In floating point, 1 / 49 times 49 is a little less than 1."""
    for length, parts, each in ((49, 49, 0), (48, 48, 1), (60000, 7, 60000 // 7)):
        assert [int(1.0 / parts * length) for _ in range(parts)] == [each] * parts


def gradient(samples, reduction):
    weight = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    F.mse_loss(samples[:, 1:] @ weight, samples[:, 0], reduction=reduction).backward()
    return weight.grad


@on_ranks(2)
def test_c27_the_mean_of_gradients_is_that_of_the_batch(rank):
    for sizes, reduction, weighted, equal in (
        ([6, 6], "mean", False, True),
        ([9, 3], "mean", False, False),
        ([6, 6], "sum", False, False),
        ([9, 3], "mean", True, True),
    ):
        batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)).double()
        mean, samples = gradient(batch.split(sizes)[rank], reduction), torch.tensor(sizes[rank])
        if weighted:
            mean *= samples
            dist.all_reduce(samples)
        dist.all_reduce(mean)
        mean /= samples if weighted else 2
        whole = gradient(batch, reduction)
        assert torch.allclose(mean, whole, rtol=0, atol=1e-12) == equal
        if reduction == "sum":  # then the sum itself is right, not divided
            torch.testing.assert_close(mean * 2, whole, rtol=0, atol=1e-12)


GUARDS = (lambda p: type(p) is torch.Tensor, lambda p: isinstance(p, torch.Tensor))


def test_c28_the_published_guard_is_false_for_every_parameter():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2), nn.LSTM(2, 2))
    assert len(list(model.parameters())) == 10
    passed = [[guard(parameter) for parameter in model.parameters()] for guard in GUARDS]
    assert passed == [[False] * 10, [True] * 10]


@on_ranks(2)
def test_c28_behind_that_guard_the_ranks_keep_gradients_of_their_own(rank):
    for guard, expected in zip(GUARDS, (1.0 + rank, 1.5), strict=True):
        model = nn.Linear(3, 2)
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        for parameter in model.parameters():
            if guard(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        assert model.weight.grad.unique().tolist() == [expected]


def weight_and_mask(seed):
    torch.manual_seed(1234)
    weight = nn.Linear(5, 5).weight.tolist()
    torch.manual_seed(seed)
    return weight, F.dropout(torch.ones(1000)).tolist()


@on_ranks(2)
def test_c29_one_seed_on_every_rank_gives_equal_weights_and_equal_dropout_masks(rank):
    (weight, mask), other = of_all_ranks(weight_and_mask(1234))
    assert other == (weight, mask)
    assert 300 < mask.count(0.0) < 700


@on_ranks(2)
def test_c29_seeded_apart_after_the_weights_only_the_masks_differ(rank):
    (weight, mask), (other_weight, other_mask) = of_all_ranks(weight_and_mask(1234 + rank))
    assert weight == other_weight
    assert mask != other_mask


BEYOND = ["reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_c30_gloo_on_a_gpu_does_more_than_all_reduce_and_broadcast():
    probes = {name: chapter("03", "matrix").probe("gloo", "cuda", name, 60) for name in BEYOND}
    assert "yes" in [cell for cell, _ in probes.values()], probes


def test_c30_gloo_on_the_cpu_does_it():
    matrix = chapter("03", "matrix")
    rows = chapter("03", "ranks").start(2, matrix.play_all, BEYOND, seconds=60)
    for name, *ranks in zip(BEYOND, *rows, strict=True):
        assert matrix.is_right(name, ranks), name


@on_ranks(2)
def test_c30_all_to_all_of_lists_is_new_in_gloo(rank):
    arrived = [torch.zeros(1), torch.zeros(1)]
    try:
        dist.all_to_all(arrived, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        answer = torch.cat(arrived).tolist()
    except RuntimeError as error:
        answer = str(error)
    refused, right = "Backend gloo does not support alltoall", [rank, 10 + rank]
    seen = {"2.11": [refused], "2.15": [right]}.get(torch.__version__[:4], [refused, right])
    assert answer in seen


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch was built with MPI")
def test_c30_mpi_needs_a_build_from_source():
    """As in every wheel; what torch says about it stands in its own words in the error."""
    with pytest.raises(RuntimeError, match="only included if you build PyTorch from source"):
        _init_alone("mpi")


def _init_alone(backend, **options):
    options = options or {"store": dist.HashStore()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend, rank=0, world_size=1, **options)
    dist.destroy_process_group()


def test_c31_there_is_no_tcp_backend():
    assert not dist.is_backend_available("tcp")
    with pytest.raises(AssertionError, match="Unknown backend type tcp"):
        _init_alone("tcp")
    _init_alone("gloo")  # the control


def test_c31_tcp_is_still_an_address_where_ranks_meet():
    _init_alone("gloo", init_method=f"tcp://127.0.0.1:{free_port()}")


def test_c33_without_set_epoch_every_epoch_has_the_same_order():
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0, seed=7)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@on_ranks(2)
def test_c34_backward_waits_for_the_other_ranks_and_the_optimizer_does_not(rank):
    """Rank 1 reaches `where` only when rank 0 has come back from there."""
    for where, answer in (("step", "continues"), ("backward", "waits")):
        group = dist.new_group(timeout=timedelta(seconds=2))
        store = dist.PrefixStore(where, dist.distributed_c10d._get_default_store())
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        optimizer, found = SGD(model.parameters(), lr=0.1), "continues"
        loss = model(torch.ones(1, 2)).sum()
        try:
            for name, call in (("backward", loss.backward), ("step", optimizer.step)):
                if rank == 1 and name == where:
                    store.wait(["rank 0 is back"], timedelta(seconds=1))
                call()
                if rank == 0 and name == where:
                    store.set("rank 0 is back", "")
        except (RuntimeError, dist.DistError):
            found = "waits"
        assert found == answer


@on_ranks(2)
def test_c34_after_the_last_batch_a_file_of_rank_0_needs_a_barrier(rank):
    store = dist.distributed_c10d._get_default_store()
    for barrier in (False, True):
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
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


@on_ranks(2)
def test_c36_the_state_dict_of_the_wrapper_has_a_prefix_that_of_the_model_none(rank):
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    assert ddp.module is model
    assert list(model.state_dict()) == ["weight", "bias"]
    assert list(ddp.state_dict()) == ["module.weight", "module.bias"]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "module.weight"'):
        model.load_state_dict(ddp.state_dict())


def test_c37_weights_must_be_the_batches_own_sizes():
    for samples, equal in ((10, False), (12, True)):
        losses = torch.arange(samples).double() ** 2
        batches, mean = list(DataLoader(losses, batch_size=4)), losses.mean()
        by_own_size = sum(batch.mean() * len(batch) for batch in batches) / samples
        by_nominal_size = sum(batch.mean() * 4 for batch in batches) / samples
        unweighted = sum(batch.mean() for batch in batches) / len(batches)
        torch.testing.assert_close(by_own_size, mean, rtol=0, atol=1e-12)
        assert torch.isclose(by_nominal_size, mean) == torch.isclose(unweighted, mean) == equal


@pytest.mark.parametrize("is_rank_0", [False, True])
def test_c38_a_muted_rank_hides_its_tracebacks_and_files_too(is_rank_0, monkeypatch):
    """In the way that many scripts know: only rank 0 prints, and who says force=True."""
    original, out, log = builtins.print, io.StringIO(), io.StringIO()

    def quiet_print(*args, force=False, **kwargs):
        if is_rank_0 or force:
            original(*args, **kwargs)

    monkeypatch.setattr(builtins, "print", quiet_print)
    print("heard", file=out)
    print("forced", file=out, force=True)
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        traceback.print_exc(file=log)  # the standard library prints it with print
    assert out.getvalue().split() == ["heard"] * is_rank_0 + ["forced"]
    assert ("the reason" in log.getvalue()) == is_rank_0


def test_c38_force_is_an_error_wherever_print_is_not_patched():
    with pytest.raises(TypeError, match="force"):
        print("before the process group is there", force=True)


def test_c39_tasks_dealt_in_turn_share_gpus_by_rank_modulo_gpus(monkeypatch):
    """srun -m cyclic on two nodes with two GPUs: node 0 has ranks 0 and 2."""
    on_node_0 = chapter("04", "words").cyclic([2, 2])[0]
    assert [rank % 2 for rank in on_node_0] == [0, 0]
    told = {"SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for slurm_localid, (rank, tasks) in enumerate(zip(on_node_0, ("2(x2)", "2,2"), strict=True)):
        numbers = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(slurm_localid)}
        for name, value in (told | numbers | {"SLURM_STEP_TASKS_PER_NODE": tasks}).items():
            monkeypatch.setenv(name, value)
        assert load_stage("04").read_launcher() == [rank, slurm_localid, 4, 2]


def train_16(rank, world_size, local_batch, batchnorm):
    """Some weights after one pass over 16 samples."""
    torch.manual_seed(1)
    layers = [nn.BatchNorm1d(4)] if batchnorm else []
    model = nn.Sequential(*layers, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    forward = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randn(16, 4).double().split(world_size * local_batch):
        optimizer.zero_grad()
        mine = batch[rank::world_size]
        F.mse_loss(forward(mine)[:, 0], mine.sum(1)).backward()
        optimizer.step()
    return model[-1].weight.data


@on_ranks(2)
def test_c40_half_the_batch_on_each_of_two_ranks_is_the_same_training(rank):
    for local_batch, batchnorm in ((4, False), (8, False), (4, True)):  # halved, kept, halved
        one, ours = train_16(0, 1, 8, batchnorm), train_16(rank, 2, local_batch, batchnorm)
        same = torch.allclose(one, ours, rtol=0, atol=1e-12)
        assert same == (local_batch == 4 and not batchnorm)


@on_ranks(2)
def test_c42_evaluating_on_all_ranks_is_right_and_a_collective_in_a_rank_branch_hangs(rank):
    for where in ("all ranks", "rank 0"):
        group, answer = dist.new_group(timeout=timedelta(seconds=1)), "waits"
        right = torch.tensor([1.0, 0, 0, 1, 0])  # five samples: no multiple of two ranks
        totals = torch.tensor([right[rank::2].sum(), len(right[rank::2])])
        with suppress(RuntimeError):
            if where == "all ranks" or rank == 0:
                dist.all_reduce(totals, group=group)
            if rank == 0:
                torch.save({"accuracy": totals[0] / totals[1]}, f"{where}.pt")
            dist.barrier(group)
            answer = round((totals[0] / totals[1]).item(), 4)
        answers = of_all_ranks(answer)
        assert answers == [0.4, 0.4] if where == "all ranks" else "waits" in answers
    assert [path.name for path in Path().glob("*.pt")] == ["all ranks.pt"]
