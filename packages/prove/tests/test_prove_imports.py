"""What runs in the user's ranks and what judges them share the records; `import prove` is light.

A check watches and judges, so it is on both sides; of watch/, only observe.py knows the checks.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prove

PACKAGE = Path(prove.__file__).parent
SOURCES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file.read_text()
    for file in PACKAGE.rglob("*.py")
    if file.name != "__init__.py"  # these only give names
}
SIDES = {  # what a module of each side must not reach
    "prove.watch.": ("prove.judge.", "prove.checks."),
    "prove.judge.": ("prove.watch.", "prove.checks."),
}


def imported(source: str) -> set[str]:
    """Name prove's modules that a source imports, also within its functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & SOURCES.keys()


def reached_from(module: str, sources: dict[str, str]) -> set[str]:
    reached, begin = set(), {module}
    while begin:
        reached |= begin
        begin = {name for each in begin for name in imported(sources[each])} - reached
    return reached


def crossings(sources: dict[str, str]) -> set[str]:
    """Name the modules of one side that reach the other one."""
    return {
        module
        for own, others in SIDES.items()
        for module in sources
        if module.startswith(own) and module != "prove.watch.observe"
        if any(name.startswith(others) for name in reached_from(module, sources))
    }


def test_what_watches_a_script_and_what_judges_it_share_the_records_alone():
    assert crossings(SOURCES) == set()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("prove.watch.data", "from prove.judge import table\n"),
        ("prove.judge.table", "from prove.processes import preload\n"),  # which imports watch
    ],
)
def test_an_import_from_the_other_side_is_found(module, line):
    assert module in crossings(SOURCES | {module: SOURCES[module] + line})


def test_importing_prove_loads_no_torch():
    """A test suite that imports prove does not wait for torch before it needs it."""
    for statement, loads in (("import prove", "False"), ("import prove.checks", "True")):
        line = f"{statement}, sys; print('torch' in sys.modules)"
        printed = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
        assert printed.stdout.strip() == loads, printed.stderr
