"""Prove a script that trains on several GPUs: run, observe, and replay it by one rank.

    python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags

`prover.Prover` holds the whole proof. Read on in this order:

    options.py     what can be asked for
    prover.py      the proof, and runs.py the runs that it needs
    controls.py    more runs, if one rank computes something else than all ranks
    processes.py   starts the ranks, and notices whether they hang; hooks/ for other launchers
    watch/         records each rank's steps and data; random_state.py, its random numbers
    comparable.py  how tensors of any dtype and layout are compared
    rank_record.py the record that each rank writes, all that the judges know of a run
    checks/        checks of the run of all ranks: one module for each
    judge/         questions that several checks ask, the judges of a replay, and the table
    resume/        --resume: a run that was stopped, beside one that was not
    formats.py     the table for GitHub, and in Markdown; cures.py, what --explain prints
    api.py         the table as a value, and pytest_plugin.py, the fixture of a test

A check both watches and judges. Otherwise, watch/ and judge/ do not import each other.
"""

import json
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path

from prove import processes
from prove.cures import all_cures
from prove.errors import ExitStatus, NotJudgedError, NotObservedError
from prove.formats import Format, annotation, annotations, append_summary, as_markdown
from prove.judge.table import (
    WARNING,
    WRONG,
    ReplayCheck,
    ReportRow,
    format_table,
    last_line,
    unproven_checks,
)
from prove.options import parse_args

STOPPING = (signal.SIGINT, signal.SIGTERM)


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(file: Path | None, rows: list[ReportRow], unproven: list[str], error: str) -> None:
    if file:
        result = {"rows": [row.as_json() for row in rows], "unproven": unproven, "error": error}
        file.write_text(json.dumps(result, indent=1, default=str))


class StoppedError(BaseException):
    """Ctrl-C or SIGTERM ended the proof. An exception, so that `finally` restores the files."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


def stop(number: int, frame: object) -> None:
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise StoppedError(number)


def run_proof(
    args: Namespace, spare: processes.SpareProcess | None, rows: list[ReportRow]
) -> tuple[int, str]:
    """Fill the table. Return an exit status, and the reason if the table is not complete."""
    try:
        if args.resume:
            from prove.resume.proof import prove_resume

            prove_resume(args, print_to_stderr, rows)
            return ExitStatus.PROVEN, ""
        from prove.prover import prove  # imports torch while the spare process does so, too

        prove(args, print_to_stderr, spare, rows)
        return ExitStatus.PROVEN, ""
    except NotObservedError as error:
        why = f"the script runs by itself, but not while prove watches it: {error}"
        return ExitStatus.OWN_ERROR, why
    except NotJudgedError as error:
        return ExitStatus.NOT_JUDGED, str(error)
    except StoppedError as error:
        return error.status, str(error)
    except Exception as error:  # a bug in prove is no verdict
        rows.clear()
        return ExitStatus.OWN_ERROR, f"prove itself failed: {type(error).__name__}: {error}"[:300]


def unproven_of(args: Namespace, rows: list[ReportRow]) -> list[str]:
    """List the rows without which nothing is proven, and that were not decided."""
    if args.resume:
        from prove.resume.proof import undecided

        return undecided(rows)
    proof = [ReplayCheck.ONE_RANK, *([ReplayCheck.ORIGINAL] if args.original else [])]
    return unproven_checks(rows, proof)


def print_table(args: Namespace, rows: list[ReportRow], ending: str, unproven: list[str]) -> None:
    """Print the table as --format asks for it, and its last line."""
    markdown = as_markdown(rows, ending)
    print(markdown if args.format == Format.MARKDOWN else f"{format_table(rows)}\n\n{ending}")
    if args.format == Format.GITHUB:
        root, missing = os.environ.get("GITHUB_WORKSPACE", ""), unproven * (not args.allow_unproven)
        print(*annotations(rows, missing, args.strict, root), sep="\n")
        append_summary(markdown)
    sys.stdout.flush()


def main() -> int:
    args, began = parse_args(), time.monotonic()
    if args.explain:
        print(all_cures()[args.explain])
        return ExitStatus.PROVEN
    for number in STOPPING:
        signal.signal(number, stop)
    is_torchrun = (
        Path(args.command[0]).name == "torchrun" or "torch.distributed.run" in args.command
    )
    is_forked = is_torchrun or processes.names_ranks(args.command)
    hashes_differ = is_forked and "PYTHONHASHSEED" not in os.environ
    spare = processes.SpareProcess() if hashes_differ and not args.resume else None
    rows: list[ReportRow] = []
    warnings.simplefilter("ignore")  # warnings from the judges are not about the script
    try:
        status, error = run_proof(args, spare, rows)
    finally:
        if spare:
            spare.end()
    if error:
        write_json(args.json, rows, [], error)
        if rows:
            print_table(args, rows, f"{len(rows)} checks so far: {error}", [])
        elif status > 128:
            error += ", before anything was known"
        if args.format == Format.GITHUB:
            print(annotation("error", "prove", error), flush=True)
            append_summary(as_markdown([], error) * (not rows))
        print_to_stderr(f"error: {error}")
        return status
    unproven = unproven_of(args, rows)
    write_json(args.json, rows, unproven, "")
    seconds = time.monotonic() - began
    print_table(args, rows, last_line(rows, unproven, args.strict, seconds), unproven)
    verdicts = {row.verdict for row in rows}
    if WRONG in verdicts or (args.strict and WARNING in verdicts):
        return ExitStatus.IS_WRONG
    return ExitStatus.NOTHING_PROVEN if unproven and not args.allow_unproven else ExitStatus.PROVEN


if __name__ == "__main__":
    sys.exit(main())
