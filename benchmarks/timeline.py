"""What is a training step spent on? Record real runs, and draw one step of each rank.

    python benchmarks/timeline.py                      # the five stages, on two ranks
    python benchmarks/timeline.py --model resnet18 --stages 03,04 --turns 3 --steps 20
    python benchmarks/timeline.py --step first         # DDP fills its buckets otherwise then
    python benchmarks/timeline.py torchrun --standalone --nproc-per-node=2 train.py --your-flags

The last one records a script of your own, which need not change: DDP, DataParallel, or collectives
by hand. It needs torch alone, and sees the ranks of this machine. It draws timeline.svg in the
folder where you are. The first two write to runs/timeline/.
"""

import json
import os
import statistics
import subprocess
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timeline_draw import draw, summary

HERE = Path(__file__).resolve().parent
# A reader's script stands elsewhere.
sys.path += [str(path) for path in (HERE.parent, *HERE.parent.glob("packages/*/src"))]
from common.options import Parser, UsageError, exit_on, int_at_least  # noqa: E402
from prove.processes import hook_variables  # noqa: E402
from result_files import RESULTS, load, provenance, save  # noqa: E402
from stage_runs import STAGES, VARIANTS, command_of  # noqa: E402

WARM_UP = 5  # steps that are not compared
RANKS, GLOBAL_BATCH = 2, 120
FILE = RESULTS / "timeline.json"
Recording = dict[str, Any]


def run(command: Sequence[str], quiet: bool) -> list[Recording]:
    """What each process of the command recorded, by rank. SystemExit if the command fails."""
    with TemporaryDirectory() as folder:
        env = {"OMP_NUM_THREADS": "1", **os.environ, "TIMELINE_FOLDER": folder}
        env |= hook_variables(os.environ, HERE, "timeline_record")
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
        try:
            done = subprocess.run(command, env=env, text=True, check=False, **pipes)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
        records = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if done.returncode:
        print(done.stdout or "", end="", file=sys.stderr)
        raise SystemExit(done.returncode)
    if not records:
        raise UsageError("no process took an optimizer step: expected a script that trains")
    return sorted(records, key=lambda record: record["rank"])


def ends_of_steps(spans: Sequence[Any]) -> list[float]:
    """When the optimizer was done with each, after the begin of the first."""
    ends = {step: end for step, kind, _, _, end, _ in spans if kind == "optimizer"}
    return [min(span[3] for span in spans if span[1] == "forward"), *ends.values()]


def cut(records: Sequence[Recording], number: int) -> Recording:
    """A step of all ranks, in milliseconds since the first of them began it."""
    ends = [ends_of_steps(record["spans"]) for record in records]
    start = min(each[number] for each in ends)
    step: Recording = {"ms": round(1000 * (max(each[number + 1] for each in ends) - start), 3)}
    step["ranks"] = []
    for record in records:
        spans = [
            [kind, thread, round(1000 * (begin - start), 3), round(1000 * (end - start), 3), size]
            for at, kind, thread, begin, end, size in record["spans"]
            if at == number and begin >= start
        ]
        step["ranks"].append({"rank": record["rank"], "spans": spans})
    return step


