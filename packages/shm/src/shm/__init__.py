"""A backend of torch.distributed for ranks on one machine: they share memory and send nothing.

    import shm
    torch.distributed.init_process_group("shm")

group.py is the process group that torch calls, and README.md explains it.
"""

import sys

if sys.platform == "win32":  # elsewhere, whoever joins a group is told the same
    raise ImportError("shm: got Windows, expected Linux: try gloo")

import torch.distributed as dist

from shm.group import SharedMemoryGroup
from shm.segment import SharingError

__all__ = ["SharedMemoryGroup", "SharingError"]
__version__ = "0.1.0"

dist.Backend.register_backend("shm", SharedMemoryGroup, devices=["cpu"])
