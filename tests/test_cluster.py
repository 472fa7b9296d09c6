"""The scripts under 04_ddp_torchrun/launch, run: on loopback, by a real SLURM, on two nodes.

SLURM is started here, with files, sockets and ports of its own. The two nodes are network
namespaces of this machine. What a machine cannot do is skipped, with the reason.
Where jobs are stopped or restarted, the scripts start survive/train.py.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, Run, free_port, load_stage, train_once

LAUNCH = ROOT / "04_ddp_torchrun" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci" / "run"])
MODEL = ("--model=net-bn", "--batch-size=60", "--device=cpu")
SHORT = ("--epochs=1", *MODEL)
SECONDS = 120  # more than anything here takes

STAND_IN = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
def stop(*_):
    (folder / f"checkpoint.{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready.{rank}").touch()
time.sleep(60)
"""

DIES_ONCE = """
import os, pathlib, runpy, signal, sys, threading, time
checkpoint = pathlib.Path(sys.argv[-1], "checkpoint.pt")
def die():
    while not checkpoint.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    threading.Thread(target=die, daemon=True).start()
sys.argv[0] = "survive/train.py"
sys.path.insert(0, "survive")
runpy.run_path(sys.argv[0], run_name="__main__")
"""

SAVES_SLOWLY = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
def stop(*_):
    time.sleep(35)
    (folder / "checkpoint").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").touch()
time.sleep(100)
"""


def environment(**more: object) -> dict[str, str]:
    """As in a shell of the reader: torchrun and python are those of this suite."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        **{name: str(value) for name, value in more.items()},
    }


def begin(
    *command: object, where: Path = ROOT, out: Path | None = None, **env: object
) -> subprocess.Popen:
    """out: the file that what it prints is added to, if not `end` is to return it."""
    with out.open("a") if out else nullcontext(subprocess.PIPE) as stdout:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=where,
            env=environment(**env),
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Its status and all that it has printed."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(*command: object, where: Path = ROOT, **env: object) -> tuple[int, str]:
    return end(begin(*command, where=where, **env))


