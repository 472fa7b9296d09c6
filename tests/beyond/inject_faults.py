"""Injects faults into real runs of beyond/survive/train.py: make faults, injected_faults.json.

Each trial trains with one fault, looks at what is left (no process, no torn checkpoint), resumes
with --resume auto, and compares the last checkpoint, to the bit, with that of a run without faults.

    PYTHONPATH=tests python tests/beyond/inject_faults.py --faults 360
    PYTHONPATH=tests python tests/beyond/inject_faults.py --faults 100 --kinds pauses --jobs 10
    PYTHONPATH=tests python tests/beyond/inject_faults.py --faults 9 --kinds hold --without-saving

Most faults must end a run in time. The pauses must not: their runs have the default time limit.
"""

import ctypes
import json
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader

import local_ranks.chapters  # noqa: F401, it lets this import the chapters of survive
from benchmarks.result_files import RESULTS, provenance, save
from common.options import Parser, int_at_least
from durable import CheckpointError, newest_whole, previous_path
from helpers.machine import free_port
from helpers.small_disk import CANNOT_MOUNT, can_mount, fill, small_disk
from local_ranks.chapters import ROOT
from local_ranks.ranks import PROCESS_DEFAULTS
from local_ranks.run_files import Run, same_run, same_weights
from local_ranks.scripts import (
    become_script,
    prepare_for_script,
    store_of_a_launcher,
    variables_of_rank,
)
from local_ranks.train_stage import train_once

SCRIPT = ROOT / "beyond/survive/train.py"
# Trials run side by side in threads. Each reads the status of its own processes, and of no others.
multiprocessing.process._cleanup = lambda: None  # type: ignore[attr-defined]

STEPS = 24  # steps of 2 epochs of digits
STEPS_PER_CHECKPOINT = 5
TIMEOUT_SECONDS = 12
FLAGS = ("--epochs=2", "--batch-size=120", f"--checkpoint-every-steps={STEPS_PER_CHECKPOINT}")
FLAGS += (f"--data-dir={ROOT / 'data'}", "--device=cpu")
VARIANTS = {"net": ("--model=net",), "net-bn": ("--model=net-bn",)}  # dropout, SyncBatchNorm
VARIANTS["bf16"] = ("--model=net", "--amp=bf16")
KINDS = {
    "stop": "SIGSTOP of a rank",
    "sleep": "a rank that sleeps and never returns",
    "hang-loader": "a loader that hangs as it starts",
    "stop-keeper": "SIGSTOP of rank 0, which keeps the store",
    "kill-keeper": "SIGKILL of rank 0, which keeps the store",
    "raise": "an exception in a rank",
    "exit": "sys.exit(0) too early",
    "os-exit": "os._exit(0) too early",
    "kill": "SIGKILL of a rank, in a step",
    "kill-any-time": "SIGKILL of a rank, at any time",
    "kill-all": "SIGKILL of all ranks, at any time",
    "term": "SIGTERM to one rank",
    "term-all": "SIGTERM to all ranks and their loaders, at any time",
    "term-loaders": "SIGTERM to all ranks and their loaders, which are just starting",
    "nan": "the weights of a rank become NaN",
    "kill-in-save": "SIGKILL while the checkpoint is written, of which a part reaches the disk",
    "disk-full": "a full disk (a limit on the size of files)",
    "tmpfs-full": "a full disk (a tmpfs, filled to the last byte)",
    "bit-flip": "SIGKILL of all, and a bit of the last checkpoint flips",
    "truncation": "SIGKILL of all, and the last checkpoint is cut off",
}
PAUSES = {  # what must not end a run, and the seconds that it lasts
    "pause": ("SIGSTOP of a rank for 30 s", 30),
    "pause-keeper": ("SIGSTOP of rank 0, which keeps the store, for 70 s", 70),
    "pause-all": ("SIGSTOP of all ranks, one of which keeps the store, for 70 s", 70),
    "pause-torchrun": ("SIGSTOP of torchrun and all its ranks for 70 s", 70),
    "hold": ("a rank that holds the interpreter's lock in C for 27 s", 27),
}
DEFAULT_TIMEOUT_SECONDS = 600
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
KINDS_OF_LOADERS = ("hang-loader", "term-loaders")
SIGTERM_KINDS = ("term", "term-all", "term-loaders")
LINE_OF_KIND = {"nan": "(the loss of rank|a weight is nan or inf after)"}
LINE_OF_KIND |= dict.fromkeys(("disk-full", "tmpfs-full"), "cannot write")
DAMAGE_KINDS = ("bit-flip", "truncation")
KINDS_OF_RANK_0 = (
    "kill-in-save",
    "disk-full",
    "tmpfs-full",
    "stop-keeper",
    "kill-keeper",
    "pause-keeper",
)
RANK_0_KEEPS_THE_STORE = ("stop-keeper", "kill-keeper", "pause-keeper", "pause-all")
KINDS_AT_ANY_TIME = ("kill-any-time", "kill-all", "term-all", *DAMAGE_KINDS)
LOADER_STARTS = 5  # before a run's last steps: three of the first epoch, its evaluation, one more


