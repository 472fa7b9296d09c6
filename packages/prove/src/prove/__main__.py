"""Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank.

    python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags

`prover.Prover` holds the whole proof. Read on in this order:

    options.py           what can be asked for
    prover.py, runs.py, examination.py    the proof, its runs, and more runs where one rank differs
    processes.py         starts the ranks, and notices whether they hang
    observe.py, rank_run.py, rank_record.py    what a rank does beside the script, and writes down
    float64.py           how it comes to compute in float64
    watch_data.py, watch_schedule.py    loaders; learning rates
    watch_model.py, watch_loss.py, watch_steps.py, model_tensors.py    forward, backward, steps
    watch_effects.py     files, printed lines, and messages between the ranks
    watch_operations.py, watch_random.py    changed parameters, and random numbers
    draws.py, samples.py, replay.py    how one rank gets the draws and the samples of all
    judge_effects.py, judge_data.py, judge_evaluation.py, judge_model.py    what the records say
    finished_replay.py, compare_steps.py    what all ranks computed against what one rank computed
    judge_replay.py, judge_schedule.py, judge_numbers.py    what else a replay says
    reasons.py, run_reasons.py, replay_reasons.py, wording.py    the words of each verdict
    table.py             the rows that are printed
    pretend_gpus.py, sync_batchnorm.py    scripts written for GPUs
    hooks/               commands other than torchrun
"""

import json
import os
import signal
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path

from prove import NotJudgedError, processes
from prove.options import parse_args
from prove.table import (
    WRONG,
    Check,
    NotObservedError,
    ReportRow,
    format_table,
    unseen_checks,
)

PROOF_OF = {Check.ONE_RANK: "what is averaged", Check.ORIGINAL: "the conversion"}
PROVEN, IS_WRONG, NOT_JUDGED, OWN_ERROR, NOTHING_PROVEN = range(5)  # exit statuses


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(file: Path | None, rows: list[ReportRow], unseen: list[str], error: str) -> None:
    if file:
        result = {"rows": [row.as_json() for row in rows], "unseen": unseen, "error": error}
        file.write_text(json.dumps(result, indent=1, default=str))


def run_proof(
    args: Namespace, spare: processes.SpareProcess | None
) -> tuple[list[ReportRow], int, str]:
    """The rows of the table; or an exit status, and why there are none."""
    try:
        from prove.prover import prove  # it imports torch, which the spare process does meanwhile

        return prove(args, print_to_stderr, spare), PROVEN, ""
    except NotJudgedError as error:
        return [], NOT_JUDGED, str(error)
    except NotObservedError as error:
        return [], OWN_ERROR, f"the script runs by itself, but not while prove watches it: {error}"
    except Exception as error:  # a mistake of prove's is no verdict
        if "PROVE_TRACEBACK" in os.environ:
            traceback.print_exc()
        return [], OWN_ERROR, f"prove itself failed: {type(error).__name__}: {error}"[:300]


def main() -> int:
    args, began = parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is put back
    is_forked = Path(args.command[0]).name == "torchrun" or "torch.distributed.run" in args.command
    hashes_differ = is_forked and "PYTHONHASHSEED" not in os.environ
    spare = processes.SpareProcess() if hashes_differ else None
    try:
        rows, status, error = run_proof(args, spare)
    finally:
        if spare:
            spare.end()
    if error:
        write_json(args.json, [], [], error)
        print_to_stderr(f"error: {error}")
        return status
    proof = [Check.ONE_RANK, Check.ORIGINAL] if args.original else [Check.ONE_RANK]
    unseen = unseen_checks(rows, proof)
    write_json(args.json, rows, unseen, "")
    print(format_table(rows))
    wrong = sum(row.verdict == WRONG for row in rows)
    ending = ""
    if unseen:
        unknown = " and ".join(PROOF_OF[check] for check in unseen)
        ending = f"; not seen: {', '.join(unseen)}, so nothing is proven about {unknown}"
    print(f"\n{wrong} WRONG of {len(rows)} checks, in {time.monotonic() - began:.0f} s{ending}")
    if wrong:
        return IS_WRONG
    return NOTHING_PROVEN if unseen and not args.allow_unproven else PROVEN


if __name__ == "__main__":
    sys.exit(main())
