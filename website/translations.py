"""The Chinese pages: README.zh.md has the same blocks as the README.md beside it.

    python website/translations.py [ENGLISH PAGE ...]

writes each Chinese page again, and lists what is still to translate. Blank lines divide blocks. A
fence is one block, with the comments above it. Comments and fences are copied, except mermaid. Each
other block is a translation, below <!-- en: DIGEST --> of the English text. In tables, diagrams and
the tour, numbers are left out of the digest, and filled in again in their order.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from pages import glossary, main_path
from readmes import ROOT

TEXT = r"(?:<!--.*-->\n)*```[\s\S]*?^```$|<!--.*-->$|(?:(?!<!--|```|[ \t]*$).+\n?)+"
BLOCK = re.compile(rf"^(?:<!-- en: (?P<key>\w*) -->\n)?(?P<text>{TEXT})", re.M)
COPIED = re.compile(r"(?:<!--.*-->\n?)*(?:```(?!mermaid)|$)")
LANGUAGE = re.compile(r"\[(?:中文|English)\]\(\S+\)")
MADE = re.compile(r"<!-- (end of )?(?:tour|table)\b")  # what stands between these is measured
CODE = r"(?<!`)`[^`]+`(?!`)"
NUMBER = re.compile(rf"{CODE}|\]\([^)]*\)|</?\w[^>]*>|((?<![A-Za-z\d])\d+(?:[.,]\d+)*)")
TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
LABEL = re.compile(r'"[^"\n]*"|(?: as |:).*$', re.M)  # what is translated in a diagram
BROKEN = re.compile(r"\w\*\*\W.*|.*\W\*\*\w", re.S)  # not bold: a sign at the end, a letter behind


def pages(root: Path) -> list[Path]:
    """The English pages that have a Chinese version. Of CLAIMS.md, it has only the beginning."""
    return [page for page in [*main_path(root), root / "CLAIMS.md"] if page.exists()]


def digest(block: str, measured: bool = False) -> str:
    text = " ".join(block.split())
    if measured:
        text = re.sub(r"\d+(?:[.,]\d+)*", "0", re.sub(r"-{3,}", "---", text))
    return sha256(text.encode()).hexdigest()[:8]


def english_blocks(page: Path) -> Iterator[tuple[str, str, bool]]:
    """Each block's digest, or nothing if it is copied; its text; whether it is measured."""
    made = False
    for match in BLOCK.finditer(page.read_text().partition("\n## All claims\n")[0]):
        text = match["text"].strip()
        if marker := MADE.match(text):
            made = not marker[1]
        measured = made or text.startswith("|") or "```mermaid" in text
        if not LANGUAGE.fullmatch(text):
            yield "" if COPIED.match(text) else digest(text, measured), text, measured


def numbers(text: str) -> list[str]:
    return [match[1] for match in NUMBER.finditer(text) if match[1]]


def refilled(english: str, chinese: str) -> str:
    new, old = numbers(english), numbers(chinese)
    if len(new) != len(old) or Counter(new) == Counter(old):  # wrong, or only in another order
        return chinese
    return NUMBER.sub(lambda match: new.pop(0) if match[1] else match[0], chinese)


def rebuilt(page: Path) -> tuple[str, list[tuple[str, str, bool]], list[str]]:
    """The Chinese version of an English page, its pairs of blocks, and what is still to do."""
    here, blocks = page.with_suffix(".zh.md"), [*english_blocks(page)]
    found, gone, last, todo = {key: "" for key, _, _ in blocks}, {}, "", []
    for match in BLOCK.finditer(here.read_text() if here.exists() else ""):
        key, text = match["key"] or "", match["text"].strip()
        if key and key in found:
            last, found[key] = key, text
        elif not COPIED.match(text) and not LANGUAGE.fullmatch(text):  # kept where it stood
            gone.setdefault(last, []).append(f"<!-- en: {key} -->\n{text}")
            todo.append(f"gone is the English of <!-- en: {key} -->\n{text}")
    parts, pairs = [f"[English]({page.name})", *gone.pop("", [])], []
    for key, text, measured in blocks:
        if not key:
            parts.append(text)
        elif chinese := found[key]:
            pairs.append((text, refilled(text, chinese) if measured else chinese, measured))
            parts += [f"<!-- en: {key} -->\n{pairs[-1][1]}", *gone.pop(key, [])]
        else:
            todo.append(f"to translate: <!-- en: {key} -->\n{text}")
    return "\n\n".join(parts) + "\n", pairs, todo


