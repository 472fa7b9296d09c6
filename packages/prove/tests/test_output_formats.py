"""The table on GitHub: notes at the lines of the script, and a summary in Markdown."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from prove.checks import accumulation, order_of_an_epoch
from prove.formats import annotations, as_markdown
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReplayCheck, not_seen, right, warning, wrong
from prove.options import parse_args
from prove.rank_record import SourceLine
from prove_cases import PACKAGE, planted
from prove_runs import TORCHRUN, run

RIGHT = right(order_of_an_epoch.NAME, order_of_an_epoch.Sentence.ORDER_CHANGES)
WARNING = warning(
    accumulation.NAME, accumulation.Sentence.LOSS_NOT_DIVIDED,
    backwards=2, at=SourceLine("steps, 1/train.py:8"),
)  # fmt: skip
MESSAGE = "`x | y` and\r\n__z__ are 100% of <b>"
WRONG = wrong(
    ReplayCheck.ORIGINAL, ReplayReason.REPLAY_FAILS,
    kind="KeyError", at=SourceLine("train.py:7"), message=MESSAGE,
)  # fmt: skip
UNKNOWN = not_seen(ReplayCheck.ONE_RANK, ReplayReason.WHICH_COMMAND)
PAGE = (PACKAGE / "README.md").read_text()
[COMMAND_OF_PAGE] = re.findall(r"- run: python -m prove (.*)", PAGE)


def test_a_row_that_is_wrong_or_a_warning_becomes_a_command_of_github_with_its_line():
    """A right row does not, nor one that is not seen, as long as the proof does without it."""
    error, warned = annotations([RIGHT, WARNING, UNKNOWN, WRONG], [])
    assert error.startswith("::error file=train.py,line=7,title=prove%3A the original::one rank, ")
    assert "cannot run it: KeyError at train.py:7: `x | y` and%0D%0A__z__ are 100%25 of" in error
    assert "%0A-> if train.py:7 counts on other ranks" in error
    place = "::warning file=steps%2C 1/train.py,line=8,title=prove%3A accumulation::2 backwards at "
    assert warned.startswith(place)
    assert "\n" not in error + warned


@pytest.mark.parametrize(
    ("unproven", "strict", "levels"),
    [([], False, ["warning"]), ([], True, ["error"]), (["one rank"], False, ["warning", "error"])],
)
def test_what_fails_the_job_is_an_error_on_its_page(
    unproven: Sequence[str], strict: bool, levels: list[str]
):
    commands = annotations([WARNING, UNKNOWN], unproven, strict)
    assert [command.split(" ")[0] for command in commands] == [f"::{each}" for each in levels]


def test_the_words_of_a_script_are_no_markdown():
    table = as_markdown([RIGHT, WRONG], "1 WRONG of 2 checks")
    first, second = table.splitlines()[-2:]
    assert first.startswith("| **WRONG** | the original | one rank, ")
    assert r"at train.py:7: \`x \| y\` and \_\_z\_\_ are 100% of \<b\><br>→ if" in first
    assert second == "| right | order of an epoch | epochs 1 and 2 differ |"


def test_github_gets_notes_at_the_lines_of_its_files_and_a_summary(tmp_path: Path):
    """By the command of the page, in a folder of the repository. The control: the usual table."""
    folder, summary = tmp_path / "src", tmp_path / "summary.md"
    folder.mkdir()
    source = planted(("sampler.set_epoch(epoch)", "pass"))
    (folder / "train.py").write_text(source)
    number = next(n for n, line in enumerate(source.splitlines(), 1) if "DataLoader(train_" in line)
    on_github = {"GITHUB_WORKSPACE": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary)}
    ended = run(folder, *shlex.split(COMMAND_OF_PAGE), **on_github)
    [note] = [line for line in ended.stdout.splitlines() if line.startswith("::")]
    assert note.startswith(f"::error file=src/train.py,line={number},title=prove%3A order of an")
    assert note.endswith("%0AMore: python -m prove --explain every-epoch-has-the-same-order")
    assert ended.returncode == 1
    text = summary.read_text()
    assert "\n| **WRONG** | order of an epoch | epochs 1 and 2 have the same order" in text
    assert "<summary>Every epoch has the same order</summary>" in text
    command = (*TORCHRUN, "train.py")
    ended = run(folder, "--format=markdown", *command, **on_github)
    assert ended.stdout.splitlines()[0] == "### prove"
    assert summary.read_text() == text
    assert "::" not in run(folder, *command, **on_github).stdout


def test_github_is_told_why_nothing_could_be_judged(tmp_path: Path):
    summary = tmp_path / "summary.md"
    ended = run(
        tmp_path, "--format=github", *TORCHRUN, "train.py", GITHUB_STEP_SUMMARY=str(summary)
    )
    assert ended.stdout == "::error title=prove::train.py: no such script\n"
    assert summary.read_text() == "### prove\n\ntrain.py: no such script\n\n"
    assert ended.returncode == 2


def test_the_workflow_of_the_page_installs_this_package_and_runs_this_program():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    job = yaml.safe_load(text)["jobs"]["prove"]
    install, proof = (step["run"] for step in job["steps"] if "run" in step)
    name, address = shlex.split(install)[-1].split(" @ ")
    assert f'name = "{name}"' in (PACKAGE / "pyproject.toml").read_text()
    assert address.endswith(f"#subdirectory=packages/{PACKAGE.name}")
    assert proof == f"python -m prove {COMMAND_OF_PAGE}"
    assert parse_args(shlex.split(COMMAND_OF_PAGE)).command == [*TORCHRUN, "train.py"]
