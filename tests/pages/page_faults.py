"""What is wrong with a page.

Links and anchors lead somewhere, in English and in Chinese. A python fence that is a part of a file
still is one, a test that a page names exists, and a comment is of a kind that some program reads.
No page shows the samples/s of a single run, as speeds are compared in tables that are measured
together. The main path explains each term of the glossary before it uses it, and each of its pages
has at most 1,000 words.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from markers import FENCE, KINDS, MARKER, fences, fences_of
from page_sources import LEFT_OUT, SPEED
from repository_pages import CHINESE, LINK, MAIN_PATH, ROOT, TEST_FILES, slugs

WORDS = 1000  # most words of a page of the main path
TERM = re.compile(r'^\| (?:<a id="[\w-]+"></a>)+(?P<term>.+?) \|', re.M)  # a row of the glossary
MAIN_PAGES = [ROOT / folder / "README.md" for folder in MAIN_PATH]
TESTS = "".join(path.read_text() for path in TEST_FILES)


def without_fences(page: Path) -> str:
    """The text without comments, too."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.S)


def running_text(page: Path) -> str:
    """The prose of a page, without fences and tables."""
    return re.sub(r"^ *\|.*$", "", without_fences(page), flags=re.M)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings, and those that the page names itself."""
    text = without_fences(page)
    return {*slugs(text), *re.findall(r'<a id="([\w-]+)"></a>', text)}


def glossary() -> dict[str, set[str]]:
    """Each term with its anchors."""
    text = (ROOT / "docs/glossary.md").read_text()
    return {row["term"]: set(re.findall(r'id="([\w-]+)"', row[0])) for row in TERM.finditer(text)}


def explained(page: Path) -> set[str]:
    """The anchors of the glossary that a page links to, where it explains a term."""
    return set(re.findall(r"\]\((?:\.\./)*docs/glossary\.md#([\w-]+)\)", page.read_text()))


def unexplained_terms(page: Path) -> Iterator[str]:
    """Terms that a page of the main path uses, but neither it nor a page before it explains."""
    before = MAIN_PAGES[: MAIN_PAGES.index(page) + 1]
    known = {anchor for each in before for anchor in explained(each)}
    text = re.sub(r"`[^`]+`", "", re.sub(LINK, r"\1", running_text(page)))  # no code, no addresses
    for term, names in glossary().items():
        form = rf"(?<![\w-]){re.escape(term)}(?:s|es)?(?![\w-])"  # the word, or its plural
        if not names & known and re.search(form, text, re.I if term.islower() else 0):
            yield term


def faults(page: Path) -> Iterator[str]:
    """Say of each thing that is wrong with a page what it is."""
    text = re.sub(r"`[^`]+`", "", without_fences(page))
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        file, _, anchor = target.partition("#")
        where = page.parent / file if file else page
        if not where.exists() or (anchor and anchor not in anchors(where)):
            yield f"leads nowhere: {target}"
    markers = [match["kind"] for match in MARKER.finditer(FENCE.sub("", page.read_text()))]
    markers += [fence.marker for fence in fences_of(page) if fence.marker]
    for marker in markers:
        if marker not in KINDS:
            yield f"has a comment that nothing reads: {marker}"
    for fence in fences("python", [page]):
        is_part = fence.marker == "part of" and page not in CHINESE
        parts = fence.text.split(LEFT_OUT) if is_part else []
        if any(part not in (page.parent / fence.value).read_text() for part in parts):
            yield f"not in {fence.value}: {fence.text}"
    for test in set(re.findall(r"`(test_\w+)`", page.read_text())):
        if f"def {test}(" not in TESTS:
            yield f"names a test that is not there: {test}"
    for epoch in SPEED.finditer(page.read_text()):
        yield f"shows the speed of one run: {epoch['speed']} samples/s"
    if page in MAIN_PAGES:
        if (words := len(running_text(page).split())) > WORDS:
            yield f"{words} words, and the main path has at most {WORDS} on a page"
        for term in unexplained_terms(page):
            yield f"used before it is explained: {term}"
