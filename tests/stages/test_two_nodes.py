"""The scripts of 04_ddp_torchrun/launch on two nodes, by a real torchrun and a real SLURM.

The nodes are network namespaces of this machine. What a machine cannot do is skipped, with the
reason. Where jobs are stopped or restarted, they are beyond/survive/train.py.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from local_ranks.run_files import Run
from shell_programs import (
    LAUNCH,
    MODEL,
    RUN_STAGE,
    SUM_OF_RANKS,
    assert_none_is_left_with,
    begin,
    end,
    is_the_run_of,
    run,
    until,
)

TWO_NODES = ("bash", LAUNCH / "two_nodes_here.sh")
ONE_EPOCH = ("--epochs=1", *MODEL)


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
    (tmp_path / "script.py").write_text(RUN_STAGE.format("05_amp_syncbn"))
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
GresTypes=gpu
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool-%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/slurmd-%n.pid
NodeName=node[0-1] NodeAddr=10.77.0.[1-2] CPUs=16 Gres=gpu:3
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
    devices = ("null", "zero", "full")  # for SLURM, a GPU is a device that is there
    gpus = "".join(f"Name=gpu File=/dev/{device}\n" for device in devices)
    (folder / "gres.conf").write_text(gpus)
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
    script.write_text(ENDS_AFTER_A_RESTART + RUN_STAGE.format("beyond/survive"))
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
    ask("scontrol", "update", f"JobId={jobs[name]}", "StartTime=now")  # else only in two minutes
    output = output_as("COMPLETED", name)
    assert output.count("stops after step") == 2
    assert f"checkpoint.pt: step {step}, saved by 2 ranks" in output
    assert is_the_run_of(2, folder, "survive", *flags, f"--max-steps={step + 10}")


ENDED = "JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT) "


def test_slurm_starts_a_stage_with_a_rank_for_each_gpu_of_one_node(slurm, tmp_path, monkeypatch):
    """The GPUs exist for SLURM alone, so the ranks use the CPU. The script asks for two."""
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    _, ask = slurm
    options = ("--parsable", "--gpus-per-node=3", f"--output={tmp_path}/output")
    command = (LAUNCH / "slurm_one_node.sbatch", *ONE_EPOCH, "--run-dir", tmp_path / "run")
    number = ask("sbatch", *options, *command)

    def job() -> str:
        return ask("scontrol", "show", "job", number, "-o")

    until(lambda: re.search(ENDED, job()))
    assert "JobState=COMPLETED " in job(), (tmp_path / "output").read_text()
    assert is_the_run_of(3, tmp_path / "run", "04", *ONE_EPOCH)


CPUS = """
import os, subprocess
if os.environ["SLURM_PROCID"] == "0":
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    subprocess.run(["scontrol", "show", "step", step])
"""


def test_srun_starts_a_script_for_torchrun_unchanged_and_each_rank_has_its_cpus(
    slurm, tmp_path, monkeypatch
):
    """The nodes are uneven. The control: a job that asks for no CPUs gets one for each task."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, ask = slurm
    options = ("--parsable", f"--output={tmp_path}/%x", "--ntasks=3", "--nodes=2")

    def run_to_its_end(*job: object) -> None:
        """sbatch --wait looks ever less often."""
        number = ask("sbatch", *options, *job)
        until(lambda: re.search(ENDED, ask("scontrol", "show", "job", number, "-o")))

    for name, text in (("train", SUM_OF_RANKS), ("cpus", CPUS)):
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
