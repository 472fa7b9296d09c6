"""How near does shm come to the limit of memory in each call?"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from shm.speed import SIZES

CALLS = ("broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send")


@section("shm")
def measure_shm(effort: Effort) -> Results:
    """Measure the table of `python -m shm.speed`, and other calls and more ranks."""
    sizes = SIZES[:1] if effort.quick else SIZES
    seconds = 1 if effort.quick else 45
    results = speed(2, ["all_reduce"], sizes, seconds)
    results["calls"] = []
    for ranks in (2,) if effort.quick else (2, 3, 5):
        names = CALLS if ranks == 2 else ("all_reduce", *CALLS)
        others = speed(ranks, names, sizes, seconds)
        results["calls"] += others["rows"]
        results["busy"] += others["busy"]
    return results


def speed(ranks: int, calls: Sequence[str], sizes: Sequence[int], seconds: float) -> Results:
    with TemporaryDirectory() as folder:
        out = Path(folder, "speed.json")
        command = [sys.executable, "-m", "shm.speed", f"--ranks={ranks}", f"--seconds={seconds}"]
        command += ["--calls", *calls, "--sizes", *map(str, sizes), f"--out={out}"]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())
