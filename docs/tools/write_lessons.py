"""The lesson of a stage: the difference between its train.py and its parent's.

    python docs/tools/write_lessons.py

writes each stage's lesson.diff, and the parts of it that its pages show: a diff fence below
<!-- lesson: FIRST ... LAST --> holds the lines from the one that begins with FIRST to the next one
that begins with LAST. `make pages-quick` calls it.
"""

import subprocess

from repository_pages import ALL_PAGES, ROOT, fences

PARENTS = {
    "02_data_parallel": "01_single_gpu",
    "03_ddp_manual_allreduce": "01_single_gpu",
    "04_ddp_torchrun": "03_ddp_manual_allreduce",
    "05_amp_syncbn": "04_ddp_torchrun",
    "beyond/survive": "05_amp_syncbn",
}


def lesson(stage: str) -> str:
    """The smallest difference, as `diff -u` finds it."""
    names = [f"{folder}/train.py" for folder in (PARENTS[stage], stage)]
    labels = [word for name in names for word in ("--label", name)]
    diff = ["diff", "-u", "-d", *labels, *names]
    return subprocess.run(diff, cwd=ROOT, capture_output=True, text=True).stdout


def write_lesson(stage: str) -> None:
    (ROOT / stage / "lesson.diff").write_text(lesson(stage))
    lines = lesson(stage).splitlines(keepends=True)[2:]  # without the names of the files
    pages = [page for page in ALL_PAGES if page.parent == ROOT / stage]
    for fence in reversed(fences("diff", pages)):  # from the end: places stay right
        if not fence.note.startswith("lesson: "):
            continue
        first, last = fence.note.removeprefix("lesson: ").split(" ... ")
        above = next((i for i, line in enumerate(lines) if line.startswith(first)), None)
        if above is None:
            raise SystemExit(f"{fence.page}: the lesson has no line that begins with {first}")
        below = next(i for i, line in enumerate(lines) if i >= above and line.startswith(last))
        fence.write("".join(lines[above : below + 1]))


if __name__ == "__main__":
    for stage in PARENTS:
        write_lesson(stage)
        print(f"wrote {stage}/lesson.diff and the parts of it in its pages")
