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

from prove import NotJudgedError, launch
from prove.judge_data import (
    data_rows,
    epoch_of_original,
    load_samples,
    rows_are_split,
    same_contents,
)
from prove.judge_model import model_rows
from prove.judge_replay import (
    RANDOM,
    SMALL_BATCH,
    Replay,
    batchnorm,
    gradient_rows,
    no_replay,
    printed,
    schedule,
    smallest_batchnorm,
)
from prove.judge_run import error_of, run_rows
from prove.table import NOT_SEEN, RIGHT, WARNING, WRONG, Row, not_seen, table
from prove.watch_world import restore

ONE_RANK, ORIGINAL = "one rank", "the original"
PROOF_OF = {ONE_RANK: "what is averaged", ORIGINAL: "the conversion"}
NUMBER_OF_RANKS = (
    r"(--nproc[-_]per[-_]node[= ])\S+",
    r"(--num[-_]processes[= ])\d+",
    r"(--devices[= ])\d+",
    r"(--world[-_]size[= ])\d+",
)
REFUSES_FLOAT64 = (
    r"(same dtype|must have|[Ff]ound dtype|not implemented for|[Ee]xpected)[^\n]*(ouble|[Ff]loat)"
)


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


def one_rank(args: Namespace) -> list[str] | None:
    """The command that starts one rank: the same, with a 1 for the number of ranks."""
    if args.alone:
        return shlex.split(args.alone)
    for pattern in NUMBER_OF_RANKS:
        text, count = re.subn(pattern, r"\g<1>1", shlex.join(args.command))
        if count:
            return shlex.split(text)
    if args.cpu and not launch.as_torchrun(args.command):
        return list(args.command)  # it will see one GPU
    return None


