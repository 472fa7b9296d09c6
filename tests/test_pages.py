"""The pages of the main path are short and plain, and links lead somewhere: tests/pages.py."""

import re

import pytest
from pages import HEADINGS, MAIN, faults, faults_together, main_path
from readmes import READMES, ROOT

BEGIN = "# 01 · One process\n\n**Question: what is it?** One.\n\nReading time: 7 minutes.\n\n"
SECTIONS = "".join(f"## {heading}\n\nIt is quick {heading}.\n\n" for heading in HEADINGS)
END = """A [**seed**](../GLOSSARY.md#seed) is a number. It has [a page](train.md#why-it-is-so).

<!-- part of: train.py -->
```python
seed = 1
```
"""
TERM = '| <a id="{0}"></a><a id="a-{0}"></a>{0} | A word. | [01](01_single_gpu/README.md) |\n'
STAGE, PAGE = "01_single_gpu/README.md", "01_single_gpu/train.md"
BOOK = {
    "README.md": "# All\n\nHere you can read about one process.\n",
    "GLOSSARY.md": "".join(TERM.format(term) for term in ("seed", "ring")),
    STAGE: BEGIN + SECTIONS + END,
    PAGE: "# train.py\n\n## `Why` it is so\n\nBack to [01](README.md).\n",
    "01_single_gpu/train.py": "import this\nseed = 1\n",
}
BOOK["CHAPTERS.md"] = "".join(f"[]({name})\n" for name in BOOK)
PLAIN = "It is quick Run it."
CONTROLS = [  # a change of that page, and what is found then
    (STAGE, "", "", ""),
    (STAGE, PLAIN, "It is. " * 450, r"9\d\d words"),
    (STAGE, PLAIN, "Heterogeneous parallelization. " * 29, r"\d+ words with reading ease -?\d"),
    (STAGE, PLAIN, "Long" + " and long" * 13 + ".", "long: Long"),
    (STAGE, "## Pitfalls", "## Traps", "it begins otherwise"),
    (STAGE, "**Question: what", "**What", "it begins otherwise"),
    (STAGE, PLAIN, "Rings are round.", "no Words: ring"),
    (STAGE, "(../GLOSSARY.md#seed)", "()", "no Words: seed"),
    (STAGE, "#seed", "#ring", "01_single_gpu: the glossary has no seed"),
    (STAGE, PLAIN, "```diff\n" + "+\n" * 13 + "```", "13 lines"),
    (STAGE, PLAIN, "```text\n" + "a\n" * 16 + "```", "16 lines"),
    (STAGE, "seed = 1", "seed = 2", "not in train.py: seed = 2"),
    (STAGE, "train.md#why", "fit.md#why", "leads nowhere: fit.md"),
    (PAGE, "it is so", "is it so", "leads nowhere: train.md#why-it-is-so"),
    (PAGE, "Back to", "See", "no way back"),
    (PAGE, "`Why`", "A walk.\n\n## `Why`", "unwanted: walk"),
    ("GLOSSARY.md", '<a id="seed"></a>', "", "01_single_gpu: the glossary has no seed"),
    ("GLOSSARY.md", "[01](01_single_gpu/README.md)", "", "no page for seed"),
    ("CHAPTERS.md", "(01_single_gpu/train.md)", "()", "CHAPTERS.md does not link 01_single_gpu/tr"),
]


@pytest.mark.parametrize(("page", "old", "new", "found"), CONTROLS)
def test_what_is_wrong_with_a_page_is_found(page, old, new, found, tmp_path):
    for name, text in BOOK.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace(old, new) if name == page else text)
    of_pages = [each for name in BOOK if "md" in name for each in faults(tmp_path / name, tmp_path)]
    text = "\n".join([*of_pages, *faults_together(tmp_path)])
    assert re.search(f"^{found}", text, re.M) if found else text == ""


@pytest.mark.parametrize("page", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_plain_and_what_it_links_and_quotes_is_there(page):
    assert [*faults(page)] == []


def test_glossary_and_chapters_know_every_term_page_and_program():
    assert len(main_path(ROOT)) == len(MAIN)
    assert [*faults_together()] == []
