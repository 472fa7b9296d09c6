"""Claims about launchers, ranks, GPUs and backends: C03, C08, C14, C16, C30 to C32, C39."""

import importlib
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from collectives import play
from helpers.on_ranks import run_on_ranks
from local_ranks.ranks import run_ranks
from local_ranks.scripts import run_script
from rank_variables import cyclic, verdict


def test_c03_rank_modulo_gpus_is_the_local_rank_only_on_equal_nodes():
    for first, gpus, right in ((8, 8, True), (4, 2, True), (3, 2, False), (4, 8, False)):
        assert verdict([*range(first, first + gpus)]) == (
            "the local rank" if right else "another GPU than LOCAL_RANK names"
        )


def test_c39_tasks_dealt_in_turn_share_gpus_by_rank_modulo_gpus():
    """srun -m cyclic on two nodes with two GPUs: node 0 has ranks 0 and 2."""
    assert cyclic([1, 4, 2]) == [[0], [1, 3, 5, 6], [2, 4]]
    on_node_0 = cyclic([2, 2])[0]
    assert verdict(on_node_0) == "ranks share GPU 0"
    assert [rank % 2 for rank in on_node_0] == [0, 0]


def test_c08_a_process_that_is_shown_gpus_3_and_4_counts_them_from_0(monkeypatch):
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


LAUNCHERS = [
    ("run", (), "has [] 0\n"),
    ("launch --use-env", (), "has [] 0\n"),
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
    launcher, *options = launcher.split()
    flags = (*options, "--standalone", "--nproc-per-node=1", str(tmp_path / "script.py"))
    script = importlib.import_module(f"torch.distributed.{launcher}").__file__
    [(status, output)] = run_script(script, *flags)
    assert line in output
    assert status == ("unrecognized" in line)
    assert ("torch.distributed.launch is deprecated" in output) == (launcher == "launch")


@pytest.mark.gpu
def test_c30_gloo_on_a_gpu_does_more_than_all_reduce_and_broadcast():
    gathered = run_ranks(2, play, "all_gather", device="cuda", seconds=60)
    assert [after for _, after in gathered] == [[1, 10]] * 2


def join_alone(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch was built with MPI")
def test_c30_mpi_needs_a_build_from_source():
    with pytest.raises(RuntimeError, match="only included if you build PyTorch from source"):
        join_alone("mpi")


def test_c31_there_is_no_tcp_backend():
    with pytest.raises(AssertionError, match="Unknown backend type tcp"):
        join_alone("tcp")
