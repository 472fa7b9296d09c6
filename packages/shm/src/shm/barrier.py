"""torch's monitored barrier: rank 0 names the ranks that do not reach it in time."""

import time
from datetime import timedelta

from shm.segment import Segment
from shm.work import NAP, scheduler

# Counters of a rank: how many barriers it has reached, and how many rank 0 has let it pass
REACHED, PASSED = 0, 1


class MonitoredBarriers:
    """All monitored barriers of one group, one after another.

    Each rank has a cache line of counters for them. That of rank 0 is `first_cache_line`.
    """

    def __init__(self, segment: Segment, first_cache_line: int) -> None:
        self.segment = segment
        ranks = range(segment.world_size)
        self.counters = [segment.counters_in(first_cache_line + rank, 1) for rank in ranks]
        self.reached = [0] * segment.world_size  # how many barriers each rank has reached

    def meet(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait for all ranks. Raises RuntimeError, which on rank 0 names those that are late."""
        deadline = time.monotonic() + timeout.total_seconds()
        milliseconds = round(timeout.total_seconds() * 1000)
        if self.segment.rank > 0:
            self.meet_rank_0(deadline, milliseconds)
        elif timeout <= timedelta(0):
            what = f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms"
            raise RuntimeError(f"shm: {what}")
        elif late := self.late_ranks(deadline, wait_all_ranks):
            who = f"{'Rank' if len(late) == 1 else 'Ranks'} {', '.join(map(str, late))}"
            what = f"{who} failed to pass monitoredBarrier in {milliseconds} ms"
            raise RuntimeError(f"shm: [Rank 0]: {what}")
        else:
            for rank in range(1, self.segment.world_size):
                self.segment.post(self.counters[rank], PASSED, self.reached[rank])

    def meet_rank_0(self, deadline: float, milliseconds: int) -> None:
        me = self.segment.rank
        self.reached[me] += 1
        self.segment.post(self.counters[me], REACHED, self.reached[me])
        if not self.wait_for_counter(0, me, PASSED, deadline):
            what = "but received errors while waiting for send/recv from rank 0"
            raise RuntimeError(
                f"shm: Rank {me} successfully reached monitoredBarrier, {what} in "
                f"{milliseconds} ms. Please check rank 0 logs for faulty rank."
            )

    def late_ranks(self, deadline: float, wait_all_ranks: bool) -> list[int]:
        """Return all ranks that do not come in time, or only the first. Rank 0 calls this."""
        late: list[int] = []
        for rank in range(1, self.segment.world_size):
            self.reached[rank] += 1
            if not self.wait_for_counter(rank, rank, REACHED, deadline):
                self.reached[rank] -= 1  # a rank that comes later comes for the next barrier
                late.append(rank)
                if not wait_all_ranks:
                    break
        return late

    def wait_for_counter(self, rank: int, owner: int, counter: int, deadline: float) -> bool:
        """Wait until the owner's counter shows this barrier; False if `rank` is late or dead."""
        counters = self.counters[owner]
        while counters[counter] < self.reached[owner]:
            if time.monotonic() > deadline or not self.segment.is_alive(rank):
                return counters[counter] >= self.reached[owner]
            scheduler.poll()  # lets other calls go on
            time.sleep(NAP)
        return True
