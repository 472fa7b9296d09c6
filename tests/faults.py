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
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from support import FOLDERS, ROOT, chapter, context, free_port

from common.options import Parser, number

sys.path.append(str(ROOT / "benchmarks"))
from timing import provenance, save

durable = chapter("survive", "durable")

EPOCHS, BATCH, STEPS, EVERY = 2, 120, 24, 5  # 1,500 training samples of digits
TIMEOUT_SECONDS = 12  # --timeout-seconds of the ranks
HANG_SECONDS = 40  # an end later than this is a hang
SLOW_SECONDS = 0.05  # added to each step of a run that receives SIGTERM: its votes take time, too
FLAGS = ("--device=cpu", f"--epochs={EPOCHS}", f"--batch-size={BATCH}")
FLAGS += (f"--checkpoint-every-steps={EVERY}", f"--timeout-seconds={TIMEOUT_SECONDS}")
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
KEEPER = ("stop-keeper", "kill-keeper")
SIGTERM = ("term", "term-all")
TOLD = {  # once, and all ranks end with status 2
    "nan": "error: (the loss of rank|a weight is nan or inf after step)",
    "disk-full": "error: cannot write",
}
DAMAGES = ("bit-flip", "truncation")


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
    match kind:
        case "kill" | "kill-keeper":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "stop" | "stop-keeper":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)
        case "raise":
            raise ValueError("a bug")
        case "exit":
            sys.exit(0)
        case "os-exit":
            os._exit(0)
        case "nan":
            parameter.data.fill_(float("nan"))
        case "disk-full":  # the kernel refuses to let a file grow: its error is a real one
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
        case "skip":  # the next sum over all ranks: the one in evaluate
            real = dist.all_reduce

            def skip(tensor: torch.Tensor, *group: object, **more: object) -> object:
                if group:  # of a vote
                    return real(tensor, *group, **more)
                dist.all_reduce = real

            dist.all_reduce = skip


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
        if rank == fault.rank and done == fault.step:
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


