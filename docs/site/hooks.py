"""What the site needs and Sphinx lacks.

The pages are the Markdown files and notebooks of the repository, where they are. Each language is
a build of its own, `_site/` and `_site/zh/`, with the same pages under the same names. The Chinese
one reads README.zh.md where it would read README.md, and the English page where there is none.
A file or folder that a page links to becomes a page too: its code, with an anchor for each line
(`train.py.html#L12`), or its list of files. Search splits Chinese into pairs of characters, so it
needs no dictionary. Nothing is loaded from a network when a page is read.
"""

import functools
import html
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from latex2mathml.converter import convert
from myst_parser.slugs import github_slugify, unique_slug
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from translations import chinese_page, translated_pages

STAGES = ["01_single_gpu", "02_data_parallel", "03_ddp_manual_allreduce", "04_ddp_torchrun"]
STAGES += ["05_amp_syncbn", "beyond/survive", "beyond/convert"]
MAIN = ["index", *(f"{stage}/index" for stage in STAGES)]
CODE = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".diff": "diff"}
CODE[".json"] = "json"
LARGE = 100_000  # bytes: a longer file gets no page
CHINESE = {  # what we add, and what Furo says, which has no translation
    "Lessons": "课程",
    "Reference": "查阅",
    "Measurements": "测量",
    "Code": "代码",
    "On this page": "本页目录",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Home": "首页",
    "Previous": "上一页",
    "Next": "下一页",
}
IN_ENGLISH = {  # what the Chinese site calls pages that have no Chinese version
    "docs/troubleshooting": "故障排查（英文）",
    "docs/two_gpus": "哪里可以用到两个 GPU（英文）",
    "beyond/index": "数据并行之后（英文）",
    "docs/index": "全部程序和页面（英文）",
    "docs/glossary": "术语表（中英文）",
    "common/index": "各阶段的共用部分（英文）",
    "benchmarks/tour": "逐行解释全程运行（英文）",
    "benchmarks/measure_stages": "哪个阶段最快（英文）",
    "notebooks/01_throughput": "吞吐量（英文）",
    "notebooks/02_memory": "内存（英文）",
    "notebooks/03_same_result": "同样的结果（英文）",
    "notebooks/04_scaling": "扩展（英文）",
}


class Pages(Project):
    def path2doc(self, filename: Any) -> str | None:
        """A folder's README is its index page."""
        return re.sub(r"(^|/)README$", r"\1index", super().path2doc(filename) or "") or None


class Words(SearchEnglish):
    """English words, and each Chinese character and pair of characters, on both sites."""

    lang = "zh"  # its language_name stays English: the name of its stemmer
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{L}\p{N}_])+/gu) || []).flatMap((part) =>
    /^[\u3400-\u9fff]{2}/.test(part) ? [...part.slice(1)].map((c, i) => part[i] + c) : [part]);
