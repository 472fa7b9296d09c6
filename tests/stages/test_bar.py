"""Long work shows a bar in rank 0's terminal, and leaves there what it prints into a pipe."""

import fcntl
import os
import re
import signal
import struct
import termios
import time
import tty
from threading import Thread

import pytest

from local_ranks.chapters import ROOT
from local_ranks.machine import SECONDS, timeout_under_load
from local_ranks.ranks import PROCESS_DEFAULTS
from local_ranks.scripts import (
    become_script,
    launch_script,
    run_script,
    store_of_a_launcher,
    variables_of_rank,
)

STAGE = """
import runpy
import sys
import common.bar
common.bar.SECONDS_BETWEEN = 0.003
{more}
runpy.run_path({script!r}, run_name="__main__")
"""
ROWS = """
from tqdm import tqdm
from common.bar import progress_bar
for number in progress_bar("rows", (1, 2), unit="row"):
    with tqdm.external_write_mode():
        print("row", number)
print("end")
"""


class Terminal:
    """A process in a terminal of its own: what it has written there, and what can be read there."""

    def __init__(self, script, *flags, rank=0, env=None):
        folder = script.parent
        self.ours, theirs = os.openpty()
        tty.setraw(theirs)  # a line ends with \n alone
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        output = folder / "terminal"
        (folder / f"terminal.{rank}").symlink_to(os.ttyname(theirs))
        arguments = (rank, env or {}, str(script), flags, str(ROOT), str(output))
        self.process = PROCESS_DEFAULTS.context().Process(target=become_script, args=arguments)
        self.text, self.theirs = "", theirs
        Thread(target=self.read, daemon=True).start()
        self.process.start()

    def read(self):
        written = b""
        while piece := os.read(self.ours, 2**16):
            written += piece
            self.text = written.decode(errors="ignore")

    def wait_for(self, text):
        end = time.monotonic() + timeout_under_load(SECONDS)
        while text not in self.text:
            assert time.monotonic() < end, self.text
            time.sleep(0.002)

    def lines(self):
        """Wait for the end; return the lines that stand in the terminal."""
        self.process.join(timeout_under_load(SECONDS))
        os.write(self.theirs, b"\n<end>")
        self.wait_for("<end>")
        return lines_on_screen(self.text.removesuffix("\n<end>"))


def lines_on_screen(text):
    """What is there after each carriage return has begun to overwrite its line."""
    shown = []
    for line in text.split("\n"):
        cells = ""
        for piece in line.split("\r"):
            cells = piece + cells[len(piece) :]
        shown.append(cells.rstrip())
    return shown


def without_speeds(lines):
    return [re.sub(r"[\d,]+ samples/s", "", line) for line in lines]


def stage_script(folder, stage, more=""):
    script = folder / "script.py"
    script.write_text(STAGE.format(script=str(ROOT / stage / "train.py"), more=more))
    return script


def test_rank_0_draws_and_in_the_end_a_terminal_shows_what_a_pipe_gets(tmp_path):
    script = stage_script(tmp_path, "04_ddp_torchrun")
    flags = ("--epochs=3", f"--run-dir={tmp_path}", "--device=cpu")
    piped = [output for _, output in launch_script(str(script), *flags)]
    _store, env = store_of_a_launcher(2)
    terminals = [
        Terminal(script, *flags, rank=rank, env=variables_of_rank(rank, env)) for rank in (0, 1)
    ]
    shown = [without_speeds(terminal.lines()) for terminal in terminals]
    assert shown == [without_speeds(text.split("\n")) for text in piped]
    drawn = terminals[0].text
    assert re.search(r"\repoch 2/3: .* \d+/12 \[00:\d\d<00:\d\d, .*step/s, loss \d", drawn)
    assert "\revaluation: 100%" in drawn
    assert "step/s" not in "".join([*piped, terminals[1].text])


def test_the_control_a_pipe_that_is_taken_for_a_terminal_gets_the_bar(tmp_path):
    script = stage_script(tmp_path, "01_single_gpu", "sys.stderr.isatty = lambda: True")
    flags = ("--epochs=1", f"--run-dir={tmp_path}", "--device=cpu")
    [(_, output)] = run_script(str(script), *flags)
    assert "step/s" in output


@pytest.mark.parametrize("is_erased", [True, False])
def test_after_ctrl_c_an_error_has_a_line_of_its_own(tmp_path, is_erased):
    """The control: if nothing erases the bar, it stands before the first line."""
    more = "" if is_erased else "common.bar.tqdm.clear = lambda *_, **__: None"
    script = stage_script(tmp_path, "01_single_gpu", more)
    flags = ("--epochs=1000", "--model=resnet18", f"--run-dir={tmp_path}", "--device=cpu")
    terminal = Terminal(script, *flags)
    terminal.wait_for("step/s, loss")  # tqdm erases no bar that is being drawn for the first time
    os.kill(terminal.process.pid, signal.SIGINT)
    lines = terminal.lines()
    assert lines[-2:] == ["KeyboardInterrupt", ""]
    assert ("Traceback (most recent call last):" in lines) == is_erased


def test_rows_that_are_printed_beside_a_bar_stand_alone(tmp_path):
    (tmp_path / "script.py").write_text(ROWS)
    terminal = Terminal(tmp_path / "script.py")
    assert terminal.lines() == ["row 1", "row 2", "end", ""]
    assert terminal.text.startswith("\rrows:   0%")
