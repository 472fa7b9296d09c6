"""Links lead somewhere, and terms are explained before they are used.

What is checked of a page stands in page_faults.py.
"""

import re
from pathlib import Path

import pytest

from page_faults import faults
from repository_pages import ALL_PAGES, CHINESE, ROOT

STAGE, PAGE = "01_single_gpu/README.md", "01_single_gpu/fit.md"
CONTROLS = [  # a page, what is added to it, and what is found then
    (STAGE, "It is. " * 450, r"(9|\d\d)\d\d words"),
    ("02_data_parallel/README.md", "It is. " * 100, r"\d\d\d words, .* at most 650"),
    (STAGE, "Rings are fast.", "used before it is explained: ring"),
    (STAGE, "A [page](nowhere.md).", "leads nowhere: nowhere.md"),
    (PAGE, "A [part](fit.md#nowhere).", "leads nowhere: fit.md#nowhere"),
    (PAGE, "A [line](fit.py#L100000).", "leads nowhere: fit.py#L100000"),
    ("docs/claims.md", "A [page](../01_single_gpu).\nA [page](nowhere)", "leads nowhere: nowhere"),
    ("docs/zh/claims.md", "**全归约（all-reduce）**是", "is not bold on GitHub"),
    ("docs/zh/claims.md", "A [page](../nowhere.md).", r"leads nowhere: \.\./nowhere.md"),
    (STAGE, "epoch 1/2  loss 2.30  7,439 samples/s", "shows the speed of one run: 7,439 samples/s"),
    (PAGE, "It takes [7.77 s](../benchmarks/bench.md).", "cites 7.77, which is not in"),
    (PAGE, "See `test_nothing`.", "names a test that is not there: test_nothing"),
    (PAGE, "<!-- lessons: + ... + -->", "has a comment that nothing reads: lessons"),
    (PAGE, "<!-- part of: train.py -->\n```python\nseed = 2\n```", "not in train.py: seed = 2"),
]


@pytest.mark.parametrize(("page", "added", "fault"), CONTROLS)
def test_what_is_wrong_with_a_page_is_found(page, added, fault, monkeypatch):
    read, path = Path.read_text, ROOT / page
    changed = f"{path.read_text()}\n{added}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda file, *more: changed if file == path else read(file, *more)
    )
    assert re.search(f"^{fault}", "\n".join(faults(path)), re.M)


@pytest.mark.parametrize(
    "page", [*ALL_PAGES, *CHINESE], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_a_page_links_and_quotes_is_there(page):
    assert [*faults(page)] == []
