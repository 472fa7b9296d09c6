"""survive's four modules: each shows what it does, alone and in a project that is not this one."""

import ctypes
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import tracemalloc
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, _utils

from support import FOLDERS, chapter, command, context, fresh_module, launcher, run_ranks
from test_collectives import of_all_ranks, on_ranks, runs

agree = chapter("survive", "agree")
durable = chapter("survive", "durable")
launch = chapter("survive", "launch")
watchdog = chapter("survive", "watchdog")
OWN_LOOP = FOLDERS["survive"] / "own_loop.py"

SHOWS = {  # all that it prints, its lines sorted
    "launch": r"1 of 2 ranks start: rank 0 ends with: 2 ranks did not meet .+"
    r"(\n2 of 2 ranks start: rank [01] has joined gloo){2}",
    "agree": r"rank 0 stops after step (1[0-3]\d); votes .+\nrank 1 receives .+ in step 100\n"
    r"rank 1 stops after step \1; votes .+",
    "watchdog": r"error: rank 0 gives up at step 3, line \d+, `dist\.barrier\(\)`: "
    r"rank 1 did not arrive, last seen at step 3, line \d+, `.+`: killed, .+",
}
MODULES = {name: FOLDERS["survive"] / f"{name}.py" for name in (*SHOWS, "durable")}


@pytest.mark.parametrize("name", SHOWS)
def test_each_module_shows_by_itself_what_it_does(name):
    [(status, output)] = command(str(MODULES[name]))
    assert status == 0, output
    said = "\n".join(sorted(line for line in output.splitlines() if not line.startswith("[W")))
    assert re.fullmatch(SHOWS[name], said), output


def test_the_modules_need_torch_and_each_other_and_nothing_else_of_ours():
    texts, line = (
        [path.read_text() for path in (OWN_LOOP, *MODULES.values())],
        r"^ *(?:from|import) (\w+)",
    )
    loop, *found = ({*re.findall(line, text, re.M)} - sys.stdlib_module_names for text in texts)
    assert (loop, [each - {*MODULES} for each in found]) == ({"torch", *MODULES}, [{"torch"}] * 4)
    marked = re.findall(r"^ *(.+  # \d+\. .+)$", OWN_LOOP.read_text(), re.M)
    page = OWN_LOOP.with_suffix(".md").read_text()
    assert len([line for line in marked if line in page]) == len(marked) >= 10


STEP = "        optimizer.step()\n"
STRIKE = f"""{STEP}        import os
        assert Path(durable.__file__).parent == Path(__file__).parent
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo need not listen to the network"
        if agreement.rank == 1 and CHECKPOINT.exists() and "SENT" in os.environ:
            os.kill(os.getpid(), 15)
"""


