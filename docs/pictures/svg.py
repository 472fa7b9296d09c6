"""Draw SVG that reads on a white page and on a dark one, wide or as narrow as a phone.

A color means one thing in all pictures and widgets. Shapes have the same color in both themes, with
a contrast of 3 or more with either page. Words need 4.5, which no color has with both, so they are
darker in the light theme than in the dark one. Some browsers take the theme from the system and not
from the page, so words keep 3 with the other page, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from textwrap import wrap
from typing import NamedTuple
from unicodedata import east_asian_width

WIDTH = 480  # on a phone, a picture is as wide as the page: the text stays large enough
SHOWN = 520  # how wide it is on a wider page
SIZE = 17  # of the letters
LETTERS = 56  # of a line
PAGES = {"light": "#ffffff", "dark": "#131416"}  # the site's; GitHub's dark page is darker still
CONTRAST = 5.5  # of words with their page
INK, ON_LIGHT, ON_DARK = "ink", "#0b1622", "#ffffff"  # words on the page, and on shapes
COLORS = {
    INK: "#767b83",
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
    "rank 1": "#0e8288",
    "measured": "#767b83",
    "you": "#6e6a86",
    # what comes of it
    "right": "#3f9142",
    "wrong": "#d5404a",
    # what autocast computes in
    "16 bits": "#626bd4",
    "32 bits": "#71757c",
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


class Language(NamedTuple):
    """What a drawing says for the English text that it is given, and the look of its letters."""

    say: Callable[[str], str]
    attributes: str


ENGLISH = Language(str, 'font-family="sans-serif"')
SPOKEN = ContextVar("SPOKEN", default=ENGLISH)


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Drawings that are made inside have this language."""
    before = SPOKEN.set(language)
    try:
        yield
    finally:
        SPOKEN.reset(before)


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2: 0 for black, 1 for white."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2, from 1 to 21."""
    dark, light = sorted(0.05 + luminance(color) for color in (one, other))
    return light / dark


def for_words(color: str, theme: str) -> str:
    """The color, made so much darker or lighter that words in it can be read on the page."""
    parts, end = [int(color[i : i + 2], 16) for i in (1, 3, 5)], 0 if theme == "light" else 255
    mixes = ([round(c + (end - c) * share / 100) for c in parts] for share in range(101))
    shades = ("#" + "".join(f"{c:02x}" for c in mix) for mix in mixes)
    return next(shade for shade in shades if contrast(shade, PAGES[theme]) >= CONTRAST)


def width_of(text: str) -> float:
    """How wide the text is, about, in a wide font."""
    widths = dict.fromkeys("fijlrt", 0.36) | {"m": 0.98, "w": 0.82}
    wide = (1 if east_asian_width(letter) in "FW" else widths.get(letter, 0.6) for letter in text)
    return SIZE * sum(wide)


def minus(number: float) -> str:
    """Write the number with the minus sign that mathematics has."""
    return f"−{-number:g}" if number < 0 else f"{number:g}"


def class_of(kind: str) -> str:
    return "w-" + kind.replace(" ", "-")


class Drawing:
    """Shapes from top to bottom; `text` closes the file. All words are given in English."""

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self.say, self.attributes = SPOKEN.get()
        self.shapes: list[str] = []
        self.kinds = {INK}  # the colors in which there are words

    def style(self) -> str:
        """The colors of words, for each theme, and of thin lines, which have that of words."""
        rules: dict[str, str] = {}
        for theme in PAGES:
            shades = {kind: for_words(COLORS[kind], theme) for kind in sorted(self.kinds)}
            words = [f".{class_of(kind)}{{fill:{shade}}}" for kind, shade in shades.items()]
            rules[theme] = "".join([*words, f".line{{stroke:{shades[INK]}}}"])
        dark = f"@media(prefers-color-scheme:dark){{{rules['dark']}}}"
        return f"<style>{rules['light']}\n{dark}</style>"

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
        edge = f' stroke="{COLORS[outline]}"' if outline else ""
        edge = ' class="line"' if outline == INK else edge
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
        spacing: int = 20,
    ) -> float:
        """Words in as many lines as they take; returns where the next line would be."""
        look = f'{self.color(kind)} font-size="{SIZE}" text-anchor="{anchor}"'
        look += ' font-weight="bold"' if bold else ""
        for part in self.say(text).split("\n"):
            for line in wrap(part, LETTERS) or [""]:
                self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(line)}</text>')
                y += spacing
        return y

    def width_of(self, text: str) -> float:
        """How wide the text is, about, as the drawing says it."""
        return width_of(self.say(text))

    def color(self, kind: str) -> str:
        """kind: a name in COLORS, for words on the page, or ON_LIGHT or ON_DARK, on a shape."""
        if kind in (ON_LIGHT, ON_DARK):
            return f'fill="{kind}"'
        self.kinds.add(kind)
        return f'class="{class_of(kind)}"'

    def words_up(self, x: float, y: float, text: str) -> None:
        """Words that are read from below, and have their middle here."""
        look = f'{self.color(INK)} font-size="{SIZE}" font-weight="bold" text-anchor="middle"'
        turned = f'transform="rotate(-90 {x:.1f} {y:.1f})"'
        said = escape(self.say(text))
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {look} {turned}>{said}</text>')

    def button(self, x: float, y: float, width: float, height: float, kind: str, text: str) -> None:
        """A filled box with a word in its middle."""
        self.box(x, y, width, height, kind)
        color = max(ON_LIGHT, ON_DARK, key=lambda it: contrast(it, COLORS[kind]))
        self.words(x + width / 2, y + height / 2 + 6, text, color, "middle", bold=True)

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
        self.shapes.append(f'<line {at} class="line" stroke-width="1.5"{end}/>')

    def curve(self, points: Iterable[tuple[float, float]], kind: str, dashes: str = "") -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'fill="none" stroke="{COLORS[kind]}" stroke-width="3"'
        look += f' stroke-dasharray="{dashes}"' if dashes else ""
        self.shapes.append(f'<polyline points="{at}" {look} stroke-linejoin="round"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLORS[kind]}"/>')

    def legend(self, y: float, names: Iterable[str], x: float = 4) -> float:
        """A square and a name for each, in as many rows as it takes; returns where they end."""
        left = x
        for name in names:
            wide = 20 + self.width_of(name)
            if x > left and x + wide > WIDTH:
                x, y = left, y + 22
            self.box(x, y, 14, 14, name, INK if name == "waiting" else "")
            self.words(x + 20, y + 13, name)
            x += wide + 9
        return y + 22

    def text(self, height: float) -> str:
        arrow = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" class="{class_of(INK)}"/></marker>'
        )
        size = f'width="{SHOWN}" height="{height * SHOWN / WIDTH:.0f}"'
        size += f' viewBox="0 0 {WIDTH} {height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {self.attributes}>'
        title, description = (escape(self.say(it)) for it in (self.title, self.description))
        about = f"<title>{title}</title><desc>{description}</desc>"
        defs = f"{self.style()}<defs>{STRIPES}{arrow}</defs>"
        return "\n".join([head, about, defs, *self.shapes, "</svg>"]) + "\n"
