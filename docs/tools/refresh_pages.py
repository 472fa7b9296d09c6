"""Write into the pages what their programs print today, and what files and results hold.

    python docs/tools/refresh_pages.py            # as `make pages`
    python docs/tools/refresh_pages.py --quick    # as `make pages-quick`: it runs no program

It writes the quoted parts of diffs and of files, the tables, and every output whose command a page
names; but first it runs the tour, and stores its results. Last come the Chinese pages.
"""

import json
import re
from argparse import ArgumentParser

import update_translations
from benchmarks.result_files import RESULTS, save
from benchmarks.tables.pages import text_of
from repository_pages import ALL_PAGES, ROOT, TABLE, fences, quotation, shell, without_speeds


def run(command: str) -> str:
    print(command, flush=True)
    return shell(command, seconds=3600)


def run_tour() -> None:
    run("python benchmarks/tour.py")
    results = json.loads((ROOT / "runs/tour/tour.json").read_text())
    save(RESULTS / "tour.json", results)


def write_outputs() -> None:
    for fence in reversed(fences("text", ALL_PAGES)):  # from the end: places stay right
        if fence.command:
            fence.write(without_speeds(run(fence.command)))


def write_quotations() -> None:
    for kind in ("diff", "python"):
        for fence in reversed(fences(kind, ALL_PAGES)):
            shown = quotation(fence)
            if shown is not None:
                fence.write(shown)


def fresh_table(match: re.Match[str]) -> str:
    name = match["name"]
    return f"<!-- table: {name} -->\n\n{text_of(name)}\n\n<!-- end of table -->"


def write_tables() -> None:
    for page in ALL_PAGES:
        page.write_text(TABLE.sub(fresh_table, page.read_text()))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run neither the tour nor a command")
    args = parser.parse_args()
    if not args.quick:
        run_tour()
        write_outputs()
    write_tables()
    write_quotations()
    update_translations.update()


if __name__ == "__main__":
    main()
