"""Run the five stages on this machine in turns, compare them, and say which of them repeat 01.

    python benchmarks/tour.py
    python benchmarks/tour.py --ranks 3 --stages 01,05 --epochs 3

Every flag that all stages share is passed to them.
"""

import json
import time
from argparse import SUPPRESS, Namespace

import torch

from benchmarks.measure.tour_runs import measure_tour
from benchmarks.result_files import write_json
from benchmarks.tables.tour_report import learned, report, speeds
from benchmarks.variants import STAGES, stages_in
from common.data import local_batch_size
from common.options import UsageError, exit_on, int_at_least, make_parser


def parse_args() -> Namespace:
    parser = make_parser("tour", __doc__)
    add, ranks_help = parser.add_argument, "how many processes (default: one per GPU, at least 2)"
    add("--ranks", type=int_at_least(1), default=SUPPRESS, metavar="N", help=ranks_help)
    add("--stages", default=",".join(STAGES), help="which to run, as in 01,04")
    parser.set_defaults(model="net-bn", batch_size=None, epochs=None)
    args = parser.parse_args()
    if args.resume:
        raise UsageError("the tour begins anew: give --resume to a stage")
    args.stages = stages_in(args.stages)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    args.ranks = getattr(args, "ranks", max(2, gpus))
    args.batch_size = args.batch_size or max(1, 120 // args.ranks) * args.ranks
    local_batch_size(args.batch_size, args.ranks)
    return args


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    file = args.run_dir / "tour.json"
    write_json(file, measure_tour(args))
    results = json.loads(file.read_text())
    (args.run_dir / "report.md").write_text(report(results, time.perf_counter() - started))
    print(f"\n{learned(results, 'simple')}\n\n{speeds(results, 'simple')}\n")
    print(f"wrote {args.run_dir}/report.md")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
