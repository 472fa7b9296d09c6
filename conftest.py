"""What a test sees of its machine: no GPU, unless the tests with the mark `gpu` alone are run.

And of pytest: the numbers of an `assert` that stands in a helper. Of the course: its chapters.
"""

import os

import pytest
import torch

# On a GPU, a process that asked torch.cuda.is_available() must not fork, because CUDA starts in no
# child of it. But a script asks when it reads its flags, and the tests then fork its ranks. So
# is_available() looks in NVML, as device_count() does, and leaves CUDA alone.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# pytest shows the numbers of a failing assert in the tests only, unless told before the import.
# `make break` prints them, and most of its asserts stand there.
pytest.register_assert_rewrite("helpers", "local_ranks")

import helpers  # noqa: E402, F401, it says what the fork server of all tests imports
import local_ranks.chapters  # noqa: E402, F401, it lets tests import chapters


def pytest_configure(config: pytest.Config) -> None:
    """So all other tests mean the same on every machine: two ranks, with or without one GPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("gpu"):
        needed = mark.args[0] if mark.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs GPUs: {needed}, and -m gpu")
