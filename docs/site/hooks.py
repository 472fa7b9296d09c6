"""What the site needs and Sphinx lacks.

The pages are the Markdown files and notebooks of the repository, where they are. Each language is
a build of its own, `_site/` and `_site/zh/`, with the same pages under the same names. The Chinese
one reads README.zh.md where it would read README.md, and the English page where there is none.
What the Chinese site and the search in Chinese need stands in chinese.py, and how code becomes
pages in code_pages.py. Nothing is loaded from a network when a page is read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from chinese import CHINESE, LABELS, Words, translation, with_rebased_links, word
from code_pages import collect, programs
from markers import FENCE, WIDGET
from narrow import for_narrow_screens
from repository_pages import slugs
from sidebar import GROUPS, ROWS, is_shown, pages_of, parent
from translations import ONLY_ENGLISH

logger = logging.getLogger(__name__)
SWITCH = r"\A\[(中文|English)\]\(.*\n"  # of the language, and to the site, which has its own
NUMBER = re.compile(r"notebooks/(\d+)")


class Pages(Project):
    def path2doc(self, filename: Any) -> str | None:
        """A folder's README is its index page."""
        return re.sub(r"(^|/)README$", r"\1index", super().path2doc(filename) or "") or None


def formula(match: re.Match[str]) -> str:
    return convert(match[1] or match[2], display="block" if match[1] else "inline")


def with_number(text: str, docname: str) -> str:
    """Name a notebook as the pages do: by its number, in front of its title."""
    if number := NUMBER.match(docname):
        return re.sub(r"^# (?!Notebook)", f"# Notebook {number[1]} · ", text, count=1, flags=re.M)
    return text


def from_notebook(text: str) -> str:
    """Cells and printed text as fences, formulas as MathML, and pictures in their address."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", formula, source))
            continue
        parts.append(f"~~~~python\n{source}\n~~~~")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"~~~~text\n{''.join(output['text']).rstrip()}\n~~~~")
            elif picture := "".join(output.get("data", {}).get("image/png", "")).replace("\n", ""):
                heading = re.findall(r"^#+ (.+)$", "\n".join(parts), re.M)[-1]
                parts.append(f"![plot: {heading}](data:image/png;base64,{picture})")
    return "\n\n".join(parts)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    text = source[0]
    if app.env.doc2path(docname).suffix == ".ipynb":
        text = with_number(from_notebook(text), docname)
    if path := translation(app, docname):
        sections = re.split(r"^(?=## )", text, flags=re.M)
        text = with_rebased_links(app, docname, path)
        untranslated = sections[1 + len(re.findall(r"^## ", text, re.M)) :]
        text = "\n".join([text, *untranslated])
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)  # a skill's name and description
    text = re.sub(SWITCH, "", text)
    source[0] = WIDGET.sub(r'<div class="widget" data-widget="\1"></div>', text)


class AsOnGitHub(SphinxTransform):
    """Anchors, links, and the pages that hang below this one in the navigation."""

    default_priority = 750  # after MyST has given each heading its slug

    def apply(self, **kwargs: Any) -> None:
        self.anchors()
        for link in self.document.findall(nodes.reference):
            if "refuri" in link and not re.match(r"\w+:|#", link["refuri"]):
                self.resolve(link)
        self.link_english()
        for caption, entries in self.below():
            names = [name for _, name in entries if name != "self"]
            tree = addnodes.toctree(parent=self.env.docname, includefiles=names, maxdepth=-1)
            tree.attributes.update({"entries": entries, "hidden": True})
            tree.attributes.update(dict.fromkeys(("glob", "numbered", "includehidden"), False))
            tree.attributes.update({"caption": caption, "rawcaption": caption, "titlesonly": True})
            self.document[-1].append(tree)
        if not is_shown(self.env.docname):
            self.env.metadata[self.env.docname]["orphan"] = True

    def anchors(self) -> None:
        """GitHub's slug comes first. A Chinese heading has the English one, too."""
        sections = [node for node in self.document.findall(nodes.section) if "slug" in node]
        for node in sections:
            node["ids"].sort(key=lambda name, slug=node["slug"]: name != slug)
        if translation(self.app, self.env.docname):
            english = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
            for node, slug in zip(sections, slugs(FENCE.sub("", english)), strict=False):
                if slug not in self.document.ids:
                    node["ids"].append(slug)

    def link_english(self) -> None:
        """The code behind an English page has its page in both languages."""
        if translation(self.app, self.env.docname):
            english = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
            for target in re.findall(
                r"(?<!!)\[[^\]]*\]\((?!\w+:|#)([^)\s#]+)", re.sub(SWITCH, "", english)
            ):
                self.page_of(target)

    def page_of(self, target: str) -> str:
        """A file or folder that is no page gets one from `collect`."""
        name, path = self.env.relfn2path(target, self.env.docname)
        name += "/index" * Path(path).is_dir()
        name = self.env.path2doc(path) or name
        if name not in self.env.found_docs:
            self.env.metadata[self.env.docname].setdefault("code", []).append(name)
        return name

    def resolve(self, link: nodes.Element) -> None:
        """Lead to a page of the site."""
        target, mark, anchor = unquote(link["refuri"]).partition("#")
        name = self.page_of(target)
        address = self.app.builder.get_relative_uri(self.env.docname, name)
        address = address.removesuffix(".html") if name.endswith(".png") else address
        link["refuri"], link["internal"] = address + mark + anchor, True

    def below(self) -> Iterator[tuple[str | None, list[tuple[str | None, str]]]]:
        """Lists of names and pages, each with its caption: the groups, or a page's chapters."""
        found, here = self.env.found_docs, self.env.docname
        if here == "index":
            for group in GROUPS:
                pages = pages_of(group, found)
                for name, _ in pages:
                    if name not in found:
                        logger.warning("docs/site/sidebar.py names %s, which is no page", name)
                entries = [(self.label(*page), page[0]) for page in pages if page[0] in found]
                entries = [
                    (label, name.replace("index", "self", name == here)) for label, name in entries
                ]
                yield word(self.app, group), entries
        elif chapters := [name for name in found if parent(name) == here]:
            text = Path(self.env.doc2path(here)).read_text(encoding="utf-8")
            paths = re.findall(r"\]\(([^)#]+\.(?:md|ipynb))", text)
            linked = [self.env.path2doc(self.env.relfn2path(path)[0]) for path in paths]
            order = {name: -at for at, name in enumerate(reversed(linked))}
            chapters.sort(key=lambda name: (order.get(name, 1), name))
            yield None, [(self.label(name, ""), name) for name in chapters]

    def label(self, name: str, label: str) -> str | None:
        """What a page is called in the sidebar; without a name, by its title."""
        if self.app.tags.has("zh") and name in LABELS:
            return LABELS[name] + ONLY_ENGLISH * (translation(self.app, name) is None)
        if NUMBER.match(name) and not label:
            text = from_notebook(Path(self.env.doc2path(name)).read_text(encoding="utf-8"))
            title = re.search(r"^# (.+?)(?:: .*)?$", with_number(text, name), re.M)
            return title[1] if title else None
        return label or None


