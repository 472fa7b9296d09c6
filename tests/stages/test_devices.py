"""Each rank takes its own GPU, tells torch so before the ranks meet, and puts all tensors there.

Rehearsed on machines that only seem to have GPUs (helpers/rehearsal.py), where each script runs
whole: those of the stages and those of the roads.
"""

import ast
import re
import sys
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
    MINIMAL,
    MINIMAL_SINGLE,
    OWN_LOOP,
    REPLICAS,
    SHARD,
    SINGLE,
    SURVIVE,
    TEMPLATE,
    RankLog,
    rehearse,
)
from local_ranks.chapters import ROOT
from local_ranks.scripts import launch_script
from local_ranks.train_stage import load_stage

JOINS = {  # how the ranks of each script join; some name their GPU then, too
    **dict.fromkeys((BY_HAND, DDP, AMP, SHARD, CONVERTED, *EXAMPLES), "join nccl"),
    **dict.fromkeys((SURVIVE, OWN_LOOP), "join cpu:gloo,cuda:nccl, device_id {}"),
}
SHOWN_ITS_OWN = [
    {"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": f"GPU-{rank}"} for rank in range(2)
]
JOINED = "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
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


def with_local_ranks(*numbers: int) -> list[dict[str, str]]:
    """What launchers on several machines say to the ranks: each machine counts from 0."""
    return [{"LOCAL_RANK": str(number)} for number in numbers]


@pytest.mark.parametrize("script", JOINS)
def test_each_rank_uses_its_own_gpu_and_says_so_before_it_joins(script):
    seen = rehearse(script, gpus=2)
    assert_own_gpus(seen, [0, 1], JOINS[script])
    assert "epoch" in seen[0].output or "ends after step" in seen[0].output, "it has trained"


def test_the_smallest_script_uses_the_gpu_of_its_local_rank():
    for script in (MINIMAL, TEMPLATE):
        assert [rank.devices for rank in rehearse(script, gpus=2)] == [[0], [1]]


def test_the_script_for_one_gpu_uses_gpu_0_and_joins_nothing():
    for script in (SINGLE, MINIMAL_SINGLE):
        [log] = rehearse(script, gpus=2)
        assert (log.error, log.devices, log.calls) == ("", [0], [])


def assert_trains_replicas(log: RankLog, calls: set[str]) -> None:
    """The whole batch goes to GPU 0, and no other GPU gets tensors but from DataParallel."""
    assert (log.error, log.devices, {*log.calls}) == ("", [0], calls)
    assert "epoch 1/2" in log.output, "it has trained"


PLACES = [  # GPUs, flags, and where 02 puts its replicas
    (2, (), "replicas on GPUs [0, 1]"),
    (3, ("--replicas=2",), "replicas on GPUs [0, 1]"),
    (2, ("--replicas=3",), "set_device 0"),  # all on the first GPU
    (1, (), "set_device 0"),
]


@pytest.mark.parametrize(("gpus", "flags", "place"), PLACES)
def test_02_asks_for_a_replica_on_each_gpu_if_they_are_enough_and_seeds_each_gpu(
    gpus, flags, place
):
    [log] = rehearse(REPLICAS, *flags, gpus=gpus)
    assert_trains_replicas(
        log, {place, *(f"seed {1234 + gpu} on GPU {gpu}" for gpu in range(gpus))}
    )


@pytest.mark.parametrize(
    "mistake", [("device(gpu)", "device(0)"), (" * gpus + gpu", ""), ("range(replicas)", "[0]")]
)
def test_a_rehearsal_sees_when_02_forgets_a_gpu(mistake):
    """The control of the test above."""
    [log] = rehearse(REPLICAS, gpus=2, changes=(mistake,))
    calls = {"replicas on GPUs [0, 1]", "seed 1234 on GPU 0", "seed 1235 on GPU 1"}
    with pytest.raises(AssertionError):
        assert_trains_replicas(log, calls)


LINES_OF_DDP = {
    "set": '    torch.cuda.set_device(device)  # from here on, "cuda" means this GPU\n',
    "number": 'int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()',
}
MISTAKES = {
    "no set_device": ((LINES_OF_DDP["set"], ""),),
    "set_device too late": (
        (LINES_OF_DDP["set"], ""),
        ("    return device\n", LINES_OF_DDP["set"] + "    return device\n"),
    ),
    "every rank on GPU 0": ((LINES_OF_DDP["number"], "0"),),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_rehearsal_sees_when_a_rank_takes_another_gpu(mistake):
    """The controls of the test above."""
    seen = rehearse(DDP, gpus=2, changes=MISTAKES[mistake])
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 1])


