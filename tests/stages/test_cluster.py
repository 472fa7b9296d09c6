"""The scripts under 04_ddp_torchrun/launch, run: by a real torchrun and a real SLURM, on two nodes.

Both are started here; the nodes are network namespaces of this machine. What a machine cannot do
is skipped, with the reason. Where jobs are stopped or restarted, they are beyond/survive/train.py.
"""

import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.run import config_from_args, parse_args

from common.chapters import ROOT
from helpers.machine import free_port
from helpers.train_stage import Run, load_stage, same_run, train_once

LAUNCH = ROOT / "04_ddp_torchrun" / "launch"
TWO_NODES = ("bash", LAUNCH / "two_nodes_here.sh")
MODEL = ("--model=net-bn", "--batch-size=60", "--device=cpu")
ONE_EPOCH = ("--epochs=1", *MODEL)
BIN = Path(sys.executable).parent
SECONDS = 120  # more than anything here takes


def environment(**env: object) -> dict[str, str]:
    """As in a shell of the reader: torchrun and python are those of this suite."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": ROOT, **env}
    return os.environ | {name: str(value) for name, value in env.items()}


def heed_sigint() -> None:
    """In a suite that runs in the background, SIGINT is ignored, and bash could not trap it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin(*command: object, where: Path = ROOT, **env: object) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes |= {"cwd": where, "env": environment(**env), "start_new_session": True}
    pipes["preexec_fn"] = heed_sigint
    return subprocess.Popen([str(part) for part in command], **pipes)


def end(process: subprocess.Popen) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(*command: object, **more) -> tuple[int, str]:
    return end(begin(*command, **more))


def until(happened) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_the_run_of(ranks: int, folder: Path, key: str, *flags: str) -> bool:
    return same_run(Run(folder, [], ""), train_once(key, ranks, *flags, dtype=torch.float32))


def processes_with(text: object) -> dict[int, str]:
    """The processes of this machine with this text in their command, and these commands."""
    found = subprocess.run(["pgrep", "-fa", re.escape(str(text))], capture_output=True, text=True)
    lines = (line.partition(" ") for line in found.stdout.splitlines())
    return {int(pid): command for pid, _, command in lines}


def assert_none_is_left_with(text: object) -> None:
    """A process that was killed takes a moment to end, on a busy machine."""
    deadline = time.monotonic() + 10
    while left := processes_with(text):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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
    ("two_nodes_here.sh", {}, "network namespaces need root"),
]


@pytest.mark.parametrize(("script", "env", "error"), REFUSALS)
def test_a_script_refuses_in_one_line_what_it_cannot_do(script, env, error, tmp_path):
    path = path_with(tmp_path, scontrol="echo node-7", id="echo 1000")
    status, output = run("bash", LAUNCH / script, where=tmp_path, PATH=path, **env)
    assert (status, output.count("\n")) == (2, 1)
    assert output.startswith(f"error: {error}")


def test_torchrun_and_train_accept_the_command_of_the_pytorchjob(monkeypatch):
    """What the operator tells the worker: pull request 1840 of Kubeflow's training operator."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -r requirements.txt")
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


RUN = """
import runpy, sys, torch
from unittest.mock import MagicMock
torch._dynamo = MagicMock(disable=lambda call, *_, **__: call)
sys.modules.update({{name: torch._dynamo for name in ("torch._dynamo", "torch._dynamo.utils")}})
sys.argv[0] = "{0}/train.py"
sys.path.insert(0, "{0}")
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # a stage, whose optimizer would import torch.compile, for seconds
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
    script.write_text(DIES_ONCE + RUN.format("beyond/survive"))
    command = ("bash", LAUNCH / "elastic.sh", *flags, "--run-dir", folder)
    status, output = run(*command, SCRIPT=script)
    assert status == 0, output
    assert "exitcode: -9" in output
    assert "saved by 2 ranks" in output
    assert is_the_run_of(2, folder, "survive", *flags)


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


