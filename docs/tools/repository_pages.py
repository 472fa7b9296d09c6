"""How a page is read: its fences, and the comments that tell what is done with them.

Above a bash fence may stand one of

    <!-- in the suite: add FLAGS -->        each command gets these flags, to be quick
    <!-- in the suite: run COMMAND -->      this instead
    <!-- in the suite: nothing, REASON -->  it is not run here

and above a text fence <!-- output of: COMMAND -->: `make pages` runs it and writes the fence, and
the suite runs it and compares. `...` replaces the samples/s of an epoch, since one run is no
measurement. What another CPU may print differently stands behind the command:

    <!-- output of: COMMAND; decimals within 2 % -->        numbers with a point or an exponent
    <!-- output of: COMMAND; whole numbers within 5 -->     measured ones; otherwise they are counts

Above a diff fence stands one of

    <!-- lesson: FIRST ... LAST -->  what differs between the train.py beside the page and the one
                                     of the stage before, from a line to a line that begin so
    <!-- part of: FILE.diff -->      all of that file but its first two lines
    <!-- break it: FILE TEST -->     with this change to the file, the test fails

and above a python fence <!-- part of: FILE -->: it is a part of that file, word for word, and ...
leaves lines out. `make pages-quick` writes all of these but "break it"; in a part of a file, it
knows what to write by the first and the last line.

Between <!-- table: NAME --> and <!-- end of table --> stands what benchmarks/tables/pages.py makes,
and <!-- widget: NAME --> is a place where the site has something to play with.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The main path, in the order in which it is read.
MAIN_PATH = [".", "01_single_gpu", "02_data_parallel", "03_ddp_manual_allreduce"]
MAIN_PATH += ["04_ddp_torchrun", "05_amp_syncbn", "beyond/survive", "beyond/convert"]
PARENTS = {  # for each train.py that teaches a difference, the folder of its parent
    "02_data_parallel": "01_single_gpu",
    "03_ddp_manual_allreduce": "01_single_gpu",
    "04_ddp_torchrun": "03_ddp_manual_allreduce",
    "05_amp_syncbn": "04_ddp_torchrun",
    "beyond/survive": "05_amp_syncbn",
}
PAGES = (
    "*.md",
    "0?_*/**/*.md",
    "beyond/**/*.md",
    "packages/**/*.md",
    "benchmarks/*.md",
    "common/*.md",
    "docs/*.md",
)


# The English pages.
ALL_PAGES = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
ALL_PAGES = [path for path in ALL_PAGES if not path.match("*.zh.md")]
# These show commands for a folder of the reader's: see test_convert.py.
CONVERT = {ROOT / "beyond/convert" / name for name in ("README.md", "detector/README.md")}
PAGES_OF_THE_ROOT = [page for page in ALL_PAGES if page not in CONVERT]
TEST_FOLDERS = ("tests/*", "packages/*/tests")
TEST_FILES = sorted(path for each in TEST_FOLDERS for path in ROOT.glob(f"{each}/test_*.py"))
FENCE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
COMMENT = re.compile(r"<!-- ([^\n]*?) -->")
KINDS = {"in the suite", "output of", "lesson", "part of", "break it", "table", "widget"}
KINDS |= {"end of table", "of the English"}  # the last one: see update_translations.py
FENCED = re.compile(r"^```\w+\n.*?^```$", re.M | re.S)  # without the comment above it
SOURCE = re.compile(r"^<!-- (?:lesson|part of): [^\n]* -->$", re.M)  # what such a fence quotes
IN_SUITE = re.compile(r"in the suite: (?P<how>add|run|nothing)\b,? (?P<rest>.+)")
WIDGET = re.compile(r"^<!-- widget: (?P<name>\w+) -->$", re.M)
LEFT_OUT = "...\n"  # between two parts of a file
BREAK = re.compile(r"break it: (?P<file>[\w.]+) (?P<test>test_\w+)")
TABLE = re.compile(r"<!-- table: (?P<name>.+?) -->\n(?P<text>.*?)<!-- end of table -->", re.S)
OUTPUT = re.compile(
    r"output of: (?P<command>.+?)"
    r"(?:; decimals within (?P<percent>[\d.]+) %)?(?:; whole numbers within (?P<whole>\d+))?"
)
SPEED = re.compile(r"(?P<before>^epoch \d+/\d+ .+  )(?P<speed>[\d,]+) samples/s$", re.M)


def chinese_page(page: Path, root: Path = ROOT) -> Path:
    """Where the Chinese version of an English page is, if there is one."""
    if page == root / "README.md":
        return root / "README.zh.md"
    return root / "docs" / "zh" / f"{page.parent.name if page.stem == 'README' else page.stem}.md"


def translated_pages(root: Path = ROOT) -> Iterator[tuple[Path, Path]]:
    """The English pages that have a Chinese version, and that version."""
    for pattern in ("README.md", "*/README.md", "beyond/*/README.md", "docs/*.md"):
        for page in sorted(root.glob(pattern)):
            if (chinese := chinese_page(page, root)).exists():
                yield page, chinese


CHINESE = [page for _, page in translated_pages()]


@dataclass(frozen=True)
class Fence:
    page: Path
    kind: str
    text: str
    note: str  # the comment right above it
    place: tuple[int, int]  # where the text lies in the file

    @property
    def name(self) -> str:
        return f"{self.page.parent.name}: {self.text.splitlines()[0]}"

    @property
    def command(self) -> str:
        """The command whose output the fence shows, or nothing."""
        match = OUTPUT.fullmatch(self.note)
        return match["command"] if match else ""

    @property
    def tolerances(self) -> tuple[float, int]:
        """What may differ on another CPU: decimals by this share, whole numbers by that much."""
        match = OUTPUT.fullmatch(self.note)
        return (float(match["percent"] or 0) / 100, int(match["whole"] or 0)) if match else (0.0, 0)

    def write(self, text: str) -> None:
        """Put this text into the page. The fences below it are no longer where they were."""
        page, (start, end) = self.page.read_text(), self.place
        self.page.write_text(page[:start] + text + page[end:])


def fences(kind: str, pages: list[Path] = PAGES_OF_THE_ROOT) -> list[Fence]:
    return [
        Fence(page, kind, match["text"], match["note"] or "", match.span("text"))
        for page in pages
        for match in FENCE.finditer(page.read_text())
        if match["kind"] == kind
    ]


def without_speeds(output: str) -> str:
    """The output of a training, with ... for the samples/s of each epoch."""
    return SPEED.sub(r"\g<before>... samples/s", output)


@cache
def lesson(stage: str) -> str:
    """The smallest difference between a train.py and its parent's, as `diff -u` finds it."""
    return shell(f"diff -u -d {PARENTS[stage]}/train.py {stage}/train.py || true")


