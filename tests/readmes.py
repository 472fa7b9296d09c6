"""How a README is read: its fences, and the comments that tell what the suite does with them.

Above a bash fence may stand one of

    <!-- in the suite: add FLAGS -->        each command gets these flags, to be quick
    <!-- in the suite: run COMMAND -->      this instead
    <!-- in the suite: nothing, REASON -->  it is not run here

and above a text fence <!-- output of: COMMAND -->: `make readme` runs it and writes the fence.
Between <!-- table: NAME --> and <!-- end of table --> stands what benchmarks/tables.py makes.
Above a diff fence stands what part of the stage's lesson.diff it shows: see lessons.py; or
<!-- break it: FILE TEST -->: with this change to the file, the test fails. Above a python fence may
stand <!-- part of: FILE -->: it is a part of that file, word for word.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "0?_*/**/*.md", "beyond/**/*.md", "benchmarks/*.md", "common/*.md", "docs/*.md")


def pages_of(root: Path) -> list[Path]:
    """The English pages; for the others, see translations.py."""
    found = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    return [path for path in found if not path.match("*.zh.md")]


READMES = pages_of(ROOT)
HERE = [page for page in READMES if page.parent.name != "convert"]  # see test_convert.py
FENCE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Fence:
    readme: Path
    kind: str
    text: str
    note: str  # the comment right above it
    place: tuple[int, int]  # of the text in the file

    @property
    def name(self) -> str:
        return f"{self.readme.parent.name}: {self.text.splitlines()[0]}"


def fences(kind: str, readmes: list[Path] = HERE) -> list[Fence]:
    return [
        Fence(readme, kind, match["text"], match["note"] or "", match.span("text"))
        for readme in readmes
        for match in FENCE.finditer(readme.read_text())
        if match["kind"] == kind
    ]


BREAK = re.compile(r"break it: (?P<file>[\w.]+) (?P<test>test_\w+)")


def sides(diff: str) -> tuple[str, str]:
    """The text before and after the change that a diff shows."""
    lines = diff.splitlines(keepends=True)
    return (
        "".join(line[1:] or "\n" for line in lines if line[:1] in " -\n"),
        "".join(line[1:] or "\n" for line in lines if line[:1] in " +\n"),
    )


TABLE = re.compile(r"<!-- table: (?P<name>.+?) -->\n(?P<text>.*?)<!-- end of table -->", re.S)


def shown_output(fence: Fence) -> str:
    """The command whose output a text fence shows, or nothing."""
    return fence.note.removeprefix("output of: ") if fence.note.startswith("output of: ") else ""


def shell(command: str, where: Path = ROOT, seconds: float = 180) -> str:
    """Its output, with the programs of this Python and one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call, pipes = ["bash", "-e", "-o", "pipefail", "-c", command], {"capture_output": True}
    done = subprocess.run(call, cwd=where, env=env, text=True, timeout=seconds, **pipes)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
