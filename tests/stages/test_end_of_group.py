"""How a script leaves its process group, so that no rank hangs after its last line."""

import gc
import os
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers.on_ranks import run_on_ranks
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.stage_files import replace_once

MINIMAL = "04_ddp_torchrun/minimal.py"
STAGES = ("04_ddp_torchrun/train.py", "05_amp_syncbn/train.py")
TEMPLATE = "05_amp_syncbn/template.py"
SCRIPTS = (MINIMAL, *STAGES, TEMPLATE)
ONE_EPOCH = ("--epochs=1",)
ONE_STEP = (*ONE_EPOCH, "--max-steps=1", "--device=cpu")
DEL_DDP = "del ddp  # before the group"


def count_ddp_when_the_group_ends(rank: int, script: str, without: tuple) -> int:
    """How many DistributedDataParallel are alive when the script ends its process group."""
    path, counts, destroy = ROOT / script, list[int](), dist.destroy_process_group

    def count_and_destroy() -> None:
        objects = gc.get_objects()
        counts.append(sum(isinstance(each, DistributedDataParallel) for each in objects))
        destroy()

    os.chdir(scratch_folder())
    Path("script.py").write_text(replace_once(path.read_text(), *without))
    sys.path.insert(0, str(path.parent))
    sys.argv = ["script.py", *(ONE_STEP if script in STAGES else ONE_EPOCH)]
    dist.destroy_process_group = count_and_destroy
    with redirect_stdout(StringIO()):
        runpy.run_path("script.py", run_name="__main__")
    return counts[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_ddp_is_gone_when_the_group_ends_because_its_end_could_wait_for_ever(script):
    """The control leaves out the line that frees it."""
    short = (("range(5)", "range(1)"),) if script == MINIMAL else ()
    for without, alive in (((), 0), (((DEL_DDP, "pass  # before the group"),), 1)):
        counts = run_on_ranks(2, count_ddp_when_the_group_ends, script, (*short, *without))
        assert counts == [alive, alive]
