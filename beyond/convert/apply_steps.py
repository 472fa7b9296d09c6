"""Apply the diffs beside a script for one GPU, and write all that follows.

    python beyond/convert/apply_steps.py

does this for the classifier and the detector, which change in steps (steps/1.diff, ...), and for
the examples, each with one diff of its name. It writes the scripts for many GPUs into
runs/converted, and the diffs with fresh line numbers. To change a step, edit its diff; to change a
script, edit the one for one GPU; then run this and `make pages-quick`, which writes the pages.
"""

import re
from argparse import ArgumentParser
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONVERTED = HERE.parents[1] / "runs" / "converted"
SCRIPTS = (
    HERE / "classifier" / "classifier.py",
    HERE / "detector" / "detector.py",
    *(path.with_suffix(".py") for path in sorted(HERE.glob("examples/*.diff"))),
)


def diffs_of(script: Path) -> list[Path]:
    """List the diffs in the script's steps/, or else the one diff that has the script's name."""
    return sorted(script.parent.glob("steps/*.diff")) or [script.with_suffix(".diff")]


def hunks(diff: str) -> list[tuple[str, str]]:
    """The text of each hunk before and after the change."""
    bodies = re.split(r"^@@.*\n", diff, flags=re.M)[1:]
    lines = [body.splitlines(keepends=True) for body in bodies]

    def side(body: list[str], sign: str) -> str:
        return "".join(line[1:] for line in body if line[0] in " " + sign)

    return [(side(body, "-"), side(body, "+")) for body in lines]


def apply(diff: str, text: str) -> str:
    for before, after in hunks(diff):
        if text.count(before) != 1:
            raise ValueError(
                f"expected this text once, found it {text.count(before)} times:\n{before}"
            )
        text = text.replace(before, after)
    return text


def versions_of(script: Path) -> list[str]:
    """The script for one GPU, and what it is after each diff."""
    texts = [script.read_text()]
    for diff in diffs_of(script):
        texts.append(apply(diff.read_text(), texts[-1]))
    return texts


def fresh_diffs(texts: list[str]) -> list[str]:
    return [
        "".join(unified_diff(a.splitlines(True), b.splitlines(True), "before.py", "after.py", n=2))
        for a, b in pairwise(texts)
    ]


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    CONVERTED.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        versions = versions_of(script)
        for path, diff in zip(diffs_of(script), fresh_diffs(versions), strict=True):
            path.write_text(diff)
        (CONVERTED / f"{script.stem}_ddp.py").write_text(versions[-1])
    print(f"wrote {len(SCRIPTS)} scripts for many GPUs to {CONVERTED}")
