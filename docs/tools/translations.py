"""Keep the Chinese pages beside the English ones: copy what is equal, compare what should be.

    python docs/tools/translations.py PAGE...    # where a Chinese page differs from its English one

The first line of a Chinese page names its English page. `make pages-quick` copies into it the
fences and the numbers of measured tables, gives each link to the Chinese version of a page, and
numbers the lines of a script's comments. The second line holds two digests, of the English prose
that the page translates and of its own, so that a digest is renewed together with the page, or with
a word that says why the page need not change. A page that is older is reported, and fails nothing.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from chinese_terms import wrong_terms
from markers import COMMENTS, FENCE, TABLE
from page_sources import PARENTS
from repository_pages import ROOT, slugs, translated_pages
from script_comments import comments_of

STATE = re.compile(
    r"<!-- of the English: (?P<english>\w+)(?:, Chinese: (?P<chinese>\w+))?"
    r"(?:, unchanged: (?P<reason>[^\n]+?))? -->"
)
NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*")
MILLIONS = {"million": 10**6, "billion": 10**9, "万": 10**4, "亿": 10**8}
COUNT = re.compile(  # English spells its months
    rf"{NUMBER.pattern}(?!\d| ?月)(?: ?(?P<unit>{'|'.join(MILLIONS)}))?"
)
LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<target>(?!\w+:)[^)\s]+)\)")
ADDRESS = re.compile(r"\]\((\w+:[^)\s]+)\)")
ONLY_ENGLISH = "（英文）"
ONLY_CHINESE = "这些页面不用的说法"  # a section of the Chinese glossary
TO_COMMENTS = "#comments"  # the table of a script's comments, which only a Chinese page has


def prose(text: str) -> str:
    """The words of a page without fences, measured tables, comments and what is only Chinese."""
    text = re.sub(rf"\n## {ONLY_CHINESE}\n.*?(?=\n## |\n回到|\Z)", "", text, flags=re.S)
    text = re.sub(r"\A\[(?:English|中文)\]\(.*\n", "", text)
    for pattern in (COMMENTS, TABLE, FENCE, re.compile(r"<!--.*?-->", re.S)):
        text = pattern.sub("", text)
    return text


def numbers_in_fences(text: str) -> set[str]:
    return {value(match) for fence in FENCE.finditer(text) for match in COUNT.finditer(fence[0])}


def digest(text: str) -> str:
    """Digest the prose: a fence or a measured number that changes needs no new translation."""
    return sha256(" ".join(prose(text).split()).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Section:
    """What must be the same in a part of a page under one heading, in any language."""

    level: str  # of the heading: ## or ###
    heading: str
    numbers: Counter[str]
    links: Counter[str]
    pictures: Counter[str]
    tables: Counter[str]  # how many columns each row has


class Languages:
    """All English pages with their Chinese versions, and what a link means in either."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.pages = dict(translated_pages(root))
        self.english = {chinese: english for english, chinese in self.pages.items()}
        self.headings: dict[Path, list[str]] = {}

    def require(self, chinese_pages: Iterable[Path]) -> None:
        """End with status 2 if one of these is not a Chinese page."""
        for page in chinese_pages:
            if page not in self.english:
                print(f"{page} is no Chinese page; expected README.zh.md or docs/zh/NAME.md")
                raise SystemExit(2)

    def slugs(self, page: Path) -> list[str]:
        if page not in self.headings:
            self.headings[page] = slugs(FENCE.sub("", page.read_text()))
        return self.headings[page]

    def anchors(self, page: Path) -> set[str]:
        return {*self.slugs(page), *re.findall(r'<a id="([\w-]+)">', page.read_text())}

    def resolved(self, page: Path, target: str) -> tuple[Path, str]:
        """The file and the anchor to which a link of a page leads."""
        file, _, anchor = target.partition("#")
        return (Path(os.path.normpath(page.parent / file)) if file else page), anchor

    def translated_anchor(self, anchor: str, source: Path, target: Path) -> str:
        """The anchor of the same heading on the other page; one that both have is kept."""
        there = self.slugs(target) if target.exists() else []
        if anchor in there or anchor not in self.slugs(source):
            return anchor
        place = self.slugs(source).index(anchor)
        return there[place] if place < len(there) else anchor

    def meaning(self, page: Path, target: str) -> str:
        """A name of what a link leads to which is the same from the page of either language."""
        file, anchor = self.resolved(page, target)
        if english := self.english.get(file):
            anchor = self.translated_anchor(anchor, file, english)
            file = english
        return f"{os.path.relpath(file, self.root)}{'#' * bool(anchor)}{anchor}".replace(
            "/zh/", "/"
        )

    def with_chinese_links(self, chinese: Path, text: str) -> str:
        """The text with each link to an English page that has a Chinese version leading there."""

        def relink(match: re.Match[str]) -> str:
            file, anchor = self.resolved(chinese, match["target"])
            new = self.pages.get(file, file)
            source = self.english.get(new)
            if match["picture"] or source is None:
                return match[0]
            anchor = self.translated_anchor(anchor, source, new) if anchor else ""
            if anchor and anchor not in self.anchors(new):  # the Chinese page is older
                return match[0]
            path = "" if new == chinese else os.path.relpath(new, chinese.parent)
            words = match["words"].replace(ONLY_ENGLISH, "")
            return f"[{words}]({path}{'#' * bool(anchor)}{anchor})" if path or anchor else match[0]

        head, rest = text.split("\n", 1)
        return f"{head}\n{LINK.sub(relink, rest)}"

    def sections(self, page: Path) -> list[Section]:
        return [*self.parts_of(page, prose(page.read_text()))]

    def parts_of(self, page: Path, text: str) -> Iterator[Section]:
        for part in re.split(r"^(?=#+ )", text, flags=re.M):
            if not part.strip():
                continue
            heading = re.match(r"(#+) (.+)", part)
            links, pictures = Counter[str](ADDRESS.findall(part)), Counter[str]()
            for match in LINK.finditer(part):
                where = pictures if match["picture"] else links
                if not match["target"].endswith(TO_COMMENTS):
                    where[self.meaning(page, match["target"])] += 1
            words = re.sub(r'\]\([^)]*\)|<a id=".*?">|`[^`]+`', " ", part)
            rows = re.findall(r"^\|.*\|$", re.sub(r"`[^`]*`", "", part), re.M)
            yield Section(
                heading[1] if heading else "",
                heading[2] if heading else "",
                Counter(value(match) for match in COUNT.finditer(words)),
                links,
                pictures,
                Counter(
                    f"a row of {row.replace(chr(92) + '|', '').count('|') - 1}" for row in rows
                ),
            )

    def differences(self, english: Path, chinese: Path) -> Iterator[str]:
        """Say of each thing that only one of the two pages has what it is, and where."""
        texts = english.read_text(), chinese.read_text()
        fences = [Counter(match[0] for match in FENCE.finditer(text)) for text in texts]
        yield from only_one("fence", "on this page", *fences)
        codes = [set(re.findall(r"`([^`\n]+)`", prose(text))) for text in texts]
        for code in sorted(codes[0] - codes[1]):
            yield f"only in English, on this page: code `{code}`"
        # A Chinese page may tell what the comments of a fence say, and lead to its English page.
        may_be_more = numbers_in_fences(texts[1]) | {
            self.meaning(english, f"#{name}") for name in self.anchors(english)
        }
        one, other = self.sections(english), self.sections(chinese)
        if [part.level for part in one] != [part.level for part in other]:
            titles = [[part.heading for part in parts] for parts in (one, other)]
            yield "the headings differ: {} and {}".format(*titles)
            return
        for ours, theirs in zip(one, other, strict=True):
            for kind in ("numbers", "links", "pictures", "tables"):
                expected, found = getattr(ours, kind), getattr(theirs, kind)
                for name in found.keys() & may_be_more:
                    found[name] = min(found[name], expected[name])
                yield from only_one(kind, f'under "{theirs.heading}"', expected, found)

    def wrong_links(self, chinese: Path) -> Iterator[str]:
        """Links that do not say, or wrongly say, that the page behind them is English."""
        text = prose(chinese.read_text())
        for match in LINK.finditer(text):
            file, _ = self.resolved(chinese, match["target"])
            is_english = file.suffix in (".md", ".ipynb") and file not in self.english
            list_says_so = (
                f"{ONLY_ENGLISH}：" in text[text.rfind("\n#", 0, match.start()) : match.start()]
            )
            says_so = match["words"].endswith(ONLY_ENGLISH)
            if is_english and not (says_so or list_says_so):
                yield f"lacks {ONLY_ENGLISH}: [{match['words']}]({match['target']})"
            if says_so and not is_english:
                yield f"wrongly has {ONLY_ENGLISH}: [{match['words']}]({match['target']})"