def _rank(rank: int, fault: Fault | None, flags: tuple, env: dict, folder: Path) -> None:
    os.setpgid(0, 0)  # with its loader workers: so an orphan can be found
    os.environ.update(env)
    torch.set_num_threads(1)
    default = multiprocessing.get_all_start_methods()[0]  # for loaders, as in a rank of torchrun
    multiprocessing.set_start_method(default, force=True)
    with (folder / f"out.{rank}").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _inject(fault or Fault("none", step=-1), rank, folder)
    sys.argv = ["train.py", *flags]
    sys.path.insert(0, str(FOLDERS["survive"]))
    try:
        runpy.run_path(str(FOLDERS["survive"] / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    for child in multiprocessing.active_children():
        child.terminate()  # as the end of an interpreter does, which os._exit leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_group(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, leader = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue  # it has just ended
        if int(leader) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def steps_of(folder: Path, rank: int) -> int:
    """The steps that a rank has begun, as it writes them down."""
    try:
        return int((folder / f"step.{rank}").read_text() or 0)
    except OSError:
        return 0


def _ended(processes: list, folder: Path) -> bool:
    """Wait until they end, at most for so long after the fault; without one, after the start."""
    began, fault = time.time(), folder / "fault"
    while any(process.is_alive() for process in processes):
        if time.time() > (fault.stat().st_mtime if fault.exists() else began + 80) + HANG_SECONDS:
            return False
        time.sleep(0.02)
    return True


def _gone(groups: list[int], seconds: float) -> list[int]:
    """Wait until the groups are empty; what is left after that many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for group in groups for pid in _in_group(group)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return left


def run(
    ranks: int, flags: tuple, fault: Fault | None = None
) -> tuple[list[int], str, bool, int, dict[str, float]]:
    """Statuses, output, whether it hung, orphans, and the notes of the ranks."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, port = [], str(free_port())
    for rank in range(ranks):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if fault and fault.kind in KEEPER:  # without torchrun, rank 0 keeps the store
            env |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        args = (rank, fault, flags, env, folder)
        processes.append(context.Process(target=_rank, args=args))
        processes[-1].start()
    try:
        if fault and fault.kind in ("kill-any-time", "kill-all", "term-all", *DAMAGES):
            while steps_of(folder, fault.rank) < fault.step and processes[0].is_alive():
                time.sleep(0.002)
            time.sleep(0.02 * fault.place)  # a step takes 5 to 20 ms
            (folder / "fault").write_text(str(time.time()))
            struck = [processes[fault.rank]] if fault.kind == "kill-any-time" else processes
            for process in struck:
                how = signal.SIGTERM if fault.kind == "term-all" else signal.SIGKILL
                os.killpg(process.pid or 0, how) if how == signal.SIGTERM else process.kill()
        if fault and fault.kind == "stop-keeper":
            _ended(processes[1:2], folder)  # it cannot learn the PID of rank 0:
            processes[0].kill()  # a launcher does this
        hang = not _ended(processes, folder)
        groups = [process.pid for process in processes if process.pid]
        orphans = [] if hang else _gone(groups, seconds=15)
    finally:
        for process in processes:
            for pid in _in_group(process.pid or -1):
                os.kill(pid, signal.SIGKILL)
            process.join()
    statuses = [process.exitcode or 0 for process in processes]
    output = "".join((folder / f"out.{rank}").read_text() for rank in range(ranks))
    names = [*(f"step.{rank}" for rank in range(ranks)), "fault", "first"]
    texts = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
    notes = {name: float(text) for name, text in texts.items() if text}  # killed while it wrote
    shutil.rmtree(folder)
    return statuses, output, hang, len(orphans), notes


@cache
def reference(variant: str, ranks: int) -> dict:
    """The last checkpoint of a run without a fault."""
    folder = Path(tempfile.mkdtemp(prefix="reference-"))
    flags = (*FLAGS, *VARIANTS[variant], f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}")
    statuses, output, *_ = run(ranks, flags)
    assert statuses == [0] * ranks, output
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    content["losses of the run"] = _losses(folder)
    shutil.rmtree(folder)
    return content


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def difference(ours: dict, theirs: dict, losses: list[float]) -> str:
    """Where two checkpoints, or the losses on the way to them, are not the same to the bit."""
    pairs = {name: (tensor, theirs["model"][name]) for name, tensor in ours["model"].items()}
    states = ours["optimizer"]["state"], theirs["optimizer"]["state"]
    for i, state in states[0].items():
        pairs[f"momentum {i}"] = (state["momentum_buffer"], states[1][i]["momentum_buffer"])
    wrong = [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    wrong += [k for k in ("epoch", "epoch_step", "step", "scaler") if ours.get(k) != theirs.get(k)]
    return ", ".join(wrong + ["losses"] * (losses != theirs["losses of the run"]))


def _damage(path: Path, fault: Fault) -> None:
    data = bytearray(path.read_bytes())
    if fault.kind == "truncation":
        data = data[: int(fault.place * len(data))]
    else:
        data[int(fault.place * len(data))] ^= 1 << fault.step % 8
    path.write_bytes(data)


def trial(fault: Fault) -> Outcome:
    """Train with the fault, look at what it left, resume, and compare with no fault at all."""
    outcome, folder = Outcome(fault), Path(tempfile.mkdtemp(prefix="trial-"))
    flags = (*FLAGS, *VARIANTS[fault.variant], f"--workers={fault.workers}")
    flags += (f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}")
    outcome.statuses, outcome.output, outcome.hang, outcome.orphans, notes = run(
        fault.ranks, flags, fault
    )
    assert "fault" in notes, f"{fault} did not happen: {outcome.output}"
    outcome.seconds = time.time() - notes["fault"]
    latest = folder / "checkpoint.pt"
    if fault.kind in DAMAGES and latest.exists():
        _damage(latest, fault)
    try:
        found = durable.newest_whole(latest)
    except durable.CheckpointError:  # the only one is damaged: delete it, as the line says
        found = latest.unlink()
        if fault.kind not in DAMAGES or durable.previous(latest).exists():
            outcome.wrong = "no checkpoint is whole"
    step = torch.load(found, weights_only=True)["step"] if found else 0
    outcome.lost_steps = int(max(v for n, v in notes.items() if n.startswith("step"))) - step
    statuses, output, hang, orphans, again = run(fault.ranks, (*flags, "--resume=auto"))
    outcome.hang |= hang
    outcome.orphans += orphans
    if statuses != [0] * fault.ranks:
        outcome.wrong = f"resumed with {statuses}: {output[-500:]}"
    else:
        ours = torch.load(latest, weights_only=True)
        outcome.wrong += difference(ours, reference(fault.variant, fault.ranks), _losses(folder))
        if "first" in again:
            outcome.recovery_seconds = again["first"] - notes["fault"]
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
    natural = number(int, 1)
    least = number(int, len(KINDS))
    parser.add_argument("--faults", default=306, type=least, metavar="N", help="of all kinds")
    parser.add_argument("--seed", default=1, type=natural, metavar="N", help="of the faults")
    parser.add_argument("--jobs", default=2, type=natural, metavar="N", help="trials at a time")
    out = ROOT / "results" / "faults.json"
    parser.add_argument("--out", default=out, type=Path, metavar="PATH", help="for the results")
    args = parser.parse_args()
    chance, kinds = random.Random(args.seed), list(KINDS)
    faults = [draw(kinds[i % len(kinds)], chance) for i in range(args.faults)]
    outcomes: list[Outcome] = []
    # Processes, not threads: multiprocessing reads the status of all its children in each of them.
    pool = ProcessPoolExecutor(args.jobs, mp_context=context)
    for i, last in enumerate(pool.map(trial, faults)):
        outcomes.append(last)
        bad = last.wrong or expected(last) or last.hang or last.orphans
        print(f"{i + 1}/{args.faults}  {last.fault.kind}  {'BAD' if bad else 'good'}", flush=True)
        if bad:
            print(asdict(last), flush=True)
    rows = summarize(outcomes)
    settings = {"steps": STEPS, "checkpoint_every_steps": EVERY, "timeout_seconds": TIMEOUT_SECONDS}
    where = provenance(faults=args.faults, seed=args.seed, jobs=args.jobs, **settings)
    save(args.out, {"provenance": where, "kinds": rows})
    print(json.dumps(rows["all"], indent=2))
    sys.exit(any(rows["all"][key] for key in ("wrong_resumes", "wrong_ends", "hangs", "orphans")))


if __name__ == "__main__":
    main()
