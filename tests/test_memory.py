"""What a step under DDP holds, and what views of the buckets save."""

import sys
from functools import cache

from support import ROOT, chapter

sys.path.append(str(ROOT / "benchmarks"))
from process_memory import WAYS, measure

peak = chapter("01", "peak")
SMALL = peak.Plan("net-bn", 28, "adam", "cpu")


@cache
def found() -> dict[str, dict]:
    return measure([name for name in list(WAYS)[:6] if name != "bf16 autocast"], SMALL, 64)


def test_a_rank_holds_its_gradients_once_with_views_of_the_buckets_and_twice_without():
    size = peak.parts_of(SMALL)["gradients"]
    for name, expected in (("DDP with Adam", (size, size)), ("views of the buckets", (0, size))):
        for rank in found()[name]["held"]:
            assert (rank["gradients"], rank["buckets"]) == expected
            assert rank["parameters"] == size, "as in one process"


def test_with_accumulation_views_save_at_the_peak_only_if_gradients_are_zeroed_in_place():
    """Inside no_sync(), autograd makes a new tensor where it finds no gradient."""
    names = "accumulate 4", "views, accumulate 4", "the same, zeroed in place"
    apart, to_none, in_place = (found()[name]["peak_bytes"][0] for name in names)
    half = peak.parts_of(SMALL)["gradients"] / 2
    assert abs(to_none - apart) < half  # nothing saved
    assert in_place < apart - half
