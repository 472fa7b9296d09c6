"""How near shm is to the limit of memory in each call, and what sums in place would gain."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from shm import fast
from shm.speed import SIZES

CALLS = ("broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send")
IN_PLACE = Path(__file__).with_name("shm_in_place.c")


def measure_shm(effort: Effort) -> Results:
    """The table of `python -m shm.speed`, and what it prints of other calls and more ranks."""
    sizes = SIZES[:1] if effort.quick else SIZES
    seconds = 1 if effort.quick else 60
    calls = []
    results = speed(2, ["all_reduce"], sizes, seconds)
    for ranks in (2,) if effort.quick else (2, 3, 5):
        names = CALLS if ranks == 2 else ("all_reduce", *CALLS)
        calls += speed(ranks, names, sizes, seconds)["rows"]
    return {
        "rows": results["rows"],
        "python": results["python"],
        "calls": results["rows"] + calls,
        "in_place": [] if effort.quick else sums_in_place(),
    }


def speed(ranks: int, calls: Sequence[str], sizes: Sequence[int], seconds: float) -> Results:
    with TemporaryDirectory() as folder:
        out = Path(folder, "speed.json")
        command = [sys.executable, "-m", "shm.speed", f"--ranks={ranks}", f"--seconds={seconds}"]
        command += ["--calls", *calls, "--sizes", *map(str, sizes), f"--out={out}"]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def sums_in_place() -> list[Results]:
    """Nothing without a compiler."""
    if not fast.library():
        return []
    with TemporaryDirectory() as folder:
        program = f"{folder}/in_place"
        subprocess.run([*fast.COMPILER, *fast.FLAGS[:2], "-o", program, str(IN_PLACE)], check=True)
        return json.loads(subprocess.run([program], check=True, capture_output=True).stdout)