def part_of_lesson(stage: str, first: str, last: str) -> str:
    """Cut a lesson: from the line that begins with `first` to the next that begins with `last`."""
    lines = lesson(stage).splitlines(keepends=True)[2:]  # without the names of the files
    end = 0
    for words in (first, last):
        places = [n for n, line in enumerate(lines) if n >= end and line.startswith(words)]
        if not places:
            raise SystemExit(f"the lesson of {stage} has no line that begins with {words}")
        start, end = end, places[0]
    return "".join(lines[start : end + 1])


def part_of_file(part: str, source: str) -> str:
    """Read a part of a file again, from its first line to its last; as it is where one is gone."""
    lines, quoted = source.splitlines(), part.strip("\n").splitlines()
    if part in source or lines.count(quoted[0]) != 1:
        return part
    first = lines.index(quoted[0])
    ends = [place for place in range(first, len(lines)) if lines[place] == quoted[-1]]
    ends = ends[quoted.count(quoted[-1]) - 1 :]  # such a line may also stand inside
    return part.replace("\n".join(quoted), "\n".join(lines[first : ends[0] + 1])) if ends else part


def quotation(fence: Fence) -> str | None:
    """What a fence of a diff or of python must hold; None if no comment says where it is from."""
    kind, _, source = fence.note.partition(": ")
    if kind == "lesson":
        stage = fence.page.parent.relative_to(ROOT).as_posix()
        return part_of_lesson(stage, *source.split(" ... "))
    if kind != "part of":
        return None
    text = (fence.page.parent / source).read_text()
    if fence.kind == "diff":
        return "".join(text.splitlines(keepends=True)[2:])
    return LEFT_OUT.join(part_of_file(part, text) for part in fence.text.split(LEFT_OUT))


def sides(diff: str) -> tuple[str, str]:
    """The text before and after the change that a diff shows."""
    lines = diff.splitlines(keepends=True)
    return (
        "".join(line[1:] or "\n" for line in lines if line[:1] in " -\n"),
        "".join(line[1:] or "\n" for line in lines if line[:1] in " +\n"),
    )


def shell(command: str, cwd: Path = ROOT, seconds: float = 180) -> str:
    """Run a command with the programs of this Python and one thread; return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = ["bash", "-e", "-o", "pipefail", "-c", command]
    seconds *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # on a busy machine, longer
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run(call, cwd=cwd, env=env, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
