"""What a test needs of its machine: the mark `gpu`."""

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("gpu"):
        needed = mark.args[0] if mark.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs GPUs: {needed}")
