"""The pages show what the pictures' program draws today, with a description, in two languages."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import result_files
from chinese_terms import avoided
from docs.pictures import chinese, draw, svg, timeline
from markers import WIDGET
from repository_pages import ALL_PAGES, CHINESE

all_pictures = pytest.mark.parametrize("name", draw.PICTURES)
all_languages = pytest.mark.parametrize("folder", draw.LANGUAGES, ids=lambda it: it or "en")


@all_languages
@all_pictures
def test_a_picture_is_what_the_program_draws_and_a_browser_can_read_it(name, folder):
    text = draw.path_of(name, folder).read_text()
    assert text == draw.draw(name, folder), "run: make pictures"
    root = ElementTree.fromstring(text)
    title, description = (root.findtext(f"{{*}}{tag}") for tag in ("title", "desc"))
    assert title
    assert description


def words_of(name: str, folder: str = "") -> list[str]:
    """The title, the description and the words of a picture."""
    root = ElementTree.fromstring(draw.path_of(name, folder).read_text())
    found = (root.iterfind(f"{{*}}{tag}") for tag in ("title", "desc", "text"))
    return [element.text or "" for element in chain(*found)]


@all_pictures
def test_a_chinese_picture_has_the_numbers_of_the_english_one(name):
    number = re.compile(r"\d+(?:[.,]\d+)*")
    texts = ["\n".join(words_of(name, folder)) for folder in draw.LANGUAGES]
    english, translated = (sorted(number.findall(text)) for text in texts)
    assert translated == english


STAY = """
Conv BatchNorm AvgPool SiLU Linear DataParallel SIGTERM rank local minimal template py epoch ms
torchrun --node-rank= WORLD_SIZE = GPU fp bf tf e e- contiguous channels_last
convert prove survive forecast shard local_sgd puzzles notebook
"""


@all_pictures
def test_only_names_and_numbers_stay_english(name):
    stay = [text for text in words_of(name, "zh") if not re.search("[一-鿿]", text)]
    stay = [text for text in stay if text[:1] not in "✓✗"]  # a row of prove's table
    assert {*re.split(r"[\s\d.,:：−+%]+", " ".join(stay))} - {*STAY.split(), ""} == set()


def test_the_control_a_text_without_chinese_is_an_error_and_a_new_number_is_not():
    assert chinese.say("step 12345") == "第 12345 步"
    assert chinese.say("rank 12345") == "rank 12345"
    for text, unknown in (("step by step", "by step"), ("another step", "another step")):
        with pytest.raises(LookupError, match=f"has no Chinese for '{unknown}'"):
            chinese.say(text)


ORIGIN = {"hardware": "AMD EPYC, 2 cores", "cores": 2, "torch": "2.14.1", "date": "2026-11-28"}
MEASURED = [  # what another measurement may make a picture say
    "04 DDP: 12.5 ms, 1 message",
    result_files.origin_line(ORIGIN | {"other_cores": 1.25}),
    result_files.origin_line(ORIGIN | {"load_before": 1.75}),
    result_files.origin_line(ORIGIN | {"hardware": "Intel Xeon, 2 cores"}),
]


@pytest.mark.parametrize("text", MEASURED)
def test_another_measurement_needs_no_new_entry(text):
    for line in chinese.say(text).split("\n"):
        assert 4 + svg.width_of(line) < svg.WIDTH


def test_every_chinese_entry_is_that_of_a_picture():
    drawn = "\n".join([*MEASURED, *(text for name in draw.PICTURES for text in words_of(name))])
    parts = {it: map(re.escape, re.split(r"\{\w*\}", it)) for it in chinese.WORDS}
    patterns = {it: re.sub(r"\\\s", r"\\s", ".*".join(part)) for it, part in parts.items()}
    assert [it for it, pattern in patterns.items() if not re.search(pattern, drawn)] == []


def test_the_chinese_entries_have_the_words_of_the_glossary():
    said = "\n".join(chinese.WORDS.values())
    assert [word for word in avoided() if word in said] == []


def misfits(text: str) -> list[str]:
    """The words that are wider than the picture or their box, or cover others."""
    boxes, places, found = [], [], []
    for shape in ElementTree.fromstring(text):
        if shape.tag.endswith("rect"):
            boxes.append(shape)
        if shape.tag.endswith("text") and shape.text and not shape.get("transform"):
            wide = 0.92 * svg.width_of(shape.text)  # which is that of a wide font
            share = {"start": 0, "middle": 0.5, "end": 1}[shape.get("text-anchor", "start")]
            left, y = float(shape.get("x", 0)) - share * wide, float(shape.get("y", 0)) - 6
            places.append((shape.text, left, left + wide, y))
    for words, left, right, y in places:
        around = [box for box in boxes if is_in(box, (left + right) / 2, y)]
        ends = [(float(box.get("x", 0)), float(box.get("width", 0))) for box in around]
        if any(left < x or right > x + width for x, width in [(0, svg.WIDTH), *ends]):
            found.append(words)
        others = [it for it in places if it[0] != words and abs(it[3] - y) < svg.SIZE - 4]
        found += [words for _, begin, end, _ in others if left < end and begin < right]
    return found


@all_languages
@all_pictures
def test_the_words_of_a_picture_have_room(name, folder):
    assert misfits(draw.path_of(name, folder).read_text()) == []


def test_the_control_words_without_room_are_found():
    for text in ("字" * 29, "一行，但别用它"):
        drawing = svg.Drawing("", "")
        drawing.button(4, 4, 100, 34, "you", text)
        assert misfits(drawing.text(40)) == [text]
    drawing.words(4, 80, "上一步")
    drawing.words(50, 84, "下一步")
    assert misfits(drawing.text(90))[1:] == ["上一步", "下一步"]


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
@all_languages
@all_pictures
def test_all_words_of_a_picture_can_be_read_in_both_themes(name, folder, pages):
    """WCAG 2 asks for 4.5. If the browser has another theme than the page, 3 are left."""
    text = draw.path_of(name, folder).read_text()
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


@all_languages
@all_pictures
def test_the_words_of_a_picture_are_large_enough_on_a_phone(name, folder):
    """On a phone of 360 pixels, a page has 328 of them for the picture."""
    root = ElementTree.fromstring(draw.path_of(name, folder).read_text())
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


def pictures_on(pages: Iterable[Path]) -> set[Path]:
    found = {page: re.findall(r"!\[.+\]\((.+\.svg)\)", page.read_text()) for page in pages}
    return {(page.parent / each).resolve() for page, shown in found.items() for each in shown}


def test_every_picture_stands_on_a_page_of_its_language_and_has_a_description_there():
    english, translated = (
        {draw.path_of(name, folder) for name in draw.PICTURES} for folder in ("", "zh")
    )
    assert pictures_on(ALL_PAGES) == english
    assert pictures_on(CHINESE) <= translated
    assert {*draw.FOLDER.glob("**/*.svg")} == english | translated


def test_above_every_widget_stands_a_picture_that_github_shows():
    for page in (*ALL_PAGES, *CHINESE):
        text = page.read_text()
        for widget in WIDGET.finditer(text):
            above = text[: widget.start()]  # a paragraph may say what the picture shows
            assert re.search(r"\n!\[.+\]\(.+\.svg\)\n\n(.+\n\n)?$", above), page
