"""Nothing in a README is typed by hand and hoped for: commands run, diffs and figures are fresh."""

import re
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.tables.pages import text_of
from helpers.outputs import differences
from local_ranks.machine import scratch_folder
from local_ranks.scripts import launch_script, run_script
from markers import TABLE, fences
from page_sources import quotation, shell
from repository_pages import ALL_PAGES, CHINESE, ROOT


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository as links, so that the runs of the suite do not land among the reader's."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


# 04's own train.py is once started by the real torchrun. For what torchrun was called before, see
# test_c16_c32.
TORCHRUN_CALL = (
    r"(?:torchrun|python -m torch\.distributed\.launch --use-env) --standalone "
    r"--nproc-per-node=(\d)(?! 04_ddp_torchrun/train.py --epochs 1$)"
)
SCRIPT_CALL = re.compile(
    rf"((?:(?!TORCH)[A-Z_]+=\w* )*)(?:python|{TORCHRUN_CALL}) ((?:\w+/)*\w+\.py)([\w =./-]*)"
)


@cache
def run(command: str, cwd: Path) -> str:
    """Return a command's output. One that is shown twice, alone and with its output, runs once.
    The ranks of most launches are forked from here, with torchrun's variables: seconds faster."""
    program, pipe, filter_of_output = command.partition(" | ")
    if pipe and SCRIPT_CALL.fullmatch(program):
        (output := scratch_folder() / "output").write_text(run(program, cwd))
        return shell(f"{filter_of_output} < {output}", cwd)
    match = SCRIPT_CALL.fullmatch(command.replace("-m shm ", "packages/shm/src/shm/__main__.py "))
    if not match:
        return shell(command, cwd)
    names, ranks, script, flags = match.groups()
    if not (ROOT / script).exists():  # a command before has made it
        script = str(cwd / script)
    how = {"env": dict(re.findall(r"(\w+)=(\S*) ", names)), "cwd": cwd, "seconds": 180}
    if ranks:
        answers = launch_script(script, *flags.split(), world_size=int(ranks), **how)
    else:
        answers = run_script(script, *flags.split(), **how)
    output = re.sub(r"^\[rank\d\]:.*\n", "", "".join(out for _, out in answers), flags=re.M)
    assert all(status == 0 for status, _ in answers), f"{command}\n{output}"
    return output  # without what torch's C++ logs


@pytest.mark.parametrize("fence", fences("bash"), ids=lambda fence: fence.name)
def test_every_command_runs(fence, copy):
    how, _, rest = fence.value.partition(" ")  # add, run, or nothing and a comma
    if how == "nothing,":
        pytest.skip(f"says the README itself: {rest}")
    text = rest if how == "run" else re.sub(r" +# .*", "", fence.text)
    for name, value in re.findall(r'^(\w+)="(.+)"$', text, re.M):
        text = text.replace(f'{name}="{value}"\n', "").replace(f"${name} ", f"{value} ")
    lines = text.strip().splitlines()
    if how == "add":
        lines = [f"{line} {rest}" if line and line[0] != "#" else line for line in lines]
    apart = all(re.match(r"python \w+/|torchrun|printf|mkdir|patch", line) for line in lines)
    for command in lines if apart else ["\n".join(lines)]:
        run(command, copy)


OUTPUTS = [f for f in fences("text") if f.command and "train.py" not in f.command]


@pytest.mark.parametrize("fence", OUTPUTS, ids=lambda fence: fence.command)
def test_the_output_shown_is_the_output(fence, copy):
    assert differences(fence.text, run(fence.command, copy), *fence.tolerances) == []


DIFFS = [fence for fence in fences("diff", ALL_PAGES) if fence.marker != "break it"]
# The test below is about the first of these diffs. test_prove.py and test_template.py make the
# changes of the others.
TYPED_ON = ("README.md", "packages/prove/README.md", "05_amp_syncbn/pieces.md")
TYPED = [fence for fence in DIFFS if fence.page in [ROOT / page for page in TYPED_ON]]


@pytest.mark.parametrize("fence", [f for f in DIFFS if f not in TYPED], ids=lambda f: f.name)
def test_every_diff_is_the_one_that_its_comment_names(fence):
    assert fence.text == quotation(fence), "run: make pages-quick"
    assert fence.text.strip()


LINES_LEFT_OUT = " ..."


def test_the_first_lines_of_the_readme_are_what_changes_between_the_minimal_scripts():
    """They show every line that changes, but the docstring.

    Where lines are left out between two others, stands ... in their place, and only there.
    """
    shown = [line for line in TYPED[0].text.splitlines() if line.strip()]
    assert len(TYPED) == len(TYPED_ON)
    pair = ("01_single_gpu/minimal.py", "04_ddp_torchrun/minimal.py")
    text = shell("diff -U99 -d {} {} || true".format(*pair))
    diff = [line for line in text.splitlines()[3:] if line[1:].strip()]
    first = diff.index(shown[0])
    expected = [line if line in shown else LINES_LEFT_OUT for line in diff[first:]]
    assert shown == [line for line, _ in groupby(expected)]
    left_out = [line for line in diff if line not in shown and line[0] in "+-"]
    assert [line for line in left_out if '"""' not in line] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.parent.name)
def test_the_tables_are_those_of_the_committed_results(page):
    for match in TABLE.finditer(page.read_text()):
        assert match["text"].strip() == text_of(match["name"]), "run: make pages"


COUNTED = re.compile(
    r"(?<!class in )\[`?[\w.]+`?\]\((?P<file>[\w./]+\.py)\)"
    r"[^.\n]{0,60}?\b(?P<lines>\d+)(?: lines| 行)"
)


@pytest.mark.parametrize("page", [*ALL_PAGES, *CHINESE], ids=lambda path: str(path.parent.name))
def test_a_page_counts_the_lines_of_a_script_correctly(page):
    for match in COUNTED.finditer(page.read_text()):
        script = (page.parent / match["file"]).read_text()
        assert len(script.splitlines()) == int(match["lines"]), match[0]
