"""An output is the one that a page shows, up to what another CPU may round otherwise.

test_readmes.py compares all outputs this way, so what it must find is shown here.
"""

import pytest

from outputs import differences

SHOWN = "loss 2.7183 of 1,500 digits\nlayer   lost\n------  ----\nconv1     36\nfc2       <1\n"
SAME = [  # the same output of another CPU, and what the page allows
    (SHOWN, 0, 0),
    (SHOWN.replace("2.7183", "2.7101"), 0.01, 0),
    (SHOWN.replace("36", " 9").replace("----\n", "---\n"), 0, 30),
    (SHOWN.replace("<1", "3"), 0, 5),
]
ROUNDED = "weights differ by at most 3e-18\n"
OTHER = [  # the controls: what is found
    (SHOWN.replace("2.7183", "2.7182"), 0, 0, ["2.7183 became 2.7182"]),
    (SHOWN.replace("2.7183", "2.9183"), 0.01, 0, ["2.7183 became 2.9183"]),
    (SHOWN.replace("2.7183", "-2.7183"), 0.01, 0, ["2.7183 became -2.7183"]),
    (SHOWN.replace("1,500", "1,499"), 0.5, 0, ["1,500 became 1,499"]),
    (SHOWN.replace("36", "31"), 0.5, 4, ["36 became 31"]),
]


@pytest.mark.parametrize(("printed", "percent", "whole"), SAME)
def test_an_output_within_what_the_page_allows_is_the_same(printed, percent, whole):
    assert differences(SHOWN, printed, percent, whole) == []


def test_rounding_errors_of_float64_are_alike_only_where_decimals_may_differ():
    assert differences(ROUNDED, ROUNDED.replace("3e-18", "1e-17"), 0.01) == []
    assert differences(ROUNDED, ROUNDED.replace("3e-18", "3e-9"), 0.01) == ["3e-18 became 3e-9"]
    assert differences(ROUNDED, ROUNDED.replace("3e-18", "1e-17")) == ["3e-18 became 1e-17"]


@pytest.mark.parametrize(("printed", "percent", "whole", "difference"), OTHER)
def test_another_number_is_found(printed, percent, whole, difference):
    assert differences(SHOWN, printed, percent, whole) == difference


@pytest.mark.parametrize(
    "printed", [SHOWN + "more\n", SHOWN.replace("conv1", "conv2"), "", "2.7183"]
)
def test_other_words_are_found_however_much_numbers_may_differ(printed):
    [difference] = differences(SHOWN, printed, 1.0, 10**6)
    assert difference.startswith("other words: ")
