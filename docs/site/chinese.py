"""The Chinese site: its words, its pages with their links, and a search that knows Chinese.

Search splits Chinese into pairs of characters, so it needs no dictionary.
"""

import itertools
import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from repository_pages import chinese_page, translated_pages

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
    "docs/two_gpus": "两个 GPU 的一小时（英文）",
    "beyond/index": "数据并行之后（英文）",
    "common/index": "各阶段的共用部分（英文）",
    "benchmarks/tour": "逐行解释全程运行（英文）",
    "benchmarks/bench": "哪个阶段最快（英文）",
    "notebooks/01_throughput": "吞吐量（英文）",
    "notebooks/02_memory": "内存（英文）",
    "notebooks/03_same_result": "同样的结果（英文）",
    "notebooks/04_scaling": "扩展（英文）",
}


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


def with_rebased_links(app: Sphinx, docname: str, path: Path) -> str:
    """A Chinese page with links as they are where its English page stands."""
    root, here = Path(app.srcdir), Path(app.env.doc2path(docname)).parent
    english = {chinese: page for page, chinese in translated_pages(root)}

    def relink(match: re.Match[str]) -> str:
        file, mark, anchor = match[2].partition("#")
        if re.match(r"\w+:", match[2]) or not file:
            return match[0]
        target = Path(os.path.normpath(path.parent / file))
        target = english.get(target, target)
        return f"{match[1]}{os.path.relpath(target, here)}{mark}{anchor})"

    return re.sub(r"(\]\()([^)\s]+)\)", relink, path.read_text(encoding="utf-8"))
