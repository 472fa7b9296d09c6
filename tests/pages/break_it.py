"""Tries a row of a stage's "Break it" by hand: makes the change, and runs the test that must fail.

make break STAGE=04          # lists the rows of the stage
make break STAGE=04 ROW=2    # tries the second one, in a temporary copy of the repository
"""

import re
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from local_ranks.chapters import ROOT
from local_ranks.stage_files import LESSON_FOLDERS, NOT_COPIED, Change, changed_source
from markers import fences, sides
from repository_pages import ALL_PAGES, TEST_FILES

# A row of a table: the line, its file and the test, or what happens and these two in a comment.
ROW = re.compile(
    r"^\| `(?P<line>.+?)` \| (?:`(?P<file>[\w.]+)` \| `(?P<test>test_\w+)`"
    r"|[^`|\n]+ <!-- break it: (?P<its_file>[\w.]+) (?P<its_test>test_\w+) -->) \|$",
    re.M,
)


@dataclass(frozen=True)
class BreakRow:
    key: str  # names the stage
    change: Change  # the file and the line to leave out; or the file, the text, and the new text
    test: str  # it must fail then

    @property
    def description(self) -> str:
        file, old, *new = self.change
        return f"{file} with\n{new[0].rstrip()}" if new else f"{file} without `{old}`"


def rows_of(key: str) -> list[BreakRow]:
    """The rows of the README and of the other pages: of their tables, and what diffs show."""
    folder, rows = LESSON_FOLDERS[key], []
    pages = [page for page in ALL_PAGES if page.is_relative_to(folder)]
    for page in sorted(pages, key=lambda page: (page != folder / "README.md", page)):
        beside = page.parent.relative_to(folder)  # a page names the files beside it
        on_page: list[tuple[int, BreakRow]] = []  # rows with their places
        for cells in ROW.finditer(page.read_text()):
            line = cells["line"]
            file, test = cells["file"] or cells["its_file"], cells["test"] or cells["its_test"]
            on_page.append((cells.start(), BreakRow(key, ((beside / file).as_posix(), line), test)))
        for fence in fences("diff", [page]):
            if fence.marker == "break it":
                file, test = fence.value.split()
                change = ((beside / file).as_posix(), *sides(fence.text))
                on_page.append((fence.place[0], BreakRow(key, change, test)))
        rows += [row for _, row in sorted(on_page, key=lambda placed: placed[0])]
    return rows


def file_of(test: str) -> Path:
    return next(path for path in TEST_FILES if f"def {test}(" in path.read_text())


def try_row(row: BreakRow) -> bool:
    """Whether the test fails with the change. Prints both, and the error."""
    folder, file = LESSON_FOLDERS[row.key].relative_to(ROOT), row.change[0]
    test = f"{file_of(row.test).relative_to(ROOT)}::{row.test}"
    print(f"{folder}/{row.description}\n{test}", flush=True)
    with TemporaryDirectory() as name:
        copy = Path(name, "copy")
        copytree(ROOT, copy, ignore=NOT_COPIED)
        (copy / folder / file).write_text(changed_source(ROOT / folder / file, [row.change]))
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", test]
        done = subprocess.run(pytest, cwd=copy, capture_output=True, text=True)
    errors = re.findall(r"^E +(?:assert|[\w.]+Error).*", done.stdout, re.M)
    verdict = {0: "It passes!", 1: "It fails."}.get(done.returncode, done.stdout)
    print(*errors[-1:], verdict, sep="\n")
    return done.returncode == 1


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=LESSON_FOLDERS)
    parser.add_argument("row", nargs="?", type=int, help="without it, the rows are listed")
    args = parser.parse_args()
    rows = rows_of(args.stage)
    if args.row in range(1, len(rows) + 1):
        raise SystemExit(not try_row(rows[args.row - 1]))
    for number, row in enumerate(rows, 1):
        print(f"{number}. {row.description}\n   {row.test}")
    raise SystemExit(2 if args.row is not None else 0)  # there is no such row


if __name__ == "__main__":
    main()