def test_a_script_hands_sigterm_to_the_ranks_and_ends_with_their_status(tmp_path):
    """The control is torchrun alone: its ranks do the same, but it ends with status 1."""
    script, started = tmp_path / "ends.py", {}
    script.write_text(ENDS_AT_SIGTERM)
    scripts = ("one_node.sh", "elastic.sh", "two_nodes.sh")
    for name in (*scripts, "torchrun"):
        (tmp_path / name).mkdir()
        command = ("bash", LAUNCH / name, tmp_path / name)
        nodes = [{}]
        if name == "torchrun":
            command = (name, "--standalone", "--nproc-per-node=2", script, tmp_path / name)
        if name == "two_nodes.sh":
            node = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NPROC_PER_NODE": 1}
            nodes = [node | {"NODE_RANK": rank} for rank in range(2)]
        started[name] = [begin(*command, SCRIPT=script, **node) for node in nodes]
    for name, processes in started.items():
        until(lambda: len(list((tmp_path / name).glob("ready.*"))) == 2)  # noqa: B023
        for process in processes:
            process.send_signal(signal.SIGTERM)
    for name, processes in started.items():
        statuses = {end(process)[0] for process in processes}
        assert statuses == {0 if name in scripts else 1}, name
        saved = sorted(path.name for path in (tmp_path / name).glob("checkpoint.*"))
        assert saved == ["checkpoint.0.of.2", "checkpoint.1.of.2"], name
    assert not processes_with(script)


RANK = "trap 'kill $!; exit 0' TERM; sleep 300 & touch $READY; wait"  # as if it had saved
IN_PLACE_OF_TORCHRUN = {"no ranks yet": ("touch $READY; exec sleep 300", 143)}
IN_PLACE_OF_TORCHRUN["a rank"] = ("rank & wait $!", 0)


@pytest.mark.parametrize("case", IN_PLACE_OF_TORCHRUN)
def test_without_pgrep_and_pkill_sigterm_reaches_the_ranks_or_else_torchrun(case, tmp_path):
    torchrun, expected = IN_PLACE_OF_TORCHRUN[case]
    missing = "exit 127"
    path = path_with(tmp_path, torchrun=torchrun, rank=RANK, pgrep=missing, pkill=missing)
    ready = tmp_path / "ready"
    process = begin("bash", LAUNCH / "one_node.sh", PATH=path, READY=ready)
    until(ready.exists)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (expected, "")


