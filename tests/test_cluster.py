"""The scripts under 04_ddp_torchrun/launch, run: by a real torchrun and a real SLURM, on two nodes.

SLURM is started here, with files, sockets and ports of its own. The two nodes are network
namespaces of this machine. What a machine cannot do is skipped, with the reason.
Where jobs are stopped or restarted, the scripts start survive/train.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, Run, free_port, load_stage, train_once
from test_stages import same_run
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

LAUNCH = ROOT / "04_ddp_torchrun" / "launch"
TWO_NODES = ("bash", LAUNCH / "two_nodes_here.sh")
MODEL = ("--model=net-bn", "--batch-size=60", "--device=cpu")
SHORT = ("--epochs=1", *MODEL)
BIN = Path(sys.executable).parent
SECONDS = 120  # more than anything here takes


def begin(*command: object, where: Path = ROOT, **env: object) -> subprocess.Popen:
    """As in a shell of the reader: torchrun and python are those of this suite."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": ROOT, **env}
    env = os.environ | {name: str(value) for name, value in env.items()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(part) for part in command]
    return subprocess.Popen(words, cwd=where, env=env, start_new_session=True, **pipes)


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Its status and all that it has printed."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(*command: object, **more: Any) -> tuple[int, str]:
    return end(begin(*command, **more))


