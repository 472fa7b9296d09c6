"""Which cores may a rank run on? Without a choice, ranks that wake each other share one of them."""

import os


def pin(rank: int, ranks: int, process: int = 0) -> int:
    """Keep this rank on cores of its own; returns how many, 0 if that is not for us to decide.

    process: the one to keep there; 0 is the calling one.

    Left alone, the scheduler likes to put ranks that wake each other on one core, where they
    wait in turns. Nothing is done if the cores are not enough, or if somebody has chosen some.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if not each or len(cores) != os.cpu_count():
        return 0
    os.sched_setaffinity(process, cores[rank * each : (rank + 1) * each])
    return each
