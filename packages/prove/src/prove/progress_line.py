"""A line in the terminal that is rewritten while a run lasts. A log or a pipe gets no byte."""

import os
import sys


class ProgressLine:
    """Leaves the cursor at the start of the line, so that any other message overwrites it."""

    def __init__(self) -> None:
        self.width = 0  # of the text that stands there

    def write(self, text: str) -> None:
        if sys.stderr.isatty():
            text = text[: (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1]
            print(f"\r{text.ljust(self.width)}\r", end="", file=sys.stderr, flush=True)
            self.width = len(text)

    def erase(self) -> None:
        if self.width:
            self.write("")
