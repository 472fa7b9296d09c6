"""Injects faults into real runs of survive/train.py; checks how they end and how they resume.

    python tests/faults.py --faults 306    # make faults: the campaign behind results/faults.json

Each trial trains with one fault, looks at what is left (no process, no torn checkpoint), resumes
with --resume auto, and compares the last checkpoint, to the bit, with that of a run without faults.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from support import ROOT, Run, _command, _with_env, chapter, context, free_port, train_once

from common.options import Parser, number

sys.path.append(str(ROOT / "benchmarks"))
from timing import provenance, save

durable = chapter("survive", "durable")
# Trials run side by side in threads. Each reads the status of its own processes, and of no others.
multiprocessing.process._cleanup = lambda: None  # type: ignore[attr-defined]

EPOCHS, BATCH, STEPS, EVERY = 2, 120, 24, 5  # 1,500 training samples of digits
TIMEOUT_SECONDS = 12  # --timeout-seconds of the ranks
HANG_SECONDS = 40  # an end later than this after the fault is a hang
SLOW_SECONDS = 0.05  # added to each step of a run that receives SIGTERM: its votes take time, too
FLAGS = (f"--epochs={EPOCHS}", f"--batch-size={BATCH}", f"--checkpoint-every-steps={EVERY}")
FLAGS += (f"--timeout-seconds={TIMEOUT_SECONDS}", f"--data-dir={ROOT / 'data'}", "--device=cpu")
VARIANTS = {
    "net": ("--model=net",),  # with dropout
    "net-bn": ("--model=net-bn",),  # with SyncBatchNorm
    "bf16": ("--model=net", "--amp=bf16"),
}
KINDS = {
    "stop": "SIGSTOP of a rank",
    "sleep": "a rank that sleeps and never returns",
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
    "nan": "the weights of a rank become NaN",
    "kill-in-save": "SIGKILL while the checkpoint is written, of which a part reaches the disk",
    "disk-full": "no room for the checkpoint (a limit on the size of files)",
    "bit-flip": "SIGKILL of all, and a bit of the last checkpoint flips",
    "truncation": "SIGKILL of all, and the last checkpoint is cut off",
}
SIGNALS = {"kill": signal.SIGKILL, "kill-keeper": signal.SIGKILL, "term": signal.SIGTERM}
SIGNALS |= {"stop": signal.SIGSTOP, "stop-keeper": signal.SIGSTOP}
KEEPER = ("stop-keeper", "kill-keeper")
SIGTERM = ("term", "term-all")
TOLD = {  # once, and all ranks end with status 2
    "nan": "error: (the loss of rank|a weight is nan or inf after step)",
    "disk-full": "error: cannot write",
}
DAMAGES = ("bit-flip", "truncation")
ANY_TIME = ("kill-any-time", "kill-all", "term-all", *DAMAGES)


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, in which rank of how many, at which step, and where it is random."""

    kind: str
    variant: str = "net"
    ranks: int = 2
    rank: int = 0
    step: int = 8
    workers: int = 0
    place: float = 0.5  # from 0 to 1: of the bytes of a file, or of the time of a step


NONE = Fault("none", step=-1)


@dataclass
class Outcome:
    fault: Fault
    statuses: list[int] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0  # from the fault to the end of the last process
    hang: bool = False
    orphans: int = 0
    lost_steps: int = 0  # done, but not in the checkpoint
    recovery_seconds: float = 0.0  # from the fault to the first step of the resumed run
    wrong: str = ""  # what is wrong in the resumed run


def _strike(kind: str, parameter: torch.Tensor) -> None:
    """The fault of a rank in a step."""
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "raise":
        raise ValueError("a bug")
    elif kind == "exit":
        sys.exit(0)
    elif kind == "os-exit":
        os._exit(0)
    elif kind == "nan":
        parameter.data.fill_(float("nan"))
    elif kind == "disk-full":  # the kernel refuses to let a file grow: its error is a real one
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    elif kind == "skip":  # the next sum over all ranks: the one in evaluate, which has no group
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **more: (
            real(*args, **more) if args[1:] else setattr(dist, "all_reduce", real)
        )


def _strike_any_time(fault: Fault, folder: Path) -> None:
    """This rank or all of them, by their process groups; this one last."""
    time.sleep(0.02 * fault.place)  # a step takes 5 to 20 ms
    (folder / "fault").write_text(str(time.time()))
    here = os.getpid()
    others = {int(note.suffix[1:]) for note in folder.glob("pid.*")} - {here}
    for pid in [here] if fault.kind == "kill-any-time" else [*others, here]:
        if fault.kind == "term-all":
            os.killpg(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGKILL)


