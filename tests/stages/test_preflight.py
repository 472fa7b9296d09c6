"""preflight.py names the right cause on every rank, and ends by itself.

Two hosts are two network namespaces with host names of their own, where each fault is real: a
firewall that drops packets, a cable that is slow, a process that is stopped. Only another torch and
GPUs are pretended. What a machine cannot do is skipped, with the reason.
"""

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from helpers.machine import free_port
from shell_programs import LAUNCH, assert_none_is_left_with, run
from test_two_nodes import TWO_NODES, namespaces, slurm  # noqa: F401, fixtures

PREFLIGHT = LAUNCH / "preflight.py"
SECONDS = 45  # in place of 60; a missing rank is waited for a third of it
PAGE = (LAUNCH / "README.md").read_text().partition("## Can these machines talk?")[2]
A, B = "node0 (10.77.0.1)", "node1 (10.77.0.2)"

# A host writes what its rank prints and, once it has ended by itself, its status.
HOST = """
hostname "node$NODE_RANK"
mount -t tmpfs -o size=1g shm /dev/shm  # that of a container may be small
export RANK=$NODE_RANK LOCAL_RANK=0 WORLD_SIZE=2 PYTHONPATH="$0/on_all"
setup="SETUP_$NODE_RANK"
eval "${!setup}"
python "$0/preflight.py" > "$0/output.$NODE_RANK" 2>&1
echo "status $?" >> "$0/output.$NODE_RANK"
"""
FIREWALL = """
ip rule add pref 100 lookup local
ip rule del pref 0
ip rule add pref 5 sport 29500 lookup local
ip rule add pref 10 iif link0 ipproto tcp dport 30000-65534 blackhole
"""  # packets that arrive for other ports than the store's are dropped without a word
SLOW = "tc qdisc replace dev link0 root tbf rate 20mbit burst 256kb limit 16mb"
PRETEND = 'export PYTHONPATH="$0/here"'

OTHER_TORCH = "import torch; torch.__version__ = '1.0'"
AT_THE_BARRIER = """
import os, signal, torch.distributed as dist
def stop(*_):
    {}
dist.monitored_barrier = stop
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
GPUS = """
import ctypes, os, types
import torch, torch.distributed as dist
real_device, real_group, real_reduce = torch.device, dist.new_group, dist.all_reduce
torch.cuda.device_count = lambda: 2
torch.cuda.can_device_access_peer = lambda here, there: True
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid={uuid})
torch.device = lambda *place: real_device("cpu")
dist.new_group = lambda timeout, **_: real_group(backend="gloo", timeout=timeout)
def all_reduce(values, group):
    if group is not None:
        {hang}
    real_reduce(values, group=group)