"""

    def split(self, text: str) -> list[str]:
        chinese = re.findall(r"[\u3400-\u9fff]+", text)
        pairs = [first + second for part in chinese for first, second in itertools.pairwise(part)]
        return [*re.findall(r"(?:(?![\u3400-\u9fff])\w)+", text), *"".join(chinese), *pairs]


def word(app: Sphinx, text: str) -> str:
    return CHINESE[text] if app.tags.has("zh") else text


def translation(app: Sphinx, docname: str) -> Path | None:
    """The Chinese file of a page, where the build is Chinese and there is one."""
    path = chinese_page(Path(app.env.doc2path(docname)), Path(app.srcdir))
    return path if app.tags.has("zh") and path.exists() else None


def formula(found: re.Match[str]) -> str:
    return convert(found[1] or found[2], display="block" if found[1] else "inline")


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


def moved(app: Sphinx, docname: str, path: Path) -> str:
    """A Chinese page with links as they are where its English page stands."""
    root, here = Path(app.srcdir), Path(app.env.doc2path(docname)).parent
    english = {chinese: page for page, chinese in translated_pages(root)}

    def relink(found: re.Match[str]) -> str:
        file, mark, anchor = found[2].partition("#")
        if re.match(r"\w+:", found[2]) or not file:
            return found[0]
        target = Path(os.path.normpath(path.parent / file))
        target = english.get(target, target)
        return f"{found[1]}{os.path.relpath(target, here)}{mark}{anchor})"

    return re.sub(r"(\]\()([^)\s]+)\)", relink, path.read_text(encoding="utf-8"))


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    text = source[0]
    if app.env.doc2path(docname).suffix == ".ipynb":
        text = from_notebook(text)
    if path := translation(app, docname):
        sections, text = re.split(r"^(?=## )", text, flags=re.M), moved(app, docname, path)
        untranslated = sections[1 + len(re.findall(r"^## ", text, re.M)) :]
        text = "\n".join([text, *untranslated])
    text = re.sub(r"\A\[(中文|English)\]\(.*\)\n", "", text)  # the site has a switch of its own
    widget = r'<div class="widget" data-widget="\1"></div>'
    source[0] = re.sub(r"^<!-- widget: (\w+) -->$", widget, text, flags=re.M)


def slugs(text: str) -> list[str]:
    text, found = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S), list[str]()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading)
        found.append(unique_slug(github_slugify(plain), found))
    return found


class AsOnGitHub(SphinxTransform):
    """Anchors, links, diagrams, and the pages that hang below this one in the navigation."""

    default_priority = 750  # after MyST has given each heading its slug

    def apply(self, **kwargs: Any) -> None:
        self.anchors()
        for link in self.document.findall(nodes.reference):
            if "refuri" in link and not re.match(r"\w+:|#", link["refuri"]):
                self.resolve(link)
        for fence in list(self.document.findall(nodes.literal_block)):
            if fence.get("language") == "mermaid":
                diagram = f'<pre class="mermaid">{html.escape(fence.astext())}</pre>'
                fence.replace_self(nodes.raw("", diagram, format="html"))
        for caption, names in self.below():
            tree = addnodes.toctree(parent=self.env.docname, includefiles=names, maxdepth=-1)
            titles = IN_ENGLISH if self.app.tags.has("zh") else {}
            entries = [(titles.get(name), name) for name in names]
            tree.attributes.update({"entries": entries, "hidden": True})
            tree.attributes.update(dict.fromkeys(("glob", "numbered", "includehidden"), False))
            tree.attributes.update({"caption": caption, "rawcaption": caption, "titlesonly": True})
            self.document[-1].append(tree)

    def anchors(self) -> None:
        """GitHub's slug comes first. A Chinese heading has the English one, too."""
        sections = [node for node in self.document.findall(nodes.section) if "slug" in node]
        for node in sections:
            node["ids"].sort(key=lambda name, slug=node["slug"]: name != slug)
        if translation(self.app, self.env.docname):
            english = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
            for node, slug in zip(sections, slugs(english), strict=False):
                if slug not in self.document.ids:
                    node["ids"].append(slug)

    def resolve(self, link: nodes.Element) -> None:
        """Lead to a page: a file or folder that is none gets one from `collect`."""
        target, mark, anchor = unquote(link["refuri"]).partition("#")
        name, path = self.env.relfn2path(target, self.env.docname)
        name += "/index" * Path(path).is_dir()
        name = self.env.path2doc(path) or name
        if name not in self.env.found_docs:
            self.env.metadata[self.env.docname].setdefault("code", []).append(name)
        address = self.app.builder.get_relative_uri(self.env.docname, name)
        address = address.removesuffix(".html") if name.endswith(".png") else address
        link["refuri"], link["internal"] = address + mark + anchor, True

    def below(self) -> Iterator[tuple[str | None, list[str]]]:
        """Lists of pages, each with its caption, in the order of docs/index.md."""
        listed = Path(self.env.doc2path("docs/index")).read_text(encoding="utf-8")
        paths = re.findall(r"\]\(\.\./([^)#]+\.(?:md|ipynb))", listed)
        order = {self.env.path2doc(path): -at for at, path in enumerate(reversed(paths))}
        rest = sorted(self.env.found_docs - {*MAIN}, key=lambda name: (order.get(name, 0), name))
        folder = self.env.docname.rpartition("/")[0]
        if self.env.docname == "index":
            rest = [name for name in rest if not name.startswith((*STAGES,))]
            numbers = [name for name in rest if name.startswith(("benchmarks/", "notebooks/"))]
            yield word(self.app, "Lessons"), MAIN[1:]
            yield word(self.app, "Reference"), [name for name in rest if name not in numbers]
            yield word(self.app, "Measurements"), numbers
        elif self.env.docname in MAIN:
            yield None, [name for name in rest if name.startswith(f"{folder}/")]


