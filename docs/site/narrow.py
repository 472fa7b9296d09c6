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
SENTENCE = re.compile(r"(?=.{40})(\S+ ){4,}\S+")  # what stands in the last column of a line


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
    """Each line that is a command or has a sentence is a block, and says how far it hangs."""
    lines = output[2].splitlines(keepends=True)
    return f"{output[1]}{''.join(wrapped(line, len(lines) == 1) for line in lines)}</pre>"


def wrapped(line: str, alone: bool) -> str:
    text = html.unescape(line).rstrip()
    if COMMAND.match(text):
        parts = re.split(r"(\s+)", line)
        words = [f'<span class="whole">{part}</span>' if is_word(part) else part for part in parts]
        return f'<span class="line">{"".join(words)}</span>'
    before, last = re.fullmatch(r"(.*\S {2,}|\s*)(\S.*|)", text).groups()
    if not (alone or SENTENCE.fullmatch(last)):
        return line
    hang = len(before) + 2 * (not before.strip())
    return f'<span class="line" style="--hang: {hang}ch">{line}</span>'


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
