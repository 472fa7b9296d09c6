"""Two network namespaces of this machine as two nodes, and the rate of the cable between them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common.options import UsageError
from run_stage import ROOT
from timing import Results

ALLOWED = os.geteuid() == 0 and all(map(shutil.which, ("tc", "ip")))  # network namespaces
RATES = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "0.2 Gbit/s": "200mbit"}


def on_two_nodes(section: str) -> Results:
    """What `SECTION_on_node` finds, run in two namespaces by launch/two_nodes_here.sh."""
    with tempfile.TemporaryDirectory() as folder:
        out, script = Path(folder, "found"), "04_ddp_torchrun/launch/two_nodes_here.sh"
        flags = [section, "--device=cpu", f"--node={out}"]
        command = ["bash", script, sys.executable, "benchmarks/bench.py", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": ""}
        if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
            raise UsageError("the nodes could not be started, or one has failed: see above")
        return json.loads(out.read_text())


def as_node(measure: Callable[[], Results], out: Path) -> None:
    """What each of the two does; node 0 writes what both have found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    found = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def set_rate(rate: str) -> None:
    """Of what this node sends."""
    link = ["dev", os.environ["GLOO_SOCKET_IFNAME"], "root"]
    subprocess.run(["tc", "qdisc", "del", *link], stderr=subprocess.DEVNULL)  # there may be none
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
        subprocess.run(["tc", "qdisc", "add", *link, *bucket], check=True)
