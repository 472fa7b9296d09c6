"""Apply steps/1.diff, steps/2.diff, ... to single.py, and write all that follows.

    python beyond/convert/steps.py

writes ddp.py, the diffs with fresh line numbers, and the fences of README.md. To change a step,
edit its diff; to change the script, edit single.py; then run this.
"""

import re
from argparse import ArgumentParser
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
STEPS = sorted(HERE.glob("steps/*.diff"))


def hunks(diff: str) -> list[tuple[str, str]]:
    """The text of each hunk before and after the change."""
    bodies = re.split(r"^@@.*\n", diff, flags=re.M)[1:]
    lines = [body.splitlines(keepends=True) for body in bodies]
    return [
        tuple("".join(line[1:] for line in body if line[0] in " " + sign) for sign in "-+")
        for body in lines
    ]


def apply(diff: str, text: str) -> str:
    for before, after in hunks(diff):
        if text.count(before) != 1:
            raise ValueError(
                f"expected this text once, found it {text.count(before)} times:\n{before}"
            )
        text = text.replace(before, after)
    return text


def scripts() -> list[str]:
    """single.py, and what it is after each step."""
    texts = [(HERE / "single.py").read_text()]
    for step in STEPS:
        texts.append(apply(step.read_text(), texts[-1]))
    return texts


def fresh_diffs(texts: list[str]) -> list[str]:
    return [
        "".join(unified_diff(a.splitlines(True), b.splitlines(True), "before.py", "after.py", n=2))
        for a, b in pairwise(texts)
    ]


def show(readme: str, diffs: list[str]) -> str:
    """The README, with the hunks of each step in the fence below <!-- step: N -->."""
    for number, diff in enumerate(diffs, start=1):
        fence = re.compile(rf"(<!-- step: {number} -->\n```diff\n).*?(^```$)", re.M | re.S)
        body = "".join(diff.splitlines(keepends=True)[2:])  # without the names of the files
        readme = fence.sub(lambda match, body=body: match[1] + body + match[2], readme)
    return readme


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    texts = scripts()
    diffs = fresh_diffs(texts)
    for step, diff in zip(STEPS, diffs, strict=True):
        step.write_text(diff)
    (HERE / "ddp.py").write_text(texts[-1])
    (HERE / "README.md").write_text(show((HERE / "README.md").read_text(), diffs))
    print(f"wrote ddp.py, {len(diffs)} diffs and README.md")