def value(match: re.Match[str]) -> str:
    number = match[0].removesuffix(match["unit"] or "").strip().replace(",", "")
    return str(round(float(number) * MILLIONS[match["unit"]])) if match["unit"] else number


def only_one(kind: str, where: str, one: Counter[str], other: Counter[str]) -> Iterator[str]:
    for language, more in (("English", one - other), ("Chinese", other - one)):
        if more:
            yield f"only in {language}, {where}: {kind} {' · '.join(sorted(more.elements()))}"


def replace_each(pattern: re.Pattern[str], texts: list[str], chinese: str) -> str:
    remaining = iter(texts)
    return pattern.sub(lambda _: next(remaining), chinese)


def refreshed(english: str, chinese: str) -> str:
    """The Chinese page with the English page's fences and measured numbers."""
    for pattern in (FENCE, TABLE):
        new, old = ([m[0] for m in pattern.finditer(page)] for page in (english, chinese))
        new = [translated(*pair) for pair in zip(new, old, strict=True)]
        chinese = replace_each(pattern, new, chinese)
    return chinese


def translated(english: str, chinese: str) -> str:
    """A fence is copied; a measured table keeps its words and gets the new numbers."""
    if FENCE.match(english):
        return english
    numbers = NUMBER.findall(english)
    if len(numbers) != len(NUMBER.findall(chinese)):
        return chinese
    return replace_each(NUMBER, numbers, chinese)