def lead(target: str, page: Path, root: Path) -> str:
    """A link, to the Chinese page if there is one. With an anchor it stays on the English page."""
    file, _, anchor = target.partition("#")
    if "://" in file or (page.parent / (file or page.name)).resolve() not in pages(root):
        return target
    return f"{file or page.name}#{anchor}" if anchor else f"{file[:-3]}.zh.md"


def form(block: str) -> str | list[str]:
    """The lines and cells of a table, a diagram without labels, or the signs of its items."""
    if block.startswith("|") or "```mermaid" in block:
        return re.sub(r"[^|\n]+" if block.startswith("|") else LABEL, "", block)
    return re.findall(r"^ *(?:#+|[-*]|\d+\.) ", block, re.M)


def differences(english: str, chinese: str, measured: bool = False) -> Iterator[str]:
    """Between a block and its translation, in all but the language."""
    for what, found in (
        ("form", form),
        ("numbers", lambda text: numbers(text) if measured else sorted(numbers(text))),
        ("code", lambda text: sorted(re.findall(CODE, " ".join(text.split())))),
        ("links", lambda text: sorted(TARGET.findall(text))),
    ):
        if found(english) != found(chinese):
            yield f"other {what}: {found(english)} is {found(chinese)} in {chinese}"
    bold = re.findall(r"\w?\*\*[^*]+\*\*\w?", chinese)
    yield from (f"not bold: {part}" for part in bold if BROKEN.fullmatch(part))
    yield from (f"two lines: {part}" for part in re.findall(r"[一-鿿]\n[一-鿿]+", chinese))


def faults(page: Path, root: Path = ROOT) -> Iterator[str]:
    """All that is wrong with the Chinese version of an English page."""
    here, (text, pairs, todo) = page.with_suffix(".zh.md"), rebuilt(page)
    yield from todo
    for path, line in (page, f"[中文]({here.name})\n\n"), (here, f"[English]({page.name})\n\n"):
        if not path.exists() or not path.read_text().startswith(line):
            yield f"{path.name} does not begin with {line}"
    if not todo and text != here.read_text():
        yield "it differs from what this writes: python website/translations.py"
    for text, chinese, measured in pairs:
        english = TARGET.sub(lambda match: lead(match[0], page, root), text)
        yield from differences(english, chinese, measured)
    everywhere = {(en, zh) for each in pages(root) for en, zh, _ in rebuilt(each)[1]}
    count = Counter(en for en, _ in everywhere if en.startswith("#"))
    yield from (f"translated in two ways: {en}" for en, _, _ in pairs if count[en] > 1)


def glossary_faults(root: Path = ROOT) -> Iterator[str]:
    """Its column 中文 has <!-- en: DIGEST OF THE MEANING -->**term**：meaning."""
    for term, row in glossary(root).items():
        meaning, chinese = row.split(" | ")[1:3]
        cell = re.fullmatch(r"<!-- en: (\w+) -->\*\*.+?\*\*：(.+)", chinese)
        if not cell or cell[1] != digest(meaning):
            yield f"to translate: {term}, <!-- en: {digest(meaning)} -->"
        else:
            yield from differences(meaning, cell[2])


if __name__ == "__main__":
    todo = [] if sys.argv[1:] else [*glossary_faults()]
    for page in [Path(each).resolve() for each in sys.argv[1:]] or pages(ROOT):
        page.with_suffix(".zh.md").write_text(rebuilt(page)[0])
        todo += [f"{page.parent.name}/{page.name}: {fault}" for fault in faults(page)]
    print(*todo, sep="\n\n")
    sys.exit(bool(todo))
