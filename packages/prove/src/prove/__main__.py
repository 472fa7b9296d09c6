"""Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank.

    python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags

`prover.Prover` holds the whole proof. Read on in this order:

    options.py     what can be asked for
    prover.py      the proof, and runs.py the runs that it needs
    controls.py    more runs, where one rank computes something else than all
    processes.py   starts the ranks, and notices whether they hang; hooks/ for other launchers
    watch/         what each rank does beside the script; random_state.py, its random numbers
    comparable.py  how tensors of any dtype and layout are compared
    rank_record.py what it writes down, and all that is known of it here
    checks/        what the run of all ranks says by itself: one module for each check
    judge/         what several checks ask of the records, what a replay says, and the table

A check watches and judges. Beside it, nothing in watch/ knows of judge/, nor the other way round.
"""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from argparse import Namespace
from pathlib import Path

from prove import processes
from prove.errors import ExitStatus, NotJudgedError, NotObservedError
from prove.judge.table import (
    WARNING,
    WRONG,
    ReplayCheck,
    ReportRow,
    format_table,
    unproven_checks,
)
from prove.judge.wording import number_with_noun
from prove.options import parse_args

PROOF_OF: dict[str, str] = {
    ReplayCheck.ONE_RANK: "what is averaged",
    ReplayCheck.ORIGINAL: "the conversion",
}
STOPPING = (signal.SIGINT, signal.SIGTERM)


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(file: Path | None, rows: list[ReportRow], unproven: list[str], error: str) -> None:
    if file:
        result = {"rows": [row.as_json() for row in rows], "unproven": unproven, "error": error}
        file.write_text(json.dumps(result, indent=1, default=str))


class StoppedError(BaseException):
    """The proof was ended from outside, by Ctrl-C or SIGTERM: all is put back on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


def stop(number: int, frame: object) -> None:
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)  # a second one must not keep us from putting back
    raise StoppedError(number)


def run_proof(
    args: Namespace, spare: processes.SpareProcess | None, rows: list[ReportRow]
) -> tuple[int, str]:
    """Fill the table. Returns an exit status, and why the table is not complete, if it is not."""
    try:
        from prove.prover import prove  # it imports torch, which the spare process does meanwhile

        prove(args, print_to_stderr, spare, rows)
        return ExitStatus.PROVEN, ""
    except NotObservedError as error:
        why = f"the script runs by itself, but not while prove watches it: {error}"
        return ExitStatus.OWN_ERROR, why
    except NotJudgedError as error:
        return ExitStatus.NOT_JUDGED, str(error)
    except StoppedError as error:
        return error.status, str(error)
    except Exception as error:  # a mistake of prove's is no verdict
        if "PROVE_TRACEBACK" in os.environ:
            traceback.print_exc()
        rows.clear()
        return ExitStatus.OWN_ERROR, f"prove itself failed: {type(error).__name__}: {error}"[:300]


def main() -> int:
    args, began = parse_args(), time.monotonic()
    for number in STOPPING:
        signal.signal(number, stop)
    is_torchrun = (
        Path(args.command[0]).name == "torchrun" or "torch.distributed.run" in args.command
    )
    is_forked = is_torchrun or processes.names_ranks(args.command)
    hashes_differ = is_forked and "PYTHONHASHSEED" not in os.environ
    spare = processes.SpareProcess() if hashes_differ else None
    rows: list[ReportRow] = []
    warnings.simplefilter("ignore")  # of what the judges compute: they are not the script's
    try:
        status, error = run_proof(args, spare, rows)
    finally:
        if spare:
            spare.end()
    if error:
        write_json(args.json, rows, [], error)
        if rows:
            print(format_table(rows))
            print(f"\n{len(rows)} checks so far: {error}", flush=True)
        elif status > 128:
            error += ", before anything was known"
        print_to_stderr(f"error: {error}")
        return status
    proof = [ReplayCheck.ONE_RANK, *([ReplayCheck.ORIGINAL] if args.original else [])]
    unproven = unproven_checks(rows, proof)
    write_json(args.json, rows, unproven, "")
    print(format_table(rows))
    wrong, warned = (sum(row.verdict == each for row in rows) for each in (WRONG, WARNING))
    found, ending = f"{wrong} WRONG", ""
    if warned:
        found += f" and {number_with_noun(warned, 'warning')}"
        if args.strict:
            ending = "; --strict counts warnings as WRONG"
    if unproven:
        unknown = " and ".join(PROOF_OF[check] for check in unproven)
        ending += f"; nothing is proven about {unknown}: see {' and '.join(unproven)}"
    print(f"\n{found} of {len(rows)} checks, in {time.monotonic() - began:.0f} s{ending}")
    if wrong or (args.strict and warned):
        return ExitStatus.IS_WRONG
    return ExitStatus.NOTHING_PROVEN if unproven and not args.allow_unproven else ExitStatus.PROVEN


if __name__ == "__main__":
    sys.exit(main())
