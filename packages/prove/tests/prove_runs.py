"""Run python -m prove as a user types it, but without importing torch again.

A fork server imports torch once, and each prove is a fork of it, ready in milliseconds.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from prove.__main__ import main

SECONDS = 60  # time limit of a call, longer than any script takes
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]
PRELOADED = ["prove.prover", "prove.watch.observe", "pytest", "torch._dynamo"]

forked = multiprocessing.get_context("forkserver")
torch.set_num_threads(1)  # one thread, as every rank has: two tests share two cores


def patience(seconds: float) -> float:
    """Return a time limit that only a hang reaches, longer on a busy machine."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def call(function: Callable, *args: Any) -> Any:
    """Return what function(*args) returns in a process of its own."""
    with ProcessPoolExecutor(1, forked) as process:
        return process.submit(function, *args).result(patience(SECONDS))


def prove_in_files(
    folder: Path, texts: Path, env: dict[str, str], arguments: tuple[str, ...]
) -> None:
    """Become a prove that prints into the files `out` and `error` of the folder `texts`."""
    # Loaders start workers as under torchrun; otherwise each rank would have a fork server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os.chdir(folder)
    os.environ.update(env)
    for number, file in ((0, Path(os.devnull)), (1, texts / "out"), (2, texts / "error")):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["prove", *arguments]
    sys.exit(main())


class Proof:
    """A prove that was started in a folder."""

    def __init__(
        self, folder: Path, *arguments: str, hashes_differ: bool = False, **env: str
    ) -> None:
        """hashes_differ: as with a real torchrun, whose ranks hash texts unlike each other; prove
        then starts one of its ranks anew, for seconds."""
        env |= {"OMP_NUM_THREADS": "1"} | ({} if hashes_differ else {"PYTHONHASHSEED": "0"})
        self.arguments, self.texts = arguments, tempfile.TemporaryDirectory(prefix="printed-")
        self.process = forked.Process(
            target=prove_in_files, args=(folder, Path(self.texts.name), env, arguments)
        )
        self.process.start()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def ended(self) -> subprocess.CompletedProcess:
        """Wait until prove ends; return its output."""
        with self.texts as texts:
            self.process.join(patience(3 * SECONDS))
            if self.process.is_alive():
                self.process.terminate()  # prove then ends its ranks
                raise TimeoutError(self.arguments)
            out, error = (Path(texts, name).read_text() for name in ("out", "error"))
        print(out, error, sep="\n")  # pytest shows it if the test fails
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, out, error)


def run(
    folder: Path, *arguments: str, hashes_differ: bool = False, **env: str
) -> subprocess.CompletedProcess:
    """Run prove in this folder; return the ended process, with what it printed."""
    return Proof(folder, *arguments, hashes_differ=hashes_differ, **env).ended()


def verdicts(folder: Path, *arguments: str, hashes_differ: bool = False) -> dict[str, str]:
    """Return the verdict of each row."""
    with tempfile.TemporaryDirectory(prefix="rows-") as name:
        file = Path(name, "rows.json")
        process = run(folder, f"--json={file}", *arguments, hashes_differ=hashes_differ)
        assert file.exists(), process.stderr
        result = json.loads(file.read_text())
    assert result["rows"], result["error"]
    return {row["check"]: row["verdict"] for row in result["rows"]}


def one_line(text: str) -> str:
    """Undo the line breaks of the table, which wraps its sentences."""
    return " ".join(text.split())


def verdict(process: subprocess.CompletedProcess, check: str) -> str:
    """Return the printed verdict of this check; `no row` and all output if there is none."""
    row = re.search(rf"^(right|WRONG|warning|not seen) +{check}(  |$)", process.stdout, re.M)
    return row[1] if row else f"no row: {process.stdout}{process.stderr}"
