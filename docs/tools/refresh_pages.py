"""Write into the pages what their programs print today: the tour, all tables, and all outputs.

    python docs/tools/refresh_pages.py

`make pages` calls it. It runs the tour, whose results it stores, and every command of
an `output of:` fence.
"""

import json
import re

from benchmarks.result_files import RESULTS, save
from benchmarks.tables.pages import text_of
from repository_pages import ALL_PAGES, ROOT, TABLE, fences, shell, without_speeds


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


def fresh_table(match: re.Match[str]) -> str:
    name = match["name"]
    return f"<!-- table: {name} -->\n\n{text_of(name)}\n\n<!-- end of table -->"


def write_tables() -> None:
    for page in ALL_PAGES:
        page.write_text(TABLE.sub(fresh_table, page.read_text()))


if __name__ == "__main__":
    run_tour()
    write_tables()
    write_outputs()
