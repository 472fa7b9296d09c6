"""Every "break it" of a stage's README: leave the line out, and the named test fails.

A test that still passes with the line gone would prove nothing about it. Where more than a line is
to be changed, the README shows a diff.
"""

import re

import pytest
import test_data_parallel
import test_precision
import test_proof
import test_reducers
import test_resume
import test_stages
import test_sync_batchnorm
from readmes import BREAK, fences, sides
from support import FOLDERS, places_of

ROW = re.compile(r"^\| `(?P<line>.+?)` \| `(?P<file>[\w.]+)` \| `(?P<test>test_\w+)` \|$", re.M)

CASES = [
    pytest.param(key, *match.group("line", "file", "test"), id=f"{key} {match['line']}")
    for key, folder in FOLDERS.items()
    for match in ROW.finditer((folder / "README.md").read_text())
]
CHANGES = [
    pytest.param(fence.readme.parent.name[:2], fence.text, *match.group("file", "test"))
    for fence in fences("diff")
    if (match := BREAK.fullmatch(fence.note))
]


def test_every_stage_can_be_broken():
    assert {case.values[0] for case in CASES} == set(FOLDERS)


def named(key, test):
    modules = (test_proof, test_stages, test_data_parallel, test_reducers, test_resume)
    modules += (test_precision, test_sync_batchnorm)
    (claim,) = [getattr(module, test) for module in modules if hasattr(module, test)]
    assert test.startswith(f"test_{key}_"), "a test of another stage"
    return claim


def fails(claim, change):
    """The claim fails by what it says, not since the change is no working program."""
    with pytest.raises((AssertionError, TimeoutError)) as caught:
        claim(without=(change,))
    slips = ("NameError", "ImportError", "AttributeError", "UnboundLocalError")
    assert not any(slip in str(caught.value) for slip in slips), caught.value


@pytest.mark.parametrize(("key", "line", "file", "test"), CASES)
def test_without_the_line_the_test_fails(key, line, file, test):
    claim = named(key, test)
    # Here, not only where it is left out: there, a missing line would look like a failing test.
    assert places_of(line, key, file), f"{file} has no such line"
    fails(claim, (file, line))


@pytest.mark.parametrize(("key", "diff", "file", "test"), CHANGES)
def test_with_the_change_the_test_fails(key, diff, file, test):
    claim, (old, new) = named(key, test), sides(diff)
    source = (FOLDERS[key] / file).read_text()
    assert source.count(old) == 1, f"{file} has not, once: {old}"
    compile(source.replace(old, new), file, "exec")  # an error here would look like a failing test
    fails(claim, (file, old, new))
