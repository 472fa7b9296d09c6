"""What every script does with GPUs, in a rehearsal: each rank takes its own, and puts all there."""

import ast
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from common.models import Net
from helpers.rehearsal import (
    AMP,
    BY_HAND,
    CONVERTED,
    DDP,
    EXAMPLES,
    OWN_LOOP,
    SHARD,
    SURVIVE,
    RankLog,
    rehearse,
)
from local_ranks.chapters import ROOT
from local_ranks.train_stage import load_stage

JOINS = {  # how the ranks of each script join, and then each names its GPU
    BY_HAND: "join nccl",
    DDP: "join nccl, device_id {}",
    AMP: "join nccl, device_id {}",
    SURVIVE: "join cpu:gloo,cuda:nccl, device_id {}",
    OWN_LOOP: "join cpu:gloo,cuda:nccl, device_id {}",
    SHARD: "join nccl, device_id {}",
    **dict.fromkeys((CONVERTED, *EXAMPLES), "join nccl"),
}
SHOWN_ITS_OWN = [
    {"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": f"GPU-{rank}"} for rank in range(2)
]
JOIN = "    dist.init_process_group(args.backend, device_id=device if args.backend"
REFUSES = (
    '    raise dist.DistBackendError("NCCL error: Duplicate GPU detected : rank 0 and rank 1")\n'
)


def assert_own_gpus(seen: list[RankLog], numbers: list[int], join: str = JOINS[DDP]) -> None:
    """Rank k uses the GPU numbers[k] alone, and has set it before it joins."""
    for rank, number in zip(seen, numbers, strict=True):
        assert rank.error == ""
        assert rank.devices == [number]
        assert rank.calls[0] == f"set_device {number}"
        assert rank.calls[-1] == join.format(number)


def assert_trains_on_own_gpus(script: str) -> None:
    seen = rehearse(script, gpus=2)
    assert_own_gpus(seen, [0, 1], JOINS[script])
    assert "epoch" in seen[0].output or "ends after step" in seen[0].output, "it has trained"


def assert_finds_the_gpu_that_it_is_shown(script: str) -> None:
    """Check that each rank uses the one GPU, at number 0, that srun --gpus-per-task=1 shows it."""
    assert_own_gpus(rehearse(script, gpus=1, envs=SHOWN_ITS_OWN), [0, 0], JOINS[script])


def assert_two_ranks_share_a_gpu(script: str, *flags: str) -> None:
    """survive sees by itself that they share it; the others are told."""
    seen = rehearse(script, *flags, gpus=1)
    assert_own_gpus(seen, [0, 0], "join gloo")
    assert ("2 ranks share 1 GPUs: gloo, not nccl" in seen[0].output) == (script == SURVIVE)


def assert_nccl_refuses_a_shared_gpu(script: str) -> None:
    """nccl refuses while they join. survive does not get so far: it takes gloo by itself."""
    seen = rehearse(script, gpus=1, changes=((JOIN, REFUSES + JOIN),))
    assert [rank.error for rank in seen] == ["exit status 2"] * 2


def assert_evaluation_sends_each_batch_to_the_gpu(key: str) -> None:
    """Tensors without data refuse to meet on two devices. The control sends nothing."""
    send = ("train.py", "images, labels = images.to(device), labels.to(device)")
    silent: dict[str, Any] = dict.fromkeys(("broadcast", "all_reduce"), lambda tensor, **_: None)
    # With all tensors on the GPU, it gets as far as reading its totals, which have no data here.
    for changes, end in (((), DataDependentOutputException), ((send,), RuntimeError)):
        evaluate = load_stage(key, changes).evaluate
        with FakeTensorMode(), patch.multiple(dist, **silent):
            with torch.device("cuda:0"):
                model = Net(channels=1, image_size=28, classes=10, batch_norm=True)
            batch = torch.empty(4, 1, 28, 28), torch.empty(4, dtype=torch.int64)
            with pytest.raises(end) as raised:
                evaluate(model, [batch], torch.device("cuda:0"))
        assert raised.type is end


def lines_of(nodes: list[ast.stmt]) -> set[int]:
    """The first line of each statement in these, but for texts, which do nothing."""
    statements = [node for each in nodes for node in ast.walk(each) if isinstance(node, ast.stmt)]
    return {
        statement.lineno
        for statement in statements
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    }


def lines_not_for_gpus(script: str) -> set[int]:
    """Lines that a right run on GPUs never reaches: a refusal, and what a CPU does instead."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Raise):
            lines |= lines_of([node])
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith(" == 'cpu'"):
            lines |= lines_of(node.body)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith(" == 'cuda'"):
            lines |= lines_of(node.orelse)
    return lines


def lines_never_run(script: str, *flags: str, machines: tuple[int, ...]) -> set[int]:
    """Find the lines that do not run when a script is rehearsed on machines with so many GPUs."""
    logs = [log for gpus in machines for log in rehearse(script, *flags, gpus=gpus)]
    assert [log.error for log in logs] == [""] * len(logs)
    statements = lines_of(ast.parse((ROOT / script).read_text()).body)
    return statements - set().union(*(log.lines for log in logs))
