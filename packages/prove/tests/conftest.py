"""What all tests of prove share."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))  # for `cases` and its runner

from helpers.prove_runs import TORCHRUN, run


@pytest.fixture
def prove_script(tmp_path):
    """Proves a script that is called train.py, on two ranks."""

    def prove_source(source: str, *options: str, **env: str) -> subprocess.CompletedProcess:
        (tmp_path / "train.py").write_text(source)
        return run(tmp_path, *options, *TORCHRUN, "train.py", **env)

    return prove_source
