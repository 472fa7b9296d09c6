"""Write into the pages what their programs print today, and what files and results hold.

    python docs/tools/refresh_pages.py                    # as `make pages`
    python docs/tools/refresh_pages.py --quick            # as `make pages-quick`: no program runs
    python docs/tools/refresh_pages.py --translated PAGE  # after its translation: it is current

It writes the quoted parts of diffs and of files, the tables, and every output whose command a page
names; but first it runs the tour, and stores its results. Last come the Chinese pages.
"""

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import translations
from benchmarks.result_files import RESULTS, save
from benchmarks.tables.pages import text_of
from markers import TABLE, Fence, fences_of
from page_sources import output, quotation, shell
from repository_pages import ALL_PAGES, ROOT


def run_tour() -> None:
    shell("python benchmarks/tour.py", seconds=3600)
    results = json.loads((ROOT / "runs/tour/tour.json").read_text())
    save(RESULTS / "tour.json", results)


def write_fences(text_for: Callable[[Fence], str | None]) -> None:
    """Write each fence that has a text now; text_for returns None for the others."""
    texts = {page: page.read_text() for page in ALL_PAGES}
    for page in ALL_PAGES:
        for fence in reversed(fences_of(page)):  # from the end: places stay right
            shown, (start, end) = text_for(fence), fence.place
            if shown is not None:
                texts[page] = texts[page][:start] + shown + texts[page][end:]
    for page, text in texts.items():  # only now, because a text may not be found
        page.write_text(text)


def fresh_table(match: re.Match[str]) -> str:
    name = match["name"]
    return f"<!-- table: {name} -->\n\n{text_of(name)}\n\n<!-- end of table -->"


def write_tables() -> None:
    for page in ALL_PAGES:
        page.write_text(TABLE.sub(fresh_table, page.read_text()))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="run neither the tour nor a command")
    add(
        "--translated",
        nargs="+",
        type=Path,
        default=(),
        metavar="PAGE",
        help="Chinese pages that are current now; nothing runs",
    )
    add(
        "--unchanged",
        default="",
        metavar="WHY",
        help="why the English change needs no other Chinese",
    )
    args = parser.parse_args()
    if not (args.quick or args.translated):
        run_tour()
        write_fences(output)
    write_tables()
    write_fences(quotation)
    translations.update([path.resolve() for path in args.translated], args.unchanged)


if __name__ == "__main__":
    main()
