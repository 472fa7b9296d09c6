"""The scripts of 04_ddp_torchrun/launch on one machine, where each of them starts a real torchrun.

On two nodes: test_two_nodes.py. Where jobs are restarted, they are beyond/survive/train.py.
"""

import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from helpers.machine import free_port
from local_ranks.train_stage import load_stage
from shell_programs import (
    BIN,
    LAUNCH,
    MODEL,
    RUN_STAGE,
    SECONDS,
    SUM_OF_RANKS,
    begin,
    end,
    environment,
    heed_sigint,
    is_the_run_of,
    processes_with,
    run,
    until,
)


def path_with(folder: Path, **programs: str) -> str:
    """The PATH on which programs of these names run these lines of shell."""
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{BIN}:{os.environ['PATH']}"


# What a script refuses, and the command of a pod


OF_A_JOB = {"SLURM_JOB_ID": 17, "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": 2}
REFUSALS = [
    ("two_nodes.sh", {"NODE_RANK": 0, "MASTER_ADDR": ""}, "NODE_RANK and MASTER_ADDR have no "),
    ("slurm.sbatch", OF_A_JOB, "no beyond/survive/train.py in "),
    ("slurm_srun.sbatch", OF_A_JOB, "no beyond/survive/train.py in "),
    ("slurm_one_node.sbatch", OF_A_JOB, "no 04_ddp_torchrun in "),
    ("two_nodes_here.sh", {}, "network namespaces need root"),
]


@pytest.mark.parametrize(("script", "env", "error"), REFUSALS)
def test_a_script_refuses_in_one_line_what_it_cannot_do(script, env, error, tmp_path):
    path = path_with(tmp_path, scontrol="echo node-7", id="echo 1000")
    status, output = run("bash", LAUNCH / script, cwd=tmp_path, PATH=path, **env)
    assert (status, output.count("\n")) == (2, 1)
    assert output.startswith(f"error: {error}")


def test_torchrun_and_train_accept_the_command_of_the_pytorchjob(monkeypatch):
    """What the operator tells the worker: pull request 1840 of Kubeflow's training operator."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -e '.[checks]'")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    spec, replicas = job["spec"], job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert replicas["Worker"] == replicas["Master"]
    pod = replicas["Master"]["template"]["spec"]
    [container] = pod["containers"]
    limit = int(container["env"][1]["value"])  # torchrun's own is 30 s; then comes SIGKILL
    assert 30 < limit < pod["terminationGracePeriodSeconds"]
    program, *arguments = container["command"] + container["args"]
    assert (container["name"], program) == ("pytorch", "torchrun")
    assert replicas["Master"]["replicas"] == 1
    given = {"NNODES": "2", "NPROC_PER_NODE": spec["nprocPerNode"], "NODE_RANK": "1"}
    given |= {"MASTER_ADDR": f"{job['metadata']['name']}-master-0", "MASTER_PORT": "23456"}
    for name, value in given.items():  # what the operator gives the worker; it takes texts only
        monkeypatch.setenv(f"PET_{name}", value)
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("survive-master-0:23456", 1)
    assert args.training_script == "beyond/survive/train.py"
    monkeypatch.setattr(sys, "argv", ["train.py", *args.training_script_args])
    assert load_stage("survive").parse_args().resume == "auto"


# Ranks that die, and signals


DIES_ONCE = """
import os, pathlib, signal, sys, threading, time
checkpoint = pathlib.Path(sys.argv[-1], "checkpoint.pt")
def die():
    while not checkpoint.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    threading.Thread(target=die, daemon=True).start()
"""


def test_elastic_heals_a_run_whose_rank_is_killed(tmp_path):
    """It ends as if nobody had died. That one did, torchrun says, and so does the new rank 0."""
    flags = ("--epochs=2", *MODEL)
    script, folder = tmp_path / "dies_once.py", tmp_path / "run"
    script.write_text(DIES_ONCE + RUN_STAGE.format("beyond/survive"))
    command = ("bash", LAUNCH / "elastic.sh", *flags, "--run-dir", folder)
    status, output = run(*command, SCRIPT=script)
    assert status == 0, output
    assert "exitcode: -9" in output
    assert "saved by 2 ranks" in output
    assert is_the_run_of(2, folder, "survive", *flags)


NODE_OF_TWO_DIES_ONCE = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

folder, node = pathlib.Path(sys.argv[-1]), os.environ["NODE"]
dist.init_process_group("gloo")
found = torch.tensor(float((folder / "checkpoint").exists()))
dist.all_reduce(found)
if not found:
    (folder / "checkpoint").touch()
    dist.barrier()
    if node == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
(folder / f"answers of node {node}").write_text(f"restarted {restarted}, found {bool(found)}")
dist.destroy_process_group()
"""