@dataclass(frozen=True)
class Fault:
    kind: str
    variant: str = "net"
    ranks: int = 2
    rank: int = 0
    step: int = 8  # for KINDS_OF_LOADERS, which start of loaders
    workers: int = 0
    place: float = 0.5  # part of a file's bytes or of a step's time, from 0 to 1
    pause_seconds: float = 0
    timeout_seconds: int = TIMEOUT_SECONDS
    beat_seconds: float = 0.25  # watchdog.BEAT_SECONDS; shorter, all its limits are shorter, too


@dataclass
class FaultOutcome:
    fault: Fault
    statuses: list[int]
    output: str
    hang: bool = False
    orphans: int = 0
    seconds: float = 0.0  # from the fault to the end of the last process
    lost_steps: int = 0  # done, but not in the checkpoint
    recovery_seconds: float = 0.0  # from the fault to the first step of the resumed run
    wrong: str = ""  # what is wrong in the resumed run

    def bad(self) -> dict[str, int]:
        wrong = {"wrong_resumes": bool(self.wrong), "wrong_ends": not as_expected(self)}
        return wrong | {"hangs": self.hang, "orphans": self.orphans}


def _strike(kind: str, parameter: torch.Tensor) -> None:
    if sent := SIGNALS.get(kind.removesuffix("-keeper")):
        os.kill(os.getpid(), sent)
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "raise":
        raise ValueError("a bug")
    elif kind in ("exit", "os-exit"):
        (sys.exit if kind == "exit" else os._exit)(0)
    elif kind == "nan":
        parameter.data.fill_(float("nan"))
    elif kind == "disk-full":  # the kernel refuses to let a file grow: its error is a real one
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
        # A loader that starts now sends its batches in files, in memory: no disk limits those.
        os.register_at_fork(
            after_in_child=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
        )
    elif kind == "tmpfs-full":
        [run_dir] = [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--run-dir=")]
        fill(Path(run_dir).parent)
    elif kind == "skip":  # the next sum over all ranks: the one in evaluate, which has no group
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **more: (
            real(*args, **more) if args[1:] else setattr(dist, "all_reduce", real)
        )


def _strike_any_time(fault: Fault, folder: Path) -> None:
    """This rank or all of them, by their process groups; this one last."""
    # A step takes 5 to 20 ms, the start of a loader longer.
    time.sleep((0.1 if fault.kind == "term-loaders" else 0.02) * fault.place)
    (folder / "fault").write_text(str(time.time()))
    here, term = os.getpid(), fault.kind in SIGTERM_KINDS
    others = {int(note.suffix[1:]) for note in folder.glob("pid.*")} - {here}
    send, sent = (os.killpg, SIGNALS["term"]) if term else (os.kill, SIGNALS["kill"])
    for pid in [here] if fault.kind == "kill-any-time" else [*others, here]:
        send(pid, sent)


def _pause(fault: Fault, folder: Path) -> None:
    """Stop this rank, or the process groups of all; a process of its own continues them."""
    here = os.getpid()
    groups = [int(note.suffix[1:]) for note in folder.glob("group.*")]
    whole_job = fault.kind in ("pause-all", "pause-torchrun")
    stopped = [f"-{group}" for group in groups] if whole_job else [str(here)]
    lines = f"sleep {fault.pause_seconds}; kill -CONT {' '.join(stopped)}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(
        ["sh", "-c", f"kill -STOP {' '.join(stopped)}; {lines}"], **quiet, start_new_session=True
    )
    time.sleep(0.5)  # the signal arrives here


