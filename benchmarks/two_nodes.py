"""Two network namespaces of this machine as two nodes, with a cable whose rate is limited.

launch/two_nodes_here.sh of stage 04 makes them, and starts this file on each.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from common.options import UsageError
from stage_runs import ROOT
from timing import Results, save

ALLOWED = os.geteuid() == 0 and all(map(shutil.which, ("tc", "ip")))  # network namespaces
RATES = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "0.2 Gbit/s": "200mbit"}


def measure_across(links: Iterable[str], measure: Callable[[], Results]) -> dict[str, Results]:
    """What a function finds on node 0 when both nodes call it, for each of these links."""
    results = {}
    for link in links:
        with tempfile.TemporaryDirectory() as folder:
            out, script = Path(folder, "results.json"), "04_ddp_torchrun/launch/two_nodes_here.sh"
            node = [sys.executable, __file__, str(out), measure.__module__, measure.__name__]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": RATES[link]}
            if subprocess.run(["bash", script, *node], cwd=ROOT, env=env).returncode != 0:
                raise UsageError("the nodes could not be started, or one has failed: see above")
            results[link] = json.loads(out.read_text())
    return results


def run_node(out: str, module: str, name: str) -> None:
    """What each of the two nodes does; node 0 writes what it finds."""
    measure = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    results = measure()
    if dist.get_rank() == 0:
        save(Path(out), results)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_node(*sys.argv[1:])
