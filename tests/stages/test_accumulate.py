"""Inside no_sync(), a rank averages nothing: all of them must be there, or none."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from local_ranks.on_ranks import on_ranks


@on_ranks(2)
def test_05_no_sync_on_one_rank_only_makes_the_other_wait(rank):
    """Both ranks are in no_sync; then only rank 0 is, so that rank 1 averages alone."""
    for both in (True, False):
        dist.barrier()  # ranks may start late; from here on, they need little time
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
        ddp(torch.ones(1, 2)).sum().backward()
        continues = both or rank == 0
        with ddp.no_sync() if continues else pytest.raises(RuntimeError):
            ddp(torch.ones(1, 2)).sum().backward()
