"""What a narrow screen needs in the HTML; site.css does the rest.

A table of three columns or more whose cells hold sentences turns into cards there, one per row, so
each cell carries the name of its column, and the roles that `display: block` takes from a table.
Each line of a command is a block, so that it wraps with an indent. So is a line of output that has
a sentence, which wraps below its own start: the columns before it stay columns. And no flag breaks
behind `--`.
"""

import html
import re

PROSE = 18  # letters per cell, on average: a table of figures has fewer
LONGEST = 32  # letters of a word that is never broken
COMMAND = re.compile(r"(\$ )?(\w+=\S* )*(python3?|torchrun|pip|make|git|sbatch|srun) ")
COLUMNS = re.compile(r"(.*\S {2,}| *)(\S.*)")  # of a line of output: those before the last, and it
SENTENCE = re.compile(r"(?=.{30})(\S+ ){4,}\S+")  # of the last column
FAR = 16  # letters before the last column: on a phone, the sentence goes below them


def plain(cell: str) -> str:
    return html.unescape(re.sub(r"<.*?>", "", cell)).strip()


def with_cards(table: re.Match[str]) -> str:
    text = table[0]
    names = [plain(name) for name in re.findall(r"<th\b.*?</th>", text, re.S)]
    cells = re.findall(r"<td\b.*?</td>", text, re.S)
    if len(names) < 3 or len(plain("".join(cells))) < PROSE * len(cells):
        return text
    columns = iter(range(len(cells)))

    def labeled(_: re.Match[str]) -> str:
        name = html.escape(names[next(columns) % len(names)])
        return f'<td role="cell" data-label="{name}"'

    text = re.sub(r"<td\b", labeled, text)
    text = text.replace("<th ", '<th role="columnheader" ').replace("<tr ", '<tr role="row" ')
    text = re.sub(r"<(thead|tbody)>", r'<\1 role="rowgroup">', text)
    return text.replace('class="docutils', 'role="table" class="cards docutils', 1)


def with_lines(command: re.Match[str]) -> str:
    """Each line a block, in which no word breaks at a hyphen, unless it is too long for a line."""
    lines = list[str]()
    for line in command[2].splitlines(keepends=True):
        parts = re.split(r'(<span class="w">.*?</span>|\s+$)', line)
        words = [f'<span class="whole">{part}</span>' if is_word(part) else part for part in parts]
        lines.append(f'<span class="line">{"".join(words)}</span>')
    return f"{command[1]}{''.join(lines)}</pre>"


def with_sentences(output: re.Match[str]) -> str:
    """Each line that is a command or has a sentence is a block, as are those of its columns."""
    lines = output[2].splitlines(keepends=True)
    rows = [COLUMNS.fullmatch(html.unescape(line).rstrip()) for line in lines]
    starts = {start(row) for row in rows if row and (len(rows) == 1 or is_sentence(row))}
    blocks = [
        block(line, row) if row and (start(row) in starts or COMMAND.match(row[0])) else line
        for line, row in zip(lines, rows, strict=True)
    ]
    return f"{output[1]}{''.join(blocks)}</pre>"


def start(row: re.Match[str]) -> int:
    """Where the last column starts, or 0 if it is the only one."""
    return len(row[1]) if row[1].strip() else 0


def is_sentence(row: re.Match[str]) -> bool:
    """Does the last column hold sentences, and no other one?"""
    return bool(SENTENCE.fullmatch(row[2])) and not SENTENCE.search(row[1])


def block(line: str, row: re.Match[str]) -> str:
    if COMMAND.match(row[0]):
        parts = re.split(r"(\s+)", line)
        words = [f'<span class="whole">{part}</span>' if is_word(part) else part for part in parts]
        return f'<span class="line">{"".join(words)}</span>'
    if not start(row):  # an indent is no place to break a line
        return f'<span class="line" style="margin-left: {len(row[1])}ch">{line.lstrip(" ")}</span>'
    kind = "line far" if start(row) > FAR else "line"
    return f'<span class="{kind}" style="--hang: {start(row)}ch">{line}</span>'


def is_word(part: str) -> bool:
    return bool(re.fullmatch(rf"\S{{1,{LONGEST}}}", plain(part))) and "-" in plain(part)


def for_narrow_screens(body: str) -> str:
    body = re.sub(r'<table class="docutils.*?</table>', with_cards, body, flags=re.S)
    start = r'(<div class="highlight-bash[^>]*><div class="highlight"><pre>(?:<span></span>)?)'
    body = re.sub(rf"{start}(.*?)</pre>", with_lines, body, flags=re.S)
    start = start.replace("bash", "text")
    body = re.sub(rf"{start}(.*?)</pre>", with_sentences, body, flags=re.S)
    flag = rf'<span class="pre">(?=[^<]{{1,{LONGEST}}}<)(?=[^<]*-)'
    return re.sub(flag, '<span class="pre whole">', body)
