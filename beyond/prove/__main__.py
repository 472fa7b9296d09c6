"""Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank.

python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags
"""

import json
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prove import launch
from prove.judge_data import data_rows, rows_are_split, same_contents
from prove.judge_model import SMALL_BATCH, model_rows
from prove.judge_replay import RANDOM, Replay, batchnorm, gradient_of, no_replay, printed, schedule
from prove.judge_run import error_of, run_rows
from prove.table import NOT_SEEN, WARNING, WRONG, Row, table
from prove.watch_world import restore

ONE_RANK = "one rank"
NUMBER_OF_RANKS = (
    r"(--nproc[-_]per[-_]node[= ])\S+",
    r"(--num[-_]processes[= ])\d+",
    r"(--devices[= ])\d+",
    r"(--world[-_]size[= ])\d+",
)
NARROW = (
    r"(same dtype|must have|[Ff]ound dtype|not implemented for|[Ee]xpected)[^\n]*(ouble|[Ff]loat)"
)


class NotJudgedError(Exception):
    """Nothing could be judged, and this one line says why."""


def parse_args(arguments: list[str] | None = None) -> Namespace:
    parser = ArgumentParser("python -m prove", description=__doc__)
    add = parser.add_argument
    add("--batches", type=int, default=4, help="of each loader and epoch")
    add("--timeout", type=float, default=60, help="seconds without progress that are a hang")
    add("--original", help="command of the script for one GPU that this one was made from")
    add("--alone", help="command that starts one rank, for launchers other than torchrun")
    add("--cpu", action="store_true", help="run a script written for GPUs on CPUs")
    add("--float32", action="store_true", help="as it is, not in float64")
    add("--json", type=Path, help="write the table here, too")
    add("command", nargs=REMAINDER, help="torchrun ... train.py ...")
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("which command? python -m prove torchrun --nproc-per-node=2 train.py")
    if args.batches < 1:
        parser.error(f"--batches {args.batches} is less than 1")
    return args


def one_rank(command: list[str], alone: str | None, cpu: bool) -> list[str] | None:
    """The command that starts one rank: the same, with a 1 for the number of ranks."""
    if alone:
        return shlex.split(alone)
    for pattern in NUMBER_OF_RANKS:
        text, count = re.subn(pattern, r"\g<1>1", shlex.join(command))
        if count:
            return shlex.split(text)
    if cpu and not launch.plain_torchrun(command):
        return command  # it will see one GPU
    return None


