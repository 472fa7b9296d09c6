"""The lesson of a stage: the difference between its train.py and its parent's.

    python tests/lessons.py

writes each stage's lesson.diff. `make lessons` calls it.
"""

from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARENTS = {
    "02_data_parallel": "01_single_gpu",
    "03_ddp_manual_allreduce": "01_single_gpu",
    "04_ddp_torchrun": "03_ddp_manual_allreduce",
    "05_amp_syncbn": "04_ddp_torchrun",
}


def lesson(stage: str) -> str:
    names = [f"{folder}/train.py" for folder in (PARENTS[stage], stage)]
    before, after = ((ROOT / name).read_text().splitlines(keepends=True) for name in names)
    return "".join(unified_diff(before, after, *names, n=3))


if __name__ == "__main__":
    for stage in PARENTS:
        (ROOT / stage / "lesson.diff").write_text(lesson(stage))
        print(f"wrote {stage}/lesson.diff")
