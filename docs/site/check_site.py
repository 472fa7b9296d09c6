"""Check the site that `make site` has built: all links, and its pages in Chromium.

.venv-site/bin/python docs/site/check_site.py [--all] [SITE]

Chromium loads the pictures, the main path and some pages of each kind on a phone and on a laptop,
and tries the widgets. With --all, it loads every page. One line for each fault, and exit status 1;
or 77 if there is no Chromium, and the links are right.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import Browser, Locator, Page, sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from repository_pages import MAIN_PATH, ROOT

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += ["--disable-sync", "--disable-background-networking", "--disable-component-update"]
SAMPLE = ["zh/" * (i % 2) + f"{folder}/index.html" for i, folder in enumerate(MAIN_PATH)]
SAMPLE += ["zh/docs/claims.html", "01_single_gpu/train.py.html"]
WIDTHS = (390, 1400)  # of a phone and of a laptop, in pixels
WIDE = """[document.documentElement, document.querySelector('.content')]  // what could scroll
    .some((it) => it.scrollWidth > it.clientWidth)"""
SMALL = """[...document.querySelectorAll('article img')].some((it) => {  // letters of 18 pixels
    return !it.naturalWidth || it.getBoundingClientRect().width < 0.62 * it.naturalWidth;
})"""
OVERFLOWING = """() => {  // texts wider than their box or the picture
    document.documentElement.style.fontFamily = 'DejaVu Sans, Verdana';  // wide letters
    const place = (it) => it.getBoundingClientRect();
    const boxes = [document.documentElement, ...document.querySelectorAll('svg > rect')].map(place);
    return [...document.querySelectorAll('text')].filter((text) => {
        const { left, right, top, bottom } = place(text);
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        const inside = (box) => box.left < x && x < box.right && box.top < y && y < box.bottom;
        return boxes.filter(inside).some((box) => left < box.left - 1 || box.right + 1 < right);
    }).map((text) => text.textContent);
}"""
STATE = "(it) => [...it.querySelectorAll('[aria-live], svg')].map((each) => each.outerHTML).join()"


def link_faults(site: Path) -> Iterator[str]:
    """Links and anchors that lead nowhere, and everything that would load from a network."""
    texts = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    anchors = {name: {*re.findall(r'\bid="([^"]+)"', text)} for name, text in texts.items()}
    for page, text in texts.items():
        for tag, target in set(re.findall(r'<(\w+)\b[^>]*? (?:href|src)="([^"]*)"', text)):
            if re.match(r"\w+:", target):
                if tag != "a" and not target.startswith("data:"):
                    yield f"{page}: <{tag}> loads {target}"
                continue
            path, _, anchor = unquote(target.partition("?")[0]).partition("#")
            name = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            name += "/index.html" * (site / name).is_dir()
            missing = name.endswith(".html") and anchor and anchor not in anchors.get(name, ())
            if missing or not (site / name).is_file():
                yield f"{page}: leads nowhere: {target}"


class Visitor:
    """Opens pages in one browser, and keeps what is wrong with them."""

    def __init__(self, browser: Browser, base: str) -> None:
        self.base, self.address, self.faults = base, "", list[str]()
        self.page = browser.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda it: it.type in ("error", "warning") and self.say(it.text))
        self.page.on("pageerror", lambda error: self.say(str(error)))
        self.page.on("request", lambda it: it.url.startswith((base, "data:")) or self.say(it.url))

    def say(self, fault: str) -> None:
        self.faults.append(f"{self.address}: {fault}")

    def open(self, address: str, width: int = 1280) -> Page:
        self.address = address
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(self.base + address)
        return self.page

    def fits(self, address: str) -> None:
        for width in WIDTHS:
            if self.open(address, width).evaluate(WIDE):
                self.say(f"is wider than a screen of {width} pixels")

            if self.page.evaluate(SMALL):
                self.say(f"has a picture that is missing, or too small on {width} pixels")

    def picture(self, address: str) -> None:
        for text in self.open(address).evaluate(OVERFLOWING):
            self.say(f"has no room for: {text}")

    def widgets(self, address: str) -> None:
        """Each answers to a drag, a key and a click: its picture or its sentence changes."""
        page = self.open(address)
        for widget in page.locator(".widget").all():
            slider, button = widget.locator("input:visible").first, widget.locator("[data-do=next]")
            menu = widget.locator("select").first

            def drag(slider: Locator = slider) -> None:
                slider.hover()
                page.mouse.down()
                box = slider.bounding_box()
                page.mouse.move(box["x"] + box["width"] - 5, 0)  # no slider begins there
                page.mouse.up()

            click = button.click if button.count() else partial(menu.select_option, index=1)
            key = partial(slider.press, "ArrowLeft")
            for what, act in {"drag": drag, "key": key, "click": click}.items():
                before = widget.evaluate(STATE)
                act()
                if widget.evaluate(STATE) == before:
                    self.say(f"{widget.get_attribute('data-widget')} does not answer to a {what}")


def browser_faults(site: Path, chromium: str, pages: list[str]) -> list[str]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        visitor = Visitor(browser, f"{site.resolve().as_uri()}/")
        visits = [partial(visitor.fits, address) for address in pages]
        for path in sorted(site.glob("_images/*.svg")):
            visits.append(partial(visitor.picture, str(path.relative_to(site))))
        for path in sorted(p for p in site.rglob("*.html") if "data-widget=" in p.read_text()):
            visits.append(partial(visitor.widgets, str(path.relative_to(site))))
        for visit in visits:
            try:
                visit()
            except Exception as error:  # a time limit, usually: a fault of this page alone
                visitor.say(str(error))
        browser.close()
    return visitor.faults


def main() -> int:
    arguments = [each for each in sys.argv[1:] if each != "--all"]
    site = Path(arguments[0]) if arguments else ROOT / "_site"
    pages = [str(path.relative_to(site)) for path in site.rglob("*.html")]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    faults = list(link_faults(site))
    if chromium and not faults:
        faults = browser_faults(site, chromium, pages if "--all" in sys.argv else SAMPLE)
    print(*faults, sep="\n")
    return 1 if faults else 0 if chromium else 77


if __name__ == "__main__":
    sys.exit(main())
