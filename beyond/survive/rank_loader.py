"""A DataLoader whose worker processes live as long as their rank, whoever gets SIGTERM."""

import os
import signal
import threading
from multiprocessing import resource_tracker
from typing import Any

import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def end_with_rank(_: int) -> None:
    """End a loader process (as worker_init_fn) when the rank ends, not sooner and not later.

    SIGTERM often goes to all processes of a job. If the loaders ended, the rank could not finish
    its step. If a fork server has started a loader (the default since Python 3.14), the loader
    outlives a killed rank, because torch only sees that the fork server is still there.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank := mp.parent_process():

        def wait() -> None:
            rank.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


class RankLoader(DataLoader):
    """A DataLoader whose worker processes end when their rank does, as `end_with_rank` says."""

    def __iter__(self) -> Any:
        """Start the workers with SIGTERM blocked, which they inherit.

        torch lets SIGTERM kill a worker from its first lines on, and calls end_with_rank only some
        of them later: on a busy machine, a quarter of a second.
        """
        self.worker_init_fn = end_with_rank
        resource_tracker.ensure_running()  # because it unblocks SIGTERM when Python starts it
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            return super().__iter__()
        finally:  # a SIGTERM that has come meanwhile reaches the rank now
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
