"""Tables as a page on GitHub holds them, made column by column or row by row."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tabulate import tabulate

from benchmarks.result_files import Results

RATIO = "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"

Column = Mapping[str, str]  # the cell of each line that has one


def table_of_columns(columns: Mapping[str, Column], head: str = "") -> str:
    """The lines are those of the longest column; others may lack some of them."""
    names = max(columns.values(), key=len)
    lines = [[name, *(cells.get(name, "") for cells in columns.values())] for name in names]
    return tabulate(lines, (head, *columns), "github", disable_numparse=True)


def column(rows: Mapping[str, Any], cell: str | Callable[[Any], str]) -> Column:
    """cell: what makes the text of a row, or the format of its numbers."""
    cell_of = cell.format_map if isinstance(cell, str) else cell
    return {name: cell_of(row) for name, row in rows.items()}


def table_of_rows(rows: Iterable[Results], columns: Mapping[str, str]) -> str:
    """A line for each row; the columns are formats of its numbers."""
    lines = [[cell.format_map(row) for cell in columns.values()] for row in rows]
    return tabulate(lines, [*columns], "github", disable_numparse=True)
