"""Write the English fences and numbers into the Chinese pages, and list those that are older.

The Chinese version of README.md is README.zh.md; of a folder's README.md, docs/zh/FOLDER.md. Its
second line holds a digest of the English prose that it translates. A translation that is older is
reported, and fails nothing. Fences are copied from the English page while both have the same ones,
and so are the numbers of measured tables.
"""

import re
from hashlib import sha256

from markers import FENCE, TABLE
from repository_pages import ROOT, translated_pages

NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*")
DIGEST = re.compile(r"<!-- of the English: (\w+) -->")


def digest(english: str) -> str:
    """Digest the prose: a fence or a measured number that changes needs no new translation."""
    prose = TABLE.sub("", FENCE.sub("", english.partition("\n## All claims\n")[0]))
    return sha256(" ".join(prose.split()).encode()).hexdigest()[:8]


def replace_each(pattern: re.Pattern[str], texts: list[str], chinese: str) -> str:
    remaining = iter(texts)
    return pattern.sub(lambda _: next(remaining), chinese)


def refreshed(english: str, chinese: str) -> str:
    """The Chinese page with the English page's fences and measured numbers."""
    for pattern in (FENCE, TABLE):
        new, old = ([m[0] for m in pattern.finditer(page)] for page in (english, chinese))
        new = [translated(*pair) for pair in zip(new, old, strict=True)]
        chinese = replace_each(pattern, new, chinese)
    return chinese


def translated(english: str, chinese: str) -> str:
    """A fence is copied; a measured table keeps its words and gets the new numbers."""
    if FENCE.match(english):
        return english
    numbers = NUMBER.findall(english)
    if len(numbers) != len(NUMBER.findall(chinese)):
        return chinese
    return replace_each(NUMBER, numbers, chinese)


def same_fences(english: str, chinese: str) -> bool:
    """Has the translation as many fences and tables as its page? Otherwise they are not copied."""
    return all(len(p.findall(english)) == len(p.findall(chinese)) for p in (FENCE, TABLE))


def update(mark_current: bool = False) -> None:
    """Refresh the Chinese pages and name the older ones; after a translation, none is older."""
    for page, translation in translated_pages():
        english, chinese = page.read_text(), translation.read_text()
        names = translation.relative_to(ROOT), page.relative_to(ROOT)
        if same_fences(english, chinese):
            chinese = refreshed(english, chinese)
        else:
            print("{} has other fences than {}, so none was copied".format(*names))
        if mark_current:
            chinese = DIGEST.sub(f"<!-- of the English: {digest(english)} -->", chinese)
        translation.write_text(chinese)
        if DIGEST.findall(chinese) != [digest(english)]:
            print("{} is older than {}".format(*names))
