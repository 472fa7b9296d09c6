"""The fixtures of prove's tests, and the settings of the machine if they run alone.

Inside the repository, its own conftest.py makes these settings for all tests.
"""

import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from prove_runs import PRELOADED, TORCHRUN, run

PACKAGE = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath == PACKAGE:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine
        multiprocessing.set_forkserver_preload(PRELOADED)


@pytest.fixture
def prove_script(tmp_path):
    """Proves a script that is called train.py, on two ranks."""

    def prove_source(source: str, *options: str, **env: str) -> subprocess.CompletedProcess:
        (tmp_path / "train.py").write_text(source)
        return run(tmp_path, *options, *TORCHRUN, "train.py", **env)

    return prove_source