def test_on_uneven_machines_the_gpu_follows_the_local_rank():
    """One rank on the first machine, two on the second. The control takes the rank."""
    machines = {"gpus": 2, "ranks": 3, "envs": with_local_ranks(0, 0, 1)}
    assert_own_gpus(rehearse(DDP, **machines), [0, 0, 1])
    by_rank = (('["LOCAL_RANK"])', '["RANK"])'),)
    seen = rehearse(DDP, **machines, changes=by_rank)
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 0, 1])


@pytest.mark.parametrize("script", [DDP, AMP, SURVIVE, OWN_LOOP, SHARD])
def test_a_rank_that_is_shown_only_its_own_gpu_finds_it_at_number_0(script):
    """As srun --gpus-per-task=1 shows it."""
    assert_own_gpus(rehearse(script, gpus=1, envs=SHOWN_ITS_OWN), [0, 0], JOINS[script])


def test_a_rank_that_forgets_that_the_numbers_begin_again_is_seen():
    """The control of the test above."""
    forgets = ((" % torch.cuda.device_count()", ""),)
    seen = rehearse(DDP, gpus=1, envs=SHOWN_ITS_OWN, changes=forgets)
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 0])


@pytest.mark.parametrize("script", [BY_HAND, DDP, AMP, SHARD, SURVIVE])
def test_two_ranks_share_one_gpu_over_gloo(script):
    """survive sees by itself that they share it; the others are told."""
    seen = rehearse(script, *("--backend=gloo",) * (script != SURVIVE), gpus=1)
    assert_own_gpus(seen, [0, 0], "join gloo")
    assert ("2 ranks share 1 GPUs: gloo, not nccl" in seen[0].output) == (script == SURVIVE)


@pytest.mark.parametrize("script", [DDP, AMP, SHARD])
def test_two_ranks_that_share_a_gpu_over_nccl_end_in_one_line(script):
    """nccl refuses when they first talk. survive takes gloo by itself."""
    seen = rehearse(script, gpus=1, changes=((JOINED, JOINED + REFUSES),))
    assert [rank.error for rank in seen] == ["exit status 2"] * 2


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_shard_torchs_fsdp_over_gloo_on_a_gpu_is_refused_because_torch_crashes(level):
    ranks = rehearse(SHARD, "--library", "--backend=gloo", f"--shard={level}", gpus=1)
    assert [rank.error for rank in ranks] == ["exit status 2"] * 2
    assert not any(rank.calls for rank in ranks), "before they join"


@pytest.mark.parametrize("key", ["01", "02", "03", "04", "05", "survive"])
def test_evaluation_sends_each_batch_to_the_gpu(key):
    """Tensors without data refuse to meet on two devices. The control sends nothing."""
    send = ("train.py", "images, labels = images.to(device), labels.to(device)")
    silent: dict[str, Any] = dict.fromkeys(("broadcast", "all_reduce"), lambda tensor, **_: None)
    # With all tensors on the GPU, it gets as far as reading its totals, which have no data here.
    for changes, end in (((), DataDependentOutputException), ((send,), RuntimeError)):
        imported = {**sys.modules}
        evaluate = load_stage(key, changes).evaluate
        sys.modules.update(imported)  # other tests pickle functions of theirs
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


ON_MACHINES = dict.fromkeys((SINGLE, MINIMAL_SINGLE, BY_HAND, DDP, AMP, MINIMAL), (2,))
ON_MACHINES[REPLICAS] = (1, 2)  # GPUs: with one, 02 has another branch than with several


@pytest.mark.parametrize("script", ON_MACHINES)
def test_each_line_of_a_script_but_refusals_and_the_cpus_branch_runs_on_gpus(script):
    assert lines_never_run(script, machines=ON_MACHINES[script]) == lines_not_for_gpus(script)


def test_a_line_that_only_a_gpu_reaches_is_seen_not_to_run_without_one():
    """The control of the test above."""
    unexpected = lines_never_run(DDP, machines=(0,)) - lines_not_for_gpus(DDP)
    texts = (ROOT / DDP).read_text().splitlines()
    assert any("torch.cuda." in texts[line - 1] for line in unexpected)


def test_the_lines_for_any_accelerator_make_a_group_on_the_cpu_too(tmp_path):
    """docs/machines.md shows them; PyTorch knows which backend is whose."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/machines.md").read_text(), re.S)
    script = tmp_path / "any_accelerator.py"
    imports = "import os\nimport torch\nimport torch.distributed as dist\n"
    script.write_text(f"{imports}{lines}print(device, dist.get_backend())\n")
    assert launch_script(str(script)) == [(0, "cpu gloo\n")] * 2
    backends = {each: dist.get_default_backend_for_device(each) for each in ("cuda", "xpu", "mps")}
    assert backends == {"cuda": "nccl", "xpu": "xccl", "mps": "gloo"}
    assert "mps" not in dist.Backend.backend_capability["gloo"]
