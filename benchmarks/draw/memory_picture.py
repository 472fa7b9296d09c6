"""Draw what each process or replica holds, stage by stage."""

from benchmarks.draw.svg import WIDTH, Drawing
from benchmarks.result_files import MIB, Results, origin_line

MEMORY_ROWS = {  # how memory.svg calls what measure/memory.py counts
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer",),
    "buckets": ("buckets",),
    "activations": ("activations",),
    "batch": ("batch", "buffers", "outputs and loss"),
}


def draw(results: Results) -> str:
    """What each process or replica holds, stage by stage."""
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
    drawing.words(4, y + 32, origin_line(results["provenance"]))
    return drawing.text(y + 42)