def test_one_node_trains_on_a_machine_that_cannot_resolve_its_own_name(tmp_path):
    """The control: the name cannot be resolved there."""
    own_name = ("unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid; exec "$@"', "sh")
    status, output = run(*own_name, "true")
    if status:
        pytest.skip(f"needs root, for a host name of its own: {output.strip()}")
    ask = "import socket; socket.getaddrinfo(socket.gethostname(), 0)"
    assert "gaierror" in run(*own_name, sys.executable, "-c", ask)[1]
    (tmp_path / "script.py").write_text(FOR_TORCHRUN)
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


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


IGNORES_SIGNALS = """
import os, pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[-1], "rank " + os.environ["RANK"]).touch()
time.sleep(300)
"""
MOMENTS = {  # when Ctrl-C comes: the script, and the node that it is
    "torchrun still imports torch": ("one_node.sh", {}),
    "the ranks run, and ignore signals": ("one_node.sh", {}),
    "node 0 waits for node 1": ("two_nodes.sh", {"NODE_RANK": 0}),
    "node 1 waits for node 0": ("two_nodes.sh", {"NODE_RANK": 1}),
    "it waits for a second node": ("elastic.sh", {"NNODES": 2}),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_script_and_its_ranks_when(moment, tmp_path):
    """A real one: the terminal sends SIGINT to all processes in its foreground."""
    (name, node), port, output = MOMENTS[moment], free_port(), tmp_path / "output"
    script = tmp_path / "script.py"
    script.write_text(IGNORES_SIGNALS)
    env = {"SCRIPT": script, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **node}
    env["RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    node_0 = socket.create_server(("127.0.0.1", port)) if "waits for node 0" in moment else None
    process, keyboard = begin_at_a_terminal(output, "bash", LAUNCH / name, tmp_path, **env)
    try:
        if node_0:  # it takes the call, and says nothing
            node_0.settimeout(SECONDS)
            _connection = node_0.accept()
        elif moment == "torchrun still imports torch":
            until(lambda: processes_with(script))
        elif moment == "the ranks run, and ignore signals":
            until(lambda: len(list(tmp_path.glob("rank *"))) == 2)
        else:
            until(lambda: listens(port))
        assert process.poll() is None, output.read_text()
        os.write(keyboard, b"\x03")
        assert process.wait(SECONDS) == 130, output.read_text()
        until(lambda: not processes_with(script))
    finally:
        for pid in processes_with(script):
            os.kill(pid, signal.SIGKILL)


# Two nodes, which are network namespaces of this machine


@pytest.fixture(scope="module")
def namespaces() -> None:
    status, output = run(*TWO_NODES, "true", RATE="1gbit")
    if status:
        pytest.skip(f"needs root and apt-get install -y iproute2: {output.strip()}")


def namespaces_of(process: subprocess.Popen) -> set[str]:
    return set(re.findall(rf"ddp-{process.pid}-\d", run("ip", "netns", "list")[1]))


def test_two_nodes_here_trains_across_the_cable(namespaces, tmp_path):
    cable = 'echo "$(cat /sys/class/net/link0/statistics/tx_bytes) bytes from node $NODE_RANK"'
    train = f'bash 04_ddp_torchrun/launch/two_nodes.sh {" ".join(ONE_EPOCH)} --run-dir "{tmp_path}"'
    command = (*TWO_NODES, "bash", "-c", f"{train}; {cable}")
    (tmp_path / "script.py").write_text(RUN.format("05_amp_syncbn"))
    status, output = run(*command, SCRIPT=tmp_path / "script.py")
    assert status == 0, output
    assert output.count("epoch 1/1") == 1, "only rank 0 prints"
    assert is_the_run_of(2, tmp_path, "05", *ONE_EPOCH)
    here = Run(tmp_path, [], "")
    momenta = here.checkpoint["optimizer"]["state"].values()
    gradients = 4 * sum(state["momentum_buffer"].numel() for state in momenta)
    for node in range(2):
        (sent,) = re.findall(rf"(\d+) bytes from node {node}", output)
        assert int(sent) > here.summary["steps"] * gradients


def test_two_nodes_here_removes_all_it_made_and_does_not_meet_another_run(namespaces, tmp_path):
    stay = 'trap "" TERM; touch "$0/$NODE_RANK"; exec -a "$0" sleep 300'
    fail = 'until [ -e "$0/0" ]; do sleep 0.1; done; exit 3'
    script = f'if [ "$1 $NODE_RANK" = "error 1" ]; then {fail}; fi; {stay}'
    expected = {"error": 3, "SIGINT": 130, "SIGTERM": 143, "refused": 1}
    started, signals = {}, ("SIGINT", "SIGTERM")
    for how in expected:
        (tmp_path / how).mkdir()
        env = {"RATE": "much" if how == "refused" else "", "GRACE": 1}
        started[how] = begin(*TWO_NODES, "bash", "-c", script, tmp_path / how, how, **env)
    until(lambda: all(len(list((tmp_path / how).iterdir())) == 2 for how in signals))
    assert len(namespaces_of(started["SIGINT"]) | namespaces_of(started["SIGTERM"])) == 4, (
        "the control: they made some"
    )
    for how, process in started.items():
        if how in signals:
            process.send_signal(signal.Signals[how])
        status, output = end(process)
        assert (status, namespaces_of(process)) == (expected[how], set()), output
    assert_none_is_left_with(tmp_path)


# A SLURM of two such nodes


CONF = """ClusterName=suite
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
AuthInfo=socket={0}/munge
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
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
def slurm(namespaces, tmp_path_factory):
    """A cluster of two nodes in two network namespaces: its folder, and commands for its node 0."""
    if not shutil.which("slurmctld"):
        pytest.skip("needs SLURM: apt-get install -y slurm-wlm munge")
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
        until(lambda: ask("sinfo", "-h", "-o", "%T %D") == "idle 2")
        yield folder, ask
    finally:
        ask("scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            end(daemon)
    assert_none_is_left_with(folder)


def steps_of(folder: Path) -> int:
    there = (folder / "metrics.jsonl").exists()
    steps = [line["step"] for line in Run(folder, [], "").metrics] if there else []
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


ENDS_AFTER_A_RESTART = """
import os, pathlib, sys
if "SLURM_RESTART_COUNT" in os.environ:
    done = pathlib.Path(sys.argv[-1], "metrics.jsonl").read_text().count("step")
    sys.argv += ["--max-steps", str(done + 10)]
"""


def test_slurm_runs_stops_and_restarts_both_job_scripts(slurm, tmp_path):
    """scancel sends SIGTERM, and so does a preemption, which then restarts the job: it resumes and
    ends as if it had not been stopped."""
    (cluster, ask), jobs, script = slurm, {}, tmp_path / "script.py"
    flags = ("--model=net-bn", "--device=cpu", "--epochs=9999")
    script.write_text(ENDS_AFTER_A_RESTART + RUN.format("beyond/survive"))
    for name, ranks in (("slurm_srun.sbatch", ["--ntasks=3"]), ("slurm.sbatch", [])):
        env = f"ALL,SCRIPT={script},NPROC_PER_NODE=1,OMP_NUM_THREADS=1"
        options = [f"--output={cluster}/%j.out", f"--export={env}"]
        command = (LAUNCH / name, *flags, "--resume=auto", "--run-dir", tmp_path / name)
        jobs[name] = ask("sbatch", "--parsable", *options, *ranks, *command)

    def output_as(state: str, name: str) -> str:
        until(lambda: f"JobState={state} " in ask("scontrol", "show", "job", jobs[name], "-o"))
        return (cluster / f"{jobs[name]}.out").read_text()

    for name, order in (
        ("slurm_srun.sbatch", ["scancel"]),
        ("slurm.sbatch", ["scontrol", "requeue"]),
    ):
        until(lambda: steps_of(tmp_path / name))  # noqa: B023
        ask(*order, jobs[name])
    assert output_as("CANCELLED", "slurm_srun.sbatch").count("stops after step") == 3
    limit = f"--max-steps={steps_of(tmp_path / 'slurm_srun.sbatch')}"
    assert is_the_run_of(3, tmp_path / "slurm_srun.sbatch", "survive", *flags, limit)

    name, folder = "slurm.sbatch", tmp_path / "slurm.sbatch"
    output_as("PENDING", name)
    assert_none_is_left_with(tmp_path)
    step = steps_of(folder)
    ask("scontrol", "update", f"JobId={jobs[name]}", "StartTime=now")  # or in two minutes
    output = output_as("COMPLETED", name)
    assert output.count("stops after step") == 2
    assert f"checkpoint.pt: step {step}, saved by 2 ranks" in output
    assert is_the_run_of(2, folder, "survive", *flags, f"--max-steps={step + 10}")


FOR_TORCHRUN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
of = os.environ["LOCAL_WORLD_SIZE"], dist.get_world_size()
print(local_rank, "of", *of, "sum", total.item(), "threads", torch.get_num_threads())
"""


CPUS = """
import os, subprocess
if os.environ["SLURM_PROCID"] == "0":
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    subprocess.run(["scontrol", "show", "step", step])
"""
ENDED = "JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT) "


def test_srun_starts_a_script_for_torchrun_unchanged_and_each_rank_has_its_cpus(
    slurm, tmp_path, monkeypatch
):
    """On uneven nodes. The control: a job that asks for no CPUs gets one for each of its tasks."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, ask = slurm
    options = ("--parsable", f"--output={tmp_path}/%x", "--ntasks=3", "--nodes=2")

    def run_to_its_end(*job: object) -> None:
        """sbatch --wait looks ever less often."""
        number = ask("sbatch", *options, *job)
        until(lambda: re.search(ENDED, ask("scontrol", "show", "job", number, "-o")))

    for name, text in (("train", FOR_TORCHRUN), ("cpus", CPUS)):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        export = f"--export=ALL,SCRIPT={script}"
        run_to_its_end(f"--job-name={name}", export, LAUNCH / "slurm_srun.sbatch")
    run_to_its_end("--job-name=control", f"--wrap=srun python {script}")
    sums = [line for line in (tmp_path / "train").read_text().splitlines() if "sum" in line]
    rest = "3 sum 111.0 threads 2"
    assert sorted(sums) == [f"0 of 1 {rest}", f"0 of 2 {rest}", f"1 of 2 {rest}"]
    assert " CPUs=6 " in (tmp_path / "cpus").read_text()
    assert " CPUs=3 " in (tmp_path / "control").read_text()
