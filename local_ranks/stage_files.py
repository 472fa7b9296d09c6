"""The files of a stage as the tests load them: as they are, or with lines left out.

Many tests and helpers take `changes`, lines of a stage to leave out. pytest passes none, so that
the test is about the stage as it is. tests/pages/test_break_it.py passes one, and the test must
fail.
"""

import ast
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import ignore_patterns

from local_ranks.chapters import ROOT

LESSON_FOLDERS = {path.name[:2]: path for path in sorted(ROOT.glob("0?_*"))}
LESSON_FOLDERS |= {
    name: ROOT / "beyond" / name for name in ("survive", "shard", "local_sgd", "forecast")
}
# A copy of the repository leaves these out. Other tests write the last two at the same time.
NOT_COPIED = ignore_patterns(".*", "runs", "*MNIST", "cifar*", "_site", "__pycache__")

# (file, line): leave this line of a stage's file out. (file, old, new): replace a text in the file.
Change = tuple[str, ...]


def functions(source: str) -> dict[str, str]:
    """The functions of a program that stand at its top level, as text."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in nodes}


def different_functions(source: str, parent: str) -> set[str]:
    """The names of the functions that both have, with other texts."""
    ours, theirs = functions(source), functions(parent)
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


def replace_once(text: str, *changes: tuple[str, str]) -> str:
    """The text with each old piece replaced by its new one. It must have the old piece, once."""
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times in the text, expected once: {old}"
        text = text.replace(old, new)
    return text


def changed_source(path: Path, changes: Sequence[Change]) -> str:
    """The text of this file, with lines left out or texts replaced."""
    source = path.read_text()
    for file, old, *new in changes:
        if not path.match(file):
            continue
        if new:
            source = replace_once(source, (old, new[0]))
            continue
        lines = source.splitlines()  # compared without indent and comment
        places = [i for i, line in enumerate(lines) if line.split("  #")[0].strip() == old]
        assert places, f"{path} has no line {old!r}"
        for place in places:
            lines[place] = lines[place].replace(old, "pass")
        source = "\n".join([*lines, ""])
    return source


compiled = cache(compile)  # a test that takes many fresh modules compiles each text once


def fresh_module(
    path: Path, changes: Sequence[Change] = (), register: bool = False
) -> types.ModuleType:
    """Load a program as a new module, with these changes.

    register: later imports of its name find this module instead of the file.
    """
    name = path.stem if path.name != "train.py" else f"train_{path.parent.name}"
    if str(path.parent) not in sys.path:  # a script finds the files beside it
        sys.path.insert(0, str(path.parent))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    if register:
        sys.modules[name] = module
    source = changed_source(path, changes)
    exec(compiled(source, module.__file__, "exec"), module.__dict__)
    return module
