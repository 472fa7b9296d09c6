"""The index of all pages and programs, docs/index.md, from their headings and docstrings.

    python docs/tools/write_index.py

`make pages-quick` calls it. A page gives its first heading, and its question where it asks one. A
program gives the first line of its docstring. What a folder's README.md links to comes first,
in that order, and the rest follows by name.
"""

import ast
import json
import os
import re
from pathlib import Path

from repository_pages import ROOT

INDEX = "docs/index.md"
# Folders whose pages and programs are listed; those inside a folder are listed with it.
SECTIONS = {
    "The core: two hours, with the README and one notebook": ("0?_*",),
    "The roads beyond it": ("beyond", "beyond/*"),
    "Two packages that work without the course": ("packages/*",),
    "Reference": ("common", "local_ranks", "notebooks", "benchmarks", "docs"),
}
INTRODUCTION = """\
# All programs and pages

Which program or page answers my question? A program whose first lines show a command can be run by
itself, and the others are parts that programs import. A page of the same name, or the README.md of
the folder, shows its output and explains it. `make pages-quick` writes this list, from the headings
of the pages and the first lines of the programs.
"""
HEAD = "\n### {}/\n\n| file | what it answers |\n|---|---|\n"
END = "\nBack to [the start](../README.md).\n"


def title_of(page: Path) -> str:
    """The first heading of a page or a notebook, and the page's question."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    heading = re.search(r"^# (.+)$", text, re.M)
    question = re.search(r"^\*\*Question: ([^*]+\?)\*\*", text, re.M)
    title = heading[1] if heading else page.name
    return f"{title}: {question[1]}" if question else title


def summary_of(program: Path) -> str:
    """The first line of its docstring; nothing if it has none."""
    docstring = ast.get_docstring(ast.parse(program.read_text())) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def files_of(folder: Path) -> list[Path]:
    """Its pages and programs: the README, what the README links to, in that order, and the rest."""
    files = [path for path in folder.rglob("*") if path.suffix in (".md", ".py", ".ipynb")]
    if folder.name == "beyond":  # its folders have sections of their own
        files = [path for path in files if path.parent == folder]
    # What makes or tests the pages and programs answers no question.
    unlisted = {"zh", "site", "tools", "tests", "pairs", "__init__.py"}
    files = [path for path in files if not unlisted & {*path.relative_to(folder).parts}]
    readme = folder / "README.md"
    links = re.findall(r"\]\(([^)#]+)", readme.read_text()) if readme.exists() else []
    linked = [Path(os.path.normpath(folder / link)) for link in links]
    order = [path.with_suffix("") for path in (readme, folder / "train.py", *linked)]

    def place(path: Path) -> tuple[int, bool]:
        """A page and the program of its name stand together, and so do the files of a folder."""
        if path.with_suffix("") in order:
            return order.index(path.with_suffix("")), False
        beside = [at for at, name in enumerate(order) if name.parent == path.parent != folder]
        return max(beside, default=len(order)), True

    return sorted(files, key=lambda path: (*place(path), path))


def index() -> str:
    """The text of docs/index.md."""
    parts, here = [INTRODUCTION], (ROOT / INDEX).parent
    for section, patterns in SECTIONS.items():
        parts.append(f"\n## {section}\n")
        folders = [path for each in patterns for path in sorted(ROOT.glob(each)) if path.is_dir()]
        for folder in filter(files_of, folders):
            parts.append(HEAD.format(folder.relative_to(ROOT).as_posix()))
            for path in files_of(folder):
                if path == ROOT / INDEX:
                    continue
                says = summary_of(path) if path.suffix == ".py" else title_of(path)
                name, link = path.relative_to(folder).as_posix(), os.path.relpath(path, here)
                name = name.replace("__", r"\_\_")  # __main__ is no bold word
                parts.append(f"| [{name}]({link}) | {says.replace('|', '&#124;')} |\n")
    return "".join([*parts, END])


if __name__ == "__main__":
    (ROOT / INDEX).write_text(index())
    print(f"wrote {INDEX}")