def test_each_torchrun_counts_its_own_restarts_and_all_ranks_find_the_checkpoint(tmp_path):
    """The rank of node 1 dies, and both nodes start theirs again. Node 0 calls it no restart."""
    script, nodes = tmp_path / "resumes.py", []
    script.write_text(NODE_OF_TWO_DIES_ONCE)
    port = free_port()
    env = {"NNODES": 2, "NPROC_PER_NODE": 1, "RDZV_ENDPOINT": f"127.0.0.1:{port}"}
    env |= {"SCRIPT": script, "GLOO_SOCKET_IFNAME": "lo"}
    for node in (0, 1):
        nodes.append(begin("bash", LAUNCH / "elastic.sh", tmp_path, NODE=node, **env))
    outputs = [end(node) for node in nodes]
    assert [status for status, _ in outputs] == [0, 0], outputs
    answers = [(tmp_path / f"answers of node {node}").read_text() for node in (0, 1)]
    assert answers == ["restarted False, found True", "restarted True, found True"]


ENDS_AT_SIGTERM = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
def stop(*_):
    (folder / f"checkpoint.{rank}.of.{os.environ['WORLD_SIZE']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready.{rank}").touch()
time.sleep(100)
"""


def test_sigterm_reaches_the_ranks_and_the_script_ends_with_their_status(tmp_path):
    """The control is torchrun alone: its ranks do the same, but it ends with status 1."""
    script, started = tmp_path / "ends.py", {}
    script.write_text(ENDS_AT_SIGTERM)
    for name, command, status in (
        ("one_node", ("bash", LAUNCH / "one_node.sh"), 0),
        ("control", ("torchrun", "--standalone", "--nproc-per-node=2", script), 1),
    ):
        (tmp_path / name).mkdir()
        started[name] = begin(*command, tmp_path / name, SCRIPT=script), status
    for name, (process, _) in started.items():
        until(lambda: len(list((tmp_path / name).glob("ready.*"))) == 2)  # noqa: B023
        process.send_signal(signal.SIGTERM)
    for name, (process, status) in started.items():
        assert end(process)[0] == status, name
        saved = sorted(path.name for path in (tmp_path / name).glob("checkpoint.*"))
        assert saved == ["checkpoint.0.of.2", "checkpoint.1.of.2"], name
    assert not processes_with(script)


def test_one_node_trains_on_a_machine_that_cannot_resolve_its_own_name(tmp_path):
    """The control: the name cannot be resolved there."""
    own_name = ("unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid; exec "$@"', "sh")
    status, output = run(*own_name, "true")
    if status:
        pytest.skip(f"needs root, for a host name of its own: {output.strip()}")
    ask = "import socket; socket.getaddrinfo(socket.gethostname(), 0)"
    assert "gaierror" in run(*own_name, sys.executable, "-c", ask)[1]
    (tmp_path / "script.py").write_text(SUM_OF_RANKS)
    env = {"SCRIPT": tmp_path / "script.py", "NPROC_PER_NODE": 1}
    status, output = run(*own_name, "bash", LAUNCH / "one_node.sh", **env)
    assert status == 0, output
    assert "0 of 1 1 sum 1.0" in output


def begin_at_a_terminal(output: Path, *command: object, **env: object) -> tuple:
    """The command in the foreground of a terminal of its own, and the keyboard of that terminal."""
    keyboard, screen = pty.openpty()

    def take_the_terminal() -> None:
        fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
        heed_sigint()

    with output.open("w") as file:
        files = {"stdin": screen, "stdout": file, "stderr": file, "pass_fds": [screen]}
        files |= {"env": environment(**env), "start_new_session": True}
        words = [str(part) for part in command]
        process = subprocess.Popen(words, preexec_fn=take_the_terminal, **files)
    os.close(screen)
    return process, keyboard


IGNORES_SIGNALS = """
import os, pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[-1], "rank " + os.environ["RANK"]).touch()
time.sleep(300)
"""
MOMENTS = {  # when Ctrl-C comes: the script, and the node that it is
    "torchrun still imports torch": ("one_node.sh", {}),
    "the ranks run, and ignore signals": ("elastic.sh", {}),
    "node 1 waits for node 0": ("two_nodes.sh", {"NODE_RANK": 1, "MASTER_ADDR": "127.0.0.1"}),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_script_and_its_ranks_when(moment, tmp_path):
    """A real one: the terminal sends SIGINT to all processes in its foreground."""
    (name, node), output = MOMENTS[moment], tmp_path / "output"
    script = tmp_path / "script.py"
    script.write_text(IGNORES_SIGNALS)
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        env = {"SCRIPT": script, "MASTER_PORT": node_0.getsockname()[1], **node}
        process, keyboard = begin_at_a_terminal(output, "bash", LAUNCH / name, tmp_path, **env)
        try:
            if "waits for node 0" in moment:  # it takes the call, and says nothing
                node_0.settimeout(SECONDS)
                _connection = node_0.accept()
            elif moment == "torchrun still imports torch":
                until(lambda: processes_with(script))
            else:
                until(lambda: len(list(tmp_path.glob("rank *"))) == 2)
            assert process.poll() is None, output.read_text()
            os.write(keyboard, b"\x03")
            assert process.wait(SECONDS) == 130, output.read_text()
            until(lambda: not processes_with(script))
        finally:
            for pid in processes_with(script):
                os.kill(pid, signal.SIGKILL)
