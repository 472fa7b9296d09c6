"""What is wrong with a page.

Links and anchors lead somewhere, in English and in Chinese. A python fence that is a part of a file
still is one, a test that a page names exists, and a comment is of a kind that some program reads. A
number in the text of a link stands, perhaps with more digits, on the page to which it leads.
No page shows the samples/s of a single run, as speeds are compared in tables that are measured
together. The main path explains each term of the glossary before it uses it, and each of its pages
has at most 1,000 words, the one on DataParallel 650.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from markers import FENCE, KINDS, MARKER, fences, fences_of
from page_sources import LEFT_OUT, SPEED
from repository_pages import CHINESE, LINK, MAIN_PATH, ROOT, TEST_FILES, slugs

WORDS = 1000  # most words of a page of the main path
FEWER_WORDS = {"02_data_parallel": 650}  # a lesson whose answer is "don't" is short
TERM = re.compile(r'^\| (?:<a id="[\w-]+"></a>)+(?P<term>.+?) \|', re.M)  # a row of the glossary
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
CITATION = re.compile(r"(?<!!)\[(?P<words>[^\]]*\d[^\]]*)\]\((?P<page>(?!https?:)[^)#\s]+\.md)")
MAIN_PAGES = [ROOT / folder / "README.md" for folder in MAIN_PATH]
TESTS = "".join(path.read_text() for path in TEST_FILES)


def without_fences(page: Path) -> str:
    """The text without comments, too."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.S)


def running_text(page: Path) -> str:
    """The prose of a page, without fences and tables."""
    return re.sub(r"^ *\|.*$", "", without_fences(page), flags=re.M)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings or lines, and those that the page names itself."""
    if page.suffix != ".md":
        return {f"L{line}" for line in range(1, len(page.read_text().splitlines()) + 1)}
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


def value(number: str) -> float:
    return float(number.replace(",", ""))


def wrong_citations(page: Path) -> Iterator[str]:
    """Numbers in the texts of links that are not on the page to which the link leads."""
    for link in CITATION.finditer(FENCE.sub("", page.read_text())):
        if (target := page.parent / link["page"]).exists():
            there = {value(number) for number in NUMBER.findall(target.read_text())}
            for number in NUMBER.findall(link["words"]):
                decimals = len(number.partition(".")[2])
                if not {value(number)} & (there | {round(each, decimals) for each in there}):
                    yield f"cites {number}, which is not in {link['page']}"


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
    yield from wrong_citations(page)
    for line in text.splitlines():
        parts = line.split("**")
        for bold, after in zip(parts[1::2], parts[2::2], strict=False):
            if re.search(r"[^\w\s]$", bold) and re.match(r"[\u3400-\u9fff]", after):
                yield f"is not bold on GitHub, so end it before the punctuation: {bold}"
    for test in set(re.findall(r"`(test_\w+)`", page.read_text())):
        if f"def {test}(" not in TESTS:
            yield f"names a test that is not there: {test}"
    for epoch in SPEED.finditer(page.read_text()):
        yield f"shows the speed of one run: {epoch['speed']} samples/s"
    if page in MAIN_PAGES:
        limit = FEWER_WORDS.get(page.parent.name, WORDS)
        if (words := len(running_text(page).split())) > limit:
            yield f"{words} words, and this page of the main path has at most {limit}"
        for term in unexplained_terms(page):
            yield f"used before it is explained: {term}"