class Prover:
    """The runs of one proof: they share a folder, and leave the user's files as they were."""

    def __init__(self, args: Namespace, folder: str, say: Callable[[str], None]) -> None:
        self.args, self.folder, self.say = args, folder, say
        self.double = not args.float32
        torchrun = launch.as_torchrun(args.command)
        self.ranks = self.gpus = torchrun.ranks if torchrun else 2
        self.shared_batches = False
        self.observed: launch.Outcome
        if torchrun and not Path(torchrun.script[0]).is_file():
            raise NotJudgedError(f"{torchrun.script[0]}: no such script")

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

    def replay(self, mode: str, command: list[str]) -> Replay:
        return Replay(self.observed, self.run(mode, command), self.folder, mode)

    def observe(self) -> None:
        outcome = self.run("observe", self.args.command)
        if self.double and outcome.status and re.search(REFUSES_FLOAT64, outcome.log):
            self.say("it does not run in float64: again in float32")
            self.double = False
            for file in Path(self.folder).glob("observe.*"):
                file.unlink()
            outcome = self.run("observe", self.args.command)
        load_samples(outcome.ranks)
        self.observed, self.ranks = outcome, len(outcome.ranks)

    def check_that_something_was_seen(self) -> None:
        outcome, ranks = self.observed, self.observed.ranks
        if outcome.silent:
            raise NotJudgedError(f"no progress for {self.args.timeout:g} s: try a larger --timeout")
        if not ranks and not outcome.status and "Traceback" not in outcome.log:
            raise NotJudgedError("the script made no process group: is it started by torchrun?")
        if outcome.hang:
            return
        if outcome.status or not ranks or any(rank["ended"] == "error" for rank in ranks):
            rows = run_rows(outcome) + data_rows(ranks)
            if not any(row.verdict == WRONG for row in rows):
                raise NotJudgedError(f"the script fails by itself: {error_of(outcome)}")
        elif not any(rank["steps"] for rank in ranks):
            raise NotJudgedError("no optimizer step was made")

    def judge(self) -> list[Row]:
        self.observe()
        self.check_that_something_was_seen()
        observed, ranks = self.observed, self.observed.ranks
        rows = run_rows(observed)
        if any(rank["world"] > len(ranks) for rank in ranks):
            text = f"{len(ranks)} of {ranks[0]['world']} wrote records"
            return [*rows, not_seen("ranks", text)]
        rows += data_rows(ranks)
        if not all(rank["ended"] in launch.ENDED_WELL for rank in ranks):
            text = "hangs" if observed.hang else f"ends with an error: {error_of(observed)}"
            return [*rows, not_seen(ONE_RANK, f"no replay of a run that {text}")]
        rows += model_rows(ranks)
        if len(ranks) == 1:
            rows.append(not_seen(ONE_RANK, "it is the only one: start two to compare"))
        else:
            rows += self.replayed(rows)
        if any(row.check == ONE_RANK and row.verdict == RIGHT for row in rows):
            # Whatever changed the gradients before the step was no mistake.
            rows = [r for r in rows if (r.check, r.verdict) != ("averaged gradients", NOT_SEEN)]
        if self.args.original:
            replay = self.replay("original", shlex.split(self.args.original))
            if replay.replayed and replay.stepped:
                rows += gradient_rows(replay, ORIGINAL) + epoch_of_original(ranks, replay.replayed)
            else:
                rows.append(no_replay(replay, ORIGINAL))
        return rows

    def replayed(self, rows: list[Row]) -> list[Row]:
        """What one rank computes from the batches of all; rows: what is known without it."""
        command, ranks = one_rank(self.args), self.observed.ranks
        if command is None:
            return [not_seen(ONE_RANK, "say how one rank is started: --alone 'COMMAND'")]
        self.shared_batches = rows_are_split(ranks)
        if self.shared_batches and not same_contents(ranks):
            text = "each rank takes its rows of a batch that all load, with other random numbers"
            return [not_seen(ONE_RANK, text)]
        gpus, self.gpus = self.gpus, 1
        replay = self.replay("replay", command)
        if self.args.cpu and replay.replayed is None:  # some scripts refuse to run on one GPU
            self.gpus = gpus
            replay = self.replay("replay", command)
        if replay.takes_more_batches():
            replay = self.replay("sequence", command)
        if not replay.stepped:
            return [no_replay(replay, ONE_RANK)]

        effects = ("weights", "averaged gradients", "zero_grad", "forward through DDP")
        explained = any(row.verdict == WRONG and row.check in effects for row in rows)
        explained |= any(row.verdict == WARNING and row.check == "weights" for row in rows)
        found = gradient_rows(replay, ONE_RANK, explained)
        undecided = replay.mode == "replay" and any(RANDOM in row.evidence for row in found)
        if undecided and replay.equals(self.replay("again", command)):
            replay.observed["random_in_step"] = 0  # drawn, but without an effect
            found = gradient_rows(replay, ONE_RANK, explained)
        if any(row.verdict == WRONG and "1/" in row.evidence for row in found):
            found = gradient_rows(replay, ONE_RANK, explained, self.replay("sequence", command))
        if all(row.verdict == RIGHT for row in found):
            found += printed(replay)
        small = 0 < smallest_batchnorm(replay.observed) < SMALL_BATCH
        whole = self.replay("whole", command) if small else None
        return found + schedule(replay) + batchnorm(replay, whole)


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


def not_proven(rows: list[Row], checks: list[str]) -> str:
    """The end of the last line, if a comparison that is the proof could not be made."""
    seen = {row.check for row in rows if row.verdict != NOT_SEEN}
    seen -= {row.check for row in rows if row.verdict == NOT_SEEN}
    unseen = [check for check in checks if check not in seen]
    if not unseen:
        return ""
    unknown = " and ".join(PROOF_OF[check] for check in unseen)
    return f"; not seen: {', '.join(unseen)}, so nothing is proven about {unknown}"


def main() -> int:
    args, began = parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is put back
    rows, error = prove(args, lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        result = {"rows": [asdict(row) for row in rows], "error": error}
        args.json.write_text(json.dumps(result, indent=1))
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    wrong = sum(row.verdict == WRONG for row in rows)
    missing = not_proven(rows, [ONE_RANK, ORIGINAL] if args.original else [ONE_RANK])
    print(f"\n{wrong} WRONG of {len(rows)} checks, in {time.monotonic() - began:.0f} s{missing}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
