"""Two network namespaces of this machine as two nodes, and the rate of the cable between them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.options import UsageError
from stage_runs import ROOT
from timing import Results

ALLOWED = os.geteuid() == 0 and all(map(shutil.which, ("tc", "ip")))  # network namespaces
RATES = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "0.2 Gbit/s": "200mbit"}


def on_two_nodes(program: str) -> Results:
    """What a program writes to the file that is its argument; it runs on two nodes."""
    with tempfile.TemporaryDirectory() as folder:
        out, script = Path(folder, "results.json"), "04_ddp_torchrun/launch/two_nodes_here.sh"
        command = ["bash", script, sys.executable, program, str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": ""}
        if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
            raise UsageError("the nodes could not be started, or one has failed: see above")
        return json.loads(out.read_text())


def set_rate(rate: str) -> None:
    """Of what this node sends."""
    link = ["dev", os.environ["GLOO_SOCKET_IFNAME"], "root"]
    subprocess.run(["tc", "qdisc", "del", *link], stderr=subprocess.DEVNULL)  # there may be none
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
        subprocess.run(["tc", "qdisc", "add", *link, *bucket], check=True)
