"""Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank.

    python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags

`prover.Prover` holds the whole proof. Read on in this order:

    options.py           what can be asked for
    prover.py            the runs of a proof, and which of them are needed
    processes.py         starts the ranks, and notices whether they hang
    observe.py, rank_run.py, rank_record.py    what a rank does beside the script, and writes down
    watch_data.py, watch_schedule.py    loaders; learning rates
    watch_model.py, model_tensors.py    forward and backward passes, steps, weights
    watch_effects.py     files, printed lines, and messages between the ranks
    watch_operations.py, draws.py, generators.py    changed parameters, and random numbers
    samples.py, replay.py    how one rank gets the samples and the draws of all
    judge_effects.py, judge_data.py, judge_evaluation.py, judge_model.py    what the records say
    judge_replay.py      the proof: what all ranks computed against what one rank computed
    judge_schedule.py, judge_numbers.py    learning rates and printed numbers, of all and of one
    reasons.py, wording.py, table.py    the words of each verdict, and the rows that are printed
    cpu.py, sync_batchnorm.py, hooks/    scripts written for GPUs; commands other than torchrun
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from prove import NotJudgedError, processes
from prove.options import parse_args
from prove.table import (
    WRONG,
    Check,
    NotObservedError,
    ReportRow,
    table,
    unseen_checks,
)

PROOF_OF = {Check.ONE_RANK: "what is averaged", Check.ORIGINAL: "the conversion"}
PROVEN, IS_WRONG, NOT_JUDGED, OWN_ERROR, NOTHING_PROVEN = range(5)  # exit statuses


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(file: Path | None, rows: list[ReportRow], unseen: list[str], error: str) -> None:
    if file:
        result = {"rows": [row.as_json() for row in rows], "unseen": unseen, "error": error}
        file.write_text(json.dumps(result, indent=1, default=str))


def main() -> int:
    args, began = parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is put back
    is_forked = Path(args.command[0]).name == "torchrun" or "torch.distributed.run" in args.command
    hashes_differ = is_forked and "PYTHONHASHSEED" not in os.environ
    spare = processes.SpareProcess() if hashes_differ else None
    try:
        from prove.prover import prove  # it imports torch, which the spare process does meanwhile

        rows = prove(args, say, spare)
    except NotJudgedError as error:
        write_json(args.json, [], [], str(error))
        say(f"error: {error}")
        return NOT_JUDGED
    except NotObservedError as error:
        write_json(args.json, [], [], str(error))
        say(f"error: the script runs by itself, but not while prove watches it: {error}")
        return OWN_ERROR
    except Exception as error:  # a mistake of prove's is no verdict
        if "PROVE_TRACEBACK" in os.environ:
            traceback.print_exc()
        write_json(args.json, [], [], f"{type(error).__name__}: {error}")
        say(f"error: prove itself failed: {type(error).__name__}: {error}"[:300])
        return OWN_ERROR
    finally:
        if spare:
            spare.end()
    proof = [Check.ONE_RANK, Check.ORIGINAL] if args.original else [Check.ONE_RANK]
    unseen = unseen_checks(rows, proof)
    write_json(args.json, rows, unseen, "")
    print(table(rows))
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
