"""The Chinese pages say what the English ones say, in the words of the glossary."""

import re
from pathlib import Path

import pytest

import translations
from chinese_terms import wrong_terms
from repository_pages import CHINESE
from script_comments import comments_of
from translations import Languages, digest, is_older, why_not_current

ENGLISH = """# One

Ten ranks in [two](docs/two.md#a-part) take 10 minutes with `rank`, as ![a picture](a.svg) shows.

## Two

| a | b |
|---|---|
| 1 | 2 |

```bash
make
```
"""
TRANSLATED = """[English](README.md)
<!-- of the English: 00000000 -->
# 一

[两部分（英文）](docs/two.md#a-part)里的十个 rank 用 `rank` 要 10 分钟，如![图](a.svg)所示。

## 二

| 甲 | 乙 |
|---|---|
| 1 | 2 |

```bash
make
```
"""
CHANGES = [  # of the Chinese page, and what is said of it then
    ("10 分钟", "11 分钟", r'only in English, under "一": numbers 10$'),
    ("10 分钟", "11 分钟", r'only in Chinese, under "一": numbers 11$'),
    ("10 分钟", "十分钟", r'only in English, under "一": numbers 10$'),
    ("two.md#a-part", "one.md", r'under "一": links docs/two.md#a-part$'),
    ("（英文）", "", r"lacks （英文）: \[两部分\]"),
    ("![图](a.svg)", "图", r'only in English, under "一": pictures a.svg$'),
    ("`rank`", "rank", r"only in English, on this page: code `rank`$"),
    ("## 二", "### 二", "the headings differ"),
    ("| 1 | 2 |\n", "| 1 |\n", r'only in English, under "二": tables a row of 2$'),
    ("make\n", "made\n", "only in English, on this page: fence ```bash make"),
    ("十个 rank", "十张显卡的占用率", "says 占用率, where the glossary has .*利用率"),
    (
        "十个 rank",
        "十个[归并](docs/zh/glossary.md#all-reduce)",
        "calls it 归并, where the glossary",
    ),
]


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A small repository with one page in both languages, and what says how they differ."""
    english, chinese = tmp_path / "README.md", tmp_path / "README.zh.md"
    english.write_text(ENGLISH)
    chinese.write_text(TRANSLATED)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/two.md").write_text("# A part\n")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    return english, chinese


def faults(english: Path, chinese: Path, reason: str = "") -> str:
    found = why_not_current(Languages(english.parent), english, chinese, reason)
    return "\n".join(" ".join(fault.split()) for fault in found)


@pytest.mark.parametrize("page", CHINESE, ids=lambda path: path.name)
def test_a_chinese_page_that_is_current_has_all_of_its_english_page(page):
    languages = Languages()
    english = languages.english[page]
    if is_older(english.read_text(), page.read_text()):
        pytest.skip(f"{page.name} is older than its English page, as make pages-quick reports")
    assert why_not_current(languages, english, page, "") == []
    assert english.read_text().startswith("[中文]("), "the English page does not lead here"


def test_a_faithful_translation_has_no_fault(pages):
    assert faults(*pages) == ""


@pytest.mark.parametrize(("before", "after", "fault"), CHANGES)
def test_what_a_translation_lacks_or_adds_is_named(pages, before, after, fault):
    assert before in TRANSLATED
    pages[1].write_text(TRANSLATED.replace(before, after))
    assert re.search(fault, faults(*pages), re.M)


def test_a_digest_is_renewed_only_with_the_page_or_with_a_reason(pages, capsys):
    english, chinese = pages
    root = english.parent
    translations.update([chinese], root=root)
    assert capsys.readouterr().out == "", "a new translation becomes current"
    translations.update(root=root)
    assert capsys.readouterr().out == "", "and stays so"
    chinese.write_text(chinese.read_text().replace("所示", "所画"))
    translations.update(root=root)
    assert capsys.readouterr().out == "", "a better word is no answer to a later English change"
    english.write_text(ENGLISH.replace("Ten", "Only ten"))
    translations.update(root=root)
    older = "README.zh.md is older than README.md\n"
    assert capsys.readouterr().out == older, "reported, and it fails nothing"
    with pytest.raises(SystemExit, match="2"):
        translations.update([chinese], root=root)
    refused = "README.zh.md: it has not changed, so say why it need not: --unchanged WHY\n"
    assert capsys.readouterr().out == refused + older
    translations.update([chinese], "the same in Chinese", root=root)
    assert capsys.readouterr().out == ""
    assert "unchanged: the same in Chinese -->" in chinese.read_text()
    english.write_text(ENGLISH.replace("Ten", "At most ten"))
    chinese.write_text(chinese.read_text().replace("十个", "最多十个"))
    translations.update([chinese], root=root)
    assert capsys.readouterr().out == "", "with the page, no reason is asked for"


def test_a_digest_is_not_renewed_while_a_number_differs(pages, capsys):
    english, chinese = pages
    chinese.write_text(TRANSLATED.replace("10 分钟", "11 分钟"))
    with pytest.raises(SystemExit, match="2"):
        translations.update([chinese], root=english.parent)
    assert "numbers 11" in capsys.readouterr().out
    assert is_older(ENGLISH, chinese.read_text())


def test_a_page_that_is_not_chinese_is_refused(pages, capsys):
    english, chinese = pages
    with pytest.raises(SystemExit, match="2"):
        translations.update([english], root=english.parent)
    expected = "README.md is no Chinese page; expected README.zh.md or docs/zh/NAME.md\n"
    assert capsys.readouterr().out.endswith(expected)
    assert is_older(ENGLISH, chinese.read_text()), "nothing was done"


def test_fences_are_copied_where_both_pages_have_them_and_otherwise_reported(pages, capsys):
    english, chinese = pages
    english.write_text(ENGLISH.replace("make\n", "make all\n"))
    translations.update(root=english.parent)
    assert "make all\n" in chinese.read_text()
    chinese.write_text(TRANSLATED.replace("```bash\nmake\n```\n", ""))
    translations.update(root=english.parent)
    said = "README.zh.md has other fences than README.md, so none was copied\n"
    assert said in capsys.readouterr().out


def test_a_link_leads_to_the_chinese_version_once_there_is_one(pages):
    english, chinese = pages
    (english.parent / "docs/zh").mkdir()
    (english.parent / "docs/zh/two.md").write_text("[English](../two.md)\n# 一部分\n")
    assert "wrongly has （英文）" not in faults(*pages), (
        "the control: it still leads to the English"
    )
    translations.update(root=english.parent)
    assert "[两部分](docs/zh/two.md#一部分)里" in chinese.read_text()
    assert faults(*pages) == ""


def test_comments_of_a_script_get_a_row_each_and_keep_their_translation(pages, monkeypatch):
    english, chinese = pages
    script = english.parent / "train.py"
    script.write_text('"""Train."""\n\nstep()  # every rank must\n# reach this\n# one line\n')
    table = "<!-- comments of: train.py -->\n{}\n<!-- end of comments -->\n"
    chinese.write_text(TRANSLATED + table.format(""))
    translations.update(root=english.parent)
    assert "| [3](train.py#L3) | every rank must |  |" in chinese.read_text()
    assert "not translated: | [4](train.py#L4) | reach this one line | |" in faults(*pages)
    chinese.write_text(re.sub(r"\|  \|$", "| 译文 |", chinese.read_text(), flags=re.M))
    script.write_text("\n" + script.read_text())
    translations.update(root=english.parent)
    assert "| [4](train.py#L4) | every rank must | 译文 |" in chinese.read_text()
    assert faults(*pages) == ""


def test_comments_are_read_with_their_lines(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('"""What it does.\n\npython script.py\n"""\nx = 1  # (B, C)\ny = 2  # why\n')
    assert comments_of(script) == [(1, "What it does."), (6, "why")]


def test_a_digest_sees_prose_but_no_measured_number():
    table = "<!-- table: t -->\n{}\n<!-- end of table -->\n"
    assert digest(table.format("1")) == digest(table.format("2"))
    assert digest("one") != digest("two"), "the control"


@pytest.mark.parametrize("page", CHINESE, ids=lambda path: path.name)
def test_a_chinese_page_uses_the_words_of_the_glossary(page):
    assert [*wrong_terms(page)] == []
