"""Whoever starts the ranks, they do the same, and each rank takes its own device and backend.

Real torchruns and a real SLURM: test_cluster.py.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support import ROOT, Run, command, free_port, launcher, load_stage, train_once
from test_bad_input import SCRIPTS, SHORT


def srun(ranks: int, tasks: str) -> dict[str, str]:
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {"SLURM_PROCID": "{RANK}", "SLURM_LOCALID": "{RANK}", "SLURM_STEP_NUM_TASKS": str(ranks)}
    return env | {"SLURM_STEP_TASKS_PER_NODE": tasks}


STARTS = [  # script, ranks, processes that are started here, what a launcher tells them
    ("04", 2, 2, launcher(0)),
    ("05", 2, 2, launcher(0)),
    ("04", 1, 1, launcher(0, 1)),
    ("survive", 2, 2, srun(2, "2(x3),1")),
    ("survive", 1, 1, {}),
    ("03", 2, 1, {}),  # starts its own processes
]


@pytest.mark.parametrize(("key", "ranks", "processes", "env"), STARTS)
def test_whoever_starts_the_ranks_their_losses_are_the_same(key, ranks, processes, env, tmp_path):
    env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}", f"--data-dir={ROOT / 'data'}")
    answers = command(SCRIPTS[key], *flags, ranks=processes, env=env)
    assert [status for status, _ in answers] == [0] * processes, answers
    assert f"global batch 60 = {ranks} × {60 // ranks}\n" in answers[0][1]
    assert "epoch" not in "".join(output for _, output in answers[1:]), "only rank 0 prints"
    same = train_once(key, ranks, *SHORT, dtype=torch.float32)
    assert torch.equal(Run(tmp_path, [], "").losses, same.losses)


@pytest.mark.parametrize("ended", ["with exit code 2", "with signal SIGKILL"])
def test_03_says_which_process_has_ended_and_how(ended, capsys):
    error = mp.ProcessExitedException(f"process 1 terminated {ended}", 1, 7, 2)
    spawn = patch.object(mp, "spawn", side_effect=error)
    stage = load_stage("03")
    main = stage.exit_on_usage_error(mp.ProcessExitedException)(stage.main)
    with spawn, patch("sys.argv", ["train.py"]), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: process 1 terminated {ended}\n"


GPU = torch.device("cuda", 1)
JOINS = [  # flags, local rank, GPUs that it sees; its device, the backend, and device_id
    (["--device=cpu"], 1, 0, (torch.device("cpu"), "gloo", None)),
    (["--device=cuda"], 1, 2, (GPU, "nccl", GPU)),
    (["--device=cuda"], 9, 8, (GPU, "nccl", GPU)),
    (["--device=cuda", "--backend=gloo"], 3, 2, (GPU, "gloo", None)),  # two ranks share a GPU
    (["--device=cuda"], 3, 1, (torch.device("cuda", 0), "nccl", torch.device("cuda", 0))),
]


@pytest.mark.parametrize("key", ["04", "05"])
@pytest.mark.parametrize(("flags", "local_rank", "gpus", "expected"), JOINS)
def test_a_rank_takes_its_gpu_before_it_joins(key, flags, local_rank, gpus, expected, monkeypatch):
    """With torch's queries patched: no GPU is needed, and none is used."""
    chosen, joined = [], []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def join(backend: str, device_id: torch.device | None = None) -> None:
        assert chosen or gpus == 0, "NCCL would use GPU 0 on every rank"
        joined.append((backend, device_id))

    monkeypatch.setattr(dist, "init_process_group", join)
    stage = load_stage(key)
    parser = stage.make_parser("", "")
    parser.add_argument("--backend", default="nccl")
    device = stage.join_process_group(parser.parse_args(flags))
    assert (device, *joined[0]) == expected
    assert chosen == [device] * (gpus > 0)
