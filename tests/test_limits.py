"""The limits and rules that keep each lesson short, and its copies from drifting apart."""

import argparse
import ast
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from lessons import PARENTS, lesson
from support import FOLDERS, ROOT, fresh_module

# Lines of train.py, and changed lines (added and removed) of lesson.diff. There are no exceptions:
# what does not fit is a chapter, or belongs to survive/, or is not needed.
LIMITS = {
    "01_single_gpu": (85, 0),
    "02_data_parallel": (105, 45),
    "03_ddp_manual_allreduce": (135, 100),
    "04_ddp_torchrun": (125, 100),
    "05_amp_syncbn": (170, 100),
    "survive": (220, 160),
}
COMMON_LINES = 470
COMMON_MODULES = ["checkpoint", "data", "models", "options", "record"]
CHAPTER_LINES = 150
SURVIVE_LINES = {"train.py": 220, "watchdog.py": 190}  # its other modules: 160
FUNCTION_LINES = 40

STAGES = list(LIMITS)
NUMBERED = STAGES[:-1]  # survive has no number
TRAINS = {stage: (ROOT / stage / "train.py") for stage in STAGES}
COMMON = sorted((ROOT / "common").glob("*.py"))
CHAPTERS = sorted(path for path in ROOT.glob("0?_*/*.py") if path.name != "train.py")
SURVIVE = sorted((ROOT / "survive").glob("*.py"))
each_stage = pytest.mark.parametrize("stage", STAGES)

# What a stage teaches: these functions differ from its parent's. All others that both have are the
# same, word for word.
TAUGHT = {
    "02_data_parallel": {"main"},
    "03_ddp_manual_allreduce": {"train_epoch", "evaluate", "main"},
    "04_ddp_torchrun": {"train_epoch", "main"},
    "05_amp_syncbn": {"train_epoch", "main"},
    "survive": {"parse_args", "train_epoch", "main"},
}
# The line that a stage is named for.
NAMED = {
    "01_single_gpu": ["loss.backward()"],
    "02_data_parallel": ["nn.DataParallel"],
    "03_ddp_manual_allreduce": ["average_gradients(model)", "dist.all_reduce(parameter.grad)"],
    "04_ddp_torchrun": ["DistributedDataParallel("],
    "05_amp_syncbn": ["torch.autocast(", "nn.SyncBatchNorm.convert_sync_batchnorm("],
    "survive": ["Watchdog(", "Agreement(", "durable."],
}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(source: str) -> dict[str, str]:
    """The functions of a program that stand at its top level, as text."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in found}


# --- How long


@each_stage
def test_a_script_is_short(stage):
    assert lines(TRAINS[stage]) <= LIMITS[stage][0]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)
def test_a_chapter_is_short_and_runs_by_itself(path):
    assert lines(path) <= CHAPTER_LINES
    assert '__name__ == "__main__"' in path.read_text()


@pytest.mark.parametrize("path", SURVIVE, ids=lambda path: path.name)
def test_a_module_of_survive_is_short_and_runs_by_itself(path):
    assert lines(path) <= SURVIVE_LINES.get(path.name, 160)
    assert '__name__ == "__main__"' in path.read_text()


def test_common_is_small():
    assert [path.stem for path in COMMON] == ["__init__", *COMMON_MODULES]
    assert sum(lines(path) for path in COMMON) <= COMMON_LINES


def long_functions(source: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    ]


@pytest.mark.parametrize(
    "path",
    [*TRAINS.values(), *CHAPTERS, *COMMON, *(path for path in SURVIVE if path.name != "train.py")],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_function_is_short(path):
    assert not long_functions(path.read_text())


def test_a_long_function_is_found():
    """The control: one line more than the limit, in a class."""
    for statements in (FUNCTION_LINES - 1, FUNCTION_LINES):
        source = "class A:\n    def work(self):\n" + "        print()\n" * statements
        assert long_functions(source) == ["work"] * (statements == FUNCTION_LINES)


# --- The difference to the parent is the lesson


@pytest.mark.parametrize("stage", PARENTS)
def test_lesson_diff_is_fresh(stage):
    assert (ROOT / stage / "lesson.diff").read_text() == lesson(stage), "run: make lessons"


def changed(diff: str) -> list[str]:
    return [line for line in diff.splitlines()[2:] if line[:1] in "+-"]


@pytest.mark.parametrize("stage", PARENTS)
def test_a_lesson_is_short(stage):
    assert 0 < len(changed(lesson(stage))) <= LIMITS[stage][1]


@pytest.mark.parametrize(("stage", "parent"), PARENTS.items())
def test_what_a_stage_does_not_teach_stands_in_it_word_for_word(stage, parent):
    ours, theirs = (functions(TRAINS[name].read_text()) for name in (stage, parent))
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert differ == TAUGHT[stage]


@each_stage
def test_the_line_that_a_stage_is_named_for_stands_in_it(stage):
    source = TRAINS[stage].read_text()
    assert all(line in source for line in NAMED[stage])
    if stage in PARENTS:  # and is new in it
        before = TRAINS[PARENTS[stage]].read_text()
        assert not any(line in before for line in NAMED[stage])


@pytest.mark.parametrize("stage", NUMBERED)
def test_the_loop_over_epochs_stands_in_main(stage):
    """Or, in stage 03, in the function that each process runs."""
    owner = "train" if stage.startswith("03") else "main"
    loops = [
        name
        for name, source in functions(TRAINS[stage].read_text()).items()
        if '    for epoch in range(start["epoch"], args.epochs):\n' in source
    ]
    assert loops == [owner]


@each_stage
def test_a_script_has_the_order_of_all_scripts(stage):
    source = TRAINS[stage].read_text()
    names = list(functions(source))
    assert names.index("train_epoch") + 1 == names.index("evaluate") < names.index("main")
    assert stage == "survive" or names[-1] == "main"
    doc = ast.get_docstring(ast.parse(source)) or ""
    assert doc.startswith("Stage 05 " if stage == "survive" else f"Stage {stage[:2]}: ")
    assert f"{stage}/train.py" in doc, "the docstring holds the command that runs it"


# --- What common may know

FORBIDDEN = {"distributed", "DataParallel", "DistributedDataParallel", "autocast", "backward"}
FORBIDDEN |= {"watchdog", "Watchdog", "signal", "multiprocessing", "threading"}


def uses(source: str) -> set[str]:
    """Every name, attribute and imported module of a program."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= set((node.module or "").split(".")) | {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
    return found


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.name)
def test_common_knows_nothing_of_parallelism(path):
    source = path.read_text()
    assert not uses(source) & FORBIDDEN
    assert "optimizer.step(" not in source


