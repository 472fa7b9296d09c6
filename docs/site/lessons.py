"""The lesson of a stage: the difference between its train.py and its parent's.

    python docs/site/lessons.py

writes each stage's lesson.diff, and the parts of it that its pages show: a diff fence below
<!-- lesson: FIRST ... LAST --> holds the lines from the one that begins with FIRST to the next one
that begins with LAST. `make lessons` calls it.
"""

from difflib import unified_diff

from repository_pages import ALL_PAGES, ROOT, fences

PARENTS = {
    "02_data_parallel": "01_single_gpu",
    "03_ddp_manual_allreduce": "01_single_gpu",
    "04_ddp_torchrun": "03_ddp_manual_allreduce",
    "05_amp_syncbn": "04_ddp_torchrun",
    "beyond/survive": "05_amp_syncbn",
}


def lesson(stage: str) -> str:
    names = [f"{folder}/train.py" for folder in (PARENTS[stage], stage)]
    before, after = ((ROOT / name).read_text().splitlines(keepends=True) for name in names)
    return "".join(unified_diff(before, after, *names, n=3))


def refresh(stage: str) -> None:
    (ROOT / stage / "lesson.diff").write_text(lesson(stage))
    lines = lesson(stage).splitlines(keepends=True)[2:]  # without the names of the files
    for fence in reversed(
        fences("diff", [page for page in ALL_PAGES if page.parent == ROOT / stage])
    ):
        if not fence.note.startswith("lesson: "):
            continue
        first, last = fence.note.removeprefix("lesson: ").split(" ... ")
        above = next(i for i, line in enumerate(lines) if line.startswith(first))
        below = next(i for i, line in enumerate(lines) if i >= above and line.startswith(last))
        text, (start, end) = fence.page.read_text(), fence.place  # from the end: it stays right
        fence.page.write_text(text[:start] + "".join(lines[above : below + 1]) + text[end:])


if __name__ == "__main__":
    for stage in PARENTS:
        refresh(stage)
        print(f"wrote {stage}/lesson.diff and the parts of it in its pages")
