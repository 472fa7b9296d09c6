"""An output is the one that a page shows, up to what another CPU may round otherwise.

test_readmes.py compares all outputs this way, so what it must find is shown here.
"""

import pytest

from helpers.outputs import differences

SHOWN = "loss 2.7183 of 1,500 digits\nlayer   lost\n------  ----\nconv1     36\nfc2       <1\n"
ROUNDED = "weights differ by at most 3e-18\n"
SAME = [  # what a page shows, what another CPU prints, and what the page allows
    (SHOWN, SHOWN, 0, 0),
    (SHOWN, SHOWN.replace("2.7183", "2.7101"), 0.01, 0),
    (SHOWN, SHOWN.replace("36", " 9").replace("----\n", "---\n"), 0, 30),
    (SHOWN, SHOWN.replace("<1", "3"), 0, 5),
    (ROUNDED, ROUNDED.replace("3e-18", "1e-17"), 0.01, 0),  # both are rounding errors of float64
]
OTHER = [  # the controls: a number on a page, another one, and what the page allows
    (SHOWN, "2.7183", "2.7182", 0, 0),
    (SHOWN, "2.7183", "2.9183", 0.01, 0),
    (SHOWN, "2.7183", "-2.7183", 0.01, 0),
    (SHOWN, "1,500", "1,499", 0.5, 0),
    (SHOWN, "36", "31", 0.5, 4),
    (ROUNDED, "3e-18", "3e-9", 0.01, 0),
    (ROUNDED, "3e-18", "1e-17", 0, 0),
]


@pytest.mark.parametrize(("shown", "printed", "percent", "whole"), SAME)
def test_an_output_within_what_the_page_allows_is_the_same(shown, printed, percent, whole):
    assert differences(shown, printed, percent, whole) == []


@pytest.mark.parametrize(("shown", "number", "another", "percent", "whole"), OTHER)
def test_another_number_is_found(shown, number, another, percent, whole):
    printed = shown.replace(number, another)
    assert differences(shown, printed, percent, whole) == [f"{number} became {another}"]


@pytest.mark.parametrize(
    "printed", [SHOWN + "more\n", SHOWN.replace("conv1", "conv2"), "", "2.7183"]
)
def test_other_words_are_found_however_much_numbers_may_differ(printed):
    [difference] = differences(SHOWN, printed, 1.0, 10**6)
    assert difference.startswith("other words: ")
