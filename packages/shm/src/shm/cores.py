"""Which cores may a rank run on? Without a choice, ranks that wake each other share one of them."""

import os


def pin(rank: int, world_size: int, process: int = 0) -> int:
    """Keep a process of this rank on cores of its own, and return how many.

    process: its number, where 0 means the calling process.

    Left alone, the operating system likes to put ranks that wake each other on one core, where
    they wait in turns. Returns 0, and changes nothing, if the cores are not enough or somebody has
    chosen some.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // world_size
    if not each or len(cores) != os.cpu_count():
        return 0
    os.sched_setaffinity(process, cores[rank * each : (rank + 1) * each])
    return each
