"""Check all links of the site that `make site` has built.

.venv-site/bin/python docs/site/check.py [SITE]

One line for each fault, and exit status 1.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]


def link_faults(site: Path) -> Iterator[str]:
    """Links and anchors that lead nowhere, and everything that would load from a network."""
    texts = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    anchors = {name: {*re.findall(r'\bid="([^"]+)"', text)} for name, text in texts.items()}
    for page, text in texts.items():
        for tag, target in set(re.findall(r'<(\w+)\b[^>]*? (?:href|src)="([^"]*)"', text)):
            if re.match(r"\w+:", target):
                if tag != "a" and not target.startswith("data:"):
                    yield f"{page}: <{tag}> loads {target}"
                continue
            path, _, anchor = unquote(target.partition("?")[0]).partition("#")
            name = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            name += "/index.html" * (site / name).is_dir()
            missing = name.endswith(".html") and anchor and anchor not in anchors.get(name, ())
            if missing or not (site / name).is_file():
                yield f"{page}: leads nowhere: {target}"


def main() -> int:
    site = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "_site"
    faults = list(link_faults(site))
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
