"""The main path stays short, and its copies stay equal.

Only the scripts that a reader copies have a limit of lines. A line that must be squeezed to fit
means that the design of its function is wrong.
"""

import ast
import re
from pathlib import Path

import pytest

from local_ranks.chapters import ROOT
from local_ranks.stage_files import different_functions, functions
from page_sources import PARENTS, lesson
from repository_pages import TEST_FILES

LIMITS = {  # most lines of a script, and of those that differ from its parent's, if it has one
    "01_single_gpu/train.py": (85, None),
    "02_data_parallel/train.py": (100, 35),
    "03_ddp_manual_allreduce/train.py": (130, 90),
    "04_ddp_torchrun/train.py": (120, 90),
    "04_ddp_torchrun/minimal.py": (45, None),
    "05_amp_syncbn/train.py": (145, 55),
    "05_amp_syncbn/template.py": (150, None),
}
TAUGHT = {  # the functions that a stage changes; the others are its parent's, word for word
    "02_data_parallel": {"main"},
    "03_ddp_manual_allreduce": {"train_epoch", "evaluate", "main"},
    "04_ddp_torchrun": {"train_epoch", "main"},
    "05_amp_syncbn": {"train_epoch", "main"},
    "beyond/survive": {"train_epoch", "main"},
}
STAGE_FOLDERS = (PARENTS["02_data_parallel"], *PARENTS)
SOURCES = {stage: (ROOT / stage / "train.py").read_text() for stage in STAGE_FOLDERS}
COMMON = sorted((ROOT / "common").glob("*.py"))
each_stage = pytest.mark.parametrize("stage", SOURCES)


def changed_lines(diff: str) -> int:
    """Without the first two lines, which name the files."""
    return sum(line[:1] in "+-" for line in diff.splitlines()[2:])


@pytest.mark.parametrize("script", LIMITS)
def test_a_script_is_short_enough_to_be_read_at_once_and_so_is_its_lesson(script):
    lines, lines_of_lesson = LIMITS[script]
    assert len((ROOT / script).read_text().splitlines()) <= lines
    if lines_of_lesson:
        assert 0 < changed_lines(lesson(str(Path(script).parent))) <= lines_of_lesson


@pytest.mark.parametrize(("stage", "parent"), PARENTS.items())
def test_a_function_that_a_stage_does_not_teach_is_its_parents(stage, parent):
    assert different_functions(SOURCES[stage], SOURCES[parent]) == TAUGHT[stage]
    changed = SOURCES[stage].replace("model.eval()", "model.train()")  # the control
    assert "evaluate" in different_functions(changed, SOURCES[parent])


@each_stage
def test_every_script_has_the_same_skeleton_and_says_how_to_run_it(stage):
    names = list(functions(SOURCES[stage]))
    assert names.index("train_epoch") + 1 == names.index("evaluate") < names.index("main")
    documentation = ast.get_docstring(ast.parse(SOURCES[stage])) or ""
    number = "05" if stage == "beyond/survive" else stage[:2]
    assert documentation.startswith(f"Stage {number}")
    assert f"{stage}/train.py" in documentation


# What only a lesson may use.
FORBIDDEN = {"distributed", "DataParallel", "DistributedDataParallel", "autocast", "backward"}
FORBIDDEN |= {"watchdog", "Watchdog", "signal", "multiprocessing", "threading"}
FIELDS = ("attr", "id", "module", "name")


def names_used(source: str) -> set[str]:
    """All names of variables, attributes and modules, and their parts between dots."""
    fields = [(node, field) for node in ast.walk(ast.parse(source)) for field in FIELDS]
    return {part for node, field in fields for part in str(getattr(node, field, "")).split(".")}


def test_common_knows_nothing_of_parallelism_and_has_no_base_class():
    text = "\n".join(path.read_text() for path in COMMON)
    assert not names_used(text) & FORBIDDEN
    assert "optimizer.step(" not in text
    assert "local_ranks" not in text
    assert not [stage for stage in SOURCES if "local_ranks.ranks" in SOURCES[stage]]
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    assert not {node.name for node in classes} & bases
    # The controls: other scripts do use what is forbidden here.
    assert names_used(SOURCES["03_ddp_manual_allreduce"]) >= {"distributed", "backward"}
    assert names_used(SOURCES["beyond/survive"]) >= {"distributed", "autocast", "watchdog"}


@each_stage
def test_no_flag_is_unread(stage):
    code = "".join(path.read_text() for path in COMMON) + SOURCES[stage]
    if "add_schedule" in code:
        code += (ROOT / "05_amp_syncbn" / "schedule.py").read_text()
    flags = set(re.findall(r'\b\w+\(\s*"--([\w-]+)", ', code))
    assert {"epochs", "resume", "workers"} <= flags
    for text, unread in ((code, set()), (code.replace("args.workers", "0"), {"workers"})):
        read = set(re.findall(r"\bargs\.(\w+)", text))
        assert {flag for flag in flags if flag.replace("-", "_") not in read} == unread


PATH_OF_A_MACHINE = re.compile(r"""["'](/home|/root|/work|/tmp)\b""")


def test_no_absolute_path_and_no_sys_path_in_what_readers_copy():
    folders = (*STAGE_FOLDERS, "beyond/local_sgd", "common")
    programs: list[Path] = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in programs:
        source = path.read_text()
        assert "sys.path" not in source, path
        assert not PATH_OF_A_MACHINE.search(source), path
    assert PATH_OF_A_MACHINE.search('open("/tmp/a")'), "the control"


def claims_without_a_test(claims: list[str], tests: str) -> list[str]:
    """Find claims whose number stands in no test's name, like test_c07_..., and in no docstring."""
    nodes = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.FunctionDef)]
    own = [node for node in nodes if node.name.startswith("test_")]
    texts = [f"{node.name} {ast.get_docstring(node) or ''}".lower() for node in own]
    words = {word for text in texts for word in re.findall(r"(?<![a-z\d])c\d\d(?!\d)", text)}
    return [claim for claim in claims if claim.lower() not in words]


def test_every_claim_has_a_test_that_carries_its_number():
    claims = re.findall(r"^\| (C\d+) \|", (ROOT / "docs/claims.md").read_text(), re.M)
    assert claims == sorted(set(claims))
    assert claims
    tests = "\n".join(path.read_text() for path in TEST_FILES)
    assert claims_without_a_test(claims, tests) == []
    assert claims_without_a_test(["C07", "C99"], tests) == ["C99"]