def neighbors(app: Sphinx, pagename: str) -> Iterator[dict[str, str] | None]:
    """The previous and the next page: of a row, a page's chapters, or the notebooks."""
    row = next((row for row in ROWS if pagename in row), [])
    if start := parent(pagename):
        row = [start, *app.env.toctree_includes.get(start, [])]
    elif NUMBER.match(pagename):
        row = [name for name in app.env.toctree_includes["index"] if NUMBER.match(name)]
    for step in (-1, 1):
        at = row.index(pagename) + step if pagename in row else -1
        if 0 <= at < len(row):
            title = app.builder.render_partial(app.env.titles[row[at]])["title"]
            yield {"link": app.builder.get_relative_uri(pagename, row[at]), "title": title}
        else:
            yield None


def context(app: Sphinx, pagename: str, _: str, values: dict[str, Any], doctree: Any) -> None:
    """What the templates and scripts of a page need."""
    zh, address = app.tags.has("zh"), app.builder.get_target_uri(pagename)
    values["other_language"] = "../" * (address.count("/") + zh) + "zh/" * (not zh) + address
    values["untranslated"] = zh and doctree is not None and not translation(app, pagename)
    values["prev"], values["next"] = neighbors(app, pagename)
    tree, caption = values["furo_navigation_tree"], 'role="heading"'
    values["furo_navigation_tree"] = tree.replace(caption, f'{caption} aria-level="2"')
    values["follow"] = not values["furo_hide_toc"]  # the headings, when the reader scrolls
    values["beside"] = [(word(app, "On this page"), values["toc"])] if values["follow"] else []
    if code := programs(app, pagename):  # Furo hides a first link, so that it lies one list deeper
        values["beside"].append((word(app, "Code"), f"<ul><li>{code}</li></ul>"))
    values["furo_hide_toc"] = not values["beside"]
    if zh:
        said = app.builder.templates.environment.globals["gettext"]
        values["_"] = values["gettext"] = lambda text: CHINESE.get(text.strip()) or said(text)
    values["body"] = body = for_narrow_screens(values.get("body", ""))
    if widgets := sorted(set(re.findall(r'data-widget="(\w+)"', body))):
        app.add_css_file("widgets.css")
        for name in ["widgets", *widgets]:
            app.add_js_file(f"{name}.js", loading_method="defer")


def use_pages(app: Sphinx) -> None:
    app.project.__class__ = Pages


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(AsOnGitHub)
    app.add_search_language(Words)
    app.connect("builder-inited", use_pages)
    app.connect("source-read", read)
    app.connect("html-collect-pages", collect)
    app.connect("html-page-context", context, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
