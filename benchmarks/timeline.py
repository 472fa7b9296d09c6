"""What is a training step of your script spent on? Record a real run, and draw one step.

    python benchmarks/timeline.py torchrun --standalone --nproc-per-node=2 train.py --your-flags
    python benchmarks/timeline.py python 01_single_gpu/train.py

The script need not change, whether it has DDP, DataParallel, or collectives by hand. It needs torch
alone. All ranks of this machine are seen. timeline.svg, in the folder where you are, then shows the
step of median length.
"""

import sys
from argparse import REMAINDER
from pathlib import Path

# A reader's script has an environment of its own, where we are not installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "packages/prove/src"))
sys.path.insert(3, str(Path(__file__).resolve().parents[1] / "packages/shm/src"))

from benchmarks.measure.recordings import choose_step, record
from common.options import Parser, UsageError, exit_on
from docs.pictures.timeline import Row, draw, table
from shm.busy import LoadWatch, busy_line, why_loaded, why_unsteady


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("program", metavar="PROGRAM", help="that starts your script")
    parser.add_argument("flags", nargs=REMAINDER, metavar="FLAGS", help="of this program")
    args = parser.parse_args()
    command = [args.program, *args.flags]
    watch = LoadWatch()
    recordings = record(command, quiet=False)
    shown = choose_step(recordings)
    low, high = shown["ms_quartiles"]
    reasons = why_loaded(watch.load()) + why_unsteady(1, (low, shown["shown"]["ms"], high))
    torch, gpu = recordings[0]["torch"].partition("+")[0], recordings[0]["gpu"] or "CPU"
    caption = f"One step, the median of {shown['steps']}; {gpu}, torch {torch}."
    if reasons:
        print(busy_line(reasons))
    name = Path(next((word for word in command if word.endswith(".py")), args.program)).name
    Path("timeline.svg").write_text(draw([Row(name, shown["shown"])], [caption]))
    print(table(shown["shown"]))
    print(f"ms of the median step; half of the {shown['steps']} took {low:.1f} to {high:.1f}")
    print("wrote timeline.svg: open it in a browser")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
