"""python -m prove, as a user types it in a folder, without importing torch again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from local_ranks.machine import patience, scratch_folder
from local_ranks.ranks import NEW_PROCESSES
from local_ranks.scripts import SECONDS, use_default_start_method
from prove.__main__ import main

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]


def _prove(folder: Path, texts: Path, env: dict[str, str], arguments: tuple[str, ...]) -> None:
    use_default_start_method()
    os.chdir(folder)
    os.environ.update(env)
    for number, file in ((0, Path(os.devnull)), (1, texts / "out"), (2, texts / "error")):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["prove", *arguments]
    sys.exit(main())


def run(
    folder: Path, *arguments: str, hashes_differ: bool = False, **env: str
) -> subprocess.CompletedProcess:
    """The ended process, with what it printed. hashes_differ: as with a real torchrun, whose ranks
    hash texts unlike each other; prove then starts one of its ranks anew, for seconds."""
    texts = scratch_folder()
    env |= {"OMP_NUM_THREADS": "1"} | ({} if hashes_differ else {"PYTHONHASHSEED": "0"})
    process = NEW_PROCESSES.context().Process(target=_prove, args=(folder, texts, env, arguments))
    process.start()
    process.join(patience(3 * SECONDS))
    if process.is_alive():
        process.terminate()  # it then ends its ranks
        raise TimeoutError(arguments)
    out, error = ((texts / name).read_text() for name in ("out", "error"))
    return subprocess.CompletedProcess(arguments, process.exitcode, out, error)


def verdicts(folder: Path, *arguments: str, hashes_differ: bool = False) -> dict[str, str]:
    """The verdict of each row."""
    file = scratch_folder() / "rows.json"
    process = run(folder, f"--json={file}", *arguments, hashes_differ=hashes_differ)
    assert file.exists(), process.stderr
    result = json.loads(file.read_text())
    assert result["rows"], result["error"]
    return {row["check"]: row["verdict"] for row in result["rows"]}


def verdict(process: subprocess.CompletedProcess, check: str) -> str:
    row = re.search(rf"^(right|WRONG|warning|not seen) +{check}(  |$)", process.stdout, re.M)
    return row[1] if row else f"no row: {process.stdout}{process.stderr}"