dist.all_reduce = all_reduce
"""  # nccl is gloo here; pause() ends by a signal only, as PyDLL even without letting Python run
OWN = 'os.environ["RANK"]'
ONE_MISSING = 'if [ "$SLURM_PROCID" = 1 ]; then exit; fi;'


class Scene(NamedTuple):
    """What is wrong on the two hosts, and what their ranks say of it."""

    setups: tuple[str, str]
    says: tuple[str, ...]  # on both ranks, or on each
    pretended: str = ""  # a module that Python imports first, where a setup asks for it
    on_all: str = ""  # and on both
    is_ready: bool = False


MISSING = rf"rank \[1\] of 2 did not come, here are rank 0 on {re.escape(A)}"
FALLEN = rf"rank 1 on {re.escape(B)} did not end the step 'barrier': was it stopped or killed"
FAST = (
    r"gloo: all-reduce of 4 MB in \d+ ms; slowest link \S+ Gbit/s(.|\n)*0 on node0(.|\n)*1 on node1"
)
SCENES = {
    "that all is well, on a cable of 1 Gbit/s": Scene(
        ("", SLOW.replace("20m", "1g")), (FAST,), is_ready=True
    ),
    "that all is well with GPUs": Scene(
        ("", ""),
        (r"P2P\) to the GPUs \[1\](.|\n)*nccl: all-reduce of 64 MB in \d+ ms; slowest link ",),
        on_all=GPUS.format(uuid=OWN, hang="pass"),
        is_ready=True,
    ),
    "an interface that no other host reaches": Scene(
        ("", "export GLOO_SOCKET_IFNAME=lo"),
        (rf"gloo would listen on 127.0.0.1 of {re.escape(B)}, where no other host reaches it",),
    ),
    "an interface that is not there": Scene(
        ("", "export GLOO_SOCKET_IFNAME=eth99"),
        (rf"GLOO_SOCKET_IFNAME is eth99 on {re.escape(B)}, which has lo, link0",),
    ),
    "a firewall that drops a range of ports": Scene(
        (FIREWALL, ""),
        (r"cannot connect to node\d \S+ at .*although MASTER_PORT is open.*\(timed out",),
    ),
    "an address that does not resolve": Scene(
        ("", "export MASTER_ADDR=nobody.invalid"),
        (MISSING, "node1 cannot find MASTER_ADDR 'nobody.invalid'.*name"),
    ),
    "another port": Scene(
        ("", "export MASTER_PORT=29501"),
        (MISSING, "node1 cannot reach rank 0 at 10.77.0.1:29501.*Connection refused"),
    ),
    "another program at the port": Scene(
        ("python -m http.server -d /dev/null 29500 > /dev/null 2>&1 & sleep 3", "sleep 3"),
        ("port 29500 of node0 is taken", "10.77.0.1:29500 does not answer node1 as rank 0 does"),
    ),
    "another torch on one host": Scene(
        ("", PRETEND),
        (rf"torch differs: 1.0 on {re.escape(B)}, \S+ on {re.escape(A)}",),
        OTHER_TORCH,
    ),
    "a small /dev/shm": Scene(
        ("", "mount -t tmpfs -o size=64m shm /dev/shm"),
        (rf"/dev/shm on {re.escape(B)} has 64 MB left",),
    ),
    "few open files": Scene(("", "ulimit -n 256"), (rf"{re.escape(B)} allows 256 open files",)),
    "a rank that nobody starts": Scene(("", "exit"), (MISSING, "")),
    "a world size of one too many": Scene(
        ("export WORLD_SIZE=3", "export WORLD_SIZE=3"),
        (rf"rank \[2\] of 3 did not come, here are rank 0 on {re.escape(A)}, rank 1 on",),
    ),
    "a world size of one too many on one host": Scene(
        ("export WORLD_SIZE=3", ""),
        (rf"WORLD_SIZE differs: 2 on {re.escape(B)}, 3 on {re.escape(A)}",),
    ),
    "two processes of one rank": Scene(
        ("", "export RANK=0"), (rf"two processes are rank 0, one of them on {re.escape(B)}",)
    ),
    "two processes of another rank": Scene(
        ("", 'python "$0/preflight.py" > /dev/null 2>&1 & sleep 1'),
        (rf"two processes are rank 1, one of them on {re.escape(B)}",),
    ),
    "a slow link": Scene(("", SLOW), (r"slowest link 0\.0\d Gbit/s, from rank \d on node",)),
    "a rank that is stopped": Scene(
        ("", PRETEND),
        (FALLEN, r"did not end \(state T, T: stopped\)\. It began: .*, barrier\. `kill -CONT`"),
        AT_THE_BARRIER.format(STOP),
    ),
    "a rank 0 that is stopped": Scene(
        (PRETEND, ""),
        (
            r"did not end \(state T, T: stopped\)\. It began: .*, barrier\. `kill -CONT`",
            "the store of rank 0 is silent. Was rank 0 st",
        ),
        AT_THE_BARRIER.format(STOP),
    ),
    "a rank that is killed": Scene(
        ("", PRETEND),
        (FALLEN, r"died of signal 9\. It began: .*, barrier"),
        AT_THE_BARRIER.format(KILL),
    ),
    "two ranks on one GPU": Scene(
        ("", ""), (r"ranks \[0, 1\] have one GPU",), on_all=GPUS.format(uuid="'GPU-7'", hang="pass")
    ),
    "a local rank beyond the GPUs": Scene(
        ("export WORLD_SIZE=3", "export WORLD_SIZE=3 LOCAL_RANK=2"),
        (rf"LOCAL_RANK is 2 on {re.escape(B)}, which shows 2 GPUs",),
        on_all=GPUS.format(uuid=OWN, hang="pass"),
    ),
    "nccl hangs on all": Scene(
        ("", ""),
        (r"all-reduce of 4 bytes over nccl: no end of it(.|\n)*NCCL_P2P_DISABLE=1",),
        on_all=GPUS.format(uuid=OWN, hang="ctypes.CDLL(None).pause()"),
    ),
    "nccl hangs on one rank and does not let Python run": Scene(
        ("", ""),
        (
            rf"rank 1 on {re.escape(B)} did not end the step 'all-reduce of 4 bytes over nccl'",
            r"did not end .*all-reduce of 4 bytes over nccl(.|\n)*NCCL_P2P_DISABLE=1",
        ),
        on_all=GPUS.format(uuid=OWN, hang=f"{OWN} == '1' and ctypes.PyDLL(None).pause()"),
    ),
}


def play(folder: Path, scene: Scene) -> list[str]:
    """What the ranks of the two hosts print, and then their status; each has ended by itself."""
    shutil.copy(PREFLIGHT, folder)  # alone, as on another cluster
    for name, text in (("here", scene.pretended), ("on_all", scene.on_all)):
        (folder / name).mkdir()
        (folder / name / "sitecustomize.py").write_text(text)
    env = {"SETUP_0": scene.setups[0], "SETUP_1": scene.setups[1]}
    env |= {"PREFLIGHT_SECONDS": SECONDS, "GRACE": 1}
    command = (*TWO_NODES, "unshare", "--uts", "--mount", "bash", "-c", HOST, folder)
    status, output = run(*command, **env)
    assert status == 0, output
    assert_none_is_left_with(folder)
    files = [folder / f"output.{node}" for node in range(2)]
    return [file.read_text() if file.exists() else "" for file in files]


@pytest.fixture(scope="module")
def played(namespaces, request, tmp_path_factory):  # noqa: F811
    """What was printed in the scenes of all these tests: four at a time, since they wait a lot."""
    items = [
        item for item in request.session.items if "played" in getattr(item, "fixturenames", ())
    ]
    names = [item.callspec.params["name"] for item in items]
    with ThreadPoolExecutor(4) as pool:
        folder = tmp_path_factory.mktemp
        yield {name: pool.submit(play, folder("scene"), SCENES[name]) for name in names}


@pytest.mark.parametrize("name", SCENES)
def test_preflight_says_on_both_hosts(name, played):
    scene, outputs = SCENES[name], played[name].result()
    for output, cause in zip(outputs, (scene.says * 2)[:2], strict=True):
        assert re.search(cause, output), outputs
        assert scene.is_ready == output.endswith("ready (ranks: 2, hosts: 2)\nstatus 0\n")
        assert bool(output) == output.endswith(f"status {int(not scene.is_ready)}\n")
    if name == "that all is well, on a cable of 1 Gbit/s":
        [shown] = re.findall(r"```text\n(gloo(?:.|\n)*?)```", PAGE)
        shown, printed = (re.sub(r"[-+\d.]+", "", text).split() for text in (shown, outputs[0]))
        assert printed[:-1] == shown


def test_the_page_shows_what_it_finds():
    """The tests above compare the same patterns with what is really printed."""
    rows = re.findall(r"^\| (.+?)(?: \(or .*\))? \| `(.+?)`", PAGE.partition("\n## ")[0], re.M)
    assert len(rows) > 10
    for fault, line in rows:
        causes = [cause for cause in SCENES[fault].says if cause]
        assert any(re.search(cause.partition("(.|")[0], line) for cause in causes), fault


def has_memory_to_share() -> bool:
    shm = os.statvfs("/dev/shm")
    return shm.f_bavail * shm.f_frsize >= 512 * 2**20


needs_shm = pytest.mark.skipif(
    not has_memory_to_share(), reason="/dev/shm is below the 512 MB that preflight asks for"
)


@needs_shm
def test_slurm_starts_it_as_it_is(slurm):  # noqa: F811
    _, ask = slurm
    output = ask("srun", "--nodes=2", "--ntasks=3", "--cpus-per-task=1", "python", PREFLIGHT)
    assert output.count("ready (ranks: 3, hosts: 2)") == 2, output
    output = ask("srun", "--nodes=1", "--ntasks=2", "sh", "-c", f"{ONE_MISSING} python {PREFLIGHT}")
    assert "rank [1] of 2 did not come, here are rank 0 on node0" in output, output


@needs_shm
@pytest.mark.parametrize("command", [("torchrun", "--standalone", "--local-addr=127.0.0.1")])
def test_torchrun_starts_it_on_one_machine(command):
    status, output = run(*command, "--nproc-per-node=2", PREFLIGHT)
    assert status == 0, output
    assert output.count("ready (ranks: 2, hosts: 1)") == 1, output


RIGHT = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "", "RANK ,"),
        ("RANK", 1, "RANK 1, LOCAL_RANK 0, WORLD_SIZE 1"),
        ("WORLD_SIZE", 0, "WORLD_SIZE 0"),
        ("MASTER_PORT", "x", "MASTER_PORT x"),
        ("MASTER_ADDR", "", "MASTER_ADDR is ''"),
        ("MASTER_ADDR", "fe80::1", "MASTER_ADDR is 'fe80::1'"),
    ],
)
def test_variables_that_make_no_sense_end_with_status_2(name, value, says):
    status, output = run(sys.executable, PREFLIGHT, **RIGHT | {"MASTER_PORT": 1, name: value})
    assert status == 2, output
    assert output.count("\n") == 1
    assert says in output


@needs_shm
def test_one_rank_is_ready_alone():
    status, output = run(sys.executable, PREFLIGHT, MASTER_PORT=free_port(), **RIGHT)
    assert status == 0, output
    assert output.endswith("ready (ranks: 1, hosts: 1)\n")


@pytest.mark.gpu
def test_the_ranks_of_all_gpus_are_ready():
    """Over nccl, with the real ones."""
    gpus = torch.cuda.device_count()
    command = ("torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={gpus}")
    status, output = run(*command, PREFLIGHT)
    assert status == 0, output
    assert re.search(r"nccl: all-reduce of 64 MB in \d+ ms", output)
    assert f"ready (ranks: {gpus}, hosts: 1)" in output
