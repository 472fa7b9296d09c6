"""Runs a script over shm where it asks for gloo, without changing it.

torchrun --standalone --nproc-per-node=2 -m shm 04_ddp_torchrun/train.py
"""

import runpy
import sys
from argparse import ArgumentParser
from typing import Any

import torch.distributed as dist

import shm  # noqa: F401  # registers the backend, however this file is started

join = dist.init_process_group


def join_over_shm(backend: str | None = None, *args: Any, **options: Any) -> None:
    join("shm" if backend in (None, "gloo") else backend, *args, **options)


if __name__ == "__main__":
    if not sys.argv[1:]:
        ArgumentParser("python -m shm", "%(prog)s SCRIPT FLAGS").error("expected a script")
    dist.init_process_group, sys.argv = join_over_shm, sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
