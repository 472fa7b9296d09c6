"""Change a few lines of a script."""

import re


def replace_once(text: str, *changes: tuple[str, str]) -> str:
    """Replace each old text by its new one. Raises ValueError unless it occurs exactly once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times in the script, expected once: {old}")
        text = text.replace(old, new)
    return text


def apply_diff(text: str, diff: str) -> str:
    """Apply a diff, as `patch` does. Raises ValueError unless each part occurs exactly once."""
    for part in re.split(r"^@@ .*@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in (" -", " +"))
        text = replace_once(text, (old, new))
    return text
