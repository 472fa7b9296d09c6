"""Check the site that `make site` has built: all links, and its pages in Chromium.

.venv-site/bin/python docs/site/check_site.py [--all] [SITE]

The sidebar and the way through the course are what sidebar.py says. Chromium loads the pictures,
the course and some pages of each kind on a phone and on a laptop, in the light and in the dark
theme, and tries the widgets. With --all, it loads every page. One line for each fault, and exit
status 1; or 77 if there is no Chromium, and the links are right.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import Browser, Locator, Page, sync_playwright

from sidebar import GROUPS, ROWS, WAY, pages_of

ROOT = Path(__file__).parents[2]

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += ["--disable-sync", "--disable-background-networking", "--disable-component-update"]
SAMPLE = ["zh/" * (i % 2) + f"{name}.html" for i, name in enumerate(WAY)]
SAMPLE += ["zh/docs/claims.html", "01_single_gpu/train.py.html", "notebooks/0[13]*.html"]
SAMPLE += ["docs/teaching.html", "docs/two_gpus.html"]
WIDTHS = (390, 1400)  # of a phone and of a laptop, in pixels
THEMES = {"light": "#ffffff", "dark": "#131416"}  # with the colors of their pages
CONTRAST = 4.5  # of words with what lies behind them
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


def way_faults(site: Path) -> Iterator[str]:
    """Where the sidebar, Previous and Next are not what sidebar.py says."""
    for folder in (site, site / "zh"):
        texts = {path.relative_to(folder): path.read_text() for path in folder.rglob("*.html")}
        pages = {path.with_suffix("").as_posix(): text for path, text in texts.items()}
        entry = re.compile(r'class="toctree-l(\d)\b[^>]*><a\b[^>]* href="([^"]+)"')
        entries = entry.findall(pages.get("index", ""))
        shown = [link.replace("#", "index.html") for level, link in entries if level == "1"]
        wanted = [f"{name}.html" for group in GROUPS for name, _ in pages_of(group, pages)]
        if shown != wanted:
            yield f"{folder.name}: the sidebar has {shown}"
        for _, link in entries:
            if re.search("answers|claims|CONTRIBUTING|CHANGELOG|evidence/|results/", link):
                yield f"{folder.name}: the sidebar has {link}"
        for one, other in chain.from_iterable(map(pairwise, ROWS)):
            for kind, page, target in [("next", one, other), ("prev", other, one)]:
                link = os.path.relpath(f"{target}.html", os.path.dirname(page) or ".")
                if f'<a class="{kind}-page" href="{link}">' not in pages.get(page, ""):
                    yield f"{folder.name}: {page} does not lead to {target}"


class Visitor:
    """Opens pages in one browser, and keeps what is wrong with them."""

    def __init__(self, browser: Browser, base: str) -> None:
        self.base, self.address, self.faults = base, "", list[str]()
        self.page = browser.new_page()
        self.page.set_default_timeout(20_000)
        self.page.add_init_script(path=Path(__file__).with_suffix(".js"))
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

    def ask(self, question: str, fault: str, *arguments: str | float) -> None:
        """Note the fault if the answer of check_site.js is yes, or for each text in it."""
        answer = self.page.evaluate(f"(them) => checks.{question}(...them)", list(arguments))
        for text in answer if isinstance(answer, list) else [""] * answer:
            self.say(f"{fault}: {text}" if text else fault)

    def fits(self, address: str) -> None:
        for width in WIDTHS:
            self.open(address, width)
            self.ask("isWide", f"is wider than a screen of {width} pixels")
            fault = f"has a picture that is missing, small or cut on {width} pixels"
            self.ask("poorPictures", fault)
            self.ask("cutCommands", f"cuts a command or a sentence on {width} pixels")
            if width == WIDTHS[-1]:
                self.ask("cutCode", f"cuts code on {width} pixels")
            self.ask("hidden", f"hides a part without a sign on {width} pixels")
        for theme, ground in THEMES.items():
            self.ask("plotsIgnore", f"has plots that ignore the {theme} theme", theme, ground)
            self.ask("picturesIgnore", f"has pictures that ignore the {theme} theme", theme)
            fault = f"has too little contrast in the {theme} theme"
            self.ask("faint", fault, theme, ground, CONTRAST)

    def picture(self, address: str) -> None:
        self.open(address)
        self.ask("withoutRoom", "has no room for")
        for theme, ground in THEMES.items():
            self.page.emulate_media(color_scheme=theme)
            fault = f"has too little contrast on a {theme} page"
            self.ask("faintInPicture", fault, ground, CONTRAST)
        self.page.emulate_media(color_scheme="light")

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
    patterns = ["**/*.html"] if "--all" in sys.argv else SAMPLE
    pages = [str(path.relative_to(site)) for each in patterns for path in site.glob(each)]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    faults = list(link_faults(site))
    if chromium and not faults:
        faults = browser_faults(site, chromium, pages)
    faults += way_faults(site)
    print(*faults, sep="\n")
    return 1 if faults else 0 if chromium else 77


if __name__ == "__main__":
    sys.exit(main())
