"""Changes single lines of what is taught, one at a time, and counts the changes that a test finds.

`make mutants` runs the suite for its times, then this. They are drawn by seed, of all files alike.
Each meets the tests that name its file or one that imports it, the nearest and fastest first, as
many as take BUDGET seconds; tests that compare the texts of programs do not count.
"""

import ast
import random
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from itertools import accumulate, islice, zip_longest
from pathlib import Path
from queue import Queue
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for top in ("common", "survive", "0?_*") for path in ROOT.glob(f"{top}/*.py"))
BUDGET, LIMIT = 60, 300  # seconds: of a mutant's tests on the unchanged program; then it ends
TEXTS = ("test_limits", "test_break_it", "test_notebooks", "_is_a_part_of_the_", "_every_hunk_")
ALIKE = re.compile(r"(round|sleep|randn|ones|empty|close|equal|dup2)\(|seed\(\d")  # no loss
SHOWN = ("print", "add_argument", "tabulate", "filterwarnings", "error", "UsageError", "warn")
SETTINGS = ("timeout", "seconds", "help", "metavar", "daemon", "non_blocking", "strict", "frozen")
OTHER = {"Add": "Sub", "Sub": "Add", "Mult": "Add", "Div": "Mult", "FloorDiv": "Mult", "Or": "And"}
OTHER |= {"Mod": "FloorDiv", "Pow": "Mult", "Lt": "LtE", "LtE": "Lt", "Gt": "GtE", "GtE": "Gt"}
OTHER |= {"Eq": "NotEq", "NotEq": "Eq", "In": "NotIn", "NotIn": "In", "Is": "IsNot", "IsNot": "Is"}


def changed(node):
    """The node with another operator or constant, a call left out, or its arguments swapped."""
    new, kind = copy(node), type(getattr(node, "op", getattr(node, "ops", [None])[0])).__name__
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if kind in OTHER:
        new.op = getattr(ast, OTHER[kind])()
        new.ops = [new.op, *getattr(node, "ops", [])[1:]]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        new.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        new.args = [node.args[1], node.args[0], *node.args[2:]]
    elif isinstance(node, ast.IfExp):
        new.body, new.orelse = node.orelse, node.body
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()
    return None if ast.dump(new) == ast.dump(node) else new


def taught(node: ast.AST) -> list:
    """The nodes below this one, without texts, annotations, and what is only shown or waited."""
    name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
    left_out = isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.arg) or name in SHOWN
    left_out |= isinstance(node, ast.keyword) and node.arg in SETTINGS
    left_out |= isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    if left_out or (isinstance(node, ast.Expr) and not taught(node.value)):
        return []
    return [node, *(each for child in ast.iter_child_nodes(node) for each in taught(child))]


def mutants_of(path: Path) -> list[tuple[Path, int, str]]:
    """Every change: file, number of the line, new line; without a GPU, not of lines on cuda."""
    lines, found = path.read_text().splitlines(), []
    for node in taught(ast.parse(path.read_text())):
        new = changed(node)
        if new and node.lineno == node.end_lineno and "cuda" not in lines[node.lineno - 1]:
            old, text = lines[node.lineno - 1].encode(), ast.unparse(new)
            text = f"({text})" if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare) else text
            line = old[: node.col_offset] + text.encode() + old[node.end_col_offset :]
            found.append((path.relative_to(ROOT), node.lineno, line.decode()))
    return found


def tests_that_passed(times: Path) -> dict[str, tuple[str, str, float]]:  # texts, seconds
    found = {}
    for case in ElementTree.parse(times).iter("testcase"):
        file, name = case.attrib["classname"].split(".")[-1], case.attrib["name"]
        if len(case) == 0 and not any(text in f"{file}::{name}" for text in TEXTS):
            text = (ROOT / "tests" / f"{file}.py").read_text()
            own = text.partition(f"def {name.split('[')[0]}(")[2].partition("\n\n\n")[0]
            found[f"tests/{file}.py::{name}"] = (name + own, text, float(case.attrib["time"]))
    return found


def names(path: Path) -> str:  # a pattern of the ways in which a test names that file
    stage, stem = path.parent.name, path.stem
    key = stage if stage == "survive" else stage[:2]
    chapter = rf'"{stem}"|\b{stem}\.py|import {stem}\b|common\.{stem}\b'
    return rf'"{key}"|test_{key}_|{stage}/train\.py|FOLDERS' if stem == "train" else chapter


def tests_of(path: Path, tests: dict[str, tuple[str, str, float]]) -> list[str]:
    says = cache(lambda pattern, text: bool(re.search(pattern, text)))
    uses = rf"^ *(from|import) (common\.)?{path.stem}\b"
    importers = [each for each in SOURCES if re.search(uses, each.read_text(), re.M)]
    near, far = names(path), "|".join(map(names, [path, *importers]))
    reach = [
        (not says(near, own), not says(near, file), seconds, test)
        for test, (own, file, seconds) in tests.items()
        if says(far, own) or says(far, file)
    ]
    ends = accumulate(seconds for _, _, seconds, _ in sorted(reach))
    return [test for (*_, test), end in zip(sorted(reach), ends, strict=True) if end < BUDGET]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", type=Path, help="what pytest --junitxml wrote")
    parser.add_argument("--count", type=int, default=120)
    args = parser.parse_args()
    tests, copies, counts = tests_that_passed(args.times), Queue(), defaultdict(Counter)

    def try_mutant(mutant: tuple[Path, int, str]) -> None:
        (path, number, line), where = mutant, copies.get()  # nobody else uses this copy meanwhile
        source = (ROOT / path).read_text()
        lines = source.splitlines(keepends=True)
        lines[number - 1] = f"{line}\n"
        (where / path).write_text("".join(lines))
        command = ["timeout", str(LIMIT), "env", f"PYTHONPATH={where}", sys.executable, "-m"]
        command += ["pytest", "-xq", *chosen[path]]
        status = subprocess.run(command, cwd=where, capture_output=True).returncode
        verdict = {0: "survived", 1: "killed", 124: "timed out"}.get(status, str(status))
        print(f"{verdict:9} {path}:{number}: {line.strip()}", flush=True)
        counts[path][verdict] += 1
        (where / path).write_text(source)
        copies.put(where)

    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for place in (Path(folder, "0", ROOT.name), Path(folder, "1", ROOT.name)):
            copytree(ROOT, place, ignore=ignore_patterns(".*", "runs", "*MNIST", "cifar*"))
            (place.parent / "shared").symlink_to(ROOT.parent / "shared")
            copies.put(place)
        rows = [random.Random(0).sample(m, len(m)) for m in map(mutants_of, SOURCES)]
        turns = (m for turn in zip_longest(*rows) for m in turn if m and not ALIKE.search(m[2]))
        mutants = list(islice(turns, args.count))
        chosen = {path: tests_of(ROOT / path, tests) for path, *_ in mutants}
        list(pool.map(try_mutant, mutants))
    for file, each in [*counts.items(), ("together", sum(counts.values(), Counter()))]:
        print(f"{file!s:42}", dict(each))


if __name__ == "__main__":
    main()
