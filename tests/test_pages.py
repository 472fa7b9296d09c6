"""The pages of the main path are short and plain, and links lead somewhere: tests/pages.py."""

import re
from pathlib import Path

import pytest

from pages import MAIN, faults, faults_together, main_path
from readmes import READMES, ROOT

STAGE, PAGE = "01_single_gpu/README.md", "01_single_gpu/train.md"
ADDED = [  # a paragraph more in that stage's page, and what is found then
    ("It is. " * 450, r"(9|\d\d)\d\d words"),
    ("Heterogeneous parallelization. " * 40, r"\d{3} words with reading ease -?\d"),
    ("Long" + " and long" * 13 + ".", "long: Long"),
    ("Buckets are round.", "no Words: bucket"),
    ("```diff\n" + "+\n" * 13 + "```", "13 lines"),
    ("```text\n" + "a\n" * 16 + "```", "16 lines"),
    ("<!-- part of: train.py -->\n```python\nseed = 2\n```", "not in train.py: seed = 2"),
    ("[a page](nowhere.md)", "leads nowhere: nowhere.md"),
    ("[a part](train.md#nowhere)", "leads nowhere: train.md#nowhere"),
    ("A walk.", "unwanted: walk"),
]
CONTROLS = [(STAGE, "## Run it\n", f"{text}\n\n## Run it\n", found) for text, found in ADDED]
CONTROLS += [  # another change of a page
    (STAGE, "## Pitfalls", "## Traps", "it begins otherwise"),
    (STAGE, "**Question: what", "**What", "it begins otherwise"),
    (STAGE, "(../GLOSSARY.md#warm-up)", "()", "no Words: warm-up"),
    (STAGE, "#seed", "#throughput", "01_single_gpu: the glossary has no seed"),
    (PAGE, "Back to", "See", "no way back"),
    ("docs/glossary.md", '<a id="seed"></a>', "", "01_single_gpu: the glossary has no seed"),
    ("docs/glossary.md", "| [fit.md](01_single_gpu/fit.md) |", "|", "no page for a"),
    ("docs/index.md", f"({PAGE})", "()", f"docs/index.md does not link {PAGE}"),
]


@pytest.mark.parametrize(("page", "old", "new", "found"), CONTROLS)
def test_what_is_wrong_with_a_page_is_found(page, old, new, found, monkeypatch):
    read, path = Path.read_text, ROOT / page
    changed = path.read_text().replace(old, new)
    monkeypatch.setattr(
        Path, "read_text", lambda file, *more: changed if file == path else read(file, *more)
    )
    assert re.search(f"^{found}", "\n".join([*faults(path), *faults_together()]), re.M)


@pytest.mark.parametrize("page", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_plain_and_what_it_links_and_quotes_is_there(page):
    assert [*faults(page)] == []


def test_glossary_and_chapters_know_every_term_page_and_program():
    assert len(main_path(ROOT)) == len(MAIN)
    assert [*faults_together()] == []
