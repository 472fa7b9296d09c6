"""How a wrong call ends: one line that begins with "error: ", status 2, and no file is left."""

import hashlib
from pathlib import Path
from typing import Any

from durable import MARK
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.scripts import launch_script, run_script
from local_ranks.stage_files import LESSON_FOLDERS

SCRIPTS = {  # the script of each folder that has one
    key: f"{folder.relative_to(ROOT)}/train.py"
    for key, folder in LESSON_FOLDERS.items()
    if (folder / "train.py").exists()
}
SCRIPTS["tour"] = "benchmarks/tour.py"


def assert_one_line(output: str, *words: str) -> None:
    """One line, with all these words."""
    assert output.strip().count("\n") == 0, output
    assert output.startswith("error: ")
    assert all(word in output for word in words), output


def refusal(key: str, *flags: str, **how: Any) -> str:
    """What a script says that is refused: all ranks the same; of survive, one. No folder stays."""
    folder = scratch_folder()
    if key in SCRIPTS:
        flags = ("--device=cpu", f"--run-dir={folder / 'run'}", *flags)
    start = launch_script if "world_size" in how else run_script
    answers = start(SCRIPTS.get(key, key), *flags, **how)
    assert {status for status, _ in answers} == {2}, answers
    outputs = [output for _, output in answers if output]
    assert outputs == outputs[:1] * (1 if key == "survive" else len(answers)), answers
    assert not (folder / "run").exists()
    return outputs[0]


class Trap:
    """A pickled object that would leave a file behind if it were ever loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def seal(path: Path) -> None:
    """Append the checksum that survive/ asks for."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + MARK + digest.encode())
