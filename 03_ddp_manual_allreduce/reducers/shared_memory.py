"""Average gradients through memory that all ranks of one machine share, so that none is sent.

Every rank has a row in this memory and can read all rows. It writes its gradients to its own row,
adds up its slice of all rows when they are complete, and takes the means out of its row. compare.py
compares it with the other ways. Page: README.md
"""

import os
import secrets
import tempfile
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from common.options import UsageError
from gradients import broadcast_model, fill_missing_gradients, views_of, write_divided_gradient

PIECE_ELEMENTS = 2**16  # that are added up at a time: they stay in the processor's cache


def share_memory(size: int) -> Tensor:
    """The same `size` bytes on every rank, all zero. UsageError if a rank cannot see them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    has_memfd = hasattr(os, "memfd_create")  # Linux has it, and its /dev/shm may be small
    paths = ["", ""]
    if rank == 0:
        if has_memfd:
            file = os.memfd_create(f"gradients-{secrets.token_hex(8)}")
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            file, path = tempfile.mkstemp()
        paths = [path, os.path.realpath(path)]  # the second holds a random name
    dist.broadcast_object_list(paths, src=0)
    path, real_path = paths

    # The last bytes, one for each rank, show whether all of them see this memory. On another
    # machine, the path leads nowhere, or to a file of another program that must not be touched.
    memory = torch.zeros(size + world_size, dtype=torch.uint8)
    if os.path.exists(path) and os.path.realpath(path) == real_path:
        memory = torch.from_file(path, shared=True, size=size + world_size, dtype=torch.uint8)
    memory[size + rank] = 1
    dist.barrier()
    if rank == 0:  # no rank needs the name any more, and the memory lives as long as one maps it
        os.close(file)
        if not has_memfd:
            os.unlink(path)
    if not memory[size:].all():
        raise UsageError("the ranks do not see the same memory: run all on one machine")
    return memory[:size]


class SharedMemory:
    """For CPUs of one machine: each rank adds up its slice of all ranks' gradients."""

    def __init__(self, model: nn.Module) -> None:
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise UsageError("shared-memory needs gradients on the CPU: try bucketed")
        self.parameters = broadcast_model(model)
        self.views: dict[Parameter, Tensor] = {}  # the parts of this rank's own rows
        self.slices: list[Tensor] = []  # (world_size, elements): what this rank adds up
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for dtype in {parameter.dtype: None for parameter in self.parameters}:
            members = [parameter for parameter in self.parameters if parameter.dtype == dtype]
            elements = sum(parameter.numel() for parameter in members)
            memory = share_memory(world_size * elements * dtype.itemsize)
            rows = memory.view(dtype).view(world_size, elements)
            self.views |= views_of(rows[rank], members)
            my_slice = rows.tensor_split(world_size, dim=1)[rank]
            self.slices += my_slice.split(PIECE_ELEMENTS, dim=1)

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, view in self.views.items():
            write_divided_gradient(parameter, view)
        dist.barrier()  # all gradients are there
        for rows in self.slices:
            rows[:] = reduce(torch.add, rows.unbind())
        dist.barrier()  # all slices are summed
        for parameter, gradient in fill_missing_gradients(self.parameters).items():
            gradient.copy_(self.views[parameter])
