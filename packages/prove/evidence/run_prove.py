"""Run prove on a script: the one place that starts it.

Each script lies in a folder of its own, and prove runs there as if its command had been typed, in a
process that has imported torch already. Its rows are read from what `--json` writes.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # optimizers import this, so import it once
import torch.distributed
import torch.utils.data

RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
PROOF = "one rank"  # the row about the training as a whole
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")
SECONDS = 600  # time limit of one proof
fork: Any = multiprocessing.get_context("fork")
Item = TypeVar("Item")


@dataclass
class Answer:
    """The answer of prove: its exit status (None if it had to be killed) and its rows."""

    status: int | None
    rows: dict[str, list[str]] = field(default_factory=dict)  # names of checks by verdict
    evidence: dict[str, str] = field(default_factory=dict)  # for checks that are not right
    error: str = ""  # reason if there are no rows
    seconds: float = 0.0
    printed: str = ""

    def checks(self, verdict: str) -> list[str]:
        return self.rows.get(verdict, [])

    @property
    def is_wrong(self) -> bool:
        return bool(self.checks(WRONG))

    @property
    def is_proven(self) -> bool:
        """True if nothing is WRONG and one rank computes the same."""
        return self.proves(PROOF)

    def proves(self, row: str) -> bool:
        """True if nothing is WRONG and this row is right."""
        verdicts = {verdict for verdict, checks in self.rows.items() if row in checks}
        return verdicts == {RIGHT} and not self.is_wrong

    @property
    def lines(self) -> list[str]:
        """Return one line for each row that is not right."""
        others = [verdict for verdict in self.rows if verdict != RIGHT]
        return [
            f"{each} {check}: {self.evidence[check]}"
            for each in others
            for check in self.rows[each]
        ]

    def new_warnings(self, known: "Answer") -> list[str]:
        return [check for check in self.checks(WARNING) if check not in known.checks(WARNING)]

    def as_json(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "printed"}


def run_prove(
    script: str,
    command: Iterable[str] = (*TORCHRUN, "train.py"),
    options: Iterable[str] = (),
    files: dict[str, str] | None = None,
    hashes_differ: bool = False,
) -> Answer:
    """files: more texts, which lie beside the script under these names."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="case-") as name:
        home, table = Path(name, "home"), Path(name, "table.json")
        out, error = Path(name, "out"), Path(name, "error")
        home.mkdir()
        for file, text in {"train.py": script, **(files or {})}.items():
            (home / file).write_text(text)
        words = [sys.executable if word == "python" else word for word in command]
        arguments = [f"--json={table}", *options, *words]
        process = fork.Process(target=_prove, args=(home, (out, error), arguments, hashes_differ))
        process.start()
        process.join(SECONDS)
        is_late = process.is_alive()
        if is_late:
            process.terminate()  # prove ends its ranks
            process.join(20)
            process.kill()
            process.join()
        printed, said = (file.read_text() if file.exists() else "" for file in (out, error))
        written: dict = {"rows": [], "error": (said.strip().splitlines() or ["no table"])[-1]}
        if table.exists():
            written = json.loads(table.read_text())
    rows: dict[str, list[str]] = {}
    for row in written["rows"]:
        rows.setdefault(row["verdict"], []).append(row["check"])
    return Answer(
        status=None if is_late else process.exitcode,
        rows=rows,
        evidence={
            row["check"]: row["evidence"] for row in written["rows"] if row["verdict"] != RIGHT
        },
        error=written["error"],
        seconds=round(time.monotonic() - began, 1),
        printed=printed,
    )


def _prove(
    home: Path, outputs: tuple[Path, Path], arguments: list[str], hashes_differ: bool
) -> None:
    """`python -m prove` in this folder, as a process that has just been forked."""
    os.chdir(home)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if not hashes_differ:
        os.environ["PYTHONHASHSEED"] = "0"
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # write to descriptors 1 and 2
    for number, file in enumerate((Path(os.devnull), *outputs)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["prove", *arguments]
    # Not by runpy, because the loader of a pytest whose plugin is prove does not know how.
    from prove.__main__ import main

    sys.exit(main())


def in_parallel(
    function: Callable[[Item], Any], items: Iterable[Item], jobs: int
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with the result of the function, as soon as it is known."""
    torch.set_num_threads(1)  # a process with a pool of threads must not fork
    with ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        futures = {pool.submit(function, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()
