"""Some generated scripts, all of which are right: prove calls none of them WRONG."""

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import break_scripts
import loaders
import oracle
from generate import generate, imports_of, nested
from prove_runs import SECONDS, patience
from tasks import Choices, Task

COUNT = Path(__file__).parents[1] / "evidence" / "count.py"
STYLES = (*loaders.STYLES, *loaders.INDEXED)

SEEDS = [0, 1, 3, 4, 6, 9, 31, 32, 41, 53, 55, 76, 89, 109, 111, 120, 125, 132, 163, 171, 232]
SEEDS += [245, 255, 256, 270, 275, 293, 296, 297, 299]
# prove judges few of them, and `python evidence/count.py generated` all 300.
JUDGED = [1, 3, 6, 9, 41, 53, 89, 125, 297]
NOT_PROVEN = [41]  # a loop without a loader: how many samples a list of indices has
WITH_FAULT = [1, 31, 55]
PLANTED = {0: "parameter", 14: "parameter", 15: "part of a tensor", 18: "lost sample"}
PIECES = "task data workers collate averaging optimizer precision accumulation schedule clipping "
PIECES += "evaluation saving launcher"


def count(kind: str, seeds: list[int]) -> dict[int, dict]:
    """Return what the command writes down of each seed."""
    with tempfile.TemporaryDirectory(prefix="counted-") as folder:
        file = Path(folder, "results.json")
        command = [sys.executable, str(COUNT), kind, *map(str, seeds), "--json", str(file)]
        how = {"capture_output": True, "text": True, "timeout": patience(10 * SECONDS)}
        ended = subprocess.run(command, **how)
        assert file.exists(), f"{ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}"
        written = json.loads(file.read_text())["cases"]
    counted = {int(seed): case for seed, case in written.items()}
    assert sorted(counted) == sorted(seeds)
    return counted


def test_right_scripts_are_not_called_wrong():
    counted = count("generated", JUDGED)
    for seed, case in counted.items():
        assert case["outcome"] == ("not proven" if seed in NOT_PROVEN else "proven"), case


def test_the_same_scripts_with_a_local_divisor_are_called_wrong():
    counted = count("faulty", WITH_FAULT)
    assert {case["outcome"] for case in counted.values()} == {"found as WRONG"}
    assert not {*WITH_FAULT} & {*NOT_PROVEN}


def test_the_scripts_are_right_and_no_longer_so_with_a_local_divisor():
    """The weights after all steps are those of one process, and prove has no part in this."""
    for case in count("oracle", SEEDS).values():
        assert case["outcome"] == "right", case
        assert case["apart"] < oracle.LIMIT < oracle.DIFFERS < case["apart with a fault"]


def test_a_planted_mistake_is_called_wrong_and_begins_with_the_weights():
    """Gradients that are gathered, complex weights, DDP, and a last window of fully_shard; and no
    change is no mistake."""
    counted = count("broken", [*PLANTED])
    assert {seed: case["kind"] for seed, case in counted.items()} == PLANTED
    assert {case["outcome"] for case in counted.values()} == {"WRONG"}
    no_change = break_scripts.changed_weights(0, lambda parts, plan, task: None)
    assert no_change < oracle.LIMIT < oracle.DIFFERS


def test_a_mistake_is_planted_only_where_it_has_a_place():
    complex_seed = next(seed for seed in PLANTED if generate(seed).pieces["task"] == "complex")
    assert break_scripts.plantable(complex_seed, "dtype")
    assert not break_scripts.plantable(0, "dtype")


def test_the_chosen_have_every_piece_that_a_script_can_have():
    pieces = {seed: generate(seed).pieces for seed in range(300)}
    of_all, of_chosen = (
        {(piece, pieces[seed].get(piece)) for seed in seeds for piece in PIECES.split()}
        for seeds in (pieces, SEEDS)
    )
    assert of_all == of_chosen
    assert {*JUDGED} <= {*SEEDS}
    assert generate(7).text == generate(7).text != generate(20).text


class OneStyle(Choices):
    """This style of loader, with one worker count, and rank and world said."""

    def __init__(self, style: str, workers: str) -> None:
        super().__init__(0)
        self.random = SimpleNamespace(random=lambda: 0.0)
        self.wanted = {"data": style, "workers": workers}

    def __call__(self, name: str, *options: str) -> str:
        return self.wanted[name]


DEALT = """
class Numbers(Dataset):
    x = y = torch.arange(64)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i, i


train_set, dealt = Numbers(), []
"""


def dealt_samples(rank: int, style: str, workers: str, folder: Path) -> list[list[int]]:
    """List the samples that this rank gets from its loader in each epoch."""
    task = Task([], [], [], "", tensors="train_set.x, train_set.y")
    own = loaders.loader(OneStyle(style, workers), task, "GLOBAL_BATCH // world", False, True)
    body = [*own.index, "dealt[-1] += batch[0].tolist()"]
    loop = [*own.epoch, "dealt.append([])", *nested(body, f"for batch in {own.batches}:")]
    lines = [
        *own.prelude,
        DEALT,
        f"rank, world, GLOBAL_BATCH, STEPS = {rank}, 2, 16, 4",
        *own.setup,
        *nested(loop, "for epoch in range(2):"),
    ]
    text = "\n".join(lines)
    file = folder / f"deal_{rank}.py"
    file.write_text("\n".join([*imports_of(text), text]))
    return runpy.run_path(str(file))["dealt"]


@pytest.mark.parametrize("style", STYLES)
def test_a_loader_deals_every_sample_to_one_rank_in_each_epoch(style, tmp_path):
    workers = "2, prefetch" if style == "stream" else "0"
    of_ranks = [dealt_samples(rank, style, workers, tmp_path) for rank in range(2)]
    for epoch in range(2):
        assert sorted(of_ranks[0][epoch] + of_ranks[1][epoch]) == list(range(64))
    first, second = of_ranks[0]
    assert (first == second) == (style == "unshuffled")
