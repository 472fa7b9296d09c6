"""Every "break it" table of a stage's README: leave the line out, and the named test fails.

A test that still passes with the line gone would prove nothing about it.
"""

import re

import pytest
import test_data_parallel
import test_proof
import test_reducers
import test_resume
import test_stages
from support import FOLDERS, places_of

ROW = re.compile(r"^\| `(?P<line>.+?)` \| `(?P<file>[\w.]+)` \| `(?P<test>test_\w+)` \|$", re.M)

CASES = [
    pytest.param(key, *match.group("line", "file", "test"), id=f"{key} {match['line']}")
    for key, folder in FOLDERS.items()
    for match in ROW.finditer((folder / "README.md").read_text())
]


def test_every_stage_can_be_broken():
    assert {case.values[0] for case in CASES} == set(FOLDERS)


@pytest.mark.parametrize(("key", "line", "file", "test"), CASES)
def test_without_the_line_the_test_fails(key, line, file, test):
    modules = (test_proof, test_stages, test_data_parallel, test_reducers, test_resume)
    (claim,) = [getattr(module, test) for module in modules if hasattr(module, test)]
    assert test.startswith(f"test_{key}_"), "a test of another stage"
    # Here, not only where it is left out: there, a missing line would look like a failing test.
    assert places_of(line, key, file), f"{file} has no such line"
    with pytest.raises((AssertionError, TimeoutError)):
        claim(without=((file, line),))