def until(happened: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return answer


def is_the_run_of(ranks: int, folder: Path, flags: tuple = SHORT, key: str = "04") -> bool:
    """The losses equal, to the bit, those of so many ranks that the suite has started itself."""
    here = Run(folder, [], "")
    assert (here.summary["world_size"], here.summary["local_batch"]) == (ranks, 60 // ranks)
    return torch.equal(here.losses, train_once(key, ranks, *flags, dtype=torch.float32).losses)


def processes_with(text: str) -> list[int]:
    """Those with this text in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def stand_in_for(program: str, folder: Path, *lines: str) -> str:
    """The PATH on which a program of this name runs these lines of shell."""
    (folder / program).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / program).chmod(0o755)
    return os.pathsep.join([str(folder), environment()["PATH"]])


def shellcheck(*paths: Path) -> tuple[int, str]:
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck: pip install -r requirements.txt")
    return run(program, *paths)


def test_shellcheck_finds_nothing_in_the_scripts(tmp_path):
    assert len(SCRIPTS) >= 7
    assert shellcheck(*SCRIPTS) == (0, "")
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/bin/sh\nls $1\n")
    status, output = shellcheck(bad)
    assert status == 1
    assert "SC2086" in output


def test_one_node_runs_from_any_folder(tmp_path):
    script = LAUNCH / "one_node.sh"
    status, output = run("bash", script, *SHORT, "--run-dir", tmp_path, where=tmp_path)
    assert status == 0, output
    assert "global batch 60 = 2 × 30" in output
    assert is_the_run_of(2, tmp_path)


def test_two_agents_on_loopback_are_two_nodes(tmp_path):
    """The way without root and without namespaces: two_nodes.sh twice, on one machine."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    command = ("bash", LAUNCH / "two_nodes.sh", *SHORT, "--run-dir", tmp_path)
    agents = [begin(*command, NODE_RANK=node, **address) for node in range(2)]
    (status, output), (other_status, other_output) = map(end, agents)
    assert (status, other_status) == (0, 0), output + other_output
    assert "global batch 60 = 2 × 30" in output
    assert "global batch" not in other_output, "only rank 0 prints"
    assert is_the_run_of(2, tmp_path)


def test_two_nodes_asks_for_what_has_no_default():
    status, output = run("bash", LAUNCH / "two_nodes.sh", NODE_RANK="0", MASTER_ADDR="")
    assert status == 2
    assert output.startswith("error: NODE_RANK and MASTER_ADDR have no default: ")
    assert output.count("\n") == 1


def test_elastic_heals_a_run_whose_rank_is_killed(tmp_path):
    """Rank 1 dies after the first checkpoint; the last weights equal those of a whole run."""
    flags = ("--epochs=3", *MODEL)
    script, healed, given_up = tmp_path / "dies_once.py", tmp_path / "healed", tmp_path / "control"
    script.write_text(DIES_ONCE)
    given_up.mkdir()
    (given_up / "checkpoint.pt").touch()  # there, rank 1 dies at once
    command = ("bash", LAUNCH / "elastic.sh", *flags, "--run-dir")
    both = [
        begin(*command, healed, SCRIPT=script),
        begin(*command, given_up, SCRIPT=script, MAX_RESTARTS=0),
    ]
    (status, output), (control, _) = map(end, both)
    assert status == 0, output
    assert control != 0, "without a restart the job has failed"
    whole = train_once("survive", 2, *flags, dtype=torch.float32).checkpoint["model"]
    ours = Run(healed, [], "").checkpoint["model"]
    assert all(torch.equal(ours[name], tensor) for name, tensor in whole.items())


def test_a_script_hands_sigterm_to_the_ranks_and_ends_with_their_status(tmp_path):
    """The control is torchrun alone: its ranks do the same, but it ends with status 1."""
    if not shutil.which("pkill"):
        pytest.skip("needs pkill: apt-get install -y procps")
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    one = {"NNODES": 1, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    alone = ("torchrun", "--standalone", "--nproc-per-node=2", script)
    started = {}
    for name in ("one_node.sh", "two_nodes.sh", "elastic.sh", "torchrun"):
        (tmp_path / name).mkdir()
        command = alone if name == "torchrun" else ("bash", LAUNCH / name)
        env = {"NPROC_PER_NODE": 2, "SCRIPT": script, **(one if name == "two_nodes.sh" else {})}
        started[name] = begin(*command, tmp_path / name, **env)
    status = {}
    for name, process in started.items():
        until(lambda folder=tmp_path / name: len(list(folder.glob("ready.*"))) == 2)
        process.send_signal(signal.SIGTERM)
        status[name], _ = end(process)
        assert len(list((tmp_path / name).glob("checkpoint.*"))) == 2, name
    assert status == {"one_node.sh": 0, "two_nodes.sh": 0, "elastic.sh": 0, "torchrun": 1}
    assert not processes_with(str(script))


# What the operator documents: the reference of its kubeflow.org/v1 API, and for nprocPerNode and
# the PET_ variables its pull request 1840. Of the pod, the fields that this file uses.
PYTORCHJOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"runPolicy", "elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs"},
    "runPolicy": {
        "activeDeadlineSeconds",
        "backoffLimit",
        "cleanPodPolicy",
        "schedulingPolicy",
        "suspend",
        "ttlSecondsAfterFinished",
    },
    "replica": {"replicas", "template", "restartPolicy"},
    "template": {"metadata", "spec"},
    "pod": {"terminationGracePeriodSeconds", "containers", "volumes"},
    "container": {"name", "image", "command", "args", "env", "resources", "volumeMounts"},
}


def faults(job: dict) -> list[str]:
    """What the operator would refuse or overlook in a PyTorchJob."""
    spec = job["spec"]
    found = (
        [] if (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") else ["kind"]
    )
    levels = {"": [job], "spec": [spec], "runPolicy": [spec["runPolicy"]]}
    replicas = spec["pytorchReplicaSpecs"]
    found += sorted(replicas.keys() - {"Master", "Worker"})
    if replicas.get("Master", {}).get("replicas") != 1:
        found.append("one Master, which is node 0")
    if not isinstance(spec["nprocPerNode"], str):
        found.append("nprocPerNode is text")
    levels["replica"] = list(replicas.values())
    levels["template"] = [replica["template"] for replica in replicas.values()]
    levels["pod"] = pods = [template["spec"] for template in levels["template"]]
    levels["container"] = [container for pod in pods for container in pod["containers"]]
    for replica in replicas.values():
        if replica["restartPolicy"] not in {"Always", "OnFailure", "Never", "ExitCode"}:
            found.append(f"restartPolicy {replica['restartPolicy']}")
    for pod in pods:
        if [container["name"] for container in pod["containers"]] != ["pytorch"]:
            found.append("a container of the name pytorch")
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        found += sorted(volumes ^ mounts)
    for level, objects in levels.items():
        for each in objects:
            found += sorted(each.keys() - PYTORCHJOB[level])
    return found


def test_the_pytorchjob_has_the_fields_of_the_operator():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -r requirements.txt")
    text = (LAUNCH / "kubernetes.yaml").read_text()
    assert faults(yaml.safe_load(text)) == []
    for right, wrong in {
        "nprocPerNode:": "nProcPerNode:",  # the old place of another spelling
        'nprocPerNode: "2"': "nprocPerNode: 2",
        "name: pytorch ": "name: trainer ",
        "restartPolicy: OnFailure": "restartPolicy: Sometimes",
        "Worker:": "Workers:",
        "kubeflow.org/v1": "kubeflow.org/v2",
    }.items():
        assert right in text
        job = yaml.safe_load(text.replace(right, wrong))
        if "nprocPerNode" not in job["spec"]:
            job["spec"]["nprocPerNode"] = "1"  # what the operator fills in
        assert faults(job), wrong


def test_torchrun_and_train_accept_the_command_of_the_pytorchjob(monkeypatch):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -r requirements.txt")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    program, *arguments = container["command"] + container["args"]
    assert program == "torchrun"
    for name, value in {  # what the operator gives the worker
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_NODE_RANK": 1,
        "PET_MASTER_ADDR": f"{job['metadata']['name']}-master-0",
        "PET_MASTER_PORT": 23456,
    }.items():
        monkeypatch.setenv(name, str(value))
    from torch.distributed.run import config_from_args, parse_args

    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert config.rdzv_endpoint == "survive-master-0:23456"
    assert config.rdzv_configs["rank"] == 1
    assert args.training_script == "survive/train.py"
    stage = load_stage("survive")
    monkeypatch.setattr(sys, "argv", ["train.py", *args.training_script_args])
    assert stage.parse_args().resume == "auto"
    monkeypatch.setattr(sys, "argv", ["train.py", "--data_dir=/shared/data"])  # the control
    with pytest.raises(SystemExit):
        stage.parse_args()


# --- The time that torchrun gives its ranks after SIGTERM


def set_in(file: str) -> int:
    """The seconds to which a file of the launch folder sets torchrun's limit."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    found = re.search(
        rf'{name}(?:="\$\{{{name}:-| #.*\n *value: ")(\d+)', (LAUNCH / file).read_text()
    )
    assert found, file
    return int(found[1])


def test_the_time_for_the_last_checkpoint_fits_what_the_cluster_gives():
    """Longer than torchrun's own 30 s, and shorter than the time until the cluster's SIGKILL."""
    for file, pattern in {
        "slurm.sbatch": r"#SBATCH --signal=TERM@(\d+)",
        "kubernetes.yaml": r"terminationGracePeriodSeconds: (\d+)",
    }.items():
        found = re.search(pattern, (LAUNCH / file).read_text())
        assert found, file
        assert 30 < set_in(file) < int(found[1]), file


@pytest.fixture(scope="module", autouse=True)
def slow_rank(tmp_path_factory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """slurm.sbatch with a rank that needs 35 s for its checkpoint, after SIGTERM to torchrun.

    It starts before the first test of this file and is looked at in the last one.
    """
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.py").write_text(SAVES_SLOWLY)
    stand_in_for("scontrol", folder, "echo localhost")
    path = stand_in_for("srun", folder, f'echo $$ > "{folder}/pid"', "shift", 'exec "$@"')
    env = {"PATH": path, "SLURM_JOB_ID": 1, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": 1}
    env |= {"SCRIPT": folder / "slow.py", "NPROC_PER_NODE": 1, "MASTER_PORT": free_port()}
    process = begin("bash", LAUNCH / "slurm.sbatch", folder, **env)
    until((folder / "ready").exists)
    (folder / "asked").touch()
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)  # torchrun's
    yield process, folder
    end(process)


def without_namespaces() -> str:
    """Why no network namespace can be made here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root (and apt-get install -y iproute2)"
    if missing := [program for program in ("ip", "tc") if not shutil.which(program)]:
        return f"needs {missing[0]}: apt-get install -y iproute2"
    name = f"ddp-test-{os.getpid()}"
    status, output = run("ip", "netns", "add", name)
    if status == 0:
        run("ip", "netns", "del", name)
    return f"this machine allows no network namespaces: {output.strip()}" if status else ""


@pytest.fixture(scope="module")
def namespaces() -> None:
    if reason := without_namespaces():
        pytest.skip(reason)


TWO_NODES = ("bash", LAUNCH / "two_nodes_here.sh")


NODE = """
mount --bind "$1/hosts" /etc/hosts # seen in this namespace only
hostname "node$NODE_RANK"
[ "$NODE_RANK" = 1 ] || slurmctld -D -c &
exec slurmd -D -N "node$NODE_RANK"
"""


def without_slurm() -> str:
    """Why no SLURM can be started here, or nothing."""
    if os.geteuid() != 0:
        return "a SLURM of the suite's own needs root (and apt-get install -y slurm-wlm munge)"
    needed = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
    if missing := [program for program in needed if not shutil.which(program)]:
        return f"needs SLURM, here is no {missing[0]}: apt-get install -y slurm-wlm munge"
    return ""


class Slurm:
    """A cluster with daemons, key, ports and files of its own.

    Two nodes in two network namespaces, each with a host name of its own, if there can be some.
    Else one node on loopback. The daemons run until `stop`.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        host = "node0" if nodes == 2 else socket.gethostname().split(".")[0]
        here = "10.77.0.1" if nodes == 2 else "127.0.0.1"
        names = f"node[0-{nodes - 1}]" if nodes == 2 else f"localhost NodeHostname={host}"
        self.folder, self.nodes, self.inside, self.daemons = folder, nodes, (), []
        (folder / "state").mkdir()
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
        (folder / "slurm.conf").write_text(
            f"""ClusterName=suite
SlurmctldHost={host}({here})
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName={names} NodeAddr={here.replace(".1", ".[1-2]") if nodes == 2 else here} CPUs=16
PartitionName=all Nodes=ALL Default=YES State=UP
"""
        )
        # slurmd looks for control groups though nothing here uses them: a namespace shows it none.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def begin(self) -> None:
        folder = self.folder
        munge = [
            f"--{name}={folder}/munge.{name}" for name in ("log-file", "pid-file", "seed-file")
        ]
        munge += [f"--key-file={folder}/key", f"--socket={folder}/munge"]
        self.daemons += [self.start("munged", "--force", "--foreground", *munge)]
        if self.nodes == 1:
            self.daemons += [self.start("slurmctld", "-D", "-c")]
            self.daemons += [self.start("slurmd", "-D", "-N", "localhost")]
        else:
            (folder / "node").write_text(NODE)
            node = ("unshare", "--uts", "bash", folder / "node", folder)
            self.daemons += [self.start(*TWO_NODES, *node, GRACE=2)]
            self.inside = ("ip", "netns", "exec", f"ddp-{self.daemons[-1].pid}-0")
        until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == f"idle {self.nodes}", 30)

    def start(self, *command: object, **env: object) -> subprocess.Popen:
        """A daemon, on its own, until `stop`."""
        return begin(
            *command, SLURM_CONF=self.folder / "slurm.conf", out=self.folder / "log", **env
        )

    def ask(self, *command: object) -> str:
        return run(*self.inside, *command, SLURM_CONF=self.folder / "slurm.conf")[1].strip()

    def submit(self, script: str, *flags: object, ranks_a_node: int) -> str:
        """The number of the job. The scripts ask for two nodes."""
        options = [f"--output={self.folder}/%j.out", f"--nodes={self.nodes}"]
        options += [f"--export=ALL,NPROC_PER_NODE={ranks_a_node}"]
        if script == "slurm_srun.sbatch":
            options += [f"--ntasks-per-node={ranks_a_node}"]
        answer = self.ask("sbatch", *options, LAUNCH / script, *flags)
        assert answer.startswith("Submitted batch job "), answer
        return answer.split()[-1]

    def state(self, job: str) -> str:
        match = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job, "-o"))
        return match[1] if match else ""

    def output(self, job: str) -> str:
        out = self.folder / f"{job}.out"
        return out.read_text() if out.exists() else ""

    def stop(self) -> None:
        try:
            self.ask("scancel", "--user=root")
            until(lambda: not self.ask("squeue", "-h"), 30)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
                daemon.wait(20)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    if reason := without_slurm():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    cluster = Slurm(folder, nodes=1 if without_namespaces() else 2)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.stop()
    assert not processes_with(str(folder)), "a daemon is left"


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def test_slurm_runs_both_job_scripts(slurm, tmp_path):
    """With torchrun and without: two ranks a node, the losses that they must have."""
    flags, ranks = ("--epochs=2", *MODEL), 2 * slurm.nodes
    jobs = {}
    for script in ("slurm.sbatch", "slurm_srun.sbatch"):
        run_dir = ("--run-dir", tmp_path / script)
        jobs[script] = slurm.submit(script, *flags, *run_dir, ranks_a_node=2)
    for script, job in jobs.items():
        until(lambda job=job: slurm.state(job) in ENDED)
        assert slurm.state(job) == "COMPLETED", slurm.output(job)
        cut = f"global batch 60 = {ranks} × {60 // ranks}\n"
        assert slurm.output(job).count(cut) == 1
        assert f"NumNodes={slurm.nodes} " in slurm.ask("scontrol", "show", "job", job, "-o")
        assert len(Run(tmp_path / script, [], "").summary["peak_memory_bytes"]) == ranks
        assert is_the_run_of(ranks, tmp_path / script, flags, "survive")
        assert Run(tmp_path / script, [], "").summary["test_accuracy"] > 0.8


def steps_of(folder: Path) -> list[int]:
    here = folder / "metrics.jsonl"
    return [line["step"] for line in Run(folder, [], "").metrics] if here.exists() else []


def stopped_at(folder: Path) -> int:
    """The step of the checkpoint. It is the last one in the metrics, and none is missing there."""
    steps = steps_of(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert not processes_with(str(folder)), "no rank is left"
    assert Run(folder, [], "").checkpoint["step"] == steps[-1]
    return steps[-1]


def test_slurm_ends_a_job_with_a_checkpoint_and_starts_it_again_from_there(slurm, tmp_path):
    """scancel sends SIGTERM first, and so does a preemption, which then restarts the job."""
    flags, preempt, jobs = ("--epochs=9999", *MODEL, "--run-dir"), ["scontrol", "requeue"], {}
    for script in ("slurm.sbatch", "slurm_srun.sbatch"):
        jobs[script] = slurm.submit(script, *flags, tmp_path / script, ranks_a_node=1)
    for script, job in jobs.items():
        until(lambda folder=tmp_path / script: steps_of(folder))
        slurm.ask(*preempt if script == "slurm.sbatch" else ["scancel"], job)
    cancelled, preempted = jobs["slurm_srun.sbatch"], jobs["slurm.sbatch"]
    until(lambda: slurm.state(cancelled) == "CANCELLED")
    assert stopped_at(tmp_path / "slurm_srun.sbatch") > 0

    folder = tmp_path / "slurm.sbatch"
    until(lambda: slurm.state(preempted) == "PENDING")
    step = stopped_at(folder)
    slurm.ask("scontrol", "update", f"JobId={preempted}", "StartTime=now")  # or in two minutes
    until(lambda: steps_of(folder)[-1] > step)
    slurm.ask("scancel", preempted)
    until(lambda: slurm.state(preempted) == "CANCELLED")
    assert stopped_at(folder) > step
    for job, times in {cancelled: 1, preempted: 2}.items():
        assert slurm.output(job).count("stops after step") == times * slurm.nodes


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_srun.sbatch"])
def test_a_job_from_another_folder_says_where_to_submit_it(script, tmp_path):
    """No SLURM is needed: the script looks before it starts anything."""
    path = stand_in_for("scontrol", tmp_path, "echo node-7", "echo node-8")
    env = {"PATH": path, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-[7-8]"}
    status, output = run("bash", LAUNCH / script, where=tmp_path, **env)
    assert status == 2
    assert output.startswith("error: no survive/train.py in ")
    assert output.count("\n") == 1


def of(process: subprocess.Popen) -> set[str]:
    """The namespaces of this run of the script."""
    names = [line.split()[0] for line in run("ip", "netns", "list")[1].splitlines()]
    return {name for name in names if name.startswith(f"ddp-{process.pid}-")}


def test_two_nodes_here_trains_across_the_cable(namespaces, tmp_path):
    """The losses are those of two ranks, and all gradients have crossed the cable."""
    cable = 'echo "$(cat /sys/class/net/link0/statistics/tx_bytes) bytes from node $NODE_RANK"'
    shaped = "tc qdisc show dev link0 | head -n 1"
    train = f'bash 04_ddp_torchrun/launch/two_nodes.sh {" ".join(SHORT)} --run-dir "{tmp_path}"'
    process = begin(*TWO_NODES, "bash", "-c", f"{train}; {cable}; {shaped}", RATE="1gbit")
    status, output = end(process)
    assert status == 0, output
    assert is_the_run_of(2, tmp_path)
    here = Run(tmp_path, [], "")
    gradients = 4 * sum(
        tensor.numel()
        for name, tensor in here.checkpoint["model"].items()
        if "running" not in name and "num_batches" not in name
    )
    for node in range(2):
        (sent,) = re.findall(rf"(\d+) bytes from node {node}", output)
        assert int(sent) > here.summary["steps"] * gradients
    assert output.count("tbf") == output.count("rate 1Gbit") == 2
    assert not of(process)


@pytest.mark.parametrize(
    ("how", "expected"), [("error", 3), ("SIGINT", 130), ("SIGTERM", 143), ("refused RATE", 1)]
)
def test_two_nodes_here_removes_all_it_made(namespaces, tmp_path, how, expected):
    """Whatever ends it; what ran inside is gone too, even if it does not listen to SIGTERM."""
    stay = 'trap "" TERM; touch "$0/$NODE_RANK"; exec -a "$0" sleep 300'
    fail = 'until [ -e "$0/0" ]; do sleep 0.1; done; exit 3'
    script = f'if [ "$NODE_RANK" = 1 ] && [ {how} = error ]; then {fail}; fi; {stay}'
    rate = "much" if how == "refused RATE" else ""
    process = begin(*TWO_NODES, "bash", "-c", script, tmp_path, RATE=rate, GRACE=1)
    if how.startswith("SIG"):
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert len(of(process)) == 2, "the control: it had made something"
        process.send_signal(signal.Signals[how])
    status, output = end(process)
    assert status == expected, output
    assert not of(process)
    assert not processes_with(str(tmp_path))


def test_two_runs_of_two_nodes_here_do_not_meet(namespaces, tmp_path):
    """Each has a cable of its own, with the same addresses on it."""
    wait = 'touch "$0/$1.$NODE_RANK"; until [ -e "$0/go" ]; do sleep 0.1; done'
    show = "ip -o -4 address show dev link0"
    script = f"{wait}; {show}"
    both = [begin(*TWO_NODES, "bash", "-c", script, tmp_path, name) for name in ("a", "b")]
    until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert len(of(both[0]) | of(both[1])) == 4
    (tmp_path / "go").touch()
    for status, output in map(end, both):
        assert status == 0, output
        assert sorted(re.findall(r"10\.77\.0\.\d", output)) == ["10.77.0.1", "10.77.0.2"]


def test_two_nodes_here_says_that_it_needs_root(tmp_path):
    status, output = run(*TWO_NODES, PATH=stand_in_for("id", tmp_path, "echo 1000"))
    assert status == 2
    assert output.startswith("error: network namespaces need root")
    assert output.count("\n") == 1


def test_hooks_and_no_sync_send_as_much_less_as_they_promise(namespaces):
    """benchmarks/links.py reads the counters of the cable; resnet18 has 11.2 million parameters."""
    status, output = run(sys.executable, "benchmarks/links.py", "--quick")
    assert status == 0, output
    table = output.partition("MB that each node sends in a step\n")[2]
    sent = dict(re.findall(r"^(.+?) +([\d.]+)$", table, re.M))
    full = 11_181_642 * 4 / 1e6
    for variant, part in {
        "compute only": 0,
        "DDP": 1,
        "per parameter": 1,
        "DDP, 4 with no_sync": 1 / 4,
        "DDP, bf16 hook": 1 / 2,
        "DDP, PowerSGD hook": 1 / 250,
    }.items():
        assert float(sent[variant]) == pytest.approx(part * full, rel=0.05, abs=0.05), variant


def test_a_rank_may_take_longer_than_the_30_seconds_of_torchrun(slow_rank, monkeypatch):
    """For real, with the setting of slurm.sbatch; the control is the limit that torch has set."""
    from torch.distributed.launcher.api import LaunchConfig

    if not hasattr(LaunchConfig, "shutdown_timeout"):
        pytest.skip("this torch always gives the ranks 30 s, as 2.11 does")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30, "less than the rank needs"
    process, folder = slow_rank
    _, output = end(process)
    assert (folder / "checkpoint").exists(), output
    seconds = (folder / "checkpoint").stat().st_mtime - (folder / "asked").stat().st_mtime
    assert 34 < seconds < set_in("slurm.sbatch")
