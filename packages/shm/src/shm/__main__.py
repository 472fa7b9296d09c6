"""Runs a script over shm where it asks for gloo, without changing it.

torchrun --standalone --nproc-per-node=2 -m shm 04_ddp_torchrun/train.py
"""

import runpy
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shm  # noqa: F401  # registers the backend, however this file is started

join = dist.init_process_group


def join_over_shm(backend: str | None = None, *args: Any, **options: Any) -> None:
    join("shm" if backend in (None, "gloo") else backend, *args, **options)


if __name__ == "__main__":
    parser = ArgumentParser("python -m shm", "%(prog)s SCRIPT FLAGS", __doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("script", metavar="SCRIPT", help="and its own flags")
    script = parser.parse_args(sys.argv[1:2]).script
    if not Path(script).is_file():
        parser.exit(2, f"error: {script} is no file: expected python -m shm SCRIPT FLAGS\n")
    dist.init_process_group, sys.argv = join_over_shm, sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
