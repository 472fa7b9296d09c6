"""What several tests of shm need: any collective by its name, outcomes, and no compiler."""

import shutil
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shm import fast

needs_a_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="fast.c needs a compiler")
ERRORS = (RuntimeError, TimeoutError, TypeError, ValueError, KeyboardInterrupt)
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
    """Call the collective of that name; return what this rank has afterwards."""
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


def outcome_of(call, *arguments, **options):
    """Return "right", or the error of the call with its kind."""
    try:
        call(*arguments, **options)
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def without_a_compiler():
    """Let Python do what fast.c does elsewhere."""
    return patch.object(fast, "library", lambda: None)
