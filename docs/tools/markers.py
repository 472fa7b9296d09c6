"""The comments on a page that say what is done with it: all of them, and all that reads them.

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

A Chinese page says in <!-- of the English: DIGEST, Chinese: DIGEST --> which prose it translates.
Between <!-- comments of: SCRIPT --> and <!-- end of comments --> it translates those comments of a
script that the script of the stage before does not have.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from repository_pages import PAGES_OF_THE_ROOT

KINDS = {"in the suite", "output of", "lesson", "part of", "break it", "table", "end of table"}
KINDS |= {"widget", "of the English", "comments of", "end of comments"}
MARKER = re.compile(r"<!-- (?P<kind>[^\n:]+?)(?:: (?P<value>[^\n]*?))? -->")
FENCE = re.compile(
    rf"(?:{MARKER.pattern}\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
TABLE = re.compile(r"<!-- table: (?P<name>.+?) -->\n(?P<text>.*?)<!-- end of table -->", re.S)
COMMENTS = re.compile(
    r"<!-- comments of: (?P<script>.+?) -->\n(?P<text>.*?)<!-- end of comments -->", re.S
)
WIDGET = re.compile(r"^<!-- widget: (?P<name>\w+) -->$", re.M)
OUTPUT = re.compile(
    r"(?P<command>.+?)"
    r"(?:; decimals within (?P<percent>[\d.]+) %)?(?:; whole numbers within (?P<whole>\d+))?"
)


@dataclass(frozen=True)
class Fence:
    page: Path
    language: str
    text: str
    marker: str  # the kind of the comment right above it, or nothing
    value: str  # what this comment says
    place: tuple[int, int]  # where the text lies in the file

    @property
    def name(self) -> str:
        return f"{self.page.parent.name}: {self.text.splitlines()[0]}"

    @property
    def command(self) -> str:
        """The command whose output the fence shows, or nothing."""
        match = OUTPUT.fullmatch(self.value)
        return match["command"] if match and self.marker == "output of" else ""

    @property
    def tolerances(self) -> tuple[float, int]:
        """What may differ on another CPU: decimals by this share, whole numbers by that much."""
        match = OUTPUT.fullmatch(self.value)
        return (float(match["percent"] or 0) / 100, int(match["whole"] or 0)) if match else (0.0, 0)


def fences_of(page: Path) -> list[Fence]:
    return [
        Fence(
            page,
            match["language"],
            match["text"],
            match["kind"] or "",
            match["value"] or "",
            match.span("text"),
        )
        for match in FENCE.finditer(page.read_text())
    ]


def fences(language: str, pages: list[Path] = PAGES_OF_THE_ROOT) -> list[Fence]:
    found = [fence for page in pages for fence in fences_of(page)]
    return [fence for fence in found if fence.language == language]


def sides(diff: str) -> tuple[str, str]:
    """The text before and after the change that a diff shows."""
    lines = diff.splitlines(keepends=True)
    return (
        "".join(line[1:] or "\n" for line in lines if line[:1] in " -\n"),
        "".join(line[1:] or "\n" for line in lines if line[:1] in " +\n"),
    )
