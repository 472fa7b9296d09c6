"""Which pages there are, in English and in Chinese, and which of them are the main path."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The main path, in the order in which it is read.
MAIN_PATH = [".", "01_single_gpu", "02_data_parallel", "03_ddp_manual_allreduce"]
MAIN_PATH += ["04_ddp_torchrun", "05_amp_syncbn", "beyond/survive", "beyond/convert"]
PAGES = (
    "*.md",
    "0?_*/**/*.md",
    "beyond/**/*.md",
    "packages/**/*.md",
    "benchmarks/*.md",
    "common/*.md",
    "docs/*.md",
)
# The English pages.
ALL_PAGES = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
ALL_PAGES = [path for path in ALL_PAGES if not path.match("*.zh.md")]
# These show commands for a folder of the reader's: see test_convert.py.
CONVERT = {ROOT / "beyond/convert" / name for name in ("README.md", "detector/README.md")}
PAGES_OF_THE_ROOT = [page for page in ALL_PAGES if page not in CONVERT]
TEST_FOLDERS = ("tests/*", "packages/*/tests")
TEST_FILES = sorted(path for each in TEST_FOLDERS for path in ROOT.glob(f"{each}/test_*.py"))
LINK = r"!?\[([^\]]*)\]\([^)]*\)"


def translated_pages(root: Path = ROOT) -> Iterator[tuple[Path, Path]]:
    """Yield each English page that has a Chinese version, and that version, which names it."""
    for chinese in [root / "README.zh.md", *sorted((root / "docs/zh").glob("*.md"))]:
        english = re.match(r"\[English\]\(([^)]+)\)", chinese.read_text(encoding="utf-8"))
        assert english, f"{chinese.relative_to(root)}: the first line is not [English](PAGE)"
        yield Path(os.path.normpath(chinese.parent / english[1])), chinese


CHINESE = [page for _, page in translated_pages()]


def slugs(text: str) -> list[str]:
    """The anchors that GitHub gives to the headings of a text without fences, in their order."""
    names, seen = list[str](), Counter()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        slug = re.sub(r"[^\w -]", "", re.sub(LINK, r"\1", heading).lower()).replace(" ", "-")
        names.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return names