def test_a_loop_of_ones_own_stops_and_resumes_to_the_bit(tmp_path):
    for path in MODULES.values():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "own_loop.py").write_text(OWN_LOOP.read_text().replace(STEP, STRIKE))

    def run(name: str, **sent: str) -> list[int]:
        (tmp_path / name).mkdir(exist_ok=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = launcher(store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"} | sent
        ended = command(str(tmp_path / "own_loop.py"), name, ranks=2, env=env, where=tmp_path)
        return [int(re.search(r"ends after step (\d+)", said)[1]) for _, said in ended]

    step, other = run("parts", SENT="SIGTERM to rank 1, after the first checkpoint")
    assert 50 < step == other < 200
    assert run("parts") == run("whole") == [200, 200]
    files = ("whole/checkpoint.pt", "parts/checkpoint.pt", "parts/checkpoint.before.pt")
    states = (torch.load(tmp_path / file, weights_only=True) for file in files)
    whole, parts, earlier = (state["model"]["weight"] for state in states)
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, earlier), "the control"


def clock() -> SimpleNamespace:
    """The module time, for one module: it stands still unless that module sleeps."""
    made = SimpleNamespace(now=100.0, monotonic=lambda: made.now)
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    return made


def votes(rank: int, seconds: list[float], sigterm: int, without: tuple = ()) -> tuple:
    """Steps of so many seconds: in which of them this rank voted, and after which it stopped."""
    module = fresh_module("survive", "agree.py", without)
    module.time = time = clock()
    agreement, voted = module.Agreement(30), []
    start = agreement._start_vote
    agreement._start_vote = lambda: (start(), voted.append(step))
    for step, more in enumerate(seconds, 1):
        time.sleep(more)
        if rank == 1 and step == sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        agreement.vote()
        if agreement.stopped:
            break
    return voted, step


@on_ranks(3)
def test_all_ranks_vote_in_the_same_steps_and_stop_after_the_same_one(rank):
    """Though their steps differ. The control: each takes its own proposal, not the vote's."""
    first, *others = of_all_ranks(votes(rank, [(1 / 48, 0.03, 0.001)[rank]] * 400, 300))
    assert others == [first, first]
    assert 300 < first[1] <= 300 + 2 * 12
    own = "sigterm = votes.tolist()[0]\n            self.interval = 5 if self.rank else 9\n"
    change = ("agree.py", "sigterm, self.interval = votes.tolist()\n", own)
    one, other, _ = of_all_ranks(votes(rank, [0.02] * 400, 60, (change,)))
    assert one != other


@on_ranks(1)
def test_steps_between_two_votes_take_a_quarter_of_a_second_within_bounds(rank):
    for seconds, voted in (
        ([1e-5] * 202, [1, 2, 52, 102, 152, 202]),
        ([0.0625] * 14, [1, 2, 6, 10, 14]),
        ([10.0] * 4, [1, 2, 3, 4]),
        ([1 / 64] * 64 + [0.125] * 29, [1, 2, 18, 34, 50, 66, 82, 91, 93]),
    ):
        assert votes(rank, seconds, 0) == (voted, len(seconds))


def _attempt(function, *args: object) -> str:
    try:
        return str(function(*args))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


TOLD, QUIET = "AgreementError: ", "SystemExit: 2"
HINT = ": nothing is saved from here on; try a lower --lr with --resume auto"
NO_SCALE = "gradients are inf or nan even with the loss scaled by 3e-08: try --amp bf16, or a"


@on_ranks(3)
def test_all_ranks_decide_alike_and_the_lowest_that_failed_tells_why(rank):
    agreement, model = agree.Agreement(30), torch.nn.Linear(2, 1)
    losses = torch.arange(4.0) + rank  # of steps 7 to 10

    def fail(*ranks: int) -> None:
        with agreement.fail_together():
            if rank in ranks:
                raise OSError(f"of rank {rank}")

    def mean(losses: torch.Tensor, scale: float = 1.0) -> list[float]:
        return agreement.mean(losses, model, 10, scale).tolist()

    made = {"two fail": _attempt(fail, 2, 1)}
    made["not the same"] = _attempt(agreement.same, 7 + (rank == 1), "it")
    made["scale"], made["no scale"] = (_attempt(mean, losses, 2.0**n) for n in (-24, -25))
    made["nan"] = _attempt(mean, losses.where(losses < 3, float("nan")))
    if rank == 1:
        agreement.sigterm.set()
        model.weight.data[0, 1] = float("inf")
    agreement.vote()
    made |= {"weight": _attempt(mean, losses), "read": str(agreement.stopped)}
    assert {name: of_all_ranks(told) for name, told in made.items()} == {
        "two fail": [QUIET, "OSError: of rank 1", QUIET],
        "not the same": [QUIET, f"{TOLD}it is 8 on rank 1, 7 on rank 0", QUIET],
        "scale": ["[1.0, 2.0, 3.0, 4.0]"] * 3,
        "no scale": [f"{TOLD}{NO_SCALE} lower --lr", QUIET, QUIET],
        "nan": [f"{TOLD}the loss of rank 2 is nan in step 8{HINT}", QUIET, QUIET],
        "weight": [QUIET, f"{TOLD}a weight is nan or inf after step 10{HINT}", QUIET],
        "read": ["True"] * 3,  # by `mean`, at the end of an epoch
    }


def _save(path: Path, step: int, module: object = durable) -> None:
    with module.replacing(path) as file:
        torch.save({"step": step}, file)


def step_of(path: Path | None) -> int | None:
    return torch.load(path, weights_only=True)["step"] if path else None


CHECK = "    if is_unchanged(path) or is_whole(path):\n"
UNCHECKED = ("durable.py", CHECK, "    if path.exists():\n")
SAVES = [  # how many came before; whether the last of them is damaged; what a kill leaves, in order
    (0, False, (), [None, 3]),
    (2, False, (), [2, 3]),
    (2, True, (), [1, 3]),
    (2, True, (UNCHECKED,), [1, None, 3]),
]


@pytest.mark.parametrize(("earlier", "damaged", "change", "left"), SAVES)
@pytest.mark.parametrize("same_process", [True, False])
def test_a_kill_in_each_line_leaves_a_whole_one(
    earlier, damaged, change, left, same_process, tmp_path, monkeypatch
):
    """Whether this process has saved what came before, or another one, and it has to be read. The
    control: unchecked, a damaged one replaces the good one before it."""
    monkeypatch.setattr(os, "fsync", id)  # it outlasts a power cut, not a kill, and takes its time
    module = fresh_module("survive", "durable.py", change)
    newest, killed = [], True
    while killed:
        path = tmp_path / str(len(newest)) / "checkpoint.pt"
        path.parent.mkdir()
        for step in range(1, earlier + 1):
            _save(path, step, module if same_process else durable)
        if damaged:
            path.write_bytes(path.read_bytes()[:-100])
        seen, last = set(), len(newest)

        def trace(frame, event, _):
            if frame.f_code.co_filename == module.__file__:
                if event == "line" and frame.f_lineno not in seen:  # noqa: B023
                    seen.add(frame.f_lineno)  # noqa: B023
                    if len(seen) > last:  # noqa: B023
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace

        if not (child := os.fork()):
            sys.settrace(trace)
            try:
                _save(path, 3, module)
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        told = _attempt(durable.newest_whole, path)
        newest.append(step_of(Path(told)) if told.startswith("/") else None)
    assert len(newest) >= 15
    assert list(dict.fromkeys(newest)) == left


@pytest.fixture
def two(tmp_path) -> Path:
    for step in (1, 2):
        _save(tmp_path / "checkpoint.pt", step)
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_that_was_cut_anywhere_or_lost_a_bit_is_whole_or_is_not_taken(two):
    """As after a kill while it, or its checksum, is written. torch reads what is taken."""
    whole = two.read_bytes()
    end = whole.rindex(durable.MARK)
    digest = end + len(durable.MARK)
    for size in (0, 1, end // 2, end - 1, end, end + 1, digest, len(whole) - 1, len(whole)):
        two.write_bytes(whole[:size])
        assert step_of(durable.newest_whole(two)) == (1 if size < end else 2), size
    for place in (*range(0, end, 7), *range(end, len(whole))):
        flipped = whole[place] ^ (1 << place % 8)
        two.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        assert durable.is_whole(two) == (end <= place < digest), place


def test_a_save_that_fails_leaves_only_the_checkpoint_before(two):
    """As on a full disk. What is saved has reached the file when its bytes are sent to the disk."""
    synced = []
    with patch("os.fsync", lambda file: synced.append(os.fstat(file).st_size)):
        _save(two, 3)
    assert synced == [two.stat().st_size]
    with patch("os.fsync", side_effect=OSError("no room")):
        told = _attempt(_save, two, 4)
    assert told.startswith(f"CheckpointError: cannot write {two} (no room), the one before is whol")
    left = [(path.name, step_of(path)) for path in two.parent.iterdir()]
    assert left == [("checkpoint.before.pt", 3)]


def test_a_bit_that_flips_after_a_save_is_seen_by_the_next_one(two):
    """Without a new size, and within a tick of the disk's clock. The control: the time is set."""
    time_before, data = two.stat().st_mtime_ns, bytearray(two.read_bytes())
    data[len(data) // 2] ^= 1
    for restored, steps in ((False, [3, 1]), (True, [3, None])):
        two.write_bytes(data)
        if restored:
            os.utime(two, ns=(time_before, time_before))
            durable.written[two] = durable.description(two)
        _save(two, 3)
        before = durable.previous(two)
        assert [step_of(two), step_of(before) if durable.is_whole(before) else None] == steps


def test_a_write_error_in_the_middle_is_told_after_torch_has_saved(two):
    """torch.save calls write from C++, where an exception might end the process."""
    saved = []

    def save() -> None:
        with durable.replacing(two) as file:
            torch.save({"weights": torch.zeros(9, 10_000)}, file)
            saved.append(file.error.strerror)

    two.with_suffix(".tmp").symlink_to("/dev/full")
    assert "No space left on device" in _attempt(save)
    assert saved == ["No space left on device"], "torch.save came to its end"
    assert [path.name for path in two.parent.iterdir()] == ["checkpoint.before.pt"]


def read_bytes(function, *args: object) -> int:
    """What this process reads from files in the meantime, from the disk or from its cache."""
    counts = [0, 0]
    for turn in range(2):
        counts[turn] = int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])
        if turn == 0:
            function(*args)
    return counts[1] - counts[0]


def peak_bytes(function, *args: object) -> int:
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MEGABYTE = 2**20


@pytest.mark.parametrize("sealed", [True, False])
def test_a_check_reads_a_file_once_and_holds_a_small_part_of_it(sealed, tmp_path):
    """The control holds and reads twice the file, as the check once did."""
    path, state = tmp_path / "checkpoint.pt", {"weights": torch.ones(4 * MEGABYTE)}
    if sealed:
        with durable.replacing(path) as file:
            torch.save(state, file)
    else:
        torch.save(state, path)
    size = path.stat().st_size
    assert durable.is_whole(path)
    assert size <= read_bytes(durable.is_whole, path) < size + MEGABYTE
    assert peak_bytes(durable.is_whole, path) < 4 * MEGABYTE < size
    control = lambda: path.read_bytes() + path.read_bytes()  # noqa: E731
    assert read_bytes(control) > 2 * size
    assert peak_bytes(control) > 2 * size


def test_a_save_reads_nothing_unless_another_process_has_saved_before(tmp_path):
    """Neither the checkpoint before nor the new one. The control: who did not save must read."""
    path, state = tmp_path / "checkpoint.pt", {"weights": torch.ones(2 * MEGABYTE)}
    other = fresh_module("survive", "durable.py")

    def save(module) -> None:
        with module.replacing(path) as file:
            torch.save(state, file)

    save(durable)
    size = path.stat().st_size
    assert read_bytes(save, durable) < MEGABYTE
    assert size < read_bytes(save, other) < size + MEGABYTE
    assert durable.is_whole(path)


@on_ranks(3)
def test_one_rank_reads_a_file_for_all_that_see_it_and_all_learn_the_answer(rank):
    """Three ways to see the files: one disk; a disk for rank 1 alone; a file that rank 1 lacks."""
    folder, agreement, read = Path(_shared_folder(rank)), agree.Agreement(30), []

    def check(path: Path) -> bool:
        read.append(path.name)
        return path.read_text() == "whole"

    def ask(*names: str) -> list:
        read.clear()
        found = agreement.first(check, [folder / name for name in names])
        return of_all_ranks((found and found.name, tuple(read)))

    if rank == 0:
        for name in ("a", "b", "0", "2"):
            (folder / name).write_text("whole")
        for name in ("1", "bad"):
            (folder / name).write_text("damaged")
        os.link(folder / "a", folder / "other name of a")
    agreement.barrier()
    assert ask("a", "b") == [("a", ("a",)), ("a", ()), ("a", ())], "the second is not needed"
    assert ask("bad", "b") == [("b", ("bad", "b")), ("b", ()), ("b", ())]
    assert ask("bad") == [(None, ("bad",)), (None, ()), (None, ())]
    name = "other name of a" if rank == 2 else "a"
    assert ask(name) == [("a", ("a",)), ("a", ()), ("other name of a", ())], "by its inode"
    own = ask(str(rank), "b")  # of rank 1, the first is damaged, and nobody else may answer for it
    assert own == [("0", ("0", "b")), ("b", ("1",)), ("2", ("2",))]
    missing = ask("nowhere" if rank == 1 else "a", "b")
    assert missing == [("a", ("a", "b")), ("b", ()), ("a", ())]


def _shared_folder(rank: int) -> str:
    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


START = ", expected a whole number: start with torchrun or srun"
TORCHRUN, SRUN = ("1", "1", "2", "2"), ("5", "1", "8", "4(x2)")
LAUNCHERS = [
    ([], SRUN, "[5, 1, 8, 4]"),
    (TORCHRUN, SRUN, "[1, 1, 2, 2]"),
    (("2", "1", "2", "2"), [], "LaunchError: RANK is 2, expected less than 2"),
    (("1", "one", "2", "2"), [], f"LaunchError: LOCAL_RANK is one{START}"),
    (("1", "1", "2"), SRUN, f"LaunchError: LOCAL_WORLD_SIZE is not set{START}"),
    (("0", "0", "1", "1"), ("1", "1", "2", "2"), "[0, 0, 1, 1]"),  # a torchrun in each of two tasks
    (("1",), [], f"LaunchError: LOCAL_RANK is not set{START}"),  # RANK alone
    (("1", "1", "2x", "2"), [], f"LaunchError: WORLD_SIZE is 2x{START}"),
    ([], ("1", "1", "2", "two"), f"LaunchError: SLURM_STEP_TASKS_PER_NODE is two{START}"),
]


@pytest.mark.parametrize(("torchrun", "srun", "expected"), LAUNCHERS)
def test_the_launcher_is_torchrun_or_srun_or_nobody(torchrun, srun, expected):
    values = [*zip(launch.TORCHRUN, torchrun, strict=False), *zip(launch.SRUN, srun, strict=False)]
    with patch.object(os, "environ", dict(values)):
        assert _attempt(launch.read_launcher) == expected


@on_ranks(3)
def test_restarted_ranks_find_nothing_of_those_before_and_tell_their_gpus_apart(rank):
    """By uuid: srun may show each rank one GPU only. The control is a store without a prefix."""
    limit, said = timedelta(seconds=30), []
    for prefix in (True, False):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        launch.open_store(rank, 3, limit, one_machine=prefix).set("address", "old")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        store = launch.open_store(rank, 3, limit, one_machine=prefix)
        assert store.check(["address"]) != prefix
    for gpus in (2, 3):
        gpu, here = SimpleNamespace(uuid=f"GPU-{rank % gpus}"), dist.PrefixStore(str(gpus), store)
        cuda = patch.multiple(torch.cuda, set_device=id, get_device_properties=lambda _: gpu)  # noqa: B023
        with cuda, patch.object(launch, "print", said.append, create=True):
            assert launch.own_gpus(here, torch.device("cuda", 0), rank, 3) == (gpus == 3)
    assert said == ["3 ranks share 2 GPUs: gloo, not nccl"] * (rank == 0)


@on_ranks(3)
def test_all_ranks_choose_the_same_backend_though_their_machines_differ(rank):
    """The control: what each would choose from its own machine."""
    store = dist.distributed_c10d._get_default_store()
    for case, gpus in enumerate((("A", "B", "C"), ("A", "B", "B"), ("A", "", "B"), ("", "", ""))):
        gpu = SimpleNamespace(uuid=gpus[rank])
        cuda = patch.multiple(torch.cuda, set_device=id, get_device_properties=lambda _: gpu)  # noqa: B023
        device = torch.device("cuda", 0) if gpus[rank] else torch.device("cpu")
        with cuda, patch.object(launch, "print", id, create=True):
            here = dist.PrefixStore(f"case {case}", store)
            told = of_all_ranks(_attempt(launch.own_gpus, here, device, rank, 3))
        mixed = "LaunchError: 1 of 3 ranks have no GPU (rank 1), the others have: give all nodes"
        expected = ("True", "False", f"{mixed} GPUs, or all ranks --device cpu", "False")[case]
        assert told == [expected] * 3
    assert len(set(of_all_ranks(("A", "", "B")[rank] != ""))) == 2


WRONG_STARTS = [
    ({"RANK": "1"}, "LOCAL_RANK is not set, expected a whole number: start with torchrun or srun"),
    (
        {"MASTER_PORT": "soon"},
        "MASTER_PORT is soon, expected a whole number: export MASTER_PORT=29",
    ),
    ({"MASTER_PORT": "0"}, "MASTER_PORT is 0, expected a free port on rank 0's host"),
]


@pytest.mark.parametrize(("env", "told"), WRONG_STARTS)
def test_wrong_launch_variables_end_in_one_line_and_nobody_trains_alone(env, told, tmp_path):
    if "RANK" not in env:
        env = {**launcher(1), **env}
    flags = ("--device=cpu", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command("beyond/survive/train.py", *flags, env=env)
    assert (status, output.count("\n")) == (2, 1), output
    assert output.startswith(f"error: {told}")
    assert not (tmp_path / "run").exists()


def test_a_torchrun_of_one_rank_in_a_step_of_several_tasks_does_not_wait(tmp_path):
    """As `srun --ntasks=2 torchrun --nproc-per-node=1`: each torchrun is a world of its own."""
    slurm = dict(zip(launch.SRUN, ("1", "1", "2", "2"), strict=True))
    flags = ("--device=cpu", "--max-steps=1", f"--run-dir={tmp_path}")
    [(status, output)] = command(
        "beyond/survive/train.py", *flags, env=launcher(1, ranks=1) | slurm
    )
    assert (status, "global batch 120 = 1 × 120" in output) == (0, True), output


@pytest.mark.parametrize(("gpus", "expected"), [(1, "cuda:0"), (2, "cuda:1"), (0, "cpu")])
def test_a_loop_of_ones_own_takes_a_gpu_that_it_sees(gpus, expected, tmp_path, monkeypatch):
    """srun may show each rank one GPU only, which is GPU 0 for all of them."""
    torchrun = dict(zip(launch.TORCHRUN, "1122", strict=True))

    def join(device: torch.device, *_: object, **__: object) -> None:
        raise StopIteration(device)

    cuda = patch.multiple(torch.cuda, is_available=lambda: gpus > 0, device_count=lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", str(tmp_path)])
    with cuda, patch.dict(os.environ, torchrun), patch.object(launch, "join", join):
        told = _attempt(lambda: runpy.run_path(str(OWN_LOOP), run_name="__main__"))
    assert told == f"StopIteration: {expected}"


def test_the_store_is_at_a_port_that_exists(monkeypatch):
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    for port in (0, 1, 2**16 - 1, 2**16):
        monkeypatch.setenv("MASTER_PORT", str(port))
        told = _attempt(launch.open_store, 0, 2, timedelta(1), True)
        assert told.startswith(f"LaunchError: MASTER_PORT is {port}, ") == (port in (0, 2**16))


def _loads(pipe) -> None:
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch", "pytest"])
    inits = (launch.end_with_rank, _looks_often)
    loaders = [iter(DataLoader([0.0], num_workers=1, worker_init_fn=init)) for init in inits]
    pipe.send([(next(loader), loader._workers[0].pid)[1] for loader in loaders])
    time.sleep(60)


def _looks_often(_: int) -> None:
    _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # for its rank: not every 5 s


def test_a_loader_ends_with_its_rank_and_not_before():
    """The control: of a fork server, the default since Python 3.14, a loader of torch stays."""
    ours, theirs = context.Pipe()
    rank = context.Process(target=_loads, args=(theirs,))
    rank.start()
    loader, control = ours.recv()
    os.kill(loader, signal.SIGTERM)
    time.sleep(0.5)
    assert runs(loader), "SIGTERM has ended it"
    rank.kill()
    rank.join()
    time.sleep(2)
    assert (runs(loader), runs(control)) == (False, True)
    os.kill(control, signal.SIGKILL)


def dog_of(rank: int = 0, world_size: int = 2):
    module = fresh_module("survive", "watchdog.py")
    module.time = clock()
    return module.Watchdog(dist.HashStore(), rank, world_size, __file__, 600), module.time


HERE, THERE, END = "step 3, line 1, `a()`", "step 3, line 2, `b()`", "the end of its work"
WAITS, LOST, RUNS, GONE = (1, HERE, True), (1, THERE, True), (1, THERE, False), (0, THERE, False)


def last(*ranks: int, at: str = THERE) -> str:
    return "; ".join(f"rank {rank} did not arrive, last seen at {at}" for rank in ranks)


SILENT = ": killed, stopped, aborted or unreachable"
VERDICTS = [  # of each other rank: whether it still writes notes, its place, if a collective failed
    ([LOST], f"the ranks wait in different collectives, rank 0 at {HERE}; rank 1 at {THERE}"),
    ([RUNS], last(1)),
    ([WAITS, WAITS, RUNS], last(3)),
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
                beats, *rest = note
                dog.store.set(f"rank {rank}", json.dumps([7 + beats * seconds, *rest, None]))

    write_notes()
    time.sleep = write_notes
    assert dog._diagnose(RuntimeError("gloo")) == verdict
    assert time.now == 101, "it looks twice, a second apart"
    assert dog._diagnose(RuntimeError("of a later rank")) == verdict, "whoever comes later"


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_process_that_wrote_a_note_is_ended(same):
    dog, _ = dog_of()
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    who = watchdog.identity(process.pid)
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert abs(uptime - int(who[3]) / os.sysconf("SC_CLK_TCK")) < 10, "when it has started"
    note = [7, THERE, False, who if same else [*who[:-1], "0"]]
    dog.store.set("rank 1", json.dumps(note))
    assert dog._diagnose(RuntimeError("gloo")) == last(1) + SILENT
    process.join(9 if same else 0.2)
    assert process.is_alive() != same
    process.kill()
    process.join()
    assert watchdog.identity(process.pid) is None


GUARDS = [("", 600.25), ("broken", 60.25), ("lost", 3.25)]


@pytest.mark.parametrize(("what", "at"), GUARDS)
@pytest.mark.parametrize("pause", [0, 100_000])
def test_a_rank_ends_when_the_store_no_longer_answers_but_not_because_it_was_paused(
    what, at, pause
):
    """A pause of the whole job, after 1 s, counts as one beat. The limit of the run is 600 s."""
    dog, time = dog_of()
    setattr(dog, what or "place", True)
    ended, began = [], time.now
    dog._end = lambda verdict: ended.append((time.now - began, verdict))

    def wait(seconds: float) -> bool:
        time.now += seconds + (pause if time.now == 101 else 0)
        return bool(ended) or time.now > began + pause + 1000

    dog.over = SimpleNamespace(wait=wait)
    dog._guard()
    assert ended == [(at + pause, watchdog.NO_STORE)]


def test_a_rank_ends_after_another_one_has_ended():
    dog, time = dog_of()
    ended = []
    dog._end = lambda verdict: ended.append((time.now - 100, verdict))

    def wait(seconds: float) -> bool:
        time.now += seconds
        if time.now == 102:
            dog.store.set("verdict", "why")
        return bool(ended) or time.now > 200

    dog.over = SimpleNamespace(wait=wait)
    dog.unanswered = 7
    dog._watch()
    assert ended == [(3.5, "why")]
    assert dog.unanswered == 0, "the store has answered"


@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_that_broke_is_told_from_a_store_that_is_slow(broken):
    dog, _ = dog_of()
    turns = count()
    dog.over = SimpleNamespace(wait=lambda _: next(turns) == 3)
    if broken:
        dog.store = SimpleNamespace(set=_raise_broken)
    dog._watch()
    assert dog.broken == broken


def _raise_broken(*_: object) -> None:
    raise dist.DistNetworkError("connection reset")


def _waits(rank: int, how: str, seconds: float, beats: int, file: str) -> str:
    """Rank 1 dies or stops. Rank 0 waits in C, where no error and no signal reaches it, as behind
    nccl, and then lets a stopped rank go on."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    module = fresh_module("survive", "watchdog.py")
    module.ENDED_BEATS = beats
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
    with module.Watchdog(store, rank, 2, __file__, seconds):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        else:
            ctypes.CDLL(None).sleep(3)
            if how == "stopped":
                os.kill(int(store.get("pid")), signal.SIGCONT)
        if how == "stopped":
            dist.barrier()
    return "waited"


WAITS_IN_C = [  # seconds: the limit of the run. A dead process is given up earlier, in beats
    ("killed", 600, 2, [None, None]),
    ("killed", 600, 80, ["waited", None]),  # the control: 20 s
    ("stopped", 0.5, 80, [None, None]),  # beyond the limit: rank 1 gets SIGKILL, or it would stay
    ("stopped", 600, 2, ["waited", "waited"]),  # the control: not beyond it
]


@pytest.mark.parametrize(("how", "seconds", "beats", "ends"), WAITS_IN_C)
def test_a_rank_that_waits_for_a_gpu_learns_that_another_died(how, seconds, beats, ends, tmp_path):
    file = tmp_path / "said"
    assert run_ranks(2, _waits, how, seconds, beats, str(file), dying=(0, 1)) == ends
    named = "error: rank 0 gives up at .+`ctypes.+: rank 1 did not arrive, last .+ unreachable"
    assert bool(re.search(named, file.read_text())) == (ends[0] is None)


def test_only_a_process_of_this_machine_is_known_to_have_ended():
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    who = watchdog.identity(process.pid)
    assert not watchdog.has_ended(who)
    process.kill()
    process.join()
    assert watchdog.has_ended(who)
    assert not watchdog.has_ended(["another machine", *who[1:]])
    assert not watchdog.has_ended(None), "a rank that has written no note"


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