def until(happened: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_the_run_of(ranks: int, folder: Path, key: str, *flags: str) -> bool:
    """It equals, to the bit, that of so many ranks that the suite has started itself."""
    return same_run(Run(folder, [], ""), train_once(key, ranks, *flags, dtype=torch.float32))


def processes_with(text: object) -> list[int]:
    """Those with this text in their command line."""
    found = subprocess.run(["pgrep", "-f", re.escape(str(text))], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def path_with(folder: Path, **programs: str) -> str:
    """The PATH on which programs of these names run these lines of shell."""
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{BIN}:{os.environ['PATH']}"


OF_A_JOB = {"SLURM_JOB_ID": 17, "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": 2}
RDZV = "--rdzv-backend c10d --rdzv-endpoint"
RESUME = "survive/train.py --run-dir runs/slurm-17 --resume auto"
STARTS = {  # the command that a script starts, after threads, address, port and limit of its ranks
    "one_node.sh": "1 - - - --standalone --nproc-per-node 2 04_ddp_torchrun/train.py",
    "two_nodes.sh": "1 node-7 - - --nnodes 2 --node-rank 1 --nproc-per-node 1 "
    "--master-addr node-7 --master-port 29500 04_ddp_torchrun/train.py",
    "elastic.sh": "1 - - - --nnodes 1 --nproc-per-node 2 --max-restarts 3 "
    f"{RDZV} localhost:0 --rdzv-id survive survive/train.py --resume auto",
    "slurm.sbatch": "1 - - 80 --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 2 "
    f"{RDZV} node-7:20017 --rdzv-id 17 {RESUME}",
    "slurm_srun.sbatch": f"1 node-7 20017 - --kill-on-bad-exit=1 python {RESUME}",
}


@pytest.mark.parametrize("script", STARTS)
def test_a_script_starts_exactly_this_command(script, tmp_path):
    limit = "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:--}"
    say = f'echo "$OMP_NUM_THREADS ${{MASTER_ADDR:--}} ${{MASTER_PORT:--}} {limit} $*"'
    path = path_with(tmp_path, torchrun=say, srun=say, scontrol="echo node-7; echo node-8")
    where = ROOT if script.endswith("sbatch") else tmp_path  # the others find the repository
    env = {"NODE_RANK": 1, "MASTER_ADDR": "node-7"} if script == "two_nodes.sh" else OF_A_JOB
    answer = run("bash", LAUNCH / script, "--epochs", "3", where=where, PATH=path, **env)
    assert answer == (0, f"{STARTS[script]} --epochs 3\n")


REFUSALS = [
    ("two_nodes.sh", {"NODE_RANK": 0, "MASTER_ADDR": ""}, "NODE_RANK and MASTER_ADDR have no "),
    ("slurm.sbatch", OF_A_JOB, "no survive/train.py in "),
    ("slurm_srun.sbatch", OF_A_JOB, "no survive/train.py in "),
    ("two_nodes_here.sh", {}, "network namespaces need root"),
]


@pytest.mark.parametrize(("script", "env", "told"), REFUSALS)
def test_a_script_refuses_in_one_line_what_it_cannot_do(script, env, told, tmp_path):
    """No SLURM is needed: the scripts look before they start anything."""
    path = path_with(tmp_path, scontrol="echo node-7", id="echo 1000")
    status, output = run("bash", LAUNCH / script, where=tmp_path, PATH=path, **env)
    assert (status, output.count("\n")) == (2, 1)
    assert output.startswith(f"error: {told}")


def test_one_node_trains_as_the_ranks_of_the_suite(tmp_path):
    script = LAUNCH / "one_node.sh"
    status, output = run("bash", script, *SHORT, "--run-dir", tmp_path, where=tmp_path)
    assert status == 0, output
    assert "global batch 60 = 2 × 30" in output
    assert output.count("epoch 1/1") == 1, "only rank 0 prints"
    assert is_the_run_of(2, tmp_path, "04", *SHORT)


RUN = """
import runpy
sys.argv[0] = "survive/train.py"
sys.path.insert(0, "survive")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DIES_ONCE = (
    """
import os, pathlib, signal, sys, threading, time
checkpoint = pathlib.Path(sys.argv[-1], "checkpoint.pt")
def die():
    while not checkpoint.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    threading.Thread(target=die, daemon=True).start()
"""
    + RUN
)


def test_elastic_heals_a_run_whose_rank_is_killed(tmp_path):
    """Rank 1 dies after the first checkpoint; the run ends as if it had not."""
    flags = ("--epochs=3", *MODEL)
    script, healed, given_up = tmp_path / "dies_once.py", tmp_path / "healed", tmp_path / "control"
    script.write_text(DIES_ONCE)
    given_up.mkdir()
    (given_up / "checkpoint.pt").touch()  # there, rank 1 dies at once
    command = ("bash", LAUNCH / "elastic.sh", *flags, "--run-dir")
    process = begin(*command, healed, SCRIPT=script)
    control, _ = run(*command, given_up, SCRIPT=script, MAX_RESTARTS=0)
    status, output = end(process)
    assert (status, control) == (0, 1), output
    assert "rank 1 did not arrive" in output
    assert is_the_run_of(2, healed, "survive", *flags)


ENDS_AT_SIGTERM = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
def stop(*_):
    time.sleep(float(os.environ.get("TAKES", 0)))
    (folder / f"checkpoint.{rank}.of.{os.environ['WORLD_SIZE']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready.{rank}").touch()
time.sleep(100)
"""
LIMIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def test_a_script_hands_sigterm_to_the_ranks_and_ends_with_their_status(tmp_path, monkeypatch):
    """The control is torchrun alone: its ranks do the same, but it ends with status 1.

    And it kills them after 30 s, or the time that slurm.sbatch and kubernetes.yaml set: here, 1 s.
    two_nodes.sh runs twice, on loopback: the way without root and without namespaces.
    """
    if not shutil.which("pkill"):
        pytest.skip("needs pkill: apt-get install -y procps")
    script, started = tmp_path / "ends.py", {}
    script.write_text(ENDS_AT_SIGTERM)
    node = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NPROC_PER_NODE": 1}
    calls = {"one_node.sh": [{}], "elastic.sh": [{}], "torchrun": [{"TAKES": 3, LIMIT: 80}]}
    calls["two_nodes.sh"] = [node | {"NODE_RANK": rank} for rank in range(2)]
    monkeypatch.delenv(LIMIT, raising=False)
    default = getattr(LaunchConfig(1, 1, 1), "shutdown_timeout", None)  # torch 2.11 has only 30 s
    assert default in (None, 30)
    calls |= {"torchrun with a limit": [{"TAKES": 3, LIMIT: 1}]} if default else {}
    for name, envs in calls.items():
        (tmp_path / name).mkdir()
        alone = ("torchrun", "--standalone", "--nproc-per-node=2", script)
        command = ("bash", LAUNCH / name) if name.endswith(".sh") else alone
        started[name] = [begin(*command, tmp_path / name, SCRIPT=script, **env) for env in envs]
    for name, processes in started.items():
        until(lambda: len(list((tmp_path / name).glob("ready.*"))) == 2)  # noqa: B023
        for process in processes:
            process.send_signal(signal.SIGTERM)
    for name, processes in started.items():
        statuses = {end(process)[0] for process in processes}
        assert statuses == {0 if name.endswith(".sh") else 1}, name
        saved = sorted(path.name for path in (tmp_path / name).glob("checkpoint.*"))
        both = ["checkpoint.0.of.2", "checkpoint.1.of.2"]
        assert saved == ([] if "limit" in name else both), name
    assert not processes_with(script)


def test_the_time_for_the_last_checkpoint_fits_what_the_cluster_gives():
    """Longer than torchrun's own 30 s, and shorter than the time until the cluster's SIGKILL."""
    cluster = r"(?:#SBATCH --signal=TERM@|terminationGracePeriodSeconds: )(\d+)"
    for file in ("slurm.sbatch", "kubernetes.yaml"):
        text = (LAUNCH / file).read_text()
        [ours] = re.findall(rf'{LIMIT}(?:="\$\{{{LIMIT}:-| #.*\n *value: ")(\d+)', text)
        [theirs] = re.findall(cluster, text)
        assert 30 < int(ours) < int(theirs), file


def test_torchrun_and_train_accept_the_command_of_the_pytorchjob(monkeypatch):
    """It has no field that the operator would refuse or overlook.

    By the reference of its kubeflow.org/v1 API, and its pull request 1840 for the PET_ variables.
    """
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -r requirements.txt")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    spec, replicas = job["spec"], job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert spec.keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert spec["runPolicy"].keys() == {"backoffLimit", "cleanPodPolicy"}
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "template", "restartPolicy"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        assert pod.keys() == {"terminationGracePeriodSeconds", "containers", "volumes"}
        [container] = pod["containers"]
        fields = "name image command args env resources volumeMounts"
        assert container.keys() == set(fields.split())
        assert container["name"] == "pytorch"
        mounts = [each["name"] for each in container["volumeMounts"]]
        assert mounts == [each["name"] for each in pod["volumes"]]
    program, *arguments = container["command"] + container["args"]
    assert program == "torchrun"
    # What the operator gives the worker; it takes texts only.
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", f"{job['metadata']['name']}-master-0")
    monkeypatch.setenv("PET_MASTER_PORT", "23456")
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("survive-master-0:23456", 1)
    assert args.training_script == "survive/train.py"
    stage = load_stage("survive")
    monkeypatch.setattr(sys, "argv", ["train.py", *args.training_script_args])
    assert stage.parse_args().resume == "auto"
    monkeypatch.setattr(sys, "argv", ["train.py", "--data_dir=/shared/data"])  # the control
    with pytest.raises(SystemExit):
        stage.parse_args()


# --- Two nodes: two network namespaces of this machine


@pytest.fixture(scope="module")
def namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root (and apt-get install -y iproute2)")
    if missing := [program for program in ("ip", "tc") if not shutil.which(program)]:
        pytest.skip(f"needs {missing[0]}: apt-get install -y iproute2")
    status, output = run(*TWO_NODES, "true")
    if status:
        pytest.skip(f"this machine allows no network namespaces: {output.strip()}")


def of(process: subprocess.Popen) -> set[str]:
    """The namespaces of this run of the script."""
    return set(re.findall(rf"ddp-{process.pid}-\d", run("ip", "netns", "list")[1]))


def test_two_nodes_here_trains_across_the_cable(namespaces, tmp_path):
    """The losses are those of two ranks, and all gradients have crossed the cable."""
    cable = 'echo "$(cat /sys/class/net/link0/statistics/tx_bytes) bytes from node $NODE_RANK"'
    shaped = "tc qdisc show dev link0 | head -n 1"
    train = f'bash 04_ddp_torchrun/launch/two_nodes.sh {" ".join(SHORT)} --run-dir "{tmp_path}"'
    env = {"RATE": "1gbit", "SCRIPT": "05_amp_syncbn/train.py"}
    process = begin(*TWO_NODES, "bash", "-c", f"{train}; {cable}; {shaped}", **env)
    status, output = end(process)
    assert status == 0, output
    assert output.count("epoch 1/1") == 1, "only rank 0 prints"
    assert is_the_run_of(2, tmp_path, "05", *SHORT)
    here = Run(tmp_path, [], "")
    momenta = here.checkpoint["optimizer"]["state"].values()
    gradients = 4 * sum(state["momentum_buffer"].numel() for state in momenta)
    for node in range(2):
        (sent,) = re.findall(rf"(\d+) bytes from node {node}", output)
        assert int(sent) > here.summary["steps"] * gradients
    assert output.count("tbf") == output.count("rate 1Gbit") == 2
    assert not of(process)


def test_two_nodes_here_removes_all_it_made_and_does_not_meet_another_run(namespaces, tmp_path):
    """Whatever ends it; what ran inside is gone too, even if it does not listen to SIGTERM.

    Each run has a cable of its own, with the same addresses on it.
    """
    stay = 'trap "" TERM; touch "$0/$NODE_RANK"; exec -a "$0" sleep 300'
    fail = 'until [ -e "$0/0" ]; do sleep 0.1; done; exit 3'
    which = f'if [ "$1 $NODE_RANK" = "error 1" ]; then {fail}; fi'
    script = f"ip -o -4 address show dev link0; {which}; {stay}"
    expected = {"error": 3, "SIGINT": 130, "SIGTERM": 143, "refused": 1}
    started, signals = {}, ("SIGINT", "SIGTERM")
    for how in expected:
        (tmp_path / how).mkdir()
        env = {"RATE": "much" if how == "refused" else "", "GRACE": 1}
        started[how] = begin(*TWO_NODES, "bash", "-c", script, tmp_path / how, how, **env)
    until(lambda: all(len(list((tmp_path / how).iterdir())) == 2 for how in signals))
    assert len(of(started["SIGINT"]) | of(started["SIGTERM"])) == 4, "the control: they made some"
    for how, process in started.items():
        if how in signals:
            process.send_signal(signal.Signals[how])
        status, output = end(process)
        assert (status, of(process)) == (expected[how], set()), output
        addresses = [] if how == "refused" else ["10.77.0.1", "10.77.0.2"]
        assert sorted(re.findall(r"inet (10\.77\.0\.\d)", output)) == addresses
    assert not processes_with(tmp_path)


def test_hooks_and_no_sync_send_as_much_less_as_they_promise():
    """By the counters of the cable; resnet18 has 11.2 million parameters. Run in test_bench.py."""
    sent = json.loads((ROOT / "results" / "04_links.json").read_text())["sent_bytes_a_step"]
    parts = {"compute only": 0, "DDP": 1, "per parameter": 1, "DDP, 4 with no_sync": 1 / 4}
    parts |= {"DDP, bf16 hook": 1 / 2, "DDP, PowerSGD hook": 1 / 250}
    full = {name: part * 11_181_642 * 4 for name, part in parts.items()}
    assert sent == pytest.approx(full, rel=0.05, abs=50_000)


# --- SLURM

CONF = """ClusterName=suite
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
AuthInfo=socket={0}/munge
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=20
MailProg=/bin/true
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool-%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/slurmd-%n.pid
NodeName=node[0-1] NodeAddr=10.77.0.[1-2] CPUs=16
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = """
exec > "$1/log.$NODE_RANK" 2>&1
mount --bind "$1/hosts" /etc/hosts # seen in this namespace only
hostname "node$NODE_RANK"
[ "$NODE_RANK" = 1 ] || slurmctld -D -c &
exec slurmd -D -N "node$NODE_RANK"
"""


@pytest.fixture(scope="module")
def slurm(namespaces, tmp_path_factory) -> Iterator[tuple[Path, Callable]]:
    """A cluster of two nodes in two network namespaces: its folder, and commands for its node 0."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
    if missing := [program for program in needed if not shutil.which(program)]:
        pytest.skip(f"needs SLURM, here is no {missing[0]}: apt-get install -y slurm-wlm munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
    (folder / "slurm.conf").write_text(CONF.format(folder))
    # slurmd looks for control groups though nothing here uses them: a namespace shows it none.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "node").write_text(NODE)
    munge = ["munged", "--force", "--foreground", f"--key-file={folder}/key"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")]
    node = ("unshare", "--uts", "bash", folder / "node", folder)
    env = {"SLURM_CONF": folder / "slurm.conf", "GRACE": 2}
    daemons = [begin(*munge, f"--socket={folder}/munge"), begin(*TWO_NODES, *node, **env)]

    def ask(*command: object) -> str:
        inside = ("ip", "netns", "exec", f"ddp-{daemons[1].pid}-0")
        return run(*inside, *command, **env)[1].strip()

    try:
        until(lambda: ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 30)
        yield folder, ask
    finally:
        ask("scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            end(daemon)
    assert not processes_with(folder), "a daemon is left"


def steps_of(folder: Path) -> int:
    """How many have been written down; none is missing."""
    there = (folder / "metrics.jsonl").exists()
    steps = [line["step"] for line in Run(folder, [], "").metrics] if there else []
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


ENDS_AFTER_A_RESTART = (
    """
import os, pathlib, sys
if "SLURM_RESTART_COUNT" in os.environ:
    done = pathlib.Path(sys.argv[-1], "metrics.jsonl").read_text().count("step")
    sys.argv.append(f"--max-steps={done + 10}")
"""
    + RUN
)


def test_slurm_runs_stops_and_restarts_both_job_scripts(slurm, tmp_path):
    """With torchrun and without. The losses are those that they must have.

    scancel sends SIGTERM first, and so does a preemption, which then restarts the job: it resumes
    from its checkpoint and ends as if it had not been stopped.
    """
    (cluster, ask), jobs, script = slurm, {}, tmp_path / "script.py"
    flags = ("--model=net-bn", "--device=cpu", "--epochs=9999")
    script.write_text(ENDS_AFTER_A_RESTART)
    for name, ranks_a_node in (("slurm.sbatch", 1), ("slurm_srun.sbatch", 2)):
        options = [f"--output={cluster}/%j.out"]
        options += [f"--export=ALL,SCRIPT={script},NPROC_PER_NODE={ranks_a_node}"]
        options += [f"--ntasks-per-node={ranks_a_node}"] * (name == "slurm_srun.sbatch")
        command = (LAUNCH / name, *flags, "--run-dir", tmp_path / name)
        jobs[name] = ask("sbatch", "--parsable", *options, *command)

    def output_as(state: str, name: str) -> str:
        until(lambda: f"JobState={state} " in ask("scontrol", "show", "job", jobs[name], "-o"))
        return (cluster / f"{jobs[name]}.out").read_text()

    for name, order in {"slurm.sbatch": "scontrol requeue", "slurm_srun.sbatch": "scancel"}.items():
        until(lambda: steps_of(tmp_path / name))  # noqa: B023
        ask(*order.split(), jobs[name])
    output, folder = output_as("CANCELLED", name), tmp_path / name
    assert output.count("global batch 120 = 4 × 30\n") == 1
    assert output.count("stops after step") == 4
    limit = f"--max-steps={steps_of(folder)}"
    assert is_the_run_of(4, folder, "survive", *flags, limit), "its checkpoint is of its last step"

    name, folder = "slurm.sbatch", tmp_path / "slurm.sbatch"
    output_as("PENDING", name)
    assert not processes_with(tmp_path), "a rank is left"
    step = steps_of(folder)
    ask("scontrol", "update", f"JobId={jobs[name]}", "StartTime=now")  # or in two minutes
    output = output_as("COMPLETED", name)
    assert output.count("stops after step") == 2
    assert f"checkpoint.pt: step {step}, saved by 2 ranks" in output
    assert is_the_run_of(2, folder, "survive", *flags, f"--max-steps={step + 10}")
