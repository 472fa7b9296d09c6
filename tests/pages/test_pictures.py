"""The pages show what the pictures' program draws today, with a description."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import result_files
from docs.pictures import draw, timeline
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
    shown = [
        match
        for page in (*ALL_PAGES, *CHINESE)
        for match in re.findall(r"!\[(.+)\]\([./\w]*pictures/(\w+)\.svg\)", page.read_text())
    ]
    assert {name for _, name in shown} == {path.stem for path in draw.FOLDER.glob("*.svg")}
    assert {name for _, name in shown} == draw.PICTURES.keys()


def test_under_every_widget_stands_a_picture_that_github_shows():
    for page in (*ALL_PAGES, *CHINESE):
        text = page.read_text()
        for widget in WIDGET.finditer(text):
            assert re.match(r"\n\n!\[.+\]\(.+\.svg\)\n", text[widget.end() :]), page
