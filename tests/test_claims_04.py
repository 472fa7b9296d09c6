"""Claims C01 to C08, C14 to C16, C32 to C34, C36 to C40 and C42: see CLAIMS.md."""

import argparse
import builtins
import io
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.distributed.launch
import torch.distributed.run
import torch.nn.functional as F
from support import chapter, command, load_stage, run_ranks
from test_chapters_04 import words
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from common.options import UsageError, cut_batch

GPUS = torch.cuda.device_count()


def join(rank, world_size, seconds=30):
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)


# --- C01 and C03: rank, local rank, world size


def test_c01_two_nodes_of_8_have_ranks_0_to_15_and_local_ranks_0_to_7():
    """As two real torchruns give them, one for each node, both on this machine."""
    rows = words(8, 8)
    assert rows["RANK 0"] + rows["RANK 1"] == list(range(16))
    assert rows["LOCAL_RANK 0"] == rows["LOCAL_RANK 1"] == list(range(8))
    assert rows["sizes 0"] == rows["sizes 1"] == [16, 8]
    assert rows["rank 0"] == rows["rank 1"] == list(range(8))  # C03: here, rank % 8 is right


@pytest.mark.parametrize(
    ("nodes", "right"),
    [([8, 8], True), ([4, 4, 4], True), ([4, 2], True), ([3, 2], False), ([4, 8], False)],
)
def test_c03_rank_modulo_gpus_is_the_local_rank_only_if_nodes_are_equal_or_it_is_luck(nodes, right):
    """Ranks as torchrun deals them, node after node; see the test of words.py."""
    starts = [sum(nodes[:node]) for node in range(len(nodes))]
    wrong = []
    for start, gpus in zip(starts, nodes, strict=True):
        devices = [(start + local_rank) % gpus for local_rank in range(gpus)]
        assert sorted(devices) == list(range(gpus))  # at least, no two ranks share a GPU
        wrong += [devices] if devices != list(range(gpus)) else []
    assert (not wrong) == right


# --- C02: save and log where local_rank == 0


def _save(rank, folder, which):
    local_rank = rank % 2  # two nodes with two ranks each
    join(rank, 4)
    if {"local": local_rank, "global": rank}[which] == 0:
        (folder / f"writer-{rank}").touch()
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_c02_on_two_nodes_two_ranks_have_local_rank_0(tmp_path):
    for which, writers in (("local", ["writer-0", "writer-2"]), ("global", ["writer-0"])):
        folder = tmp_path / which
        folder.mkdir()
        assert run_ranks(4, _save, folder, which) == [writers] * 4


# --- C04: the learning rate is scaled by GPUs × batch / 32


