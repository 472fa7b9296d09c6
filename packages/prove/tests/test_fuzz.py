"""Some generated scripts, all of which are right: prove calls none of them WRONG."""

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from evidence.generated import oracle
from evidence.generated.cells import fill
from evidence.generated.choices import INDEXED, LOADERS
from evidence.generated.judged import changed_weights
from evidence.generated.loader import loader
from evidence.generated.mistakes import plantable
from evidence.generated.script import generate, imports_of
from prove_cases import PACKAGE
from prove_runs import SECONDS, patience

STYLES = (*LOADERS, *INDEXED)

# A few scripts of each kind. `python -m evidence generated` judges all 300 on demand.
JUDGED = [1, 89]  # a stream of words, and complex weights that are stepped by hand
WITH_FAULT = [1]
COMPARED = [1, 3, 31, 89]  # these two, fully_shard, and a comm hook with master weights
PLANTED = {14: "parameter", 18: "lost sample"}


def count(kind: str, seeds: list[int], *options: str) -> dict[int, dict]:
    """Return the results that the command writes for each seed."""
    with tempfile.TemporaryDirectory(prefix="counted-") as folder:
        file = Path(folder, "results.json")
        command = [sys.executable, "-m", "evidence", kind, *map(str, seeds), f"--json={file}"]
        how = {"capture_output": True, "text": True, "timeout": patience(10 * SECONDS)}
        ended = subprocess.run([*command, *options], cwd=PACKAGE, **how)
        assert file.exists(), f"{ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}"
        written = json.loads(file.read_text())["cases"]
    counted = {int(seed): case for seed, case in written.items()}
    assert sorted(counted) == sorted(seeds)
    return counted


def test_right_scripts_are_not_called_wrong():
    counted = count("generated", JUDGED)
    assert {case["outcome"] for case in counted.values()} == {"proven"}, counted


def test_the_same_scripts_with_a_local_divisor_are_called_wrong():
    counted = count("broken", WITH_FAULT, "--mistake=local divisor")
    assert {case["outcome"] for case in counted.values()} == {"WRONG"}


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
    no_change = changed_weights(0, lambda parts: None)
    assert no_change < oracle.LIMIT < oracle.DIFFERS


def test_a_mistake_is_planted_only_where_it_has_a_place():
    of_complex_weights, of_points = 14, 0
    assert "dtype" in plantable(of_complex_weights)
    assert "dtype" not in plantable(of_points)


def test_a_seed_is_always_the_same_script():
    assert generate(7).text == generate(7).text != generate(20).text


DEALT = """
class Numbers(Dataset):
    x = y = torch.arange(64)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i, i


train_set, dealt = Numbers(), []
"""
SETTINGS = "rank, world, GLOBAL_BATCH, STEPS = {}, 2, 16, 4"
LOOP = """
for epoch in range(2):
    EPOCH
    dealt.append([])
    for batch in BATCHES:
        INDEX
        dealt[-1] += batch[0].tolist()
"""


def dealt_samples(rank: int, style: str, workers: str, folder: Path) -> list[list[int]]:
    """List the samples that this rank gets from its loader in each epoch."""
    made = {"data": style, "workers": workers, "batch size": "global"}
    made |= {"pin memory": "not said", "rank": "said"}
    own = loader(made, "train_set.x, train_set.y", collate="", is_reference=False)
    holes = {"EPOCH": own.epoch, "INDEX": own.index, "BATCHES": own.batches}
    parts = (*own.classes, DEALT, SETTINGS.format(rank), own.setup, fill(LOOP, holes))
    text = "\n".join(parts)
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
