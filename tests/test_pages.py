"""The pages of the main path are short and plain, and links lead somewhere: tests/pages.py."""

import re

import pytest
from pages import MAIN, faults, faults_together, main_path
from readmes import READMES, ROOT

STAGE = """# 01 · One process

**Question: what is there at first?** A script.

You need: a CPU. Reading time: 7 minutes.

## Words

- [**seed**](../GLOSSARY.md#seed): where random numbers start.

## Run it

It is quick.

## The idea

There is one process. It has a seed.

## What changed

<!-- part of: train.py -->
```python
seed = 1
```

## Check it

See [its page](train.md#why-it-is-so).

## Pitfalls

None.

## Exercise

None.

## Next

That is all.
"""
GLOSSARY = """| term | meaning | page |
|---|---|---|
| <a id="seed"></a><a id="random-seed"></a>seed | A number. | [01](01_single_gpu/README.md) |
| <a id="ring"></a>ring | A circle of ranks. | [01](01_single_gpu/README.md) |
"""
NAMES = ("README.md", "GLOSSARY.md", "01_single_gpu/README.md", "01_single_gpu/train.md")
BOOK = {
    "README.md": "# All\n\nHere you can read about one process.\n",
    "CHAPTERS.md": "".join(f"[]({name})\n" for name in (*NAMES, "01_single_gpu/train.py")),
    "GLOSSARY.md": GLOSSARY,
    "01_single_gpu/README.md": STAGE,
    "01_single_gpu/train.md": "# train.py\n\n## `Why` it is so\n\nBack to [01](README.md).\n",
    "01_single_gpu/train.py": "import this\nseed = 1\n",
}
PLAIN = "It is quick."
CONTROLS = [  # a change of that page, and what is found then
    ("01_single_gpu/README.md", "", "", ""),
    ("01_single_gpu/README.md", PLAIN, "It is. " * 450, "9.. words"),
    ("01_single_gpu/README.md", PLAIN, "Long" + " and long" * 13 + ".", "long: Long"),
    ("01_single_gpu/README.md", PLAIN, "Heterogeneous parallelization. " * 9, r"\d\d words with"),
    ("01_single_gpu/README.md", "## Pitfalls", "## Traps", "it begins otherwise"),
    ("01_single_gpu/README.md", "**Question: what", "**What", "it begins otherwise"),
    ("01_single_gpu/README.md", PLAIN, "Rings are round.", "no Words: ring"),
    ("01_single_gpu/README.md", "(../GLOSSARY.md#seed)", "()", "no Words: seed"),
    ("01_single_gpu/README.md", "#seed", "#ring", "01_single_gpu: the glossary has no seed"),
    ("01_single_gpu/README.md", PLAIN, "```diff\n" + "+\n" * 13 + "```", "13 lines"),
    ("01_single_gpu/README.md", PLAIN, "```text\n" + "a\n" * 16 + "```", "16 lines"),
    ("01_single_gpu/README.md", "seed = 1", "seed = 2", "not in train.py: seed = 2"),
    ("01_single_gpu/README.md", "train.md#why", "fit.md#why", "leads nowhere: fit.md"),
    ("01_single_gpu/train.md", "it is so", "is it so", "leads nowhere: train.md#why-it-is-so"),
    ("01_single_gpu/train.md", "Back to", "See", "no way back"),
    ("01_single_gpu/train.md", "`Why`", "A walk to the rooms.\n\n## `Why`", "unwanted: walk"),
    ("GLOSSARY.md", '<a id="seed"></a>', "", "01_single_gpu: the glossary has no seed"),
    ("GLOSSARY.md", "[01](01_single_gpu/README.md)", "", "no page for seed"),
    ("CHAPTERS.md", "(01_single_gpu/train.md)", "()", "CHAPTERS.md does not link 01_single_gpu/tr"),
]


@pytest.mark.parametrize(("page", "old", "new", "found"), CONTROLS)
def test_what_is_wrong_with_a_page_is_found(page, old, new, found, tmp_path):
    """The control of the next two tests."""
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
