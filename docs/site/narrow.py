"""What a narrow screen needs in the HTML; site.css does the rest.

A table of three columns or more whose cells hold sentences turns into cards there, one per row, so
each cell carries the name of its column, and the roles that `display: block` takes from a table.
And each line of a command is a block, so that it wraps with an indent.
"""

import html
import re

PROSE = 18  # letters per cell, on average: a table of figures has fewer


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
    lines = "".join(f'<span class="line">{line}</span>' for line in command[2].splitlines(True))
    return f"{command[1]}{lines}</pre>"


def for_narrow_screens(body: str) -> str:
    body = re.sub(r'<table class="docutils.*?</table>', with_cards, body, flags=re.S)
    start = r'(<div class="highlight-bash[^>]*><div class="highlight"><pre>(?:<span></span>)?)'
    return re.sub(rf"{start}(.*?)</pre>", with_lines, body, flags=re.S)
