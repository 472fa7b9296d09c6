"""The Chinese pages have the blocks, code, numbers and links of the English ones."""

import re

import pages
import pytest
import translations
from readmes import ROOT
from translations import digest, english_blocks, faults, glossary_faults

BLOCKS = [
    ("# All", "# 全部"),
    (
        "[01](01_single_gpu/README.md), [b](#b), `c` 2",
        "[01](01_single_gpu/README.zh.md)：\n[乙](README.md#b)，`c` 2",
    ),
    ("<!-- d -->\n```bash\nmake\n```", ""),
    ("| a | s |\n|---|---|\n| quick | 1.5 to 2 |", "| 甲 | 秒 |\n|---|---|\n| 快 | 1.5～2 |"),
    ('```mermaid\nA["rank"] --> B["s"]\n```', '```mermaid\nA["rank 号"] --> B["秒"]\n```'),
    ("## Next", "## 下一步"),
    ("**Why?** So.", "**为什么？** 因为。"),
]
ROW = f'| <a id="a"></a>a | 1 b. | <!-- en: {digest("1 b.")} -->**甲**：1 乙。 | [c](c.md) |\n'
EN, ZH, ONE = "README.md", "README.zh.md", "01_single_gpu/README.md"
CONTROLS = [  # what is changed on which page, and what is found then
    (EN, "# All", "# All", ""),
    (EN, "` 2", "` 3", r"gone is the English of <!-- en: \w+ -->\n\[01(.|\n)*to translate"),
    (EN, "1.5 to 2", "3 to 1.5", "it differs"),
    (EN, "quick", "fast", "to translate"),
    (EN, r"\[中.*\n\n", "", "README.md does not begin"),
    (ZH, r"\[E.*\n\n", "", "README.zh.md does not begin"),
    (ZH, "` 2", "` 二", "other numbers"),
    (ZH, "1.5～2", "2～1.5", "other numbers"),
    (ZH, "`c`", "c", "other code"),
    (ZH, "README.zh.md\\)", "README.md)", "other links"),
    (ZH, "```bash\nmake", "```bash\nmade", "it differs"),
    (ZH, "<!-- en.*\n# .*", "", "to translate: .*\n# All"),
    (ZH, "(<!-- en.*\n#.*\n\n)(<!-- en.*\n.*\n.*\n\n)", r"\2\1", "it differs"),
    (ZH, "B\\[", "C[", "other form"),
    (ZH, r"\| 快 \|", "| 快", "other form"),
    (ZH, "？\\*\\* ", "？**", "not bold: "),
    (ZH, "：\n", "者\n一", "two lines"),
    ("01_single_gpu/README.zh.md", "下一步", "接着", "translated in two ways: ## Next"),
    ("GLOSSARY.md", "1 b", "2 b", "to translate: a"),
    ("GLOSSARY.md", "：1", "：2", "other numbers"),
]


@pytest.mark.parametrize(("page", "old", "new", "found"), CONTROLS)
def test_what_is_wrong_with_a_translation_is_found(page, old, new, found, tmp_path):
    (tmp_path / ONE).parent.mkdir()
    (tmp_path / "GLOSSARY.md").write_text(ROW)
    for name, blocks in (EN, BLOCKS), (ONE, BLOCKS[-2:]):
        here = (tmp_path / name).with_suffix(".zh.md")
        (tmp_path / name).write_text("\n\n".join(["[中文](README.zh.md)", *dict(blocks)]) + "\n")
        keys = [key for key, _, _ in english_blocks(tmp_path / name)]
        text = (
            f"<!-- en: {key} -->\n{chinese}" for key, (_, chinese) in zip(keys, blocks, strict=True)
        )
        here.write_text("\n\n".join(text))
        here.write_text(translations.rebuilt(tmp_path / name)[0])
    text, changes = re.subn(old, new, (tmp_path / page).read_text(), count=1)
    (tmp_path / page).write_text(text)
    text = "\n".join([*faults(tmp_path / EN, tmp_path), *glossary_faults(tmp_path)])
    assert changes == 1
    assert re.search(found, text) if found else text == ""


@pytest.mark.parametrize(
    "page", translations.pages(ROOT), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_chinese_page_is_its_english_one(page):
    assert [*faults(page), *pages.faults(page.with_suffix(".zh.md"))] == []


def test_the_glossary_is_in_chinese_too():
    assert [*glossary_faults()] == []