def _inject(fault: Fault, rank: int, folder: Path) -> None:
    """Patch this process so that the fault happens in it."""
    done = 0
    real_step, real_save, real_fsync = torch.optim.SGD.step, torch.save, os.fsync

    def step(self: torch.optim.SGD, *args: object, **more: object) -> object:
        nonlocal done
        done += 1
        (folder / f"step.{rank}").write_text(str(done))
        if rank == 0 and done == 1:
            (folder / "first").write_text(str(time.time()))
        if fault.kind in SIGTERM:
            time.sleep(SLOW_SECONDS)
        if rank == fault.rank and done == fault.step and fault.kind in ANY_TIME:
            threading.Thread(target=_strike_any_time, args=(fault, folder)).start()
        elif rank == fault.rank and done == fault.step:
            (folder / "fault").write_text(str(time.time()))
            _strike(fault.kind, self.param_groups[0]["params"][0])
        return real_step(self, *args, **more)

    def cut(file: int, part: float) -> None:
        """Of what this process has written, only a part reaches the disk, and it dies."""
        (folder / "fault").write_text(str(time.time()))
        os.ftruncate(file, int(part * os.fstat(file).st_size))
        os.kill(os.getpid(), signal.SIGKILL)

    def save(state: dict, path: Path) -> None:
        real_save(state, path)
        if done >= fault.step and fault.place < 0.5:
            cut(os.open(path, os.O_RDWR), 2 * fault.place)

    def fsync(file: int) -> None:
        if done >= fault.step:
            cut(file, 2 * fault.place - 1)
        real_fsync(file)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    if fault.kind == "kill-in-save":
        torch.save, os.fsync = save, fsync


def _rank(rank: int, fault: Fault, flags: tuple, env: dict, folder: Path) -> None:
    os.setpgid(0, 0)  # with its loader workers: so an orphan can be found
    (folder / f"pid.{os.getpid()}").touch()
    default = multiprocessing.get_all_start_methods()[0]  # for loaders, as in a rank of torchrun
    multiprocessing.set_start_method(default, force=True)
    _inject(fault, rank, folder)
    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    script = str(ROOT / "survive" / "train.py")
    _with_env(env, _command, (rank, script, flags, str(ROOT), str(folder / "out")))


def _in_groups(processes: list) -> list[int]:
    """What still runs of these processes and of those that they have started."""
    found, groups = [], [process.pid for process in processes]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, leader = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue  # it has just ended
        if int(leader) in groups and state != "Z":
            found.append(int(stat.parent.name))
    return found


