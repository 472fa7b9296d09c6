"""The options between `python -m prove` and the command that is to be proven."""

import shlex
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path

from prove.cures import all_cures
from prove.formats import Format

LAUNCHERS = ("torchrun", "python", "python3", "accelerate", "srun", "bash")
DESCRIPTION = (
    "Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank."
)

FORMATS = "markdown, for a pull request; github: notes at the lines of the script, and a summary"


def parse_args(arguments: list[str] | None = None) -> Namespace:
    parser = ArgumentParser("python -m prove", description=DESCRIPTION)
    add = parser.add_argument
    add("--batches", type=int, default=4, help="of each loader and epoch")
    add("--timeout", type=float, default=60, help="seconds without progress that are a hang")
    add("--original", help="command of the script for one GPU that this one was made from")
    add("--alone", help="command that starts one rank, for launchers other than torchrun")
    add("--cpu", action="store_true", help="run a script written for GPUs on CPUs")
    add("--float32", action="store_true", help="as it is, not in float64")
    add("--resume", help="command that resumes the script after a stop; auto: by its own flag")
    add("--stop-after", type=int, default=0, help="with --resume: steps, not the first epoch")
    add("--allow-unproven", action="store_true", help="exit with 0 also if nothing is proven")
    add("--strict", action="store_true", help="exit with 1 also if there are warnings")
    add("--json", type=Path, help="write the table here, too")
    add("--format", choices=[*map(str, Format)], default=Format.TEXT, help=FORMATS)
    add("--explain", choices=all_cures(), metavar="NAME", help="print a cure of the table in full")
    add("command", nargs=REMAINDER, help="torchrun ... train.py ...")
    words = sys.argv[1:] if arguments is None else arguments
    if "--resume" in words and Path([*words, ""][words.index("--resume") + 1]).name in LAUNCHERS:
        parser.error("the command after --resume needs quotes: --resume 'torchrun ... train.py'")
    args = parser.parse_args(arguments)
    if args.explain:
        return args
    if not args.command:
        parser.error("which command? python -m prove torchrun --nproc-per-node=2 train.py")
    if args.batches < 1:
        parser.error(f"--batches {args.batches} is less than 1")
    if args.resume is not None:
        try:
            words = shlex.split(args.resume)
        except ValueError as error:
            parser.error(f"--resume {args.resume!r}: {error}")
        if not words:
            parser.error("--resume which command? 'torchrun ... train.py --resume {checkpoint}'")
    if args.stop_after < 0:
        parser.error(f"--stop-after {args.stop_after} is less than 0")
    if args.stop_after and not args.resume:
        parser.error("--stop-after belongs to --resume")
    if args.resume and (args.original or args.alone):
        parser.error("--resume compares runs of all ranks: leave out --original and --alone")
    return args
