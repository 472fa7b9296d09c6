"""What the pages are held to; `make words` shows how long and how plain each of them is.

python tests/pages.py
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import textstat
from tabulate import tabulate

from readmes import READMES, ROOT, fences, pages_of

# The main path, in the order in which it is read. It has the same headings everywhere.
STAGES = ("01_single_gpu", "02_data_parallel", "03_ddp_manual_allreduce", "04_ddp_torchrun")
MAIN = (".", *STAGES, "05_amp_syncbn", "beyond/survive", "beyond/convert")
HEADINGS = ["Words", "Run it", "The idea", "What changed", "Check it", "Pitfalls", "Exercise"]
HEADINGS += ["Next"]
BEGIN = r"^# (0\d|survive|convert) · .+\n\n\*\*Question: [^*]+\?\*\*(.|\n)*?Reading time: \d+ min"
WORDS, SENTENCE, EASE = 900, 25, 60  # at most, at most, at least
LINES = {"diff": 12, "text": 15}  # of a fence, at most
PROGRAMS = ("0?_*/*.py", "beyond/survive/*.py", "beyond/convert/*.py")
UNWANTED = r"\b(?:ladder|rung|zoo|gallery|house|room|door|road|journey|walk)s?\b"
LINK = r"!?\[([^\]]*)\]\([^)]*\)"


def main_path(root: Path) -> list[Path]:
    return [page for folder in MAIN if (page := root / folder / "README.md").exists()]


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.M | re.S)


def sentences(page: Path) -> list[str]:
    """Of the prose; a piece of code counts as one word, a heading and an item end a sentence."""
    text = re.sub(r"^ *\|.*$|</?\w[^>]*>|\*\*", "", without_fences(page), flags=re.M)
    text = re.sub(r"`[^`]+`", "code", re.sub(LINK, r"\1", text))
    blocks = re.split(r"\n\s*\n|\n(?=#+ |[-*] |\d+\. )", text)
    blocks = [re.sub(r"^(#+|[-*]|\d+\.) ", "", " ".join(block.split())) for block in blocks]
    return [part for block in blocks for part in re.split(r"(?<=[.?!]) ", block) if part]


def measures(page: Path) -> tuple[int, float, int]:
    """Words outside fences and tables, Flesch's reading ease, and words of the longest sentence."""
    words = re.sub(r"^ *\|.*$", "", without_fences(page), flags=re.M).split()
    text = " ".join(part if part[-1] in ".?!" else f"{part}." for part in sentences(page))
    longest = max(len(part.split()) for part in sentences(page))
    return len(words), textstat.flesch_reading_ease(text), longest


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives to headings, and those that the page names itself."""
    text, seen = without_fences(page), Counter()
    found = set(re.findall(r'<a id="([\w-]+)"></a>', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        slug = re.sub(r"[^\w -]", "", re.sub(LINK, r"\1", heading).lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def glossary(root: Path) -> dict[str, str]:
    """The row of each term."""
    text = (root / "docs/glossary.md").read_text()
    return {row[1]: row[0] for row in re.findall(r"^(\| (?:<a .+?</a>)+(.+?) \|.*)$", text, re.M)}


def introduced(page: Path) -> dict[str, str]:
    """The terms in a page's Words, each with the anchor that it links."""
    link = r"\[\*\*(.+?)\*\*\]\((?:\.\./)*docs/glossary\.md#([\w-]+)\)"
    return dict(re.findall(link, page.read_text()))


def main_faults(page: Path, root: Path) -> Iterator[str]:
    (words, ease, _), spoken = measures(page), sentences(page)
    if words > WORDS or ease < EASE:
        yield f"{words} words with reading ease {ease:.0f}"
    yield from (f"long: {part}" for part in spoken if len(part.split()) > SENTENCE)
    found = re.findall(r"^## (.+)$", without_fences(page), re.M)
    if page.parent != root and (found != HEADINGS or not re.search(BEGIN, page.read_text(), re.M)):
        yield f"it begins otherwise, or has other headings: {found}"
    for fence in (fence for kind in LINES for fence in fences(kind, [page])):
        lines = len(fence.text.splitlines())
        if lines > LINES[fence.kind] and not fence.note.startswith("step: "):
            yield f"{lines} lines below {fence.note}"
    before = main_path(root)[: main_path(root).index(page) + 1]
    known = {term for each in before for term in introduced(each)}
    for term in (term for term in glossary(root) if term not in known):
        form = rf"(?<![\w-]){re.escape(term)}(?:s|es)?(?![\w-])"  # of the word, or its plural
        if re.search(form, "\n".join(spoken), re.I if term.islower() else 0):
            yield f"no Words: {term}"


def faults(page: Path, root: Path = ROOT) -> Iterator[str]:
    """All that is wrong with a page."""
    text, spoken = re.sub(r"`[^`]+`", "", without_fences(page)), " ".join(sentences(page))
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        file, _, anchor = target.partition("#")
        where = page.parent / file if file else page
        if not where.exists() or (anchor and anchor not in anchors(where)):
            yield f"leads nowhere: {target}"
    for fence in fences("python", [page]):
        kind, _, file = fence.note.partition(": ")
        if kind == "part of" and fence.text not in (page.parent / file).read_text():
            yield f"not in {file}: {fence.text}"
    yield from (f"unwanted: {word}" for word in re.findall(UNWANTED, spoken, re.I))
    if page in main_path(root):
        yield from main_faults(page, root)
    elif page.parent != root and "Back to [" not in text and not page.match("*.zh.md"):
        yield "no way back"


def faults_together(root: Path = ROOT) -> Iterator[str]:
    """What is wrong between the pages."""
    terms, listed = glossary(root), (root / "docs/index.md").read_text()
    for page in main_path(root):
        for term, anchor in introduced(page).items():
            if f'<a id="{anchor}"></a>' not in terms.get(term, ""):
                yield f"{page.parent.name}: the glossary has no {term} with the anchor {anchor}"
    yield from (f"no page for {term} in the glossary" for term in terms if "](" not in terms[term])
    for path in [*pages_of(root), *(path for each in PROGRAMS for path in sorted(root.glob(each)))]:
        if path.name != "docs/index.md" and f"]({path.relative_to(root)})" not in listed:
            yield f"docs/index.md does not link {path.relative_to(root)}"


if __name__ == "__main__":
    main = main_path(ROOT)
    pages = [*main, *(page for page in READMES if page not in main)]
    rows = [[page.relative_to(ROOT), *map(round, measures(page))] for page in pages]
    chinese = sorted({here for page in pages for here in page.parent.glob("*.zh.md")})
    count = re.compile(r"[一-鿿]|[^\W一-鿿]+")  # characters, and words in other letters
    rows += [[page.relative_to(ROOT), len(count.findall(without_fences(page)))] for page in chinese]
    print(tabulate(rows, ["page", "words", "reading ease", "longest sentence"]))
    for page in [*pages, *chinese]:
        print(*(f"{page.relative_to(ROOT)}: {fault}\n" for fault in faults(page)), sep="", end="")
    print(*faults_together(), sep="\n")
