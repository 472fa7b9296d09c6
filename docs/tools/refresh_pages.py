"""Write into the pages what their programs print today: the tour, all tables, and all outputs.

    python docs/tools/refresh_pages.py

`make pages` calls it. It runs the tour, whose results it stores, and every command of
an `output of:` fence.
"""

import json
import sys

from repository_pages import ALL_PAGES, ROOT, TABLE, fences, shell

sys.path.insert(1, str(ROOT / "benchmarks"))
from results import RESULTS, save
from tables import TABLES


def run(command: str) -> str:
    print(command, flush=True)
    return shell(command, seconds=3600)


def run_tour() -> None:
    run("python benchmarks/tour.py")
    results = json.loads((ROOT / "runs/tour/tour.json").read_text())
    save(RESULTS / "tour.json", results)


def write_outputs() -> None:
    for fence in reversed(fences("text", ALL_PAGES)):  # from the end: places stay right
        if command := fence.command:
            text, (start, end) = fence.page.read_text(), fence.place
            fence.page.write_text(text[:start] + run(command) + text[end:])


def write_tables() -> None:
    for page in ALL_PAGES:
        text = page.read_text()
        for match in reversed(list(TABLE.finditer(text))):
            start, end = match.span("text")
            text = f"{text[:start]}\n{TABLES[match['name']].text()}\n\n{text[end:]}"
        page.write_text(text)


if __name__ == "__main__":
    run_tour()
    write_tables()
    write_outputs()