@functools.cache
def code_pages(app: Sphinx) -> set[str]:
    """All that some page links to; and the code in the folders of pages, and in folders linked."""
    found = {name for page in app.env.metadata.values() for name in page.get("code", [])}
    folders = {Path(name).parent for name in app.env.found_docs} - {Path()}
    folders |= {Path(name).parent for name in found if name.endswith("/index")}
    files = [path for each in folders for path in (app.srcdir / each).iterdir()]
    code = [path for path in files if path.suffix in CODE and path.stat().st_size < LARGE]
    return found | {path.relative_to(app.srcdir).as_posix() for path in code}


def code_list(app: Sphinx, pagename: str) -> str:
    """Links to the code in the folder of a page: the lesson first."""
    folder = pagename.rpartition("/")[0]
    beside = [n for n in code_pages(app) if n.rpartition("/")[0] == folder != ""]
    beside = [name for name in beside if Path(name).suffix in CODE]
    beside.sort(key=lambda n: (not n.endswith("/train.py"), not n.endswith("/lesson.diff"), n))
    links = [f'<li><a href="{Path(n).name}.html">{Path(n).name}</a></li>' for n in beside]
    return f"<ul>{''.join(links)}</ul>" if links else ""


def collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of code, and of folders."""
    for name in sorted(code_pages(app)):
        path, title = app.srcdir / name, name.removesuffix("/index")
        if name.endswith(".png"):
            shutil.copyfile(path, app.outdir / name)
            continue
        if title != name:
            body = code_list(app, name)
        else:
            numbers = {"linenos": "inline", "lineanchors": "L", "anchorlinenos": True}
            text, kind = path.read_text(encoding="utf-8"), CODE.get(path.suffix, "text")
            body = app.builder.highlighter.highlight_block(text, kind, **numbers)
            body = re.sub(r'\bL-(\d+")', r"L\1", body)
        yield name, {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def neighbors(app: Sphinx, pagename: str) -> Iterator[dict[str, str] | None]:
    """The previous and the next page: of the main path, or of a stage's chapters."""
    folder = next((stage for stage in STAGES if pagename.startswith(f"{stage}/")), "")
    start = f"{folder}/index"
    row = MAIN if pagename in MAIN else [start, *app.env.toctree_includes.get(start, [])]
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
    if code := code_list(app, pagename):  # Furo hides a first link, so that it lies one list deeper
        values["beside"].append((word(app, "Code"), f"<ul><li>{code}</li></ul>"))
    values["furo_hide_toc"] = not values["beside"]
    if zh:
        said = app.builder.templates.environment.globals["gettext"]
        values["_"] = values["gettext"] = lambda text: CHINESE.get(text.strip()) or said(text)
    body = values.get("body", "")
    if 'class="mermaid"' in body:
        app.add_js_file("mermaid.tiny.js", loading_method="defer", priority=300)  # before site.js
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
