"""survive's four modules: each shows what it does, alone and in a project that is not this one."""

import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import FOLDERS, ROOT, chapter, command, context, fresh_module, run_ranks
from torch.utils.data import DataLoader, _utils

agree = chapter("survive", "agree")
durable = chapter("survive", "durable")
launch = chapter("survive", "launch")
watchdog = chapter("survive", "watchdog")
OWN_LOOP = ROOT / "tests" / "own_loop.py"

FORKS = """import functools, runpy, torch.multiprocessing as mp
mp.spawn = functools.partial(mp.start_processes, start_method="fork")  # imports torch once
runpy.run_path({!r}, run_name="__main__")
"""
SHOWS = {  # all that it prints, its lines sorted
    "launch": r"1 of 2 ranks start: rank 0 ends with: 2 ranks did not meet at 127.0.0.1:\d+ \(.+\n"
    r"2 of 2 ranks start: rank 0 has joined gloo\n2 of 2 ranks start: rank 1 has joined gloo",
    "agree": r"rank 0 stops after step (1[0-3]\d); votes took \d+ µs per step\n"
    r"rank 1 receives SIGTERM in step 100\nrank 1 stops after step \1; votes .+",
    "durable": r"a bit of checkpoint.pt flips: .+ whole checkpoint is checkpoint.before.pt\n"
    r"saved step 1; files: \['checkpoint.pt'\]\n"
    r"saved step 2; files: \['checkpoint.before.pt', 'checkpoint.pt'\]\nsaved step 3; files: .+\n"
    r"saved step 4; the damaged file has not replaced step 2 before it",
    "watchdog": r"error: rank 0 gives up at step 3, line \d+, `dist\.barrier\(\)`: "
    r"rank 1 did not arrive, last seen at step 3, line \d+, `.+`: killed, .+",
}
MODULES = {name: FOLDERS["survive"] / f"{name}.py" for name in SHOWS}


@pytest.mark.parametrize("name", SHOWS)
def test_each_module_shows_by_itself_what_it_does(name, tmp_path):
    (tmp_path / "show.py").write_text(FORKS.format(str(MODULES[name])))
    [(status, output)] = command(str(tmp_path / "show.py"))
    assert status == 0, output
    said = "\n".join(sorted(line for line in output.splitlines() if not line.startswith("[W")))
    assert re.fullmatch(SHOWS[name], said), output


def test_the_modules_need_torch_and_nothing_else_of_ours():
    def imports(path: Path) -> set[str]:
        names = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)
        return set(names) - sys.stdlib_module_names

    assert [imports(path) for path in MODULES.values()] == [{"torch"}] * 4
    assert imports(OWN_LOOP) == {"torch", *SHOWS}
    assert "common" in imports(FOLDERS["survive"] / "train.py"), "the control: our own script"
    marked = re.findall(r"^ *(.+  # \d+\. .+)$", OWN_LOOP.read_text(), re.M)
    assert len(marked) >= 10
    readme = (FOLDERS["survive"] / "README.md").read_text()
    assert [line for line in marked if line not in readme] == [], "the README shows other lines"


def _own_loop(rank: int, project: Path, folder: Path, how: signal.Signals | None) -> str:
    """One rank of the copied script; rank 1 receives a signal after the first checkpoint."""
    for name in SHOWS.keys() & sys.modules.keys():
        del sys.modules[name]
    sys.path[0:0] = [str(project)]
    sys.argv = ["own_loop.py", str(folder)]
    out, step = folder / f"out.{rank}", torch.optim.SGD.step

    def strike(*args: object, **more: object) -> object:
        if rank == 1 and how and (folder / "checkpoint.pt").exists():
            os.kill(os.getpid(), how)
        return step(*args, **more)

    torch.optim.SGD.step = strike
    with out.open("w") as file, redirect_stdout(file), redirect_stderr(file), suppress(SystemExit):
        runpy.run_path(str(project / "own_loop.py"), run_name="__main__")
    assert sys.modules["agree"].__file__ == str(project / "agree.py")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo need not listen to the network"
    return out.read_text()


