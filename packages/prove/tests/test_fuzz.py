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

# A few of each kind. `python evidence/count.py` judges all 300 on demand.
JUDGED = [1, 89]  # a stream of words, and complex weights that are stepped by hand
WITH_FAULT = [1]
COMPARED = [1, 3, 31, 89]  # and fully_shard, and a comm hook with master weights
PLANTED = {14: "parameter", 18: "lost sample"}


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
    assert {case["outcome"] for case in counted.values()} == {"proven"}, counted


def test_the_same_scripts_with_a_local_divisor_are_called_wrong():
    counted = count("faulty", WITH_FAULT)
    assert {case["outcome"] for case in counted.values()} == {"found as WRONG"}


def test_the_scripts_are_right_and_no_longer_so_with_a_local_divisor():
    """The weights after all steps are those of one process, and prove has no part in this."""
    for case in count("oracle", COMPARED).values():
        assert case["outcome"] == "right", case
        assert case["apart"] < oracle.LIMIT < oracle.DIFFERS < case["apart with a fault"]


def test_a_planted_mistake_is_called_wrong_and_begins_with_the_weights():
    """Complex weights, and a last window of fully_shard. The control: no change is no mistake."""
    counted = count("broken", [*PLANTED])
    assert {seed: case["kind"] for seed, case in counted.items()} == PLANTED
    assert {case["outcome"] for case in counted.values()} == {"WRONG"}
    no_change = break_scripts.changed_weights(0, lambda parts, plan, task: None)
    assert no_change < oracle.LIMIT < oracle.DIFFERS


def test_a_mistake_is_planted_only_where_it_has_a_place():
    of_complex_weights, of_points = 14, 0
    assert break_scripts.plantable(of_complex_weights, "dtype")
    assert not break_scripts.plantable(of_points, "dtype")


def test_a_seed_is_always_the_same_script():
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