def _inject(fault: Fault, rank: int, folder: Path) -> None:
    done = starts = 0
    real_step, real_fsync, real_iter = torch.optim.SGD.step, os.fsync, DataLoader.__iter__

    def step(self: torch.optim.SGD, *args: object, **more: object) -> object:
        nonlocal done
        done += 1
        (part := folder / f"part.{rank}").write_text(str(done))
        part.replace(folder / f"step.{rank}")  # killed while it writes, it leaves the one before
        if rank == 0 and done == 1:
            (folder / "first").write_text(str(time.time()))
        if fault.kind in SIGTERM_KINDS:
            time.sleep(0.05)  # its votes take time, too
        if rank == fault.rank and done == fault.step and fault.kind in KINDS_AT_ANY_TIME:
            threading.Thread(target=_strike_any_time, args=(fault, folder)).start()
        elif rank == fault.rank and done == fault.step and fault.kind not in KINDS_OF_LOADERS:
            (folder / "fault").write_text(str(time.time()))
            if fault.kind.startswith("pause"):
                _pause(fault, folder)
            elif fault.kind == "hold":
                ctypes.PyDLL(None).usleep(round(1e6 * fault.pause_seconds))  # unlike CDLL
            else:
                _strike(fault.kind, self.param_groups[0]["params"][0])
        return real_step(self, *args, **more)

    def fsync(file: int) -> None:
        if done >= fault.step:
            (folder / "fault").write_text(str(time.time()))
            os.ftruncate(file, int(fault.place * os.fstat(file).st_size))
            os.kill(os.getpid(), signal.SIGKILL)
        real_fsync(file)

    def start_loaders(self: DataLoader) -> Iterator:
        nonlocal starts
        starts += 1
        if rank == fault.rank and starts == fault.step:
            if fault.kind == "hang-loader":
                (folder / "fault").write_text(str(time.time()))
                os.register_at_fork(after_in_child=lambda: ctypes.PyDLL(None).sleep(1000))
            else:
                threading.Thread(target=_strike_any_time, args=(fault, folder)).start()
        return real_iter(self)

    import watchdog

    watchdog.BEAT_SECONDS = fault.beat_seconds
    torch.optim.SGD.step = step  # type: ignore[method-assign]
    if fault.kind == "kill-in-save":
        os.fsync = fsync
    if fault.kind in KINDS_OF_LOADERS:
        DataLoader.__iter__ = start_loaders  # type: ignore[method-assign]


def _rank(rank: int, fault: Fault, flags: tuple, env: dict, folder: Path) -> None:
    os.setpgid(0, 0)  # with its loader workers: so an orphan can be found
    (folder / f"pid.{os.getpid()}").touch()
    (folder / f"group.{os.getpgid(0)}").touch()
    _inject(fault, rank, folder)
    env = variables_of_rank(rank, env)
    become_script(rank, env, str(SCRIPT), flags, str(ROOT), str(folder / "out"))


def _torchrun(fault: Fault, flags: tuple, folder: Path) -> None:
    """What the command torchrun does; but its ranks are forks, which need not import torch."""
    os.setpgid(0, 0)
    (folder / f"group.{os.getpgid(0)}").touch()
    how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    config = LaunchConfig(1, 1, fault.ranks, run_id=folder.name, max_restarts=0, **how)
    elastic_launch(config, _rank_of_torchrun)(fault, flags, folder)


def _rank_of_torchrun(fault: Fault, flags: tuple, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    (folder / f"forked.{rank}").touch()
    while len([*folder.glob("forked.*")]) < fault.ranks:  # why: run_rank of local_ranks
        time.sleep(0.01)
    _inject(fault, rank, folder)
    prepare_for_script(str(SCRIPT), flags, f"{folder}/out.{rank}")
    runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.stdout.flush()


def _in_groups(processes: list) -> list[int]:
    groups = [process.pid for process in processes]
    ps = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True)
    rows = map(str.split, ps.stdout.splitlines())
    return [int(pid) for pid, group, state in rows if int(group) in groups and state[0] != "Z"]