def test_a_loop_of_ones_own_stops_resumes_to_the_bit_and_names_a_rank_that_is_killed(tmp_path):
    """Of somebody else: a folder with the four modules, and a script with a loop of its own."""
    for path in (*MODULES.values(), OWN_LOOP):
        shutil.copy(path, tmp_path)

    def run(name: str, how: signal.Signals | None = None, dying: tuple = ()) -> list[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        return run_ranks(2, _own_loop, tmp_path, tmp_path / name, how, dying=dying)

    def weight(path: Path) -> torch.Tensor:
        return torch.load(path, weights_only=True)["model"]["weight"]

    stops = run("parts", signal.SIGTERM)
    [step] = {int(re.fullmatch(r"rank \d ends after step (\d+)\n", said)[1]) for said in stops}
    assert 50 < step < 200
    for name in ("parts", "whole"):
        assert run(name) == [f"rank {rank} ends after step 200\n" for rank in range(2)]
    whole, parts = (tmp_path / name / "checkpoint.pt" for name in ("whole", "parts"))
    assert torch.equal(weight(whole), weight(parts))
    assert not torch.equal(weight(whole), weight(durable.previous(parts))), "the control"
    said, _ = run("killed", signal.SIGKILL, dying=(1,))
    place = r"step \d+, line \d+, `.+`: "
    verdict = f"rank 1 did not arrive, last seen at {place}killed, stopped, .+\n"
    assert re.fullmatch(f"error: rank 0 gives up at {place}{verdict}", said), said


def clock() -> SimpleNamespace:
    """The module time, for one module: it stands still unless that module sleeps."""
    made = SimpleNamespace(now=100.0, monotonic=lambda: made.now)
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    return made


# --- agree: when the ranks vote, and on what


def _votes(rank: int, seconds: list[list[float]], sigterm: int, without: tuple = ()) -> tuple:
    """Steps of so many seconds, per rank: in which steps the rank voted, and when it stopped."""
    module = fresh_module("survive", "agree.py", without)
    module.time = time = clock()
    dist.init_process_group("gloo", rank=rank)
    agreement, voted = module.Agreement(30), []
    start = agreement._start_vote
    agreement._start_vote = lambda: (start(), voted.append(step))
    for step, more in enumerate(seconds[rank], 1):
        time.sleep(more)
        if rank == 1 and step == sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        agreement.vote()
        if agreement.stopped:
            break
    return voted, step


def test_all_ranks_vote_in_the_same_steps_and_stop_after_the_same_one():
    """Though their steps take different times: rank 0 proposes, and the vote carries it to all.

    The control: each takes its own proposal instead of the one in the vote.
    """
    seconds = [[1 / 48] * 400, [0.03] * 400, [0.001] * 400]
    first, *others = run_ranks(3, _votes, seconds, 300)
    assert others == [first, first]
    assert {b - a for a, b in pairwise(first[0][1:])} == {12}, "0.25 s, at 21 ms per step"
    assert 300 < first[1] <= 300 + 2 * 12
    own = "sigterm = votes.tolist()[0]\n            self.interval = 5 if self.rank else 9\n"
    change = ("agree.py", "sigterm, self.interval = votes.tolist()\n", own)
    (_, one), (_, other) = run_ranks(2, _votes, [[0.02] * 400] * 2, 60, (change,))
    assert one != other


@pytest.mark.parametrize(
    ("seconds", "voted"),
    [
        ([1e-5] * 202, [1, 2, 52, 102, 152, 202]),
        ([0.0625] * 14, [1, 2, 6, 10, 14]),
        ([10.0] * 4, [1, 2, 3, 4]),
        ([1 / 64] * 64 + [0.125] * 29, [1, 2, 18, 34, 50, 66, 82, 91, 93]),
    ],
    ids=["very fast", "fast", "very slow", "eight times slower"],
)
def test_steps_between_two_votes_take_a_quarter_of_a_second_within_bounds(seconds, voted):
    """At least one step and at most 50. A vote is read one interval after it has started."""
    assert run_ranks(1, _votes, [seconds], 0) == [(voted, len(seconds))]


def _attempt(function: Callable, *args: object) -> str:
    try:
        return str(function(*args))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _decisions(rank: int) -> dict[str, str]:
    dist.init_process_group("gloo", rank=rank)
    agreement, model = agree.Agreement(30), torch.nn.Linear(2, 1)
    losses = torch.arange(4.0) + rank  # of steps 7 to 10
    bad = losses.where(losses < 3, float("nan"))

    def fail(*ranks: int) -> str:
        with agreement.fail_together():
            if rank in ranks:
                raise OSError(f"of rank {rank}")
        return "continues"

    def mean(losses: torch.Tensor, scale: float = 1.0) -> list[float]:
        return agreement.mean(losses, model, 10, scale).tolist()

    made = {"nobody fails": _attempt(fail), "two fail": _attempt(fail, 2, 1)}
    made["the same"] = _attempt(agreement.same, 7, "it")
    made["not the same"] = _attempt(agreement.same, 7 + (rank == 1), "it")
    made["scale"], made["no scale"] = (_attempt(mean, losses, 2.0**n) for n in (-24, -25))
    made["nan"] = _attempt(mean, bad)
    if rank == 1:
        agreement.sigterm.set()
        model.weight.data[0, 1] = float("inf")
    agreement.vote()
    return made | {"weight": _attempt(mean, losses), "read": str(agreement.stopped)}


TOLD, QUIET = "AgreementError: ", "SystemExit: 2"
HINT = ": nothing is saved from here on; try a lower --lr with --resume auto"
NO_SCALE = "gradients are inf or nan even with the loss scaled by 3e-08: try --amp bf16, or a"
DECIDED = {
    "nobody fails": ["continues"] * 3,
    "two fail": [QUIET, "OSError: of rank 1", QUIET],
    "the same": ["None"] * 3,
    "not the same": [QUIET, f"{TOLD}it is 8 on rank 1, 7 on rank 0", QUIET],
    "scale": ["[1.0, 2.0, 3.0, 4.0]"] * 3,
    "no scale": [f"{TOLD}{NO_SCALE} lower --lr", QUIET, QUIET],
    "nan": [f"{TOLD}the loss of rank 2 is nan in step 8{HINT}", QUIET, QUIET],
    "weight": [QUIET, f"{TOLD}a weight is nan or inf after step 10{HINT}", QUIET],
    "read": ["True"] * 3,  # by `mean`, at the end of an epoch
}


def test_all_ranks_decide_alike_and_the_lowest_that_failed_tells_why():
    ranks = run_ranks(3, _decisions)
    assert {name: [rank[name] for rank in ranks] for name in DECIDED} == DECIDED


# --- durable: a kill at any moment of a save


def _save(path: Path, step: int, module: object = durable, renamed: bool = False) -> None:
    """renamed: the block itself gives the file its name, as common's save_checkpoint does."""
    with module.replacing(path) as file:
        torch.save({"step": step}, file)
        if renamed:
            file.replace(path)


def step_of(path: Path | None) -> int | None:
    return torch.load(path, weights_only=True)["step"] if path else None


UNCHECKED = ("durable.py", "    if is_whole(path):  #", "    if path.exists():  #")


SAVES = [  # how many came before; whether the last of them is damaged; what a kill leaves, in order
    (0, False, (), [None, 3]),
    (2, False, (), [2, 3]),
    (2, True, (), [1, 3]),
    (2, True, (UNCHECKED,), [1, None, 3]),
]


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize(("earlier", "damaged", "change", "left"), SAVES)
def test_a_kill_in_each_line_leaves_a_whole_one(earlier, damaged, change, left, renamed, tmp_path):
    """The control: unchecked, a damaged one replaces the good one before it."""
    module = fresh_module("survive", "durable.py", change)
    newest, killed = [], True
    while killed:
        path = tmp_path / str(len(newest)) / "checkpoint.pt"
        path.parent.mkdir()
        for step in range(1, earlier + 1):
            _save(path, step)
        if damaged:
            path.write_bytes(path.read_bytes()[:-100])
        lines, last = count(), len(newest)

        def trace(frame, event, _):
            if frame.f_code.co_filename == module.__file__:
                if event == "line" and next(lines) == last:  # noqa: B023
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace

        if not (child := os.fork()):
            sys.settrace(trace)
            try:
                _save(path, 3, module, renamed)
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        told = _attempt(durable.newest_whole, path)
        newest.append(step_of(Path(told)) if told.startswith("/") else None)
    assert len(newest) >= 15
    assert list(dict.fromkeys(newest)) == left


@pytest.fixture
def two(tmp_path) -> Path:
    """The second of two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        _save(tmp_path / "checkpoint.pt", step)
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_that_was_cut_anywhere_or_lost_any_bit_is_whole_or_is_not_taken(two):
    """As after a kill while it, or its checksum, is written. Plain torch reads all that is taken.

    The checksum stands behind what torch.save has written; without a mark before it, there is none.
    """
    whole = two.read_bytes()
    end = whole.rindex(durable.MARK)
    digest = end + len(durable.MARK)
    assert len(whole) == digest + 64
    for size in (0, 1, end // 2, end - 1, end, end + 1, digest, len(whole) - 1, len(whole)):
        two.write_bytes(whole[:size])
        assert step_of(durable.newest_whole(two)) == (1 if size < end else 2), size
    for place in range(len(whole)):
        flipped = whole[place] ^ (1 << place % 8)
        two.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        assert durable.is_whole(two) == (end <= place < digest), place


@pytest.mark.parametrize("renamed", [False, True])
def test_a_save_that_fails_leaves_only_the_checkpoint_before(renamed, two):
    """As on a full disk. What is saved has reached the file when its bytes are sent to the disk."""
    synced = []
    with patch("os.fsync", lambda file: synced.append(os.fstat(file).st_size)):
        _save(two, 3)
    assert synced == [two.stat().st_size]
    with patch("os.fsync", side_effect=OSError("no room")):
        told = _attempt(_save, two, 4, durable, renamed)
    assert told.startswith(f"CheckpointError: cannot write {two} (no room), the one before is whol")
    assert {path.name: step_of(path) for path in two.parent.iterdir()} == {
        "checkpoint.before.pt": 3
    }


def test_a_new_run_sets_the_checkpoints_of_an_older_one_aside(two):
    """If it ends before its first checkpoint, --resume auto finds none. What it resumed, stays."""
    for own in (two, two.parent / ".." / two.parent.name / two.name, durable.previous(two)):
        durable.set_aside(two, own)
        assert durable.newest_whole(two) == two
    for resumed in (None, two.parent / "elsewhere.pt"):
        durable.set_aside(two, resumed)
        assert durable.newest_whole(two) is None
        (two.parent / "checkpoint.old.pt").rename(two)
    durable.set_aside(two, None)
    names = {path.name: step_of(path) for path in two.parent.iterdir()}
    assert names == {"checkpoint.old.pt": 2, "checkpoint.before.old.pt": 1}


# --- launch: who the ranks are, where they meet, and how their loaders end

START = ", expected a whole number: start with torchrun or srun"
TORCHRUN, SRUN = ("1", "1", "2", "2"), ("5", "1", "8", "4(x2)")
LAUNCHERS = [
    ([], [], "[0, 0, 1, 1]"),
    ([], SRUN, "[5, 1, 8, 4]"),
    (TORCHRUN, SRUN, "[1, 1, 2, 2]"),
    (("2", "1", "2", "2"), [], "LaunchError: RANK is 2, expected less than 2"),
    (("1", "one", "2", "2"), [], f"LaunchError: LOCAL_RANK is one{START}"),
    (("1", "1", "2"), SRUN, f"LaunchError: LOCAL_WORLD_SIZE is not set{START}"),
]


@pytest.mark.parametrize(("torchrun", "srun", "expected"), LAUNCHERS)
def test_the_launcher_is_torchrun_or_srun_or_nobody(torchrun, srun, expected):
    values = [*zip(launch.TORCHRUN, torchrun, strict=False), *zip(launch.SRUN, srun, strict=False)]
    with patch.object(os, "environ", dict(values)):
        assert _attempt(launch.read_launcher) == expected


def _meets(rank: int) -> tuple:
    """What ranks find in the store of torchrun after a restart; and whether they share GPUs."""
    found, said, own, limit = [], [], [], timedelta(seconds=30)
    for prefix in (True, False):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        launch.meet(rank, 3, limit, one_machine=prefix).set("address", "old")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        store = launch.meet(rank, 3, limit, one_machine=prefix)
        found.append(store.check(["address"]))
    launch.print = said.append
    for gpus in (2, 3):
        gpu, here = SimpleNamespace(uuid=f"GPU-{rank % gpus}"), dist.PrefixStore(str(gpus), store)
        with patch.multiple(torch.cuda, set_device=id, get_device_properties=lambda _: gpu):  # noqa: B023
            own.append(launch.own_gpus(here, torch.device("cuda", 0), rank, 3))
    return found, own, said


def test_restarted_ranks_find_nothing_of_those_before_and_tell_their_gpus_apart():
    """By uuid: srun may show each rank one GPU only, and all of them call it 0.

    The control is the store without a prefix: there, the address before the restart is found.
    """
    said = ["3 ranks share 2 GPUs: gloo, not nccl"], [], []
    assert run_ranks(3, _meets) == [([False, True], [False, True], each) for each in said]


def test_the_store_is_at_a_port_unless_a_rank_is_alone(monkeypatch):
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    for port, good in {0: False, 1: True, 2**16 - 1: True, 2**16: False}.items():
        monkeypatch.setenv("MASTER_PORT", str(port))
        told = _attempt(launch.meet, 0, 2, timedelta(1), True)
        expected = f"LaunchError: MASTER_PORT is {port}, expected a free port on rank 0's host"
        assert ("PrefixStore" in told) if good else (told == expected)
        assert isinstance(launch.meet(0, 1, timedelta(1), True), dist.HashStore)


def _loads(pipe, method: str) -> None:
    """A rank with two loader processes, which tells their PIDs; then it waits to be killed."""
    multiprocessing.set_start_method(method, force=True)
    inits = (launch.end_with_rank, _looks_often)
    loaders = [iter(DataLoader([0.0], num_workers=1, worker_init_fn=init)) for init in inits]
    pipe.send([(next(loader), loader._workers[0].pid)[1] for loader in loaders])
    time.sleep(60)


def _looks_often(_: int) -> None:
    _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # for its rank: not every 5 s


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_loader_ends_with_its_rank_and_not_before():
    """The control: of a fork server, the default since Python 3.14, a loader of torch stays."""
    pipes = {method: context.Pipe() for method in ("fork", "forkserver")}
    ranks = [context.Process(target=_loads, args=(pipes[name][1], name)) for name in pipes]
    for rank in ranks:
        rank.start()
    (forked, _), (served, control) = (pipe.recv() for pipe, _ in pipes.values())
    for loader in (forked, served):
        os.kill(loader, signal.SIGTERM)
    time.sleep(0.5)
    assert all(map(_runs, (forked, served, control))), "SIGTERM has ended one"
    for rank in ranks:
        rank.kill()
        rank.join()
    deadline = time.monotonic() + 8
    while any(map(_runs, (forked, served))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    assert list(map(_runs, (forked, served, control))) == [False, False, True]
    os.kill(control, signal.SIGKILL)


# --- watchdog: what it says of a rank that is missing


def dog_of(rank: int = 0, world_size: int = 2):
    """A watchdog of a module whose time stands still, and that time."""
    module = fresh_module("survive", "watchdog.py")
    module.time = clock()
    return module.Watchdog(dist.HashStore(), rank, world_size, __file__), module.time


HERE, THERE, END = "step 3, line 1, `a()`", "step 3, line 2, `b()`", "the end of its work"
WAITS, LOST, RUNS, GONE = (1, HERE, True), (1, THERE, True), (1, THERE, False), (0, THERE, False)


def last(*ranks: int, at: str = THERE) -> str:
    return "; ".join(f"rank {rank} did not arrive, last seen at {at}" for rank in ranks)


def places(ranks: int) -> str:
    return "; ".join(f"rank {rank} at {THERE if rank else HERE}" for rank in range(ranks))


SILENT, APART = (
    ": killed, stopped, aborted or unreachable",
    "the ranks wait in different collectives",
)
VERDICTS = [  # of each other rank: whether it still writes notes, its place, if a collective failed
    ([WAITS], "all ranks have arrived, but gloo: is the network open between the machines?"),
    ([LOST], f"{APART}, {places(2)}"),
    ([LOST] * 4, f"{APART}, {places(4)}"),
    ([RUNS], last(1)),
    ([WAITS, WAITS, RUNS], last(3)),
    ([GONE], last(1) + SILENT),
    ([(0, HERE, True)], last(1, at=HERE) + SILENT),
    ([RUNS, GONE], last(2) + SILENT),
    ([(0, END, False)], last(1, at=END)),
    ([None], last(1, at="its start") + SILENT),
    ([GONE] * 4, last(1, 2, 3, 4) + SILENT),
    ([GONE] * 5, last(1, 2, 3, 4) + "; 1 more" + SILENT),
]


@pytest.mark.parametrize(("others", "verdict"), VERDICTS)
def test_the_missing_rank_is_the_one_that_is_silent_or_else_where_most_are_not(others, verdict):
    dog, time = dog_of(0, len(others) + 1)
    dog.place, dog.lost = HERE, True

    def write_notes(seconds: float = 0) -> None:
        time.now += seconds
        for rank, note in enumerate(others, 1):
            if note:
                beats, place, lost = note
                note = json.dumps([7 + beats * seconds, place, lost, None])
                dog.store.set(f"rank {rank}", note)

    write_notes()
    time.sleep = write_notes
    assert dog._diagnose(RuntimeError("gloo")) == verdict
    assert time.now == 101, "it looks twice, a second apart"
    assert dog._diagnose(RuntimeError("of a later rank")) == verdict, "whoever comes later"


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_process_that_wrote_a_note_is_ended(same):
    """A PID is used again: the process that has it now may be anybody's."""
    dog, _ = dog_of()
    with subprocess.Popen(["sleep", "9"]) as process:
        who = watchdog.identity(process.pid)
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        assert abs(uptime - int(who[3]) / os.sysconf("SC_CLK_TCK")) < 10, "when it has started"
        note = [7, THERE, False, who if same else [*who[:-1], "0"]]
        dog.store.set("rank 1", json.dumps(note))
        assert dog._diagnose(RuntimeError("gloo")) == last(1) + SILENT
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        assert (process.poll() is None) != same
        process.kill()
    assert watchdog.identity(process.pid) is None


@pytest.mark.parametrize(("lost", "at"), [(False, 60.25), (True, 3.25)])
def test_a_rank_ends_when_the_store_no_longer_answers_or_another_rank_has_ended(lost, at):
    """It looks four times per second. The verdict comes after 2 s; another 1.5 s are for itself."""
    dog, time = dog_of()
    dog.lost, ended = lost, []
    dog._end = lambda verdict: ended.append((time.now - 100, verdict))

    def wait(seconds: float) -> bool:
        time.now += seconds
        if time.now == 102:
            dog.store.set("verdict", "why")
        return bool(ended) or time.now > 200

    dog.over = SimpleNamespace(wait=wait)
    dog._guard()
    assert ended.pop() == (at, watchdog.NO_STORE)
    time.now = 100.0
    dog.store.delete_key("verdict")
    dog._watch()
    assert ended == [(3.5, "why")]
    assert dog.answered == 103.5


NO_NETWORK = "all ranks have arrived, but {}: is the network open between the machines?"
OWN = "a parameter was not used in DistributedDataParallel"  # has a word that gloo's errors have
ERRORS = [
    (None, 0, ""),
    (SystemExit(2), 0, ""),
    (RuntimeError(OWN), 0, f"rank 0 ended at PLACE with RuntimeError: {OWN}"),
    (SystemExit("two\nlines"), 1, "rank 1 ended at PLACE with SystemExit: two lines"),
    (RuntimeError("gloo: closed"), 0, NO_NETWORK.format("gloo: closed")),
    (dist.DistError("no\nanswer"), 0, NO_NETWORK.format("no\nanswer")),
]


@pytest.mark.parametrize(("error", "rank", "verdict"), ERRORS, ids=repr)
def test_an_error_of_its_own_is_not_taken_for_a_missing_rank(error, rank, verdict, capsys):
    """It keeps its traceback, and the others learn of it. One of a collective is explained."""
    dog, time = dog_of(rank, rank + 1)
    dog.step, ended, place = lambda: 4, None, END
    try:
        with dog:
            assert dog.store.check([f"rank {rank}"]), "a note at once"
            if error:
                place = f"step 4, line {sys._getframe().f_lineno + 1}, `raise error`"
                raise error  # a comment
    except BaseException as caught:
        ended = caught
    lost, verdict = verdict.startswith("all"), verdict.replace("PLACE", place)
    assert repr(ended) == ("SystemExit(1)" if lost else repr(error))
    assert dog.store.compare_set("verdict", "", " ").decode() == (verdict or " ")
    said = f"error: rank {rank} gives up at {place}: {' '.join(verdict.split())}\n"
    assert capsys.readouterr().err == (said if lost else "")
    note = json.loads(dog.store.get(f"rank {rank}"))
    assert note[1:] == [place, lost, watchdog.identity(os.getpid())]
    assert time.now == 100 + lost + 0.5 * (error is not None and rank == 0)
    assert not dog.thread.is_alive()
