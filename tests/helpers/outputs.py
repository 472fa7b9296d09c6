"""Read what a page shows of a program, and compare it with what was printed, whatever the CPU.

A CPU rounds sums in its own order, so the last digits of a measured decimal depend on it. A count
does not. So the texts must be equal once the numbers are taken out, whole numbers must be equal,
and decimals may differ by as much as the page allows. Where they may, two rounding errors of
float64 are alike, however small each of them is.
"""

import re
import sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from unittest.mock import patch

from helpers.machine import in_time
from markers import fences

ROUNDING_ERROR = 1e-12
NUMBER = re.compile(r"<?(?<![\w.])-?\d+(?:,\d{3})*(?P<decimals>\.\d+)?(?P<exponent>e[+-]?\d+)?")


def rows_on_page(program: str) -> list[list[str]]:
    """The cells that a page shows; test_the_output_shown_is_the_output runs the program."""
    [text] = [f.text for f in fences("text") if f.command == f"python {program}"]
    return [line.split() for line in text.splitlines()]


def differences(shown: str, printed: str, percent: float = 0.0, whole: int = 0) -> list[str]:
    """What differs between two outputs, one line for each difference; none if they agree.

    percent: by which share of the larger one two decimals may differ, in addition to one unit of
    the last digit that is shown. With 0, they are compared digit by digit.
    whole: by how much two whole numbers may differ. Give it only where they are measured: "<1" is
    then less than 1.
    """
    if _without_numbers(shown) != _without_numbers(printed):
        return [f"other words: {printed!r}"]
    pairs = zip(NUMBER.finditer(shown), NUMBER.finditer(printed), strict=True)
    return [f"{a[0]} became {b[0]}" for a, b in pairs if not _agree(a, b, percent, whole)]


def _without_numbers(text: str) -> str:
    """Columns are as wide as their numbers, so the space around them does not count either."""
    return " ".join(re.sub(r"-{3,}", "---", NUMBER.sub(" # ", text)).split())


def _agree(shown: re.Match[str], printed: re.Match[str], percent: float, whole: int) -> bool:
    if shown[0] == printed[0]:
        return True
    is_whole = not any(match["decimals"] or match["exponent"] for match in (shown, printed))
    a, b = _value(shown), _value(printed)
    if is_whole:
        return abs(a - b) <= whole
    if not percent:
        return False
    if max(abs(a), abs(b)) < ROUNDING_ERROR:
        return True
    return abs(a - b) <= percent * max(abs(a), abs(b)) + max(_unit(shown), _unit(printed))


def _value(number: re.Match[str]) -> float:
    return float(number[0].removeprefix("<").replace(",", ""))


def _unit(number: re.Match[str]) -> float:
    """One unit of its last digit: 0.01 for 2.71, 1e-6 for 3.2e-05."""
    digits = len(number["decimals"] or ".") - 1
    return 10.0 ** (int((number["exponent"] or "e0")[1:]) - digits)


def output_of(chapter: str, *flags: str) -> str:
    """What a chapter prints, run in this process."""
    argv = patch.object(sys, "argv", [chapter, *flags])
    with in_time(), argv, redirect_stdout(StringIO()) as output:
        import_module(chapter).main()
    return output.getvalue()
