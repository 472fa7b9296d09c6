"""Pages of code: a file or folder that a page links to becomes a page too.

It shows the code, with an anchor for each line (`train.py.html#L12`), or the folder's list of
files.
"""

import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

CODE = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".diff": "diff"}
CODE[".json"] = "json"
LARGE = 100_000  # bytes: a longer file gets no page


@functools.cache
def all_code(app: Sphinx) -> set[str]:
    """All that some page links to; and the code in the folders of pages, and in folders linked."""
    code_files = {name for page in app.env.metadata.values() for name in page.get("code", [])}
    folders = {Path(name).parent for name in app.env.found_docs} - {Path()}
    folders |= {Path(name).parent for name in code_files if name.endswith("/index")}
    files = [path for each in folders for path in (app.srcdir / each).iterdir()]
    code = [path for path in files if path.suffix in CODE and path.stat().st_size < LARGE]
    return code_files | {path.relative_to(app.srcdir).as_posix() for path in code}


def programs(app: Sphinx, pagename: str) -> str:
    """The code beside a page that is a lesson or a chapter. Others have only what serves them."""
    return "" if pagename.startswith(("docs/", "notebooks/")) else code_list(app, pagename)


def code_list(app: Sphinx, pagename: str) -> str:
    """Links to the code in the folder of a page: the lesson first."""
    folder = pagename.rpartition("/")[0]
    beside = [n for n in all_code(app) if n.rpartition("/")[0] == folder != ""]
    beside = [n for n in beside if Path(n).suffix in CODE and Path(n).name != "__init__.py"]
    beside.sort(key=lambda n: (not n.endswith("/train.py"), n))
    links = [f'<li><a href="{Path(n).name}.html">{Path(n).name}</a></li>' for n in beside]
    return f"<ul>{''.join(links)}</ul>" if links else ""


def collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of code, and of folders."""
    for name in sorted(all_code(app)):
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
        heading = title.replace("/", "/<wbr>")
        yield name, {"title": title, "body": f"<h1>{heading}</h1>{body}"}, "page.html"
