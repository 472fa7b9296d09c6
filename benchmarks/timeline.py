"""What is a training step spent on? Record real runs, and draw one step of each rank.

    python benchmarks/timeline.py                      # the five stages, on two ranks
    python benchmarks/timeline.py --model resnet18 --stages 03,04 --turns 3 --steps 20
    python benchmarks/timeline.py --step first         # DDP fills its buckets otherwise then
    python benchmarks/timeline.py torchrun --standalone --nproc-per-node=2 train.py --your-flags

The last one records a script of your own, which need not change: DDP, DataParallel, or collectives
by hand. It needs torch alone, and sees the ranks of this machine. It draws timeline.svg in the
folder where you are. The others write to runs/timeline/.
"""

import sys
from argparse import REMAINDER, Namespace
from pathlib import Path

# A reader's script has an environment of its own, where we are not installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "packages/prove/src"))

from benchmarks.measure.recordings import WARM_UP, record, record_stages, shown_steps
from benchmarks.result_files import RESULTS, save_part, write_json
from benchmarks.variants import STAGES, VARIANTS, stages_in
from common.options import Parser, UsageError, exit_on, int_at_least
from docs.pictures.timeline import draw, picture, table

FILE = RESULTS / "timeline.json"


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
    args.stages = stages_in(args.stages)
    return args


def draw_command(args: Namespace) -> Path:
    """Record and draw a script of the reader's own; return the file of the picture."""
    recordings = record(args.command, quiet=False)
    steps = shown_steps(recordings)
    torch, gpu = recordings[0]["torch"].partition("+")[0], recordings[0]["gpu"] or "CPU"
    which = "the first one" if args.step == "first" else f"the median of {steps['steps']}"
    name = Path(next((w for w in args.command if w.endswith(".py")), args.command[0])).name
    file = Path("timeline.svg")
    caption = [f"One step, {which}; {gpu}, torch {torch}."]
    file.write_text(draw([(name, steps[args.step])], caption))
    print(table(steps[args.step]))
    return file


def draw_stages(args: Namespace) -> Path:
    """Record and draw the stages; return the file of the picture."""
    results = record_stages(args.stages, args.model, args.steps, args.turns)
    file = Path("runs/timeline/timeline.svg")
    write_json(file.with_suffix(".json"), results)
    file.write_text(picture(results, which=args.step))
    for stage, steps in results["stages"].items():
        print(f"\n{VARIANTS[stage].label}\n{table(steps[args.step])}")
    if args.store:
        save_part(FILE, args.model, results)
    return file


def main() -> None:
    args = parse_args()
    file = draw_command(args) if args.command else draw_stages(args)
    print(f"wrote {file}: open it in a browser")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
