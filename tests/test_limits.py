"""The limits and rules that keep each lesson short, and its copies from drifting apart."""

import ast
import re
from pathlib import Path

import pytest

from lessons import PARENTS, lesson
from support import ROOT

# Lines of train.py; changed lines (added and removed) of lesson.diff; and the functions that differ
# from the parent's, while all others are the same, word for word. There are no exceptions: what
# does not fit is a chapter, or belongs to survive/, or is not needed.
LIMITS = {
    "01_single_gpu": (85, 0, set()),
    "02_data_parallel": (105, 45, {"main"}),
    "03_ddp_manual_allreduce": (135, 100, {"train_epoch", "evaluate", "main"}),
    "04_ddp_torchrun": (125, 100, {"train_epoch", "main"}),
    "05_amp_syncbn": (170, 100, {"train_epoch", "main"}),
    "beyond/survive": (220, 160, {"parse_args", "train_epoch", "main"}),
}
FUNCTION_LINES, CHAPTER_LINES, MODULE_LINES, WATCHDOG_LINES = 40, 150, 160, 190
TOGETHER = {"common": 470, "benchmarks": 3000, "tests": 7000}  # lines
SOURCES = {stage: (ROOT / stage / "train.py").read_text() for stage in LIMITS}
COMMON = sorted((ROOT / "common").glob("*.py"))
CHAPTERS = [path for path in ROOT.glob("0?_*/*.py") if path.name not in ("train.py", "exercise.py")]
MODULES = [
    path
    for path in ROOT.glob("beyond/survive/*.py")
    if path.name not in ("train.py", "exercise.py")
]
each_stage = pytest.mark.parametrize("stage", LIMITS)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(source: str) -> dict[str, str]:
    """The functions of a program that stand at its top level, as text."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in found}


def long_functions(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in nodes if node.end_lineno - node.lineno >= FUNCTION_LINES]


def test_all_programs_and_their_functions_are_short_and_chapters_run_by_themselves():
    limits = {ROOT / stage / "train.py": limit for stage, (limit, *_) in LIMITS.items()}
    limits |= dict.fromkeys(CHAPTERS, CHAPTER_LINES) | dict.fromkeys(MODULES, MODULE_LINES)
    assert max(map(lines, ROOT.glob("03_ddp_manual_allreduce/shm/*.py"))) <= MODULE_LINES
    limits[ROOT / "beyond/survive" / "watchdog.py"] = WATCHDOG_LINES
    assert {path.name: lines(path) for path in limits if lines(path) > limits[path]} == {}
    assert [path for path in limits if '__name__ == "__main__"' not in path.read_text()] == []
    modules = ["__init__", "checkpoint", "data", "models", "options", "record"]
    assert [path.stem for path in COMMON] == modules
    for folder, limit in TOGETHER.items():
        assert sum(lines(path) for path in ROOT.glob(f"{folder}/*.py")) <= limit, folder
    texts = [path.read_text() for path in [*limits, *COMMON]]
    assert [name for text in texts for name in long_functions(text)] == []
    for statements in (FUNCTION_LINES - 1, FUNCTION_LINES):  # the control: one line too many
        source = "class A:\n    def work(self):\n" + "        print()\n" * statements
        assert long_functions(source) == ["work"] * (statements == FUNCTION_LINES)


@pytest.mark.parametrize(("stage", "parent"), PARENTS.items())
def test_the_difference_to_the_parent_is_the_lesson(stage, parent):
    assert (ROOT / stage / "lesson.diff").read_text() == lesson(stage), "run: make lessons"
    changed = [line for line in lesson(stage).splitlines()[2:] if line[:1] in "+-"]
    assert 0 < len(changed) <= LIMITS[stage][1]
    ours, theirs = functions(SOURCES[stage]), functions(SOURCES[parent])
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert differ == LIMITS[stage][2]


MARK = "every rank must reach this line"
CALL = r"\bdist\.(?:all_|broadcast|barrier|reduce|gather|scatter)|agreement\.(?:vote|barrier)\("


@each_stage
def test_a_script_has_the_order_the_loop_and_the_marks_of_all_scripts(stage):
    source = SOURCES[stage]
    bodies, doc = functions(source), ast.get_docstring(ast.parse(source)) or ""
    names = list(bodies)
    assert names.index("train_epoch") + 1 == names.index("evaluate") < names.index("main")
    assert doc.startswith("Stage 05 " if stage == "beyond/survive" else f"Stage {stage[:2]}: ")
    assert f"{stage}/train.py" in doc, "the docstring holds the command that runs it"
    calls = [line for line in source.splitlines() if re.search(CALL, line)]
    assert [line for line in calls if MARK not in line] == [], "every collective is marked"
    assert bool(calls) == (stage >= "03")
    if stage != "beyond/survive":
        assert names[-1] == "main"
        loop = '    for epoch in range(saved["epoch"], args.epochs):\n'
        owner = "train" if stage.startswith("03") else "main"  # what each process of 03 runs
        assert [name for name, body in bodies.items() if loop in body] == [owner]


FORBIDDEN = {"distributed", "DataParallel", "DistributedDataParallel", "autocast", "backward"}
FORBIDDEN |= {"watchdog", "Watchdog", "signal", "multiprocessing", "threading"}
FIELDS = ("attr", "id", "module", "name")


def uses(source: str) -> set[str]:
    fields = [(node, field) for node in ast.walk(ast.parse(source)) for field in FIELDS]
    return {part for node, field in fields for part in str(getattr(node, field, "")).split(".")}


def test_common_knows_nothing_of_parallelism_and_has_no_base_class():
    text = "\n".join(path.read_text() for path in COMMON)
    assert not uses(text) & FORBIDDEN
    assert "optimizer.step(" not in text
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    assert not {node.name for node in classes} & {ast.unparse(b) for c in classes for b in c.bases}
    assert uses(SOURCES["03_ddp_manual_allreduce"]) >= {"distributed", "signal"}, "the control"
    assert uses(SOURCES["beyond/survive"]) >= {"distributed", "autocast", "watchdog"}


@each_stage
def test_no_flag_is_unread(stage):
    code = "".join(path.read_text() for path in COMMON) + SOURCES[stage]
    if "add_schedule" in SOURCES[stage]:
        code += (ROOT / "05_amp_syncbn" / "schedule.py").read_text()
    flags = re.findall(r'\b\w+\(\s*"--([\w-]+)", ', code)
    assert {"epochs", "resume", "workers"} <= set(flags)
    for text, unread in ((code, set()), (code.replace("args.workers", "0"), {"workers"})):
        read = set(re.findall(r"\bargs\.(\w+)", text))
        assert {flag for flag in flags if flag.replace("-", "_") not in read} == unread


def test_no_absolute_path_and_no_sys_path_in_what_readers_copy():
    allowed = 'sys.path.insert(1, str(Path(__file__).parents[2] / "05_amp_syncbn"))\n'  # in survive
    sources = [*SOURCES.values(), *(path.read_text() for path in [*CHAPTERS, *MODULES, *COMMON])]
    for source in sources:
        assert "sys.path" not in source.replace(allowed, "")
        assert not re.search(r"""["'](/home|/root|/work|/tmp)""", source)


def test_every_claim_names_tests_that_exist():
    text = (ROOT / "docs/claims.md").read_text()
    rows, table = re.findall(r"^- (C\d+): (.*)$", text, re.M), re.findall(r"^\| (C\d+)", text, re.M)
    assert [name for name, _ in rows] == table == [f"C{number:02}" for number in range(1, 44)]
    files = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)", files, re.M))
    assert [c for c, row in rows if not set() < {*re.findall(r"`(test_\w+)`", row)} <= tests] == []