class Prover:
    """The runs of one proof: they share a folder, and leave the user's files as they were."""

    def __init__(self, args: Namespace, folder: str, say: Callable[[str], None]) -> None:
        self.args, self.folder, self.say = args, folder, say
        self.double = not args.float32
        self.ranks, self.gpus, self.shared_batches = 2, 2, False
        if found := launch.plain_torchrun(args.command):
            self.ranks = self.gpus = found[0]

    def run(self, mode: str, command: list[str]) -> launch.Outcome:
        self.say(f"{mode}: {shlex.join(command)}")
        settings = {
            "folder": self.folder, "mode": mode, "double": self.double, "cpu": self.args.cpu,
            "batches": self.args.batches, "ranks": self.ranks,
            "shared_batches": self.shared_batches, "gpus": self.gpus,
        }  # fmt: skip
        try:
            return launch.run(command, settings, self.args.timeout)
        except FileNotFoundError as error:
            raise NotJudgedError(f"{error.filename}: no such command") from None
        finally:
            restore(Path(self.folder))

    def observe(self) -> launch.Outcome:
        command = self.args.command
        found = launch.plain_torchrun(command)
        if found and not Path(command[found[1]]).is_file():
            raise NotJudgedError(f"{command[found[1]]}: no such script")
        outcome = self.run("observe", command)
        if self.double and outcome.status and re.search(NARROW, outcome.log):
            self.say("it does not run in float64: again in float32")
            self.double = False
            for file in Path(self.folder).glob("observe.*"):
                file.unlink()
            outcome = self.run("observe", command)
        self.check(outcome)
        self.ranks = len(outcome.ranks)
        return outcome

    def check(self, outcome: launch.Outcome) -> None:
        """Was there anything to judge?"""
        ranks = outcome.ranks
        if outcome.silent:
            raise NotJudgedError(f"no progress for {self.args.timeout:g} s: try a larger --timeout")
        if not ranks and not outcome.status and "Traceback" not in outcome.log:
            raise NotJudgedError("the script made no process group: is it started by torchrun?")
        failed = outcome.status or not ranks or any(rank["ended"] == "error" for rank in ranks)
        if failed and not outcome.hang:
            rows = run_rows(outcome) + data_rows(ranks)
            if not any(row.verdict == WRONG for row in rows):
                raise NotJudgedError(f"the script fails by itself: {error_of(outcome)}")
        elif not outcome.hang and not any(rank["steps"] for rank in ranks):
            raise NotJudgedError("no optimizer step was made")

    def replay(self, mode: str, command: list[str], observed: launch.Outcome) -> Replay:
        return Replay(observed, self.run(mode, command), self.folder, mode)

    def judge(self) -> list[Row]:
        observed = self.observe()
        ranks = observed.ranks
        rows = run_rows(observed)
        if any(rank["world"] > len(ranks) for rank in ranks):
            return [
                *rows,
                Row(NOT_SEEN, "ranks", f"{len(ranks)} of {ranks[0]['world']} wrote records"),
            ]
        rows += data_rows(ranks)
        if not all(rank["ended"] in ("epochs", "script") for rank in ranks):
            text = "hangs" if observed.hang else f"ends with an error: {error_of(observed)}"
            return [*rows, Row(NOT_SEEN, ONE_RANK, f"no replay of a run that {text}")]
        rows += model_rows(ranks)
        if len(ranks) > 1:
            rows += self.replayed(observed, rows)
        if self.args.original:
            rows += self.compared_with_original(observed)
        return rows

    def replayed(self, observed: launch.Outcome, rows: list[Row]) -> list[Row]:
        command = one_rank(self.args.command, self.args.alone, self.args.cpu)
        if command is None:
            return [Row(NOT_SEEN, ONE_RANK, "say how one rank is started: --alone 'COMMAND'")]
        self.shared_batches = rows_are_split(observed.ranks)
        if self.shared_batches and not same_contents(observed.ranks):
            text = "each rank takes its rows of a batch that all load, with other random numbers"
            return [Row(NOT_SEEN, ONE_RANK, text)]
        gpus, self.gpus = self.gpus, 1
        replay = self.replay("replay", command, observed)
        if self.args.cpu and replay.one is None:  # some scripts refuse to run on one GPU
            self.gpus = gpus
            replay = self.replay("replay", command, observed)
        if replay.takes_more_batches():
            replay = self.replay("sequence", command, observed)
        if not replay.stepped:
            return [no_replay(replay, ONE_RANK)]
        effects = ("weights", "averaged gradients", "forward through DDP")
        explained = any(row.verdict == WRONG and row.check in effects for row in rows)
        explained |= any(row.verdict == WARNING and row.check == "weights" for row in rows)
        found = gradient_of(replay, ONE_RANK, explained, None)
        undecided = replay.mode == "replay" and any(RANDOM in row.evidence for row in found)
        if undecided and replay.equals(self.replay("again", command, observed)):
            observed.ranks[0]["random_in_step"] = 0  # drawn, but without an effect
            found = gradient_of(replay, ONE_RANK, explained, None)
        if any(row.verdict == WRONG and "1/" in row.evidence for row in found):
            sequence = self.replay("sequence", command, observed)
            found = gradient_of(replay, ONE_RANK, explained, sequence)
        agrees = all(row.verdict == "right" for row in found)
        whole = None
        least = [n for _, n in observed.ranks[0]["batchnorm"].values()]
        if least and min(least) < SMALL_BATCH:
            whole = self.replay("whole", command, observed)
        if agrees:  # then any factor before it was made up for
            doubts = (WARNING, NOT_SEEN)
            rows[:] = [
                r for r in rows if r.check != "averaged gradients" or r.verdict not in doubts
            ]
            found += printed(replay)
        return found + schedule(replay) + batchnorm(replay, whole)

    def compared_with_original(self, observed: launch.Outcome) -> list[Row]:
        check = "the original"
        replay = self.replay("original", shlex.split(self.args.original), observed)
        if not replay.stepped:
            return [no_replay(replay, check)]
        return gradient_of(replay, check, False, None)


def prove(args: Namespace, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows of the table, and why there are none."""
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        return Prover(args, folder, say).judge(), ""
    except NotJudgedError as error:
        return [], str(error)
    finally:
        restore(Path(folder))
        shutil.rmtree(folder)


def main() -> int:
    args, began = parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is put back
    rows, error = prove(args, lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        result: dict[str, Any] = {"rows": [asdict(row) for row in rows], "error": error}
        args.json.write_text(json.dumps(result, indent=1))
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    wrong = sum(row.verdict == WRONG for row in rows)
    print(f"\n{wrong} WRONG of {len(rows)} checks, in {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
