"""A bar that shows in a terminal how far long work has come. A log or a pipe gets no byte."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN = 0.25  # from one drawing to the next


def progress_bar(name: str, items: Iterable | None = None, **options: Any) -> tqdm:
    """Make a bar that vanishes when the work is done. options: tqdm's; disable=True: no bar."""
    if items is None and "total" not in options:  # nothing to count
        options["bar_format"] = "{desc}"
    options = {"disable": None, **options}  # None: unless stderr is a terminal
    options |= {"mininterval": SECONDS_BETWEEN, "dynamic_ncols": True, "leave": False}
    return tqdm(items, name, **options)