def same_fences(english: str, chinese: str) -> bool:
    """Has the translation as many fences and tables as its page? Otherwise they are not copied."""
    return all(len(p.findall(english)) == len(p.findall(chinese)) for p in (FENCE, TABLE))


def with_comments(chinese: Path, text: str) -> str:
    """The text with the lines of each script's comments, and a row for each one that is new."""

    def table(match: re.Match[str]) -> str:
        script = ROOT / match["script"]
        old = re.findall(r"^\| \[\d+\]\(.*?\) \| (.+?) \| (.*?) \|$", match["text"], re.M)
        known = dict(old)
        link = os.path.relpath(script, chinese.parent)
        rows = [
            f"| [{line}]({link}#L{line}) | {comment} | {known.get(comment, '')} |"
            for line, comment in new_comments(script)
        ]
        head = f"<!-- comments of: {match['script']} -->\n\n| 行 | 注释 | 中文 |\n|---|---|---|\n"
        return head + "\n".join(rows) + "\n\n<!-- end of comments -->"

    return COMMENTS.sub(table, text)


def new_comments(script: Path) -> list[tuple[int, str]]:
    """The comments of a script that the script of the same name before it does not have."""
    stage, parent = script.parent.relative_to(ROOT).as_posix(), set[str]()
    while stage := PARENTS.get(stage, ""):
        if (before := ROOT / stage / script.name).exists():
            parent |= {comment for _, comment in comments_of(before)}
    return [(line, comment) for line, comment in comments_of(script) if comment not in parent]


def untranslated_comments(text: str) -> list[str]:
    return [
        row
        for table in COMMENTS.finditer(text)
        for row in re.findall(r"^.*\|  \|$", table[0], re.M)
    ]


def is_older(english: str, chinese: str) -> bool:
    state = STATE.search(chinese)
    return state is None or state["english"] != source_digest(english, chinese)


def source_digest(english: str, chinese: str) -> str:
    """Digest what a Chinese page translates: the prose, and the comments of scripts it lists."""
    scripts = [ROOT / match["script"] for match in COMMENTS.finditer(chinese)]
    comments = [comment for script in scripts for _, comment in new_comments(script)]
    return digest("\n".join([english, *comments]))


def with_state(english: str, chinese: str, reason: str) -> str:
    """The Chinese page, called current."""
    why = f", unchanged: {reason}" if reason else ""
    state = f"of the English: {source_digest(english, chinese)}, Chinese: {digest(chinese)}{why}"
    return STATE.sub(f"<!-- {state} -->", chinese, count=1)


def old_reason(chinese: str) -> str:
    state = STATE.search(chinese)
    return (state and state["reason"]) or ""


def why_not_current(languages: Languages, page: Path, chinese: Path, reason: str) -> list[str]:
    """What must be done before a Chinese page may be called current; nothing if it may be."""
    text = chinese.read_text()
    state = STATE.search(text)
    faults = [*languages.differences(page, chinese), *languages.wrong_links(chinese)]
    faults += [*wrong_terms(chinese)]
    faults += [f"not translated: {row}" for row in untranslated_comments(text)]
    is_as_before = state is not None and state["chinese"] == digest(text)
    if is_as_before and is_older(page.read_text(), text) and not reason:
        faults.append("it has not changed, so say why it need not: --unchanged WHY")
    return faults


def update(current: Iterable[Path] = (), reason: str = "", root: Path = ROOT) -> None:
    """Refresh the Chinese pages, call these current that may be, and name those that are older."""
    languages, failed = Languages(root), False
    languages.require(current)
    for page, translation in languages.pages.items():
        english, chinese = page.read_text(), translation.read_text()
        names = translation.relative_to(root), page.relative_to(root)
        if same_fences(english, chinese):
            chinese = refreshed(english, chinese)
        else:
            print("{} has other fences than {}, so none was copied".format(*names))
        chinese = with_comments(translation, languages.with_chinese_links(translation, chinese))
        translation.write_text(chinese)
        if not is_older(english, chinese):  # what changes now answers to no later English change
            chinese = with_state(english, chinese, old_reason(chinese))
        elif translation in current:
            faults = why_not_current(languages, page, translation, reason)
            failed |= bool(faults)
            for fault in faults:
                print(f"{names[0]}: {fault}")
            chinese = chinese if faults else with_state(english, chinese, reason)
        translation.write_text(chinese)
        if is_older(english, chinese):
            print("{} is older than {}".format(*names))
    if failed:
        raise SystemExit(2)


if __name__ == "__main__":
    both = Languages()
    named = [Path(name).resolve() for name in sys.argv[1:]]
    both.require(named)
    for path in named or both.english:
        for fault in why_not_current(both, both.english[path], path, "compared only"):
            print(f"{path.relative_to(ROOT)}: {fault}")
