"""Is a script that trains on several GPUs right? It is run, observed, and replayed by one rank.

    python -m prove torchrun --standalone --nproc-per-node=2 train.py --my-flags

`Prover` below holds the whole proof. Read on in this order:

    launch.py            starts the ranks, and notices whether they hang
    rank_run.py, record.py    what each of them does beside the script, and what it writes down
    watch_data.py, watch_model.py, watch_effects.py, generators.py    how that is seen
    replay.py            how one rank gets the batches of all
    judge_effects.py, judge_data.py, judge_evaluation.py, judge_model.py    what the records say
    judge_replay.py      the proof: what all ranks computed against what one rank computed
    table.py             the rows that are printed
    cpu.py, hooks/       scripts written for GPUs, and commands other than torchrun
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
from dataclasses import asdict, replace
from pathlib import Path

from prove import NotJudgedError, judge_data, judge_replay, launch
from prove.judge_effects import effect_rows, error_of
from prove.judge_evaluation import evaluation_rows
from prove.judge_model import model_rows
from prove.record import Ended, Mode, Settings
from prove.table import NOT_SEEN, RIGHT, WARNING, WRONG, ReportRow, not_seen, table
from prove.watch_effects import restore

ONE_RANK, THE_ORIGINAL = "one rank", "the original"  # the checks that are the proof
PROOF_OF = {ONE_RANK: "what is averaged", THE_ORIGINAL: "the conversion"}
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
    parser = ArgumentParser("python -m prove", description=__doc__.partition("\n")[0])
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


def command_of_one_rank(args: Namespace) -> list[str] | None:
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
        self.args, self.say = args, say
        torchrun = launch.as_torchrun(args.command)
        if torchrun and not Path(torchrun.script[0]).is_file():
            raise NotJudgedError(f"{torchrun.script[0]}: no such script")
        world_size = torchrun.world_size if torchrun else 2
        self.settings = Settings(
            folder,
            Mode.OBSERVE,
            not args.float32,
            args.cpu,
            args.batches,
            gpus=world_size,
            world_size=world_size,
        )
        self.observed: launch.RunOutcome

    def run(self, mode: str, command: list[str]) -> launch.RunOutcome:
        self.say(f"{mode}: {shlex.join(command)}")
        try:
            settings = replace(self.settings, mode=mode)
            return launch.execute(command, settings, self.args.timeout)
        except FileNotFoundError as error:
            raise NotJudgedError(f"{error.filename}: no such command") from None
        finally:
            restore(Path(self.settings.folder))

    def replay(self, mode: str, command: list[str]) -> judge_replay.Replay:
        return judge_replay.Replay(
            self.observed, self.run(mode, command), self.settings.folder, mode
        )

    def observe(self) -> None:
        outcome = self.run(Mode.OBSERVE, self.args.command)
        if self.settings.float64 and outcome.status and re.search(REFUSES_FLOAT64, outcome.log):
            self.say("it does not run in float64: again in float32")
            self.settings.float64 = False
            for file in Path(self.settings.folder).glob(f"{Mode.OBSERVE}.*"):
                file.unlink()
            outcome = self.run(Mode.OBSERVE, self.args.command)
        judge_data.load_samples(outcome.records)
        self.observed, self.settings.world_size = outcome, len(outcome.records)
        self.settings.rows_are_split = judge_data.rows_are_split(outcome.records)

    def check_that_something_was_seen(self) -> None:
        outcome, records = self.observed, self.observed.records
        if outcome.silent:
            raise NotJudgedError(f"no progress for {self.args.timeout:g} s: try a larger --timeout")
        if not records and not outcome.status and "Traceback" not in outcome.log:
            raise NotJudgedError("the script made no process group: is it started by torchrun?")
        if outcome.hang:
            return
        if outcome.status or not records or any(rank.ended == Ended.WITH_ERROR for rank in records):
            rows = effect_rows(outcome) + judge_data.data_rows(records)
            if not any(row.verdict == WRONG for row in rows):
                raise NotJudgedError(f"the script fails by itself: {error_of(outcome)}")
        elif not any(rank.steps for rank in records):
            raise NotJudgedError("no optimizer step was made")

    def judge(self) -> list[ReportRow]:
        self.observe()
        self.check_that_something_was_seen()
        observed, records = self.observed, self.observed.records
        rows = effect_rows(observed)
        if any(rank.world_size > len(records) for rank in records):
            text = f"{len(records)} of {records[0].world_size} wrote records"
            return [*rows, not_seen("ranks", text)]
        rows += judge_data.data_rows(records) + evaluation_rows(records)
        if not all(rank.ended in Ended.WELL for rank in records):
            text = "hangs" if observed.hang else f"ends with an error: {error_of(observed)}"
            return [*rows, not_seen(ONE_RANK, f"no replay of a run that {text}")]
        rows += model_rows(records)
        rows += self.one_rank_rows(rows)
        if any(row.check == ONE_RANK and row.verdict == RIGHT for row in rows):
            # Whatever changed the gradients before the step was no mistake.
            unexplained = ("averaged gradients", NOT_SEEN)
            rows = [row for row in rows if (row.check, row.verdict) != unexplained]
        if self.args.original:
            replay = self.replay(Mode.ORIGINAL, shlex.split(self.args.original))
            if replay.stepped:
                rows += judge_replay.gradient_rows(
                    replay, THE_ORIGINAL
                ) + judge_data.original_epoch_rows(records, replay.replayed)
            else:
                rows.append(judge_replay.not_replayed(replay, THE_ORIGINAL))
        return rows

    def why_not_replayed(self, command: list[str] | None) -> str:
        """Empty if one rank can compute from the batches of all."""
        records = self.observed.records
        if len(records) == 1:
            return "it is the only one: start two to compare"
        if command is None:
            return "say how one rank is started: --alone 'COMMAND'"
        if "the model is divided" in records[0].notes:
            return "each rank holds a part of the model"
        if self.settings.rows_are_split and not judge_data.same_contents(records):
            return "each rank takes its rows of a batch that all load, with other random numbers"
        return ""

    def best_replay(self, command: list[str]) -> judge_replay.Replay:
        """Which gives one rank the batches in the order in which the script takes them."""
        self.settings.gpus = 1
        replay = self.replay(Mode.REPLAY, command)
        if self.args.cpu and not replay.wrote_record:  # some scripts refuse to run on one GPU
            self.settings.gpus = len(self.observed.records)
            replay = self.replay(Mode.REPLAY, command)
        if replay.takes_more_batches():
            replay = self.replay(Mode.SEQUENCE, command)
        return replay

    def compared_gradients(
        self, replay: judge_replay.Replay, command: list[str], rows: list[ReportRow]
    ) -> list[ReportRow]:
        """With more replays where the first one leaves open what a difference means."""
        of_the_model = ("weights", "averaged gradients", "zero_grad", "forward through DDP")
        explained = any(row.verdict == WRONG and row.check in of_the_model for row in rows)
        explained |= any(row.verdict == WARNING and row.check == "weights" for row in rows)
        compared = judge_replay.gradient_rows(replay, ONE_RANK, explained)
        undecided = replay.mode == Mode.REPLAY and any(
            judge_replay.RANDOM in row.evidence for row in compared
        )
        if undecided and replay.equals(self.replay(Mode.AGAIN, command)):
            replay.observed.steps_with_random_numbers = 0  # drawn, but without an effect
            compared = judge_replay.gradient_rows(replay, ONE_RANK, explained)
        if any(row.verdict == WRONG and "1/" in row.evidence for row in compared):
            sequence = self.replay(Mode.SEQUENCE, command)
            compared = judge_replay.gradient_rows(replay, ONE_RANK, explained, sequence)
        return compared

    def one_rank_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        """What one rank computes from the batches of all; rows: what is known without it."""
        command = command_of_one_rank(self.args)
        reason = self.why_not_replayed(command)
        if command is None or reason:
            return [not_seen(ONE_RANK, reason)]
        replay = self.best_replay(command)
        if not replay.stepped:
            return [judge_replay.not_replayed(replay, ONE_RANK)]
        compared = self.compared_gradients(replay, command, rows)
        if all(row.verdict == RIGHT for row in compared):
            compared += judge_replay.printed_rows(replay)
        compared += judge_replay.schedule_rows(replay)
        has_small_batchnorm = (
            0 < judge_replay.smallest_batchnorm(replay.observed) < judge_replay.SMALL_BATCH
        )
        whole_batch_replay = self.replay(Mode.WHOLE, command) if has_small_batchnorm else None
        return compared + judge_replay.batchnorm_rows(replay, whole_batch_replay)


def prove(args: Namespace, say: Callable[[str], None]) -> tuple[list[ReportRow], str]:
    """The rows of the table, and why there are none."""
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        return Prover(args, folder, say).judge(), ""
    except NotJudgedError as error:
        return [], str(error)
    finally:
        restore(Path(folder))
        shutil.rmtree(folder)


def unseen_checks(rows: list[ReportRow], checks: list[str]) -> list[str]:
    """Those of the comparisons that are the proof which could not be made."""
    seen = {row.check for row in rows if row.verdict != NOT_SEEN}
    seen -= {row.check for row in rows if row.verdict == NOT_SEEN}
    return [check for check in checks if check not in seen]


def main() -> int:
    args, began = parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is put back
    rows, error = prove(args, lambda text: print(text, file=sys.stderr, flush=True))
    unseen = unseen_checks(rows, [ONE_RANK, THE_ORIGINAL] if args.original else [ONE_RANK])
    if args.json:
        result = {"rows": [asdict(row) for row in rows], "unseen": unseen, "error": error}
        args.json.write_text(json.dumps(result, indent=1))
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    wrong = sum(row.verdict == WRONG for row in rows)
    ending = ""
    if unseen:
        unknown = " and ".join(PROOF_OF[check] for check in unseen)
        ending = f"; not seen: {', '.join(unseen)}, so nothing is proven about {unknown}"
    print(f"\n{wrong} WRONG of {len(rows)} checks, in {time.monotonic() - began:.0f} s{ending}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
