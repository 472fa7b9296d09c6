"""Draw what the process of stage 01 holds, kind by kind."""

from benchmarks.result_files import MIB, Results, origin_line
from docs.pictures.svg import WIDTH, Drawing

KINDS = {  # how the picture calls what benchmarks/measure/memory.py counts
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer",),
    "activations": ("activations",),
    "batch": ("batch", "buffers", "outputs and loss"),
}


def draw(results: Results) -> str:
    """Draw a bar from left to right, and below it a line for each kind."""
    [found] = results["stages"]["01"]["held"]  # one process
    held = {kind: sum(found[part] for part in parts) for kind, parts in KINDS.items()}
    total = sum(held.values())
    lines = {kind: f"{kind}: {size / MIB:.0f} MiB" for kind, size in held.items()}
    title = f"{results['model']}: {total / MIB:.0f} MiB in one process"
    drawing = Drawing(title, "; ".join(lines.values()))
    drawing.words(4, 18, title, bold=True)
    x = 4.0
    for kind, size in held.items():
        width = (WIDTH - 8) * size / total
        drawing.box(x, 28, width - 0.7, 30, kind)
        x += width
    for place, (kind, line) in enumerate(lines.items()):
        column, row = divmod(place, 3)
        left, top = 4 + 244 * column, 72 + 24 * row
        drawing.box(left, top, 14, 14, kind)
        drawing.words(left + 20, top + 13, line)
    about = "{image_size} pixels, global batch {global_batch}, at the end of forward."
    y = drawing.words(4, 164, about.format(**results))
    return drawing.text(drawing.words(4, y, origin_line(results["provenance"])) - 10)
