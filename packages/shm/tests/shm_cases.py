"""What several tests of shm need: any collective by its name, and a rank without a compiler."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from shm import fast

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_gather",
)


def collect(name, group, x, op, root, rank, ranks):
    """Call the collective of that name: what this rank has afterwards."""
    is_root, empty = rank == root, [torch.empty_like(x) for _ in range(ranks)]
    parts = [x + other for other in range(ranks)]
    arguments, result = {
        "all_reduce": ((x, op), [x]),
        "broadcast": ((x, root), [x]),
        "reduce": ((x, root, op), [x] if is_root else []),
        "gather": ((x, empty if is_root else None, root), empty if is_root else []),
        "scatter": ((empty[0], parts if is_root else None, root), empty[:1]),
        "reduce_scatter": ((empty[0], parts, op), empty[:1]),
        "all_to_all": ((empty, parts), empty),
        "all_gather": ((empty, x), empty),
    }[name]
    getattr(dist, name)(*arguments, group=group)
    return result


def without_a_compiler():
    """Python does what fast.c does elsewhere."""
    return patch.object(fast, "library", lambda: None)
