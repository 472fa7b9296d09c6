"""Settings of the site for Sphinx: `make site` builds it, and hooks.py does what Sphinx lacks."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]
CHINESE = tags.has("zh")  # noqa: F821 (Sphinx gives it): sphinx-build -t zh

project = "PyTorch 数据并行" if CHINESE else "Data-parallel PyTorch"
html_title = project
language = "zh_CN" if CHINESE else "en"
extensions = ["myst_parser", "hooks", "sphinx.ext.githubpages"]

# Which pages: those of the repository, where they are. README.md becomes index.html.
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
PAGE_FOLDERS = ["0*", "beyond", "packages", "common", "benchmarks", "notebooks", "docs"]
include_patterns = ["*.md", *(f"{folder}/**" for folder in PAGE_FOLDERS)]
exclude_patterns = [".*", "**/.*", "_site", "data", "runs", "shared", "*.zh.md", "docs/zh"]

# Markdown: as GitHub renders it, with its anchors.
myst_gfm_only = True
myst_heading_anchors = 6
smartquotes = False

# Look
html_theme = "furo"
html_theme_options = {
    "top_of_page_buttons": ["view"],  # our template makes it the language switch
    "light_css_variables": {
        "code": "#f5f6f8",
        "comment": "#515151",
        "added": "#0b6125",
        "removed": "#a40e26",
    },
    "dark_css_variables": {
        "code": "#26282c",
        "comment": "#abb2bd",
        "added": "#7ee787",
        "removed": "#ffa198",
    },
}
templates_path = ["templates"]
html_static_path = ["site.css", "site.js"] + ["widgets"] * (HERE / "widgets").exists()
html_favicon = "favicon.svg"
html_css_files, html_js_files = ["site.css"], [("site.js", {"defer": ""})]
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
html_search_language = "zh"  # chinese.Words: English and Chinese
html_copy_source = html_use_index = html_show_copyright = False