def _descend(lr, steps, batches):
    """The weights after some steps of SGD, in float64: one batch a step."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values / 2)
    images = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    before = torch.cat([parameter.data.flatten() for parameter in model.parameters()])
    optimizer = SGD(model.parameters(), lr)
    for step in range(steps):
        batch = images.chunk(batches)[step % batches]
        optimizer.zero_grad()
        F.mse_loss(model(batch)[:, 0], batch.sum(1)).backward()
        optimizer.step()
    return torch.cat([parameter.data.flatten() for parameter in model.parameters()]) - before


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
    def scaled(lr, ranks, batch, of_recipe):
        return lr * ranks * batch / of_recipe

    assert scaled(0.001, 1, 32, of_recipe=32) == 0.001
    assert scaled(0.1, 8, 32, of_recipe=256) == 0.1  # a recipe for 256, on 256 in all
    assert scaled(0.1, 8, 32, of_recipe=32) == 8 * 0.1  # the same run, by the published rule


# --- C05: --multi_gpu False


@pytest.mark.parametrize(("text", "value"), [("False", True), ("0", True), ("", False)])
def test_c05_type_bool_takes_any_text_for_true_but_the_empty_one(text, value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi_gpu", type=bool, default=True)
    assert parser.parse_args(["--multi_gpu", text]).multi_gpu is value


def test_c05_boolean_optional_action_turns_it_off():
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi-gpu", action=argparse.BooleanOptionalAction, default=True)
    assert parser.parse_args([]).multi_gpu is True
    assert parser.parse_args(["--no-multi-gpu"]).multi_gpu is False


# --- C06: the batch size of a DDP script is that of each GPU


def first_step(batch_size, world_size):
    """The samples that all ranks together take in their first step."""
    taken = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(4096), world_size, rank)
        taken += next(iter(DataLoader(range(4096), batch_size, sampler=sampler))).tolist()
    return set(taken)


def test_c06_32_on_each_of_2_times_8_ranks_is_a_global_batch_of_512():
    assert len(first_step(32, 2 * 8)) == 512
    local_batch = cut_batch(32, 16)  # this project's flag is global
    assert (local_batch, len(first_step(local_batch, 16))) == (2, 32)
    with pytest.raises(UsageError, match="does not divide by 16: try 48"):
        cut_batch(40, 16)


# --- C07: evaluate with DistributedSampler and average


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


# --- C08: CUDA_VISIBLE_DEVICES


def test_c08_a_process_is_told_3_and_4_and_counts_them_from_0(monkeypatch):
    """How torch reads it; which devices these are, only a machine with GPUs can show."""
    for text, devices in (("3,4", [3, 4]), ("4,3", [4, 3]), ("3,-1,4", [3]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert torch.cuda._parse_visible_devices() == devices  # at place i: what cuda:i is
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert torch.cuda._parse_visible_devices()[:5] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_c08_on_gpus_the_second_alone_becomes_cuda_0():
    ask = "import torch; p = torch.cuda.get_device_properties(0); n = torch.cuda.device_count()"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    told = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(n, p.uuid)"], env=env, capture_output=True, text=True
    )
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)]
    assert told.stdout.split() == ["1", uuids[1]] != ["1", uuids[0]]


# --- C14: init_process_group(rank=local_rank)


def _init(rank, which):
    local_rank = rank % 2  # two nodes with two ranks each
    try:
        join({"local": local_rank, "global": rank}[which], 4, seconds=1)
        total = torch.tensor(rank)
        dist.all_reduce(total)
    except dist.DistError as error:
        return str(error)
    return total.item()


def test_c14_with_the_local_rank_two_nodes_never_meet():
    """Ranks 2 and 3 of 4 never come: each other waits for them until the time limit."""
    for answer in run_ranks(4, _init, "local"):
        assert answer.startswith("wait timeout after 1000ms")
    assert run_ranks(4, _init, "global") == [0 + 1 + 2 + 3] * 4


# --- C15: with a sampler the loader takes neither shuffle nor drop_last


def test_c15_a_sampler_excludes_shuffle_but_not_drop_last():
    data = range(10)
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(data, 4, sampler=RandomSampler(data), shuffle=True)
    sizes = [len(batch) for batch in DataLoader(data, 4, sampler=RandomSampler(data))]
    assert sizes == [4, 4, 2]
    loader = DataLoader(data, 4, sampler=RandomSampler(data), drop_last=True)
    assert [len(batch) for batch in loader] == [4, 4]


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "drop_last"])
def test_c15_a_batch_sampler_excludes_all_of_them(option):
    data = range(10)
    batches = BatchSampler(RandomSampler(data), batch_size=4, drop_last=True)
    assert [len(batch) for batch in DataLoader(data, batch_sampler=batches)] == [4, 4]
    value = {"batch_size": 4, "sampler": RandomSampler(data)}.get(option, True)
    with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
        DataLoader(data, batch_sampler=batches, **{option: value})


# --- C16 and C32: the script needs a --local_rank argument

SCRIPTS = {
    "no-argument": "import os, sys; print('has', sys.argv[1:], os.environ['LOCAL_RANK'])",
    "underscore": "import argparse; p = argparse.ArgumentParser(); "
    "p.add_argument('--local_rank', type=int); print('has', p.parse_args().local_rank)",
    "both": "import argparse; p = argparse.ArgumentParser(); "
    "p.add_argument('--local-rank', '--local_rank', type=int); "
    "print('has', p.parse_args().local_rank)",
}


def launched(launcher, script, folder):
    """Exit status and output of the real launcher with one rank, a script without torch."""
    path = folder / "script.py"
    path.write_text(SCRIPTS[script])
    flags = ("--standalone", "--nproc-per-node=1", str(path))
    [answer] = command(launcher.__file__, *flags)
    return answer


def test_c32_torchrun_needs_no_argument_it_sets_local_rank(tmp_path):
    status, output = launched(torch.distributed.run, "no-argument", tmp_path)
    assert (status, output.splitlines()[-1]) == (0, "has [] 0")


def test_c16_torch_distributed_launch_passes_local_rank_with_a_dash(tmp_path):
    status, output = launched(torch.distributed.launch, "no-argument", tmp_path)
    assert (status, output.splitlines()[-1]) == (0, "has ['--local-rank=0'] 0")
    assert "torch.distributed.launch is deprecated" in output


def test_c16_a_script_that_knows_only_the_underscore_is_refused(tmp_path):
    status, output = launched(torch.distributed.launch, "underscore", tmp_path)
    assert status == 1
    assert "unrecognized arguments: --local-rank=0" in output
    status, output = launched(torch.distributed.launch, "both", tmp_path)  # the control
    assert (status, output.splitlines()[-1]) == (0, "has 0")


# --- C33: without set_epoch


def test_c33_without_set_epoch_every_epoch_has_the_same_order():
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0, seed=7)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


# --- C34: DDP waits after each batch


def _wait_in(rank, where):
    """Rank 1 reaches `where` only when rank 0 has come back from there."""
    join(rank, 2, seconds=2)
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).sum()
    try:
        for name, call in (("backward", loss.backward), ("step", optimizer.step)):
            if rank == 1 and name == where:
                store.wait(["rank 0 is back"], timedelta(seconds=1))
            call()
            if rank == 0 and name == where:
                store.set("rank 0 is back", "")
    except (RuntimeError, dist.DistError):
        return "waits"
    return "continues"


def test_c34_backward_waits_for_the_other_ranks_and_the_optimizer_does_not():
    assert run_ranks(2, _wait_in, "backward") == ["waits", "waits"]
    assert run_ranks(2, _wait_in, "step") == ["continues", "continues"]


def _file(rank, path, barrier):
    join(rank, 2)
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        if not barrier:
            store.wait(["rank 1 has looked"])  # saving takes long
        path.touch()
    if barrier:
        dist.barrier()
    found = path.exists()
    if rank == 1:
        store.set("rank 1 has looked", "")
    return found


def test_c34_after_the_last_batch_a_file_of_rank_0_needs_a_barrier(tmp_path):
    assert run_ranks(2, _file, tmp_path / "without", False) == [True, False]
    assert run_ranks(2, _file, tmp_path / "with", True) == [True, True]


# --- C36: module.


def _names(rank):
    join(rank, 1)
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    return list(ddp.state_dict()), list(model.state_dict()), ddp.module is model


def test_c36_the_state_dict_of_the_wrapper_has_a_prefix_that_of_the_model_none():
    [(wrapped, plain, same)] = run_ranks(1, _names)
    assert wrapped == ["module.weight", "module.bias"]
    assert plain == ["weight", "bias"]
    assert same
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "module.weight"'):
        nn.Linear(2, 2).load_state_dict(dict.fromkeys(wrapped, torch.ones(2)))


# --- C37: weight each evaluation loss by the batch size


@pytest.mark.parametrize(("samples", "equal"), [(10, False), (12, True)])
def test_c37_weights_must_be_the_batches_own_sizes(samples, equal):
    losses = torch.arange(samples).double() ** 2
    batches = list(DataLoader(losses, batch_size=4))
    by_own_size = sum(batch.mean() * len(batch) for batch in batches) / samples
    by_nominal_size = sum(batch.mean() * 4 for batch in batches) / samples
    unweighted = sum(batch.mean() for batch in batches) / len(batches)
    torch.testing.assert_close(by_own_size, losses.mean(), rtol=0, atol=1e-12)
    assert torch.isclose(by_nominal_size, losses.mean()) == equal
    assert torch.isclose(unweighted, losses.mean()) == equal


# --- C38: mute print on the other ranks


def mute(is_rank_0):
    """The way that many scripts know: only rank 0 prints, and who says force=True."""
    original = builtins.print

    def quiet_print(*args, force=False, **kwargs):
        if is_rank_0 or force:
            original(*args, **kwargs)

    builtins.print = quiet_print


def _muted(rank, is_rank_0):
    out, log = io.StringIO(), io.StringIO()
    mute(is_rank_0)
    print("heard", file=out)
    print("forced", file=out, force=True)
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        traceback.print_exc(file=log)  # the standard library prints it with print
    return out.getvalue().split(), "the reason" in log.getvalue()


def test_c38_a_muted_rank_hides_its_tracebacks_and_files_too():
    assert run_ranks(1, _muted, False) == [(["forced"], False)]
    assert run_ranks(1, _muted, True) == [(["heard", "forced"], True)]


def test_c38_force_is_an_error_wherever_print_is_not_patched():
    with pytest.raises(TypeError, match="force"):
        print("before the process group is there", force=True)


# --- C39: SLURM


def test_c39_tasks_dealt_in_turn_share_gpus_by_rank_modulo_gpus(monkeypatch):
    """srun -m cyclic on two nodes with two GPUs: node 0 has ranks 0 and 2."""
    on_node_0 = chapter("04", "words").cyclic([2, 2])[0]
    assert [rank % 2 for rank in on_node_0] == [0, 0]
    stage, local_ranks = load_stage("04"), []
    for slurm_localid, rank in enumerate(on_node_0):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_LOCALID", str(slurm_localid))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        told = stage.read_launcher()
        assert told[0] == rank
        local_ranks.append(told[1])
    assert local_ranks == [0, 1]


# --- C40: halve the batch on each of two GPUs


def _weights(rank, world_size, local_batch, batchnorm):
    join(rank, world_size)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    layers = [nn.BatchNorm1d(4)] if batchnorm else []
    model = nn.Sequential(*layers, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    ddp = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    global_batch = world_size * local_batch
    for start in range(0, 16, global_batch):
        batch = images[start + rank : start + global_batch : world_size]
        optimizer.zero_grad()
        F.mse_loss(ddp(batch)[:, 0], batch.sum(1)).backward()
        optimizer.step()
    return model[-1].weight.data


@pytest.mark.parametrize(
    ("local_batch", "batchnorm", "same"),
    [(4, False, True), (8, False, False), (4, True, False)],
    ids=["halved", "kept", "halved-with-batchnorm"],
)
def test_c40_half_the_batch_on_each_of_two_ranks_is_the_same_training(local_batch, batchnorm, same):
    [one] = run_ranks(1, _weights, 1, 8, batchnorm)
    for two in run_ranks(2, _weights, 2, local_batch, batchnorm):
        assert torch.allclose(one, two, rtol=0, atol=1e-12) == same


# --- C42: save on rank 0, evaluate on all


def _evaluate(rank, where, folder):
    join(rank, 2, seconds=1)
    right = torch.tensor([1.0, 0, 0, 1, 0])  # five samples: no multiple of two ranks
    totals = torch.tensor([right[rank::2].sum(), len(right[rank::2])])
    try:
        if where == "all ranks" or rank == 0:
            dist.all_reduce(totals)
        if rank == 0:
            torch.save({"accuracy": totals[0] / totals[1]}, folder / f"{where}.pt")
        dist.barrier()
    except RuntimeError:
        return "waits"
    return round((totals[0] / totals[1]).item(), 4)


def test_c42_evaluating_on_all_ranks_is_right_and_a_collective_in_a_rank_branch_hangs(tmp_path):
    assert run_ranks(2, _evaluate, "all ranks", tmp_path) == [0.4, 0.4]
    assert [path.name for path in tmp_path.iterdir()] == ["all ranks.pt"]
    assert "waits" in run_ranks(2, _evaluate, "rank 0", tmp_path)