def run(ranks: int, flags: tuple, fault: Fault) -> tuple:
    """Statuses, output, whether it hung, orphans, and the notes of the ranks."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if fault.kind in KEEPER:  # without torchrun, rank 0 keeps the store
        env |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    args = [(rank, fault, flags, env, folder) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=each) for each in args]
    for process in processes:
        process.start()
    try:
        if fault.kind == "stop-keeper":  # rank 1 cannot learn the PID of rank 0: a launcher ends it
            processes[1].join(120)
            processes[0].kill()
        latest = time.monotonic() + 120
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


def _damage(path: Path, fault: Fault) -> None:
    data = bytearray(path.read_bytes())
    place = int(fault.place * len(data))
    if fault.kind == "truncation":
        data = data[:place]
    else:
        data[place] ^= 1 << fault.step % 8
    path.write_bytes(data)


def trial(fault: Fault) -> Outcome:
    """Train with the fault, look at what it left, resume, and compare with no fault at all."""
    from test_stages import same_run  # not in each rank, which imports this file

    flags = (*FLAGS, *VARIANTS[fault.variant])
    reference = train_once("survive", fault.ranks, *flags, dtype=torch.float32)
    outcome, folder = Outcome(fault), Path(tempfile.mkdtemp(prefix="trial-"))
    flags += (f"--workers={fault.workers}", f"--run-dir={folder}")
    found = run(fault.ranks, flags, fault)
    outcome.statuses, outcome.output, outcome.hang, outcome.orphans, notes = found
    assert "fault" in notes, f"{fault} did not happen: {outcome.output}"
    outcome.seconds = time.time() - notes["fault"]
    outcome.hang |= outcome.seconds > HANG_SECONDS
    latest = folder / "checkpoint.pt"
    if fault.kind in DAMAGES and latest.exists():
        _damage(latest, fault)
    try:
        newest = durable.newest_whole(latest)
    except durable.CheckpointError:  # the only one is damaged: delete it, as the line says
        newest = latest.unlink()
        if fault.kind not in DAMAGES or durable.previous(latest).exists():
            outcome.wrong = "no checkpoint is whole"
    step = torch.load(newest, weights_only=True)["step"] if newest else 0
    outcome.lost_steps = int(max(v for n, v in notes.items() if n.startswith("step"))) - step
    found = run(fault.ranks, (*flags, "--resume=auto"), NONE)
    statuses, output, hang, orphans, again = found
    outcome.hang, outcome.orphans = outcome.hang or hang, outcome.orphans + orphans
    if statuses != [0] * fault.ranks:
        outcome.wrong = f"resumed with {statuses}: {output[-500:]}"
    else:
        good = same_run(Run(folder, [], ""), reference)
        outcome.wrong += "" if good else "resumed to other bits"
        outcome.recovery_seconds = again.get("first", notes["fault"]) - notes["fault"]
    shutil.rmtree(folder)
    return outcome


def draw(kind: str, chance: random.Random) -> Fault:
    """A fault of this kind, random in all else."""
    ranks = chance.choice((2, 2, 2, 3))
    rank = 0 if kind in ("kill-in-save", "disk-full", *KEEPER) else chance.randrange(ranks)
    workers, variant = chance.choice((0, 0, 0, 1)), chance.choice(list(VARIANTS))
    step = chance.randrange(1, STEPS // 2 if kind in SIGTERM else STEPS - 1)
    return Fault(kind, variant, ranks, rank, step, workers, chance.random())


def expected(outcome: Outcome) -> str:
    """What is wrong with how the run with the fault has ended; nothing if all is as it must be."""
    fault, statuses = outcome.fault, outcome.statuses
    if fault.kind in SIGTERM:
        steps = re.findall(r"stops after step (\d+)", outcome.output)
        good = len(steps) == fault.ranks and len(set(steps)) == 1 and outcome.lost_steps == 0
        good &= statuses == [0] * fault.ranks
        return "" if good else f"statuses {statuses}, steps {steps}, lost {outcome.lost_steps}"
    if fault.kind in TOLD:
        lines = re.findall("error: .*", outcome.output)
        good = len(lines) == 1 and re.match(TOLD[fault.kind], lines[0])
        return "" if good and set(statuses) == {2} else f"statuses {statuses}, lines {lines}"
    if fault.kind in ("kill-all", *DAMAGES):
        return ""
    others = [code for rank, code in enumerate(statuses) if rank != fault.rank]
    name = f"rank {fault.rank} "
    lines = [line for line in outcome.output.splitlines() if " gives up at " in line]
    if set(others) != {1} or not all(name in line.split("`: ", 1)[1] for line in lines):
        return f"statuses {statuses}, lines {lines}"
    return "" if len(lines) >= len(others) else f"{len(lines)} ranks told whom they waited for"


def summarize(outcomes: list[Outcome]) -> dict:
    """One row a kind, and all together. Seconds: from the fault to the end, to the next step."""
    rows = {}
    for kind in (*KINDS, "all"):
        some = [each for each in outcomes if kind in (each.fault.kind, "all")]
        again = sorted(each.recovery_seconds for each in some if each.recovery_seconds)
        rows[kind] = {
            "what": KINDS.get(kind, "all"),
            "faults": len(some),
            "wrong_resumes": sum(bool(each.wrong) for each in some),
            "wrong_ends": sum(bool(expected(each)) for each in some),
            "hangs": sum(each.hang for each in some),
            "orphans": sum(each.orphans for each in some),
            "end_seconds_median": round(statistics.median(each.seconds for each in some), 2),
            "recovery_seconds_median": round(statistics.median(again), 2),
            "recovery_seconds_p95": round(again[int(0.95 * (len(again) - 1))], 2),
            "lost_steps_median": statistics.median(each.lost_steps for each in some),
            "lost_steps_max": max(each.lost_steps for each in some),
        }
    return rows


def main() -> None:
    parser = Parser(__doc__)
    for flag, default, least in (("--faults", 306, len(KINDS)), ("--seed", 1, 1), ("--jobs", 2, 1)):
        parser.add_argument(flag, default=default, type=number(int, least), metavar="N")
    parser.add_argument("--out", default=ROOT / "results" / "faults.json", type=Path)
    args = parser.parse_args()
    chance, kinds = random.Random(args.seed), list(KINDS)
    faults = [draw(kinds[i % len(kinds)], chance) for i in range(args.faults)]
    outcomes: list[Outcome] = []
    for last in ThreadPoolExecutor(args.jobs).map(trial, faults):
        outcomes.append(last)
        bad = last.wrong or expected(last) or last.hang or last.orphans
        verdict = f"BAD {asdict(last)}" if bad else "good"
        print(f"{len(outcomes)}/{args.faults}  {last.fault.kind}  {verdict}", flush=True)
    rows = summarize(outcomes)
    settings = {"steps": STEPS, "checkpoint_every_steps": EVERY, "timeout_seconds": TIMEOUT_SECONDS}
    where = provenance(faults=args.faults, seed=args.seed, jobs=args.jobs, **settings)
    save(args.out, {"provenance": where, "kinds": rows})
    print(json.dumps(rows["all"], indent=2))
    sys.exit(any(rows["all"][key] for key in ("wrong_resumes", "wrong_ends", "hangs", "orphans")))


if __name__ == "__main__":
    main()
