"""Apply steps/1.diff, steps/2.diff, ... to a script for one GPU, and write all that follows.

    python beyond/convert/apply_steps.py

does this for the classifier and for the detector. It writes the scripts for many GPUs into
runs/converted, the diffs with fresh line numbers, and the fences of the pages. To change a step,
edit its diff; to change a script, edit the one for one GPU; then run this.
"""

import re
from argparse import ArgumentParser
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONVERTED = HERE.parents[1] / "runs" / "converted"
CLASSIFIER = HERE / "classifier"
PAGES = {  # folder, with NAME.py for one GPU: the page of its steps
    CLASSIFIER: HERE / "README.md",
    HERE / "detector": HERE / "detector" / "README.md",
}


def steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("steps/*.diff"))


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


def script_for_one_gpu(folder: Path) -> Path:
    return folder / f"{folder.name}.py"


def scripts(folder: Path = CLASSIFIER) -> list[str]:
    """The script for one GPU, and what it is after each step."""
    texts = [script_for_one_gpu(folder).read_text()]
    for step in steps(folder):
        texts.append(apply(step.read_text(), texts[-1]))
    return texts


def fresh_diffs(texts: list[str]) -> list[str]:
    return [
        "".join(unified_diff(a.splitlines(True), b.splitlines(True), "before.py", "after.py", n=2))
        for a, b in pairwise(texts)
    ]


def with_fence(page: str, mark: str, body: str) -> str:
    """The page, with this body in the diff fence below the comment."""
    fence = re.compile(rf"(<!-- {mark} -->\n```diff\n).*?(^```$)", re.M | re.S)
    return fence.sub(lambda match: match[1] + body + match[2], page)


def show(readme: str, diffs: list[str]) -> str:
    """The README, with the hunks of each step in the fence below <!-- step: N -->."""
    for number, diff in enumerate(diffs, start=1):
        body = "".join(diff.splitlines(keepends=True)[2:])  # without the names of the files
        readme = with_fence(readme, f"step: {number}", body)
    return readme


def show_examples(page: str) -> str:
    """Its page, with the change of each example in the fence below <!-- example: NAME -->."""
    for name in re.findall(r"<!-- example: (\w+) -->", page):
        before, after = (
            (HERE / "examples" / f"{name}{end}.py").read_text().splitlines(keepends=True)
            for end in ("", "_ddp")
        )
        body = "".join(list(unified_diff(before, after, n=0))[2:])
        body = re.sub(r"^@@.*\n", "@@\n", body, flags=re.M)
        page = with_fence(page, f"example: {name}", body)
    return page


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    CONVERTED.mkdir(parents=True, exist_ok=True)
    for folder, page in PAGES.items():
        texts = scripts(folder)
        diffs = fresh_diffs(texts)
        for step, diff in zip(steps(folder), diffs, strict=True):
            step.write_text(diff)
        script = CONVERTED / f"{folder.name}_ddp.py"
        script.write_text(texts[-1])
        page.write_text(show(page.read_text(), diffs))
        print(f"wrote {script}, {len(diffs)} diffs and {page.relative_to(HERE)}")
    page = HERE / "examples" / "README.md"
    page.write_text(show_examples(page.read_text()))