def shown_steps(*runs: Sequence[Recording]) -> Recording:
    """The first step and the median one of all runs, and how far the others are from it."""
    compared: list[Recording] = []
    for records in runs:
        steps = min(len(ends_of_steps(record["spans"])) for record in records) - 1
        if steps <= WARM_UP:
            raise UsageError(f"the script took {steps} steps: expected more than {WARM_UP}")
        compared += [cut(records, number) for number in range(WARM_UP, steps)]
    compared.sort(key=lambda step: step["ms"])
    times = [step["ms"] for step in compared]
    quartiles = statistics.quantiles(times, n=4)[::2] if len(times) > 1 else times * 2
    about = {"steps": len(times), "quartiles_ms": [round(ms, 3) for ms in quartiles]}
    return about | {"first": cut(runs[0], 0), "median": compared[(len(times) - 1) // 2]}


def record_stages(
    stages: Sequence[str], model: str = "net-bn", steps: int = 65, turns: int = 1
) -> Recording:
    """The recording of each stage, with the machine and the date. steps: of a stage in a turn."""
    about = {"model": model, "ranks": RANKS, "global_batch": GLOBAL_BATCH}
    results: Recording = {"provenance": provenance(), **about, "stages": {}}
    runs: dict[str, list[Sequence[Recording]]] = {stage: [] for stage in stages}
    for stage in [*stages] * turns:  # in turns: what else the machine does hits them all alike
        print(VARIANTS[stage].label, flush=True)
        with TemporaryDirectory() as folder:
            flags = ["--device=cpu", f"--model={model}", f"--batch-size={GLOBAL_BATCH}"]
            flags += ["--epochs=100", f"--max-steps={steps}"]
            flags += [f"--run-dir={folder}", f"--data-dir={HERE.parent / 'data'}"]
            command = [sys.executable, *command_of(stage, RANKS), *flags]
            runs[stage].append(run(command, quiet=True))
    results["stages"] = {stage: shown_steps(*runs[stage]) for stage in stages}
    return results


def caption(results: Recording, which: str) -> list[str]:
    step = "the first step" if which == "first" else "the step of median length"
    batch = results["global_batch"]
    about = f"{results['model']}, global batch {batch}: {step} of a recorded run."
    return [about, origin_line(results["provenance"])]


def origin_line(where: Recording) -> str:
    version = where["torch"].partition("+")[0]
    return f"{where['hardware']}, torch {version}, {where['date']}."


def picture(results: Recording, stages: Sequence[str] = (), which: str = "median") -> str:
    """stages: which of them; without it, all."""
    shown = stages or [*results["stages"]]
    rows = [(VARIANTS[stage].label, results["stages"][stage][which]) for stage in shown]
    return draw(rows, caption(results, which))


def tell(step: Recording) -> str:
    """A table for a terminal, in milliseconds."""
    rows = summary(step)
    lines = [["", *rows[0].times]]
    lines += [[row.name, *(f"{ms:.1f}" for ms in row.times.values())] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", nargs=REMAINDER, metavar="COMMAND", help="that starts a script of your own")
    add("--model", default="net-bn", choices=("net", "net-bn", "resnet18"), help="of the stages")
    add("--stages", default=",".join(STAGES), help="which to record, as in 03,04")
    add("--step", default="median", choices=("median", "first"), help="which one to draw")
    add("--store", action="store_true", help=f"also write {FILE.name}, which the pages show")
    add("--steps", default=65, type=int_at_least(WARM_UP + 2), help="of each stage in a turn")
    add("--turns", default=1, type=int_at_least(1), help="how often each stage runs")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    if not set(args.stages) <= set(STAGES):
        raise UsageError(f"--stages {','.join(args.stages)}: expected some of {','.join(STAGES)}")
    return args


def main() -> None:
    args = parse_args()
    if args.command:
        records = run(args.command, quiet=False)
        steps = shown_steps(records)
        torch, gpu = records[0]["torch"].partition("+")[0], records[0]["gpu"] or "CPU"
        which = "the first one" if args.step == "first" else f"the median of {steps['steps']}"
        name = Path(next((w for w in args.command if w.endswith(".py")), args.command[0])).name
        file = Path("timeline.svg")
        file.write_text(
            draw([(name, steps[args.step])], [f"One step, {which}; {gpu}, torch {torch}."])
        )
        print(tell(steps[args.step]))
    else:
        results = record_stages(args.stages, args.model, args.steps, args.turns)
        file = Path("runs/timeline/timeline.svg")
        save(file.with_suffix(".json"), results)
        file.write_text(picture(results, which=args.step))
        if args.store:
            stored = {"provenance": results["provenance"], args.model: results}
            save(FILE, load(FILE.stem) | stored)
        for stage, steps in results["stages"].items():
            print(f"\n{VARIANTS[stage].label}\n{tell(steps[args.step])}")
    print(f"wrote {file}: open it in a browser")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