def test_what_common_must_not_use_is_found():
    """The control: stages 03 and survive would not pass."""
    assert uses(TRAINS["03_ddp_manual_allreduce"].read_text()) >= {"distributed", "signal"}
    assert uses(TRAINS["survive"].read_text()) >= {"distributed", "autocast", "watchdog"}


def inherited(sources: list[str]) -> set[str]:
    """The classes of these programs that others of their classes inherit from."""
    classes = [n for s in sources for n in ast.walk(ast.parse(s)) if isinstance(n, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    return bases & {node.name for node in classes}


def test_common_has_no_base_class():
    assert not inherited([path.read_text() for path in COMMON])
    assert inherited(["class A: pass", "class B(A): pass"]) == {"A"}, "the control"


# --- Flags, collectives, paths


class _Parsed(Exception):  # noqa: N818
    """Carries the flags of a stage out of its main."""


def flags_of(stage: str) -> set[str]:
    def parse_args(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parsed({action.dest for action in parser._actions} - {"help"})

    key = next(key for key, folder in FOLDERS.items() if folder.name == stage)
    module = fresh_module(key, "train.py")
    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        pytest.raises(_Parsed) as caught,
    ):
        module.main()
    return caught.value.args[0]


def unread(stage: str, code: str) -> set[str]:
    """The flags of a stage that this code does not read."""
    return flags_of(stage) - set(re.findall(r"\bargs\.(\w+)", code))


def code_of(stage: str) -> str:
    paths = [*COMMON, TRAINS[stage]]
    if "add_schedule" in TRAINS[stage].read_text():
        paths.append(ROOT / "05_amp_syncbn" / "schedule.py")
    return "".join(path.read_text() for path in paths)


@each_stage
def test_no_flag_is_unread(stage):
    assert not unread(stage, code_of(stage))
    assert unread(stage, code_of(stage).replace("args.workers", "0")) == {"workers"}, "the control"


COLLECTIVE = re.compile(
    r"\bdist\.(all_|broadcast|barrier|reduce|gather|scatter)|agreement\.(vote|barrier)\("
)
MARK = "every rank must reach this line"


def unmarked(source: str) -> list[str]:
    """The collectives of a program without a word to the reader: here, a missing rank is a hang."""
    return [x.strip() for x in source.splitlines() if COLLECTIVE.search(x) and MARK not in x]


@each_stage
def test_every_collective_is_marked(stage):
    source = TRAINS[stage].read_text()
    assert not unmarked(source)
    assert (MARK in source) == (stage >= "03")
    assert unmarked("dist.all_reduce(x)\ndist.barrier()  # wait"), "the control"


SYS_PATH = 'sys.path.insert(1, str(Path(__file__).parents[1] / "05_amp_syncbn"))\n'


def test_no_absolute_path_and_no_sys_path_in_what_readers_copy():
    for path in [*ROOT.glob("0?_*/*.py"), *SURVIVE, *COMMON, ROOT / "tour.py"]:
        source = path.read_text()
        if path == TRAINS["survive"]:  # it finds two chapters of stage 05
            source = source.replace(SYS_PATH, "")
        assert "sys.path" not in source, path
        assert not re.search(r"""["'](/home|/root|/work|/tmp)""", source), path


def test_every_claim_names_tests_that_exist():
    claims = (ROOT / "CLAIMS.md").read_text()
    rows = [line for line in claims.splitlines() if line.startswith("| C")]
    assert len(rows) >= 14
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    for row in rows:
        assert row.count("|") == 6, f"five cells: {row[:40]}"
        named = re.findall(r"`(test_\w+)`", row.split("|")[5])
        assert named, f"{row[:40]} names no test"
        missing = [name for name in named if f"def {name}(" not in tests]
        assert not missing, f"{row[:6]}: {missing}"
