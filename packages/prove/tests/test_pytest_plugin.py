"""The fixture that pytest finds once prove is installed, in the tests of a script's project."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prove.api
from prove import pytest_plugin
from prove.checks import SENTENCES
from prove.errors import NotJudgedError
from prove_cases import PACKAGE, planted
from prove_runs import one_line, run

pytest_plugins = ["pytester"]
NO_SET_EPOCH = ("sampler.set_epoch(epoch)", "pass")


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Runs one test in a project of its own, whether prove is installed or only on the path."""
    assert SENTENCES  # imported here, because what is first imported in the project is forgotten
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def quick_run(call: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess:
        assert call[:3] == [sys.executable, "-m", "prove"]
        return run(cwd, *call[3:])

    monkeypatch.setattr(prove.api.subprocess, "run", quick_run)

    def outcome_of(call: str) -> str:
        """Return what pytest prints of a test that makes this call."""
        (pytester.path / "tests").mkdir(exist_ok=True)
        (pytester.path / "tests/test_ddp.py").write_text(f"def test_ddp(prove):\n    {call}\n")
        result = pytester.runpytest_inprocess("-p", "prove.pytest_plugin", "tests/test_ddp.py")
        result.assert_outcomes(**{"passed" if result.ret == 0 else "failed": 1})
        return result.stdout.str()

    return outcome_of


def test_a_test_fails_with_the_table_of_a_script_that_is_wrong(outcome, pytester):
    """The control is right: it passes, and gives the table to the test."""
    script = pytester.path / "train.py"
    script.write_text(planted())
    assert " passed" in outcome('assert not prove("train.py", "--epochs", "1").wrong')
    script.write_text(planted(NO_SET_EPOCH))
    printed = outcome('prove("train.py")')
    assert "\nWRONG     order of an epoch\n" in printed
    assert "\n1 WRONG of " in printed
    assert "Traceback" not in printed
    assert "test_ddp.py:2:" not in printed, "no line of ours, nor of the test"


def test_a_test_says_why_a_script_was_not_judged(outcome, pytester):
    printed = outcome('prove("train.py")')
    looked = f"prove: train.py: no such script in {pytester.path}. If it lies beside the test: "
    assert f'{looked}prove(Path(__file__).with_name("train.py"))' in printed
    (pytester.path / "train.py").write_text("raise ValueError('my own mistake')")
    printed = outcome('prove("train.py", cpu=False)')
    assert "not judged: the script fails by itself: ValueError: my own mistake" in printed
    assert "a list is a whole command" in outcome('prove(["torchrun", "train.py"], "--epochs")')


def test_the_page_shows_what_pytest_prints(outcome, pytester):
    page = (PACKAGE / "README.md").read_text()
    [test] = re.findall(r"```python\n(def test_.*?)```", page, re.S)
    [shown] = re.findall(r"```text\n(_+ test_ddp _+\n.*?)```", page, re.S)
    script = (PACKAGE / "examples/two_mistakes.py").read_text()
    (pytester.path / "train.py").write_text(script)
    printed = one_line(outcome(test.splitlines()[1].strip()))
    assert test.splitlines()[0] == "def test_ddp(prove):"
    for part in shown.split("...\n"):
        assert one_line(part) in printed


class CalledError(Exception):
    """The command that would have been run."""


@pytest.fixture
def command_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:
    """Returns the command and the options that a call of the fixture would have run, and where."""

    def check(command: list[str], *options: str, **more: object) -> None:
        raise CalledError(command, options, more)

    monkeypatch.setattr(prove.api, "check", check)

    def of(rootdir: Path, *arguments: object, **options: object) -> tuple:
        with pytest.raises(CalledError) as called:
            pytest_plugin.ProveFixture(rootdir)(*arguments, **options)
        return called.value.args

    return of


def test_a_call_becomes_a_command_and_its_keywords_become_options(
    command_of, tmp_path, monkeypatch
):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    command, options, more = command_of(
        tmp_path, "train.py", "--epochs", 1, ranks=3, cpu=True, strict=True, batches=8,
        original="python single.py", allow_unproven=True, float32=False,
    )  # fmt: skip
    assert command == [
        "torchrun",
        "--standalone",
        "--nproc-per-node=3",
        "train.py",
        "--epochs",
        "1",
    ]
    expected = {"--cpu", "--batches=8", "--original=python single.py", "--allow-unproven"}
    assert {*options} == expected
    assert more == {"strict": True, "cwd": tmp_path}
    whole = ["accelerate", "launch", "train.py"]
    assert command_of(tmp_path, whole, cpu=False) == (whole, (), {"strict": False, "cwd": tmp_path})


def test_a_script_is_found_from_the_current_folder_and_from_the_rootdir(
    command_of, tmp_path, monkeypatch
):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    (tmp_path / "train.py").touch()
    assert command_of(tmp_path, "train.py")[2]["cwd"] == tmp_path
    (inside / "train.py").touch()
    assert command_of(tmp_path, "train.py")[2]["cwd"] == inside
    assert command_of(tmp_path, tmp_path / "train.py")[2]["cwd"] == inside


def test_gpus_that_are_missing_are_pretended(command_of, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for gpus, ranks, options in ((0, 2, ("--cpu",)), (2, 2, ()), (2, 3, ("--cpu",))):
        monkeypatch.setattr(pytest_plugin, "number_of_gpus", lambda gpus=gpus: gpus)
        assert command_of(tmp_path, "train.py", ranks=ranks)[1] == options
    assert command_of(tmp_path, "train.py", ranks=3, cpu=False)[1] == ()


def test_what_is_not_proven_fails_unless_that_is_allowed(monkeypatch, tmp_path):
    result = prove.Result([], ["one rank"])
    monkeypatch.setattr(prove.api, "check", lambda *_, **__: result)
    (tmp_path / "train.py").touch()
    fixture = pytest_plugin.ProveFixture(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="nothing is proven about what is averaged"):
        fixture("train.py")
    assert fixture("train.py", allow_unproven=True) is result


def test_a_bug_of_prove_is_no_error_of_the_test(monkeypatch, tmp_path):
    def check(*_: object, **__: object) -> None:
        raise NotJudgedError("prove itself failed: KeyError")

    monkeypatch.setattr(prove.api, "check", check)
    (tmp_path / "train.py").touch()
    with pytest.raises(pytest.fail.Exception, match="not judged: prove itself failed: KeyError"):
        pytest_plugin.ProveFixture(tmp_path)("train.py")


def test_a_project_that_has_the_fixture_and_calls_none_needs_no_torch(tmp_path):
    """The control imports torch, which this pytest cannot."""
    (tmp_path / "conftest.py").write_text("import sys\nsys.modules['torch'] = None\n")
    tests = "def test_one(prove):\n    pass\ndef test_two():\n    import torch\n"
    (tmp_path / "test_other.py").write_text(tests)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "prove.pytest_plugin"],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "FAILED test_other.py::test_two" in ended.stdout, ended.stderr
    assert "1 failed, 1 passed" in ended.stdout
