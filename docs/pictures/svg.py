"""Draw SVG that reads on a white page and on a dark one, wide or as narrow as a phone.

A color means one thing in all pictures and widgets. No color depends on the theme, because GitHub's
theme need not be the browser's: each has a contrast of 3 or more with white and with GitHub's dark
page, except pale fills, which have an outline.
"""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 480  # on a phone, a picture is as wide as the page: the text stays large enough
SHOWN = 560  # how wide it is on a wider page
SIZE = 16  # of the letters
INK = "#767b83"
COLORS = {
    # what a rank does
    "loading": "#8a6d1f",
    "forward": "#3f92cf",
    "backward": "#2f6bbf",
    "optimizer": "#71757c",
    "waiting": "url(#waiting)",
    "sending": "#c9630f",
    # what it holds: what forward keeps, what backward makes, what the optimizer keeps
    "activations": "#3f92cf",
    "gradients": "#2f6bbf",
    "optimizer state": "#71757c",
    "parameters": "#1a8043",
    "batch": "#8a6d1f",
    # whose it is
    "rank 0": "#8c5bc7",
    "rank 1": "#0f868c",
    "measured": INK,
    "you": "#6e6a86",
    "same": INK,
    # what comes of it
    "right": "#3f9142",
    "wrong": "#d5404a",
    # what autocast converts, and what it leaves
    "16 bits": "#5a63c8",
    "still 16 bits": "#cdd1f6",
    "32 bits": INK,
    # how images lie in memory
    "contiguous": "#9c7a6b",
    "channels_last": "#c8506a",
    # the bits of a number
    "sign": "#767b83",
    "exponent": "#b4568b",
    "fraction": "#6f8a1f",
}
STRIPES = (
    '<pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2" height="5" fill="#c9630f"/></pattern>'
)


def width_of(text: str) -> float:
    """How wide the text is, about, in a wide font."""
    widths = dict.fromkeys("fijlrt", 0.36) | {"m": 0.98, "w": 0.82}
    return SIZE * sum(widths.get(letter, 0.6) for letter in text)


class Drawing:
    """Shapes from top to bottom; `text` closes the file."""

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self.shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        outline: str = "",
        dashes: str = "",
        is_pale: bool = False,
    ) -> None:
        edge = f' stroke="{COLORS.get(outline, outline)}"' if outline else ""
        edge += f' stroke-dasharray="{dashes}"' if dashes else ""
        edge += ' fill-opacity="0.55"' if is_pale else ""
        at = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}"'
        rounding = ' rx="4"' if outline else ""
        self.shapes.append(f'<rect {at}{rounding} fill="{COLORS.get(kind, kind)}"{edge}/>')

    def words(
        self,
        x: float,
        y: float,
        text: str,
        kind: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        look = f'fill="{COLORS.get(kind, kind)}" font-size="{SIZE}" text-anchor="{anchor}"'
        look += ' font-weight="bold"' if bold else ""
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>')

    def words_up(self, x: float, y: float, text: str) -> None:
        """Words that are read from below, and have their middle here."""
        look = f'fill="{INK}" font-size="{SIZE}" font-weight="bold" text-anchor="middle"'
        turned = f'transform="rotate(-90 {x:.1f} {y:.1f})"'
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {look} {turned}>{escape(text)}</text>')

    def button(self, x: float, y: float, width: float, height: float, kind: str, text: str) -> None:
        """A filled box with a word in its middle."""
        self.box(x, y, width, height, kind)
        self.words(x + width / 2, y + height / 2 + 6, text, "#fff", "middle", bold=True)

    def card(self, middle: float, y: float, width: float, kind: str, lines: Sequence[str]) -> None:
        """An outlined box of lines: the last one is bold, and the name of the color has it."""
        self.box(middle - width / 2, y, width, 13 + 21 * len(lines), "none", kind)
        for row, line in enumerate(lines):
            color = kind if line == kind or len(lines) == 1 else INK
            is_bold = line == kind or line == lines[-1]
            self.words(middle, y + 22 + 21 * row, line, color, "middle", bold=is_bold)

    def line(self, x1: float, y1: float, x2: float, y2: float, arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.shapes.append(f'<line {at} stroke="{INK}" stroke-width="1.5"{end}/>')

    def curve(self, points: Iterable[tuple[float, float]], kind: str, dashes: str = "") -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'fill="none" stroke="{COLORS.get(kind, kind)}" stroke-width="3"'
        look += f' stroke-dasharray="{dashes}"' if dashes else ""
        self.shapes.append(f'<polyline points="{at}" {look} stroke-linejoin="round"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLORS[kind]}"/>')

    def legend(self, y: float, names: Iterable[str], x: float = 4) -> float:
        """A square and a name for each, in as many rows as it takes; returns where they end."""
        left = x
        for name in names:
            wide = 20 + width_of(name)
            if x > left and x + wide > WIDTH:
                x, y = left, y + 22
            self.box(x, y, 14, 14, name, INK if name == "waiting" else "")
            self.words(x + 20, y + 13, name)
            x += wide + 9
        return y + 22

    def text(self, height: float) -> str:
        arrow = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
        )
        size = f'width="{SHOWN}" height="{height * SHOWN / WIDTH:.0f}"'
        size += f' viewBox="0 0 {WIDTH} {height:.0f}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
        )
        about = f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        defs = f"<defs>{STRIPES}{arrow}</defs>"
        return "\n".join([head, about, defs, *self.shapes, "</svg>"]) + "\n"
