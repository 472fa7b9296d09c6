"""A bar that shows in a terminal how far long work has come. A log or a pipe gets no byte."""

from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN = 0.5  # from one drawing to the next


def progress_bar(name: str, items: Any = None, shown: bool = True, **counts: Any) -> tqdm:
    """Make a bar that vanishes when the work is done. counts: tqdm's total, initial, unit."""
    if items is None and not counts:
        counts["bar_format"] = "{desc}"
    return tqdm(
        items,
        desc=name,
        disable=None if shown else True,  # None: unless stderr is a terminal
        leave=False,
        mininterval=SECONDS_BETWEEN,
        dynamic_ncols=True,
        **counts,
    )
