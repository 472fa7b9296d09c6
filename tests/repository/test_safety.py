"""No program unpickles what comes from outside, and a workflow may only read the repository.

What an attacker reaches all the same: stages/test_untrusted.py.
"""

import re

import pytest

from local_ranks.chapters import ROOT

PROGRAMS = ("[0cl]*/**/*.py", "beyond/**/*.py", "packages/*/src/**/*.py")
UNPICKLING = re.compile(
    r"pickle\.load|weights_only=False|\w_object\w*\(|torch\.load\((?!.*weights_only=)"
)
TRUSTED = {  # how often each of these reads what its own processes have written
    "local_ranks/ranks.py": 2,
    "prove/rank_record.py": 1,
    "shm/speed.py": 1,
    "watch/batches.py": 1,
    # The batches of the user's script, in a process of that script.
    "watch/feeder.py": 2,
    "watch/loop_feeder.py": 1,
    # What a rank of the replay has drawn, in the judge: only the user's script wrote to its folder.
    "judge/replay.py": 1,
    # What ranks of one job send to each other.
    "04_ddp_torchrun/failures.py": 1,
    "04_ddp_torchrun/uneven.py": 1,
    "convert/check_gradient.py": 1,
}


def unpickling_calls(sources: dict[str, str]) -> dict[str, int]:
    """The programs that unpickle, and how often each of them does."""
    counts = {name: len(UNPICKLING.findall(text)) for name, text in sources.items()}
    return {name: count for name, count in counts.items() if count}


def test_no_file_unpickles_what_comes_from_outside():
    """ruff refuses the rest: S in pyproject.toml."""
    files = [path for pattern in PROGRAMS for path in ROOT.glob(pattern)]
    sources = {f"{path.parent.name}/{path.name}": path.read_text() for path in files}
    assert unpickling_calls(sources) == TRUSTED
    controls = {"plain": "torch.load(path)", "safe": "torch.load(path, weights_only=True)"}
    assert unpickling_calls(controls) == {"plain": 1}


@pytest.mark.parametrize("path", [*ROOT.glob(".github/workflows/*")], ids=lambda path: path.name)
def test_a_workflow_may_only_read_the_repository_unless_it_asks_for_more(path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -e '.[checks]'")
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
