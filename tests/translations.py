"""The Chinese pages: README.zh.md beside README.md has the same blocks in the same order.

    python tests/translations.py [ENGLISH PAGE ...]

writes each Chinese page again, and lists what is still to translate. Blank lines divide blocks; a
fence is one block, with the comments above it. Comments and fences are copied, except mermaid.
Each other block is a translation, below <!-- en: DIGEST --> of its English text. In tables,
diagrams and the tour, numbers do not count in the digest: they are filled in again, cell by cell
or line by line, in the order of the English ones. `make lessons` and `make readme` call it.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pages import glossary, main_path
from readmes import ROOT

TEXT = r"(?:<!--.*-->\n)*```[\s\S]*?^```$|<!--.*-->$|(?:(?!<!--|```|[ \t]*$).+\n?)+"
BLOCK = re.compile(rf"^(?:<!-- en: (?P<key>\w*) -->\n)?(?P<text>{TEXT})", re.M)
COPIED = re.compile(r"(?:<!--.*-->\n?)*(?:```(?!mermaid)|$)")
LANGUAGE = re.compile(r"\[(?:中文|English)\]\(\S+\)")
MADE = re.compile(r"<!-- (end of )?(?:tour|table)\b")  # what stands between these is measured
NUMBER = re.compile(r"`[^`]*`|\]\([^)]*\)|</?\w[^>]*>|((?<![A-Za-z\d])\d+(?:[.,]\d+)*)")
CODE, TARGET = re.compile(r"(?<!`)`([^`]+)`(?!`)"), re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FORM = re.compile(r"^ *(?:#+|[-*]|\d+\.) ", re.M)  # of a heading or an item
CELL, NAME = re.compile(r"(?<!\\)\|"), re.compile(r"\[[\w./]+[./]\w*\]\(\S+\)")
LABEL = re.compile(r'"[^"]*"|(?: as |:).*$')  # what is translated in a line of a diagram


class Pair(NamedTuple):
    english: str
    chinese: str
    measured: bool


def pages(root: Path) -> list[Path]:
    """The English pages that have a Chinese version. Of CLAIMS.md, it has only the beginning."""
    return [page for page in [*main_path(root), root / "CLAIMS.md"] if page.exists()]


def digest(block: str, measured: bool = False) -> str:
    text = " ".join(block.split())
    if measured:
        text = re.sub(r"\d+(?:[.,]\d+)*", "0", re.sub(r"-{3,}", "---", text))
    return sha256(text.encode()).hexdigest()[:8]


def pieces(block: str) -> list[list[str]]:
    """The cells of each row of a table, the lines of a diagram, or the whole text."""
    if block.startswith("|"):
        return [[cell.strip() for cell in CELL.split(row)[1:-1]] for row in block.splitlines()]
    return [[line] for line in block.splitlines()] if "```mermaid" in block else [[block]]


def numbers(text: str) -> list[str]:
    return [match[1] for match in NUMBER.finditer(text) if match[1]]


def lead(text: str, page: Path, root: Path) -> str:
    """The text with links to Chinese pages. A link with an anchor stays on the English page."""

    def target(match: re.Match) -> str:
        file, _, anchor = match[0].partition("#")
        if "://" in file or (page.parent / (file or page.name)).resolve() not in pages(root):
            return match[0]
        return f"{file or page.name}#{anchor}" if anchor else f"{file[:-3]}.zh.md"

    return TARGET.sub(target, text)


def fill(english: str, chinese: str, page: Path, root: Path) -> str:
    """A part of a measured block with the numbers of today."""
    if not re.search("[A-Za-z]", NAME.sub("", CODE.sub("", english))):
        return lead(english, page, root)
    new, old = numbers(english), numbers(chinese)
    if len(new) != len(old) or Counter(new) == Counter(old):  # wrong, or only in another order
        return chinese
    return NUMBER.sub(lambda match: new.pop(0) if match[1] else match[0], chinese)


def refill(pair: Pair, page: Path, root: Path) -> str:
    english, chinese = pieces(pair.english), pieces(pair.chinese)
    if not pair.measured or [*map(len, english)] != [*map(len, chinese)]:
        return pair.chinese
    rows = [
        [fill(en, zh, page, root) for en, zh in zip(*row, strict=True)]
        for row in zip(english, chinese, strict=True)
    ]
    table = pair.english.startswith("|")
    return "\n".join(f"| {' | '.join(row)} |" if table else row[0] for row in rows)


def english_blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """Each with: may its numbers be measured again?"""
    made = False
    for match in BLOCK.finditer(page.read_text().partition("\n## All claims\n")[0]):
        text = match["text"].strip()
        if marker := MADE.match(text):
            made = not marker[1]
        if not LANGUAGE.fullmatch(text):
            yield text, made or text.startswith("|") or "```mermaid" in text


def rebuild(page: Path, root: Path) -> tuple[str, list[Pair], list[str]]:
    """The Chinese version of an English page, its translations, and what is still to do."""
    here, blocks = page.with_suffix(".zh.md"), [*english_blocks(page)]
    keys = [None if COPIED.match(text) else digest(text, measured) for text, measured in blocks]
    found, stale, last, faults = {}, {}, "", []
    for match in BLOCK.finditer(here.read_text() if here.exists() else ""):
        key, text = match["key"], match["text"].strip()
        if key in keys and key:
            last, found[key] = key, text
        elif not COPIED.match(text) and not LANGUAGE.fullmatch(text):
            stale.setdefault(last, []).append(f"<!-- en: {key or ''} -->\n{text}")
            faults.append(f"gone is the English of {key}: {text}")
    parts, pairs = [f"[English]({page.name})", *stale.pop("", [])], []
    for key, (text, measured) in zip(keys, blocks, strict=True):
        if key is None:
            parts.append(text)
        elif key in found:
            pair = Pair(text, found[key], measured)
            pairs.append(pair._replace(chinese=refill(pair, page, root)))
            parts += [f"<!-- en: {key} -->\n{pairs[-1].chinese}", *stale.pop(key, [])]
        else:
            faults.append(f"to translate: <!-- en: {key} -->\n{text}")
    return "\n\n".join(parts) + "\n", pairs, faults


def differences(english: str, chinese: str, measured: bool = False) -> Iterator[str]:
    """Between a block and its translation, in all but the language. Links lead to Chinese pages."""
    rows = [pieces(english), pieces(chinese)]
    if [*map(len, rows[0])] != [*map(len, rows[1])] or FORM.findall(english) != FORM.findall(
        chinese
    ):
        yield f"other form: {chinese}"
        return
    for old, new in zip(*(chain(*each) for each in rows), strict=True):
        order = list if measured else sorted
        if order(numbers(old)) != order(numbers(new)):
            yield f"other numbers, or in another order: {numbers(old)} is {new}"
        if "```mermaid" in english and LABEL.sub("", old) != LABEL.sub("", new):
            yield f"other diagram: {new}"
    for what, pattern in ("code", CODE), ("links", TARGET):
        old, new = (Counter(pattern.findall(" ".join(text.split()))) for text in (english, chinese))
        if old != new:
            yield f"other {what}: {[*(old - new)]} is {[*(new - old)]} in {chinese}"


def faults(page: Path, root: Path = ROOT) -> Iterator[str]:
    """All that is wrong with the Chinese version of an English page."""
    here = page.with_suffix(".zh.md")
    new, pairs, todo = rebuild(page, root)
    yield from todo
    for path, line in (page, f"[中文]({here.name})\n\n"), (here, f"[English]({page.name})\n\n"):
        if not path.exists() or not path.read_text().startswith(line):
            yield f"{path.name} does not begin with {line}"
    if not todo and new != here.read_text():
        yield "not as written again: python tests/translations.py"
    for english, chinese, measured in pairs:
        yield from differences(lead(english, page, root), chinese, measured)
    others = {pair for each in pages(root) for pair in rebuild(each, root)[1]}
    for pair in pairs:
        same = {each.chinese for each in others if each.english == pair.english}
        if pair.english.startswith("#") and len(same) > 1:
            yield f"the same heading in two ways: {same}"


def glossary_faults(root: Path = ROOT) -> Iterator[str]:
    """The column 中文: <!-- en: DIGEST OF THE MEANING -->**term**：meaning."""
    for term, row in glossary(root).items():
        [[_, meaning, chinese, *_]] = pieces(row)
        cell = re.fullmatch(r"<!-- en: (\w+) -->\*\*.+?\*\*：(.+)", chinese)
        if not cell or cell[1] != digest(meaning):
            yield f"to translate: {term}, <!-- en: {digest(meaning)} -->"
        else:
            yield from differences(meaning, cell[2])


if __name__ == "__main__":
    todo = [] if sys.argv[1:] else [*glossary_faults()]
    for page in [Path(each).resolve() for each in sys.argv[1:]] or pages(ROOT):
        text, _, _ = rebuild(page, ROOT)
        page.with_suffix(".zh.md").write_text(text)
        todo += [f"{page.parent.name}/{page.name}: {fault}" for fault in faults(page)]
    print(*todo, sep="\n\n")
    sys.exit(bool(todo))
