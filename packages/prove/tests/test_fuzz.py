"""Some generated scripts, all of which are right: prove calls none of them WRONG."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence.generated import oracle
from evidence.generated.judged import changed_weights
from evidence.generated.script import generate
from prove_cases import PACKAGE
from prove_runs import SECONDS, patience

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


def test_a_seed_is_always_the_same_script():
    assert generate(7).text == generate(7).text != generate(20).text
