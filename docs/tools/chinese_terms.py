"""The words of the Chinese pages: docs/zh/glossary.md decides."""

import re
from collections.abc import Iterator
from pathlib import Path

from markers import FENCE
from repository_pages import ROOT

GLOSSARY = ROOT / "docs/zh/glossary.md"
TERM = re.compile(
    r'^\| <a id="(?P<anchor>[\w-]+)"></a>(?P<english>.+?) \| \*\*(?P<chinese>.+?)\*\*', re.M
)
AVOIDED = re.compile(r"^\| `(?P<avoided>[^`]+)` \| (?P<better>[^|]+?) \|", re.M)
LINK = re.compile(r"\[(?P<words>[^\]]+)\]\([^)]*glossary\.md#(?P<anchor>[\w-]+)\)")


def avoided() -> dict[str, str]:
    """What no Chinese page says, and what it says instead."""
    return {row["avoided"]: row["better"] for row in AVOIDED.finditer(GLOSSARY.read_text())}


def terms() -> dict[str, list[str]]:
    """What a link to each row of the glossary may call it: in English, and each Chinese word."""
    return {
        row["anchor"]: [row["english"].lower(), *re.split(r"[（）、/]", row["chinese"].lower())]
        for row in TERM.finditer(GLOSSARY.read_text())
    }


def wrong_terms(page: Path) -> Iterator[str]:
    """Say which words of a Chinese page the glossary does not allow."""
    text = FENCE.sub("", page.read_text())
    prose = AVOIDED.sub("", text)
    for word, better in avoided().items():
        if word in prose:
            yield f"says {word}, where the glossary has {better}"
    names = terms()
    for link in LINK.finditer(text):
        words = link["words"].lower()
        if not any(name and name in words for name in names[link["anchor"]]):
            expected = " or ".join(filter(None, names[link["anchor"]]))
            yield f"calls it {link['words']}, where the glossary has {expected}"
