"""What the tests of shm see of their machine if they are run alone, from the package's folder.

In the repository around it, the conftest.py there says this for all tests.
"""

import multiprocessing
import os
from pathlib import Path

import pytest

from shm_ranks import PRELOADED


def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath == Path(__file__).parents[1]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine
        multiprocessing.set_forkserver_preload(PRELOADED)
