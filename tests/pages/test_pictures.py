"""The pages show what the pictures' program draws today, with a description."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import result_files
from docs.pictures import draw, svg, timeline
from markers import WIDGET
from repository_pages import ALL_PAGES, CHINESE


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_the_program_draws_and_a_browser_can_read_it(name):
    text = draw.path_of(name).read_text()
    assert text == draw.PICTURES[name](), "run: make pictures"
    root = ElementTree.fromstring(text)
    title, description = (root.findtext(f"{{*}}{tag}") for tag in ("title", "desc"))
    assert title
    assert description


def colors_of(style: str) -> dict[str, str]:
    """The fill of each class in a style sheet."""
    return dict(re.findall(r"\.([\w-]+)\{fill:(#\w+)\}", style))


def contrasts(text: str, theme: str, page: str) -> list[tuple[float, str]]:
    """The contrast of all words of a picture, each with the shape or the page behind it."""
    root = ElementTree.fromstring(text)
    light, _, dark = root.findtext("{*}style", "").partition("@media(prefers-color-scheme:dark)")
    colors, boxes, found = colors_of(light if theme == "light" else dark), [], []
    for shape in root:
        if shape.tag.endswith("rect"):
            boxes.append(shape)
        if shape.tag.endswith("text"):
            # The middle of the words, about; none of those on a shape are turned.
            wide = svg.width_of(shape.text or "")
            share = {"start": 0.5, "middle": 0.0, "end": -0.5}[shape.get("text-anchor", "start")]
            x, y = float(shape.get("x", 0)) + share * wide, float(shape.get("y", 0)) - 6
            behind = [box for box in boxes if box.get("fill") != "none" and is_in(box, x, y)]
            ground = behind[-1].get("fill", "") if behind else page
            color = colors.get(shape.get("class", "")) or shape.get("fill", "")
            found.append((svg.contrast(color, ground), shape.text or ""))
    return found


def is_in(box: ElementTree.Element, x: float, y: float) -> bool:
    left, top, width, height = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
    return left < x < left + width and top < y < top + height


GITHUB = {"light": "#ffffff", "dark": "#0d1117"}


@pytest.mark.parametrize("pages", [svg.PAGES, GITHUB], ids=["on the site", "on GitHub"])
@pytest.mark.parametrize("name", draw.PICTURES)
def test_all_words_of_a_picture_can_be_read_in_both_themes(name, pages):
    """WCAG 2 asks for 4.5. If the browser has another theme than the page, 3 are left."""
    text = draw.path_of(name).read_text()
    for theme, other in (("light", "dark"), ("dark", "light")):
        assert [it for it in contrasts(text, theme, pages[theme]) if it[0] < 4.5] == []
        assert [it for it in contrasts(text, theme, pages[other]) if it[0] < 3] == []


def test_the_control_one_gray_for_both_themes_is_too_faint_in_one():
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert svg.contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)  # as published
    gray = '<svg xmlns="http://www.w3.org/2000/svg"><text fill="#767b83">rank 0</text></svg>'
    for theme, page in svg.PAGES.items():
        ((ratio, _),) = contrasts(gray, theme, page)
        assert 3 < ratio < 4.5
    box = '<rect x="-9" y="-9" width="99" height="9" fill="#3f92cf"/>'
    white = gray.replace("<text", f"{box}<text").replace("#767b83", "#ffffff")
    ((ratio, _),) = contrasts(white, "dark", svg.PAGES["dark"])
    assert 3 < ratio < 4.5, "white on the color of forward"


@pytest.mark.parametrize("name", draw.PICTURES)
def test_the_words_of_a_picture_are_large_enough_on_a_phone(name):
    """On a phone of 360 pixels, a page has 328 of them for the picture."""
    root = ElementTree.fromstring(draw.path_of(name).read_text())
    width = float(root.get("viewBox", "").split()[2])
    sizes = [float(element.get("font-size", 0)) for element in root.iterfind(".//{*}text")]
    assert min(sizes) * 328 / width > 11


def test_another_recording_gives_another_picture():
    """The control of the test above."""
    results = result_files.load("timeline")["net-bn"]
    before = timeline.picture(results)
    results["stages"]["04"]["shown"]["ranks"][1]["spans"].pop()
    assert timeline.picture(results) != before


def test_the_pictures_of_the_stages_can_be_compared():
    """They have one axis, and each but the first also shows stage 01."""
    steps = result_files.load("timeline")["net-bn"]["stages"]
    base = f"01, for comparison: {steps['01']['shown']['ms']:.1f} ms"
    ticks = set()
    for stage in steps:
        root = ElementTree.parse(draw.path_of(f"timeline_{stage}")).getroot()
        words = [(element.text or "", element.get("y")) for element in root.iterfind(".//{*}text")]
        assert (base in dict(words)) == (stage != "01")
        axis = dict(words)["ms"]
        ticks.add(tuple(text for text, y in words if y == axis and text != "ms"))
    assert len(ticks) == 1, "one axis"


def test_every_picture_stands_on_a_page_and_has_a_description_there():
    shown = {
        (page.parent / match).resolve()
        for page in (*ALL_PAGES, *CHINESE)
        for match in re.findall(r"!\[.+\]\((.+\.svg)\)", page.read_text())
    }
    assert shown == {draw.path_of(name) for name in draw.PICTURES}
    assert shown == {*draw.FOLDER.glob("*.svg")}


def test_above_every_widget_stands_a_picture_that_github_shows():
    for page in (*ALL_PAGES, *CHINESE):
        text = page.read_text()
        for widget in WIDGET.finditer(text):
            above = text[: widget.start()]  # a paragraph may say what the picture shows
            assert re.search(r"\n!\[.+\]\(.+\.svg\)\n\n(.+\n\n)?$", above), page