def run(fault: Fault, ranks: int, *flags: str) -> tuple:
    """Statuses, output, whether it hung, orphans, and the notes of the ranks."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    _store, env = store_of_a_launcher(ranks)
    if fault.kind in RANK_0_KEEPS_THE_STORE:  # as without torchrun
        env |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    args = [(rank, fault, flags, env, folder) for rank in range(ranks)]
    processes = [PROCESS_DEFAULTS.context().Process(target=_rank, args=each) for each in args]
    if fault.kind == "pause-torchrun":
        processes = [
            PROCESS_DEFAULTS.context().Process(target=_torchrun, args=(fault, flags, folder))
        ]
    for process in processes:
        process.start()
    try:
        if fault.kind == "stop-keeper":  # rank 1 cannot learn the PID of rank 0: a launcher ends it
            processes[1].join(120)
            processes[0].kill()
        latest = time.monotonic() + 120 + fault.pause_seconds
        for process in processes:
            process.join(max(0, latest - time.monotonic()))
        hang, latest = any(process.is_alive() for process in processes), time.monotonic() + 15
        while (left := _in_groups(processes)) and not hang and time.monotonic() < latest:
            time.sleep(0.05)
        orphans = 0 if hang else len(left)
    finally:
        for pid in _in_groups(processes):
            os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.join()
    statuses = [process.exitcode for process in processes]
    output = "".join(path.read_text() for path in sorted(folder.glob("out.*")))
    texts = {path.name: path.read_text() for path in folder.iterdir() if "out" not in path.name}
    notes = {name: float(text) for name, text in texts.items() if text}  # killed while it wrote
    shutil.rmtree(folder)
    return statuses, output, hang, orphans, notes


def reference(fault: Fault) -> Run:
    flags = (*FLAGS, *VARIANTS[fault.variant], f"--timeout-seconds={TIMEOUT_SECONDS}")
    return train_once("survive", fault.ranks, *flags, dtype=torch.float32)


def trial(fault: Fault) -> FaultOutcome:
    with tempfile.TemporaryDirectory(prefix="trial-") as folder, small_disk() as disk:
        parent = disk if fault.kind == "tmpfs-full" else Path(folder)
        assert parent, CANNOT_MOUNT
        return trial_in(parent / "run", fault)


def trial_in(folder: Path, fault: Fault) -> FaultOutcome:
    """A run in this folder with a fault, and one that resumes it."""
    flags = (*FLAGS, *VARIANTS[fault.variant], f"--workers={fault.workers}", f"--run-dir={folder}")
    flags += (f"--timeout-seconds={fault.timeout_seconds}",)
    *ended, notes = run(fault, fault.ranks, *flags)
    outcome = FaultOutcome(fault, *ended)
    assert "fault" in notes, f"{fault} did not happen: {outcome.output}"
    outcome.seconds = time.time() - notes["fault"]
    if fault.kind not in PAUSES:  # a paused run takes its steps afterwards: `run` sees it hang
        outcome.hang |= outcome.seconds > 40
    latest = folder / "checkpoint.pt"
    if fault.kind in DAMAGE_KINDS and latest.exists():
        data = bytearray(latest.read_bytes())
        place = int(fault.place * len(data))
        data[place] ^= 1 << fault.step % 8
        latest.write_bytes(data if fault.kind == "bit-flip" else data[:place])
    try:
        newest = newest_whole(latest)
    except CheckpointError:  # the only one is damaged: delete it, as the line says
        newest = latest.unlink()
        if fault.kind not in DAMAGE_KINDS or previous_path(latest).exists():
            outcome.wrong = "no checkpoint is whole"
    step = torch.load(newest, weights_only=True)["step"] if newest else 0
    done = max((v for n, v in notes.items() if n.startswith("step")), default=0)
    outcome.lost_steps = int(done) - step
    if fault.kind == "tmpfs-full":
        (folder.parent / "ballast").unlink()  # make room
    none = Fault("none", step=-1)
    # Lines of metrics.jsonl that a full disk had no room for are lost; no step of the training is.
    same = same_weights if fault.kind == "tmpfs-full" else same_run
    statuses, output, hang, orphans, again = run(none, fault.ranks, *flags, "--resume=auto")
    outcome.hang, outcome.orphans = outcome.hang or hang, outcome.orphans + orphans
    if statuses != [0] * fault.ranks:
        outcome.wrong = f"resumed with {statuses}: {output[-500:]}"
    elif not same(Run(folder, [], ""), reference(fault)):
        outcome.wrong = "resumed to other bits"
    outcome.recovery_seconds = again.get("first", notes["fault"]) - notes["fault"]
    return outcome


def draw(kind: str, chance: random.Random) -> Fault:
    ranks = chance.choice((2, 2, 2, 3))
    rank = chance.randrange(ranks) if kind not in KINDS_OF_RANK_0 else 0
    workers, variant = chance.choice((0, 0, 0, 1)), chance.choice(list(VARIANTS))
    step = chance.randrange(1, STEPS // 2 if kind in SIGTERM_KINDS else STEPS - 1)
    fault = Fault(kind, variant, ranks, rank, step, workers, chance.random())
    if kind in KINDS_OF_LOADERS:
        return replace(fault, step=1 + step % LOADER_STARTS, workers=2)
    if kind in PAUSES:
        seconds = PAUSES[kind][1]
        return replace(fault, pause_seconds=seconds, timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
    return fault


def as_expected(outcome: FaultOutcome) -> bool:
    fault, statuses = outcome.fault, outcome.statuses
    if fault.kind in PAUSES:
        paused = outcome.seconds >= fault.pause_seconds  # or it did not happen
        went_on = set(statuses) == {0} and outcome.lost_steps == 0
        return paused and went_on and "error: " not in outcome.output
    if fault.kind in SIGTERM_KINDS:
        steps = re.findall(r"stops after step (\d+)", outcome.output)
        together = len(steps) == fault.ranks and len(set(steps)) == 1
        return together and outcome.lost_steps == 0 and set(statuses) == {0}
    if fault.kind in LINE_OF_KIND:
        lines = re.findall("error: (.*)", outcome.output)
        is_told = len(lines) == 1 and re.match(LINE_OF_KIND[fault.kind], lines[0])
        return bool(is_told) and set(statuses) == {2}
    if fault.kind in ("kill-all", *DAMAGE_KINDS):
        return True
    others = [code for rank, code in enumerate(statuses) if rank != fault.rank]
    lines = [line for line in outcome.output.splitlines() if " gives up at " in line]
    named = all(f"rank {fault.rank} " in line.split("`: ", 1)[1] for line in lines)
    return named and set(others) == {1} and len(lines) >= len(others)


def summarize(outcomes: list[FaultOutcome], kinds: dict[str, str]) -> dict:
    rows = {}
    for kind in (*kinds, "all"):
        some = [each for each in outcomes if kind in (each.fault.kind, "all")]
        row = {
            "what": kinds.get(kind, "all"),
            "faults": len(some),
            **{name: sum(each.bad()[name] for each in some) for name in some[0].bad()},
            "end_seconds_median": round(statistics.median(each.seconds for each in some), 2),
            "lost_steps_median": statistics.median(each.lost_steps for each in some),
            "lost_steps_max": max(each.lost_steps for each in some),
        }
        if again := sorted(each.recovery_seconds for each in some if each.recovery_seconds):
            row["recovery_seconds_median"] = round(statistics.median(again), 2)
            row["recovery_seconds_p95"] = round(again[int(0.95 * (len(again) - 1))], 2)
        rows[kind] = row
    return rows


def inject(faults: list[Fault], jobs: int) -> list[FaultOutcome]:
    for fault in faults:
        reference(fault)  # before two threads train the same one
    outcomes: list[FaultOutcome] = []
    for last in ThreadPoolExecutor(jobs).map(trial, faults):
        outcomes.append(last)
        verdict = f"BAD {last}" if any(last.bad().values()) else "good"
        print(f"{len(outcomes)}/{len(faults)}  {last.fault.kind}  {verdict}", flush=True)
    return outcomes


def main() -> None:
    file = RESULTS / "injected_faults.json"
    groups = {"faults": list(KINDS), "pauses": list(PAUSES)}
    names = [*groups, *KINDS, *PAUSES]
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--faults", default=360, type=int_at_least(1), help="how many, of all kinds in turn")
    add("--kinds", nargs="+", default=["faults"], choices=names, metavar="KIND", help="which")
    add("--jobs", default=2, type=int_at_least(1), help="trials at the same time")
    add("--without-saving", action="store_true", help=f"leave {file.name} as it is")
    args = parser.parse_args()
    chance = random.Random(1)
    if not can_mount():
        groups["faults"].remove("tmpfs-full")
        print(f"without tmpfs-full: {CANNOT_MOUNT}")
    kinds = [kind for name in args.kinds for kind in groups.get(name, [name])]
    faults = [draw(kinds[i % len(kinds)], chance) for i in range(args.faults)]
    outcomes = inject(faults, args.jobs)
    [section] = [name for name in groups if kinds == groups[name]] or [""]
    if section and not args.without_saving:  # the other section stays as it was measured
        settings = {"steps": STEPS, "checkpoint_every_steps": STEPS_PER_CHECKPOINT}
        settings |= {"jobs": args.jobs, "seed": 1, "timeout_seconds": faults[0].timeout_seconds}
        what = KINDS if section == "faults" else {kind: text for kind, (text, _) in PAUSES.items()}
        new = {"provenance": provenance(faults=len(faults), **settings)}
        new["kinds"] = summarize(outcomes, what)
        results = json.loads(file.read_text())
        save(file, results | (new if section == "faults" else {"pauses": new}))
    sys.exit(any(value for last in outcomes for value in last.bad().values()))


if __name__ == "__main__":
    main()
