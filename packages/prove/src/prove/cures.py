"""The cures that need more than a line: `python -m prove --explain NAME` prints one of them.

They come along with the package, so a row names the command: a path would lead into site-packages.
"""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("cures.md")


@cache
def all_cures() -> dict[str, str]:
    """Return each section of cures.md, by the anchor of its heading, which is Reason.link."""
    sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.M)[1:]
    return {anchor(heading_of(section)): section.strip() for section in sections}


def heading_of(section: str) -> str:
    return section.partition("\n")[0].removeprefix("## ")


def anchor(heading: str) -> str:
    """Make of a heading what GitHub makes of it in an address."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def explain_command(link: str) -> str:
    return f"python -m prove --explain {link}"
