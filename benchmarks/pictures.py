"""Draw the pictures of the pages: docs/pictures/, from committed results and from what is computed.

    python benchmarks/pictures.py

Here stand the pictures of what was measured; docs/tools/lesson_pictures.py has the others.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import timeline
from common.chapters import ROOT, load_chapter
from common.options import Parser
from result_files import MACHINE, MIB, load
from svg import WIDTH, Drawing

lesson_pictures = load_chapter("docs/tools", "lesson_pictures")

FOLDER = ROOT / "docs" / "pictures"
MEMORY_ROWS = {  # how memory.svg calls what measure_memory.py counts
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer",),
    "buckets": ("buckets",),
    "activations": ("activations",),
    "batch": ("batch", "buffers", "outputs and loss"),
}


def draw_memory() -> str:
    """What each process or replica holds, stage by stage."""
    results = load(MACHINE)["process_memory"]
    rows: list[tuple[str, dict[str, int]]] = []
    for key, stage in results["stages"].items():
        names = ("02 main device", "02 the other") if key == "02" else (stage["label"],)
        for name, found in zip(names, stage["held"], strict=False):  # ranks hold alike
            rows.append(
                (name, {k: sum(found[part] for part in MEMORY_ROWS[k]) for k in MEMORY_ROWS})
            )
    left, right = 150, 84
    scale = (WIDTH - left - right) / max(sum(held.values()) for _, held in rows)
    text = "; ".join(f"{name}: {sum(held.values()) / MIB:.0f} MiB" for name, held in rows)
    drawing = Drawing("What each rank holds, stage by stage", text)
    drawing.legend(4, [*MEMORY_ROWS][:3])
    drawing.legend(28, [*MEMORY_ROWS][3:])
    y = 60.0
    for name, held in rows:
        drawing.words(left - 8, y + 18, name, anchor="end")
        x = float(left)
        for kind, size in held.items():
            if size:
                drawing.box(x, y, size * scale - 0.7, 24, kind)
                x += size * scale
        drawing.words(x + 6, y + 18, f"{sum(held.values()) / MIB:.0f} MiB", bold=True)
        y += 32
    about = "{model}, {image_size} pixels, global batch {global_batch}, at the end of forward."
    drawing.words(4, y + 14, about.format(**results))
    where = timeline.origin_line(results["provenance"])
    drawing.words(4, y + 32, where)
    return drawing.text(y + 42)


def draw_timeline(model: str, *stages: str) -> str:
    """A recorded step of these stages; without stages, of all."""
    return timeline.picture(load("timeline")[model], stages)


PICTURES: dict[str, Callable[[], str]] = {
    **lesson_pictures.PICTURES,
    "memory": draw_memory,
    "timeline": partial(draw_timeline, "net-bn"),
    "timeline_01": partial(draw_timeline, "net-bn", "01"),
    "timeline_02": partial(draw_timeline, "net-bn", "02", "04"),
    "timeline_03": partial(draw_timeline, "net-bn", "01", "03"),
    "timeline_04": partial(draw_timeline, "net-bn", "03", "04"),
    "timeline_05": partial(draw_timeline, "net-bn", "04", "05"),
    "timeline_resnet18": partial(draw_timeline, "resnet18", "03", "04"),
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, make in PICTURES.items():
        path_of(name).write_text(make())
    print(f"wrote {len(PICTURES)} pictures to {FOLDER.relative_to(ROOT)}/")
