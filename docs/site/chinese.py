"""The Chinese site: its words, its pages with their links, and a search that knows Chinese.

Search splits Chinese into pairs of characters, so it needs no dictionary.
"""

import itertools
import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from repository_pages import translated_pages

CHINESE = {  # what we add, and what Furo says, which has no translation
    "Course": "课程",
    "Roads": "岔路",
    "Tools": "工具",
    "For a class": "上课用",
    "Reference": "查阅",
    "Code": "代码",
    "On this page": "本页目录",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Home": "首页",
    "Previous": "上一页",
    "Next": "下一页",
}
LABELS = {  # what pages are called in the sidebar of the Chinese site
    "index": "开始",
    "01_single_gpu/index": "01 · 单卡",
    "02_data_parallel/index": "02 · DataParallel",
    "03_ddp_manual_allreduce/index": "03 · 手写全归约",
    "04_ddp_torchrun/index": "04 · DDP 与 torchrun",
    "05_amp_syncbn/index": "05 · AMP 与 SyncBN",
    "beyond/puzzles/index": "谜题：自己写，找错误",
    "beyond/convert/index": "改造你的脚本",
    "packages/prove/index": "证明它是对的",
    "beyond/index": "接下来走哪条路？",
    "beyond/survive/index": "survive：要跑几天的训练",
    "beyond/shard/index": "shard：放不下的模型",
    "beyond/local_sgd/index": "local_sgd：慢的网络",
    "beyond/forecast/index": "forecast：用几个 GPU？",
    "04_ddp_torchrun/launch/index": "launch：多台机器、SLURM",
    "packages/shm/index": "shm：可以读懂的后端",
    "notebooks/01_throughput": "Notebook 01 · 哪个阶段最快？",
    "notebooks/02_memory": "Notebook 02 · 显存花在哪里？",
    "notebooks/03_same_result": "Notebook 03 · 各阶段结果相同吗？",
    "notebooks/04_scaling": "Notebook 04 · 能扩展到多大？",
    "notebooks/05_find_the_mistake": "Notebook 05 · 找出错误",
    "docs/teaching": "四小时的实验课",
    "docs/two_gpus": "两个 GPU 的一小时",
    "docs/machines": "各种机器",
    "docs/troubleshooting": "故障排除",
    "docs/glossary": "术语表",
    "benchmarks/index": "测量",
    "benchmarks/tour": "逐行解释全程运行",
    "benchmarks/bench": "哪个阶段最快",
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
    pages = dict(translated_pages(Path(app.srcdir))) if app.tags.has("zh") else {}
    return pages.get(Path(app.env.doc2path(docname)))


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
