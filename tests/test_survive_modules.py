"""survive's four modules: each shows what it does, alone and in a project that is not this one."""

import ast
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import FOLDERS, ROOT, chapter, command, context, fresh_module, run_ranks
from torch.utils.data import DataLoader

agree, durable, launch = (chapter("survive", name) for name in ("agree", "durable", "launch"))
MODULES = ("launch.py", "agree.py", "durable.py", "watchdog.py")

# --- Each module runs by itself

SHOWS = {
    "launch.py": (
        r"2 of 2 ranks start: rank 0 has joined gloo",
        r"1 of 2 ranks start: rank 0 ends with: 2 ranks did not meet at 127\.0\.0\.1:\d+",
    ),
    "agree.py": (
        r"rank 1 receives SIGTERM in step 100",
        r"rank 0 stops after step (\d+); votes took \d+ µs per step",
        r"rank 1 stops after step (\d+); votes took \d+ µs per step",
    ),
    "durable.py": (
        r"the newest whole checkpoint is checkpoint\.before\.pt",
        r"the damaged file has not replaced step 2 before it",
    ),
    "watchdog.py": (
        r"rank 0 gives up at step 3, .*: rank 1 did not arrive, last seen at step 3, ",
    ),
}


@pytest.mark.parametrize("module", MODULES)
def test_each_module_shows_by_itself_what_it_does(module):
    [(status, output)] = command(f"survive/{module}")
    assert status == 0, output
    found = [re.search(pattern, output) for pattern in SHOWS[module]]
    assert all(found), output
    steps = {match[1] for match in found if match and match.groups()}
    assert len(steps) <= 1, "both ranks stop after the same step"


# --- Outside of this repository


def imports(source: str) -> set[str]:
    """The top level names of the modules that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def test_the_modules_need_torch_and_nothing_else_of_ours():
    names = {Path(module).stem for module in MODULES}
    for module in MODULES:
        source = (FOLDERS["survive"] / module).read_text()
        assert imports(source) <= {"torch", *sys.stdlib_module_names}, module
    own = (ROOT / "tests" / "own_loop.py").read_text()
    assert imports(own) - sys.stdlib_module_names == {"torch", *names}
    ours = (FOLDERS["survive"] / "train.py").read_text()
    assert "common" in imports(ours), "the control: the script of this repository does"


def _own_loop(rank: int, project: Path, folder: Path, how: signal.Signals | None) -> str:
    """One rank of the copied script; rank 1 receives a signal after the first checkpoint."""
    for name in [name for name in sys.modules if f"{name}.py" in MODULES]:
        del sys.modules[name]
    sys.path[0:0] = [str(project)]
    sys.argv = ["own_loop.py", str(folder)]
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    with (
        (folder / f"out.{rank}").open("a", buffering=1) as file,
        redirect_stdout(file),
        redirect_stderr(file),
        suppress(SystemExit),
    ):
        if rank == 1 and how:
            step = torch.optim.SGD.step

            def strike(*args: object, **more: object) -> object:
                if (folder / "checkpoint.pt").exists():
                    os.kill(os.getpid(), how)
                return step(*args, **more)

            torch.optim.SGD.step = strike
        runpy.run_path(str(project / "own_loop.py"), run_name="__main__")
    assert sys.modules["agree"].__file__ == str(project / "agree.py")
    return (folder / f"out.{rank}").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder of somebody else: the four modules, and a script with a loop of its own."""
    folder = tmp_path_factory.mktemp("project")
    for module in MODULES:
        shutil.copy(FOLDERS["survive"] / module, folder)
    shutil.copy(ROOT / "tests" / "own_loop.py", folder)
    return folder


def test_a_loop_of_ones_own_stops_and_resumes_to_the_bit(project, tmp_path):
    """Rank 1 receives SIGTERM; both stop after the same step, and resume there."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, how in ((whole, None), (parts, signal.SIGTERM), (parts, None)):
        folder.mkdir(exist_ok=True)
        run_ranks(2, _own_loop, project, folder, how)
    ends = [re.findall(r"ends after step (\d+)", (parts / f"out.{r}").read_text()) for r in (0, 1)]
    assert ends[0] == ends[1]
    [stop, end] = map(int, ends[0])
    assert 50 < stop < end == 200
    one, other = (torch.load(each / "checkpoint.pt", weights_only=True) for each in (whole, parts))
    assert all(torch.equal(one["model"][name], value) for name, value in other["model"].items())
    middle = torch.load(durable.previous(parts / "checkpoint.pt"), weights_only=True)
    assert not torch.equal(middle["model"]["weight"], one["model"]["weight"]), "the control"


def test_a_loop_of_ones_own_names_the_rank_that_is_killed(project, tmp_path):
    output, _ = run_ranks(2, _own_loop, project, tmp_path, signal.SIGKILL, dying=(1,))
    assert re.search(
        r"error: rank 0 gives up at step \d+, line \d+, `.+`: "
        r"rank 1 did not arrive, last seen at step \d+, line \d+, `.+`: killed, ",
        output,
    ), output


# --- agree: when the ranks vote


class Clock:
    """time.monotonic that stands still, but for what is added to it."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def _votes(rank: int, seconds: list[list[float]], sigterm: int, without: tuple = ()) -> dict:
    """Steps of so many seconds, per rank: in which the rank voted, and after which it stopped."""
    module = fresh_module("survive", "agree.py", without)
    module.time = clock = Clock()
    dist.init_process_group("gloo", rank=rank)
    agreement, voted, times = module.Agreement(30), [], []
    start = agreement._start_vote
    agreement._start_vote = lambda: (start(), voted.append(step), times.append(clock.now))
    for step in range(1, len(seconds[rank]) + 1):
        clock.now += seconds[rank][step - 1]
        if rank == 1 and step == sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        agreement.vote()
        if agreement.stopped:
            break
    return {"voted": voted, "times": times, "stopped": step}


def test_all_ranks_vote_in_the_same_steps_and_stop_after_the_same_one():
    """Though their steps take different times: rank 0 proposes, and the vote carries it to all."""
    seconds = [[0.02] * 400, [0.03] * 400, [0.001] * 400]
    ranks = run_ranks(3, _votes, seconds, 300)
    first = ranks[0]
    assert all(
        (each["voted"], each["stopped"]) == (first["voted"], first["stopped"]) for each in ranks
    )
    gaps = [b - a for a, b in pairwise(first["voted"][3:])]
    assert set(gaps) <= {12, 13}, "a quarter of a second, at 20 ms per step"
    assert 300 < first["stopped"] <= 300 + 2 * 13


def test_ranks_that_decide_for_themselves_stop_after_different_steps():
    """The control: each takes its own proposal instead of the one in the vote."""
    own = (
        "agree.py",
        "            sigterm, self.interval = votes.tolist()\n",
        "            sigterm = votes.tolist()[0]\n"
        "            self.interval = 5 if self.rank else 9\n",
    )
    ranks = run_ranks(2, _votes, [[0.02] * 400] * 2, 60, (own,))
    assert ranks[0]["stopped"] != ranks[1]["stopped"]


@pytest.mark.parametrize(
    ("seconds", "gap"),
    [(1e-5, 50), (0.01, 25), (0.1, 2), (10.0, 1)],
    ids=["very fast", "fast", "slow", "very slow"],
)
def test_steps_between_two_votes_take_a_quarter_of_a_second_within_bounds(seconds, gap):
    """At least one step and at most 50; a vote is read one interval after it has started."""
    [rank] = run_ranks(1, _votes, [[seconds] * 600], 0)
    gaps = [b - a for a, b in pairwise(rank["voted"][3:])]
    assert set(gaps) <= {gap, gap + (seconds == 0.1)}


def test_the_schedule_follows_a_change_of_the_step_time():
    """Ten times slower from step 200 on: at most two intervals later, the votes are close again."""
    [rank] = run_ranks(1, _votes, [[0.01] * 200 + [0.1] * 200], 0)
    late = [step for step in rank["voted"] if step > 250]
    assert {b - a for a, b in pairwise(late)} <= {2, 3}


# --- agree: errors


def _fails(rank: int, failing: tuple[int, ...]) -> str:
    dist.init_process_group("gloo", rank=rank)
    try:
        with agree.Agreement(30).fail_together():
            if rank in failing:
                raise OSError(f"of rank {rank}")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "continues"


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), ["continues"] * 3),
        ((1,), ["SystemExit: 2", "OSError: of rank 1", "SystemExit: 2"]),
        ((1, 2), ["SystemExit: 2", "OSError: of rank 1", "SystemExit: 2"]),
    ],
)
def test_an_error_of_one_rank_ends_all_and_is_told_once(failing, expected):
    assert run_ranks(3, _fails, failing) == expected


def _mean_with_scale(rank: int, scale: float) -> str:
    store = dist.PrefixStore("mean", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        agreement = agree.Agreement(seconds=20)
        losses = agreement.mean(torch.ones(3), torch.nn.Linear(1, 1), step=3, scale=scale)
        return f"{losses.tolist()}"
    except (agree.AgreementError, SystemExit) as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def test_a_loss_scale_that_no_step_can_use_ends_all_ranks():
    """In fp16, all later steps would be skipped. The control is the smallest useful scale."""
    first, second = run_ranks(2, _mean_with_scale, 2.0**-25)
    assert "gradients are inf or nan even with the loss scaled by 3e-08" in first
    assert second == "2"
    assert run_ranks(2, _mean_with_scale, 2.0**-24) == ["[1.0, 1.0, 1.0]"] * 2


def test_nan_is_named_by_its_first_step_and_lowest_rank():
    model = torch.nn.Linear(2, 1)
    losses = torch.ones(3, 4)  # ranks, steps
    agree.refuse_nan(losses, model, step=10)  # the control
    losses[2, 1] = losses[1, 2] = losses[2, 2] = float("nan")
    with pytest.raises(agree.AgreementError, match="loss of rank 2 is nan in step 8: "):
        agree.refuse_nan(losses, model, step=10)
    model.weight.data[0, 1] = float("inf")
    with pytest.raises(agree.AgreementError, match="a weight is nan or inf after step 10: "):
        agree.refuse_nan(torch.ones(3, 4), model, step=10)


# --- durable: a kill at any moment of a save


def _save(path: Path, step: int, module: object = durable, renamed: bool = False) -> None:
    """renamed: the block itself gives the file its name, as common's save_checkpoint does."""
    with module.replacing(path) as file:
        torch.save({"step": step}, file)
        if renamed:
            file.replace(path)


def _killed_in_line(number: int, path: Path, module: object, renamed: bool) -> bool:
    """Save in a child that is killed before the n-th line of durable.py; whether it was."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = number

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    _save(path, 3, module, renamed)
    os._exit(0)


def _outcomes(
    folder: Path, earlier: str, module: object = durable, renamed: bool = False
) -> list[int | None]:
    """The step of the newest whole checkpoint after a kill in each line of a save of step 3.

    earlier: before it, there are "none", or "two" of steps 1 and 2, or the second is "damaged".
    """
    found, number, killed = [], 0, True
    while killed:
        number, here = number + 1, folder / str(number)
        here.mkdir()
        path = here / "checkpoint.pt"
        for step in (1, 2) if earlier != "none" else ():
            _save(path, step)
        if earlier == "damaged":
            path.write_bytes(path.read_bytes()[:-100])
        killed = _killed_in_line(number, path, module, renamed)
        newest = None
        with suppress(durable.CheckpointError):
            newest = durable.newest_whole(path)
        found.append(torch.load(newest, weights_only=True)["step"] if newest else None)
    return found


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize(("earlier", "old"), [("none", None), ("two", 2), ("damaged", 1)])
def test_a_kill_in_each_line_of_a_save_leaves_a_whole_checkpoint(earlier, old, renamed, tmp_path):
    """Also in the first save after a recovery from a damaged one, which used to leave none."""
    steps = _outcomes(tmp_path, earlier, renamed=renamed)
    assert len(steps) > 15
    assert set(steps) == {old, 3}
    assert (steps[0], steps[-1]) == (old, 3)


def test_a_save_that_moves_a_damaged_checkpoint_can_leave_none(tmp_path):
    """The control: without the check, the damaged file replaces the good one before it."""
    always = ("durable.py", "    if is_whole(path):  #", "    if path.exists():  #")
    module = fresh_module("survive", "durable.py", (always,))
    assert None in _outcomes(tmp_path, "damaged", module)


def test_half_of_a_first_checkpoint_is_no_obstacle(tmp_path):
    """After a kill in torch.save, the run starts again. The control: a damaged one is refused."""
    path = tmp_path / "checkpoint.pt"

    def killed() -> None:
        with durable.replacing(path) as file:
            file.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert durable.newest_whole(path) is None
    _save(path, 1)
    assert durable.newest_whole(path) == path
    path.write_bytes(b"half")
    with pytest.raises(durable.CheckpointError, match="is damaged: resume from another one"):
        durable.newest_whole(path)


def test_a_checkpoint_that_was_cut_anywhere_is_whole_or_is_not_taken(tmp_path):
    """As after a kill while it, or its checksum, is written."""
    path = tmp_path / "checkpoint.pt"
    for step in (1, 2):
        _save(path, step)
    whole = path.read_bytes()
    end = whole.rindex(durable.MARK)  # of what torch.save has written
    for size in (0, 1, end // 2, end - 1, end, end + 1, end + len(durable.MARK), len(whole) - 1):
        path.write_bytes(whole[:size])
        taken = torch.load(durable.newest_whole(path), weights_only=True)["step"]
        assert taken == (1 if size < end else 2), size


# --- launch: who the ranks are, where they meet, and how their loaders end


def test_the_launcher_is_torchrun_or_srun_or_nobody(monkeypatch):
    for name in (*launch.TORCHRUN, *launch.SRUN):
        monkeypatch.delenv(name, raising=False)
    assert launch.read_launcher() == [0, 0, 1, 1]
    for name, value in zip(launch.SRUN, ("5", "1", "8", "4(x2)"), strict=True):
        monkeypatch.setenv(name, value)
    assert launch.read_launcher() == [5, 1, 8, 4]
    for name, value in zip(launch.TORCHRUN, ("1", "1", "2", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert launch.read_launcher() == [1, 1, 2, 2], "torchrun under srun: torchrun's"
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(launch.LaunchError, match="RANK is 2, expected less than 2"):
        launch.read_launcher()
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(launch.LaunchError, match="LOCAL_RANK is not set"):
        launch.read_launcher()


def _gpus(rank: int, gpus: int) -> tuple[bool, str]:
    store = launch.meet(rank, 3, launch.timedelta(seconds=30), one_machine=True)
    gpu = SimpleNamespace(uuid=f"GPU-{rank % gpus}")
    with (
        patch.object(torch.cuda, "set_device"),
        patch.object(torch.cuda, "get_device_properties", lambda _: gpu),
        (Path(os.devnull)).open("w") as nowhere,
        redirect_stdout(nowhere),
    ):
        return launch.own_gpus(store, torch.device("cuda", 0), rank, 3)


@pytest.mark.parametrize("gpus", [2, 3])
def test_ranks_that_share_a_gpu_are_told_apart_by_the_uuid_of_their_gpus(gpus):
    """srun may show each rank one GPU only, and all of them call it 0."""
    assert run_ranks(3, _gpus, gpus) == [gpus == 3] * 3


def _left_over(rank: int, prefix: bool) -> str:
    """What a rank finds in the store of torchrun after a restart."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    launch.meet(rank, 2, launch.timedelta(seconds=30), one_machine=prefix).set("address", "old")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    store = launch.meet(rank, 2, launch.timedelta(seconds=30), one_machine=prefix)
    return "old" if store.check(["address"]) else "nothing"


def test_restarted_ranks_find_nothing_of_those_before():
    assert run_ranks(2, _left_over, True) == ["nothing"] * 2
    assert run_ranks(2, _left_over, False) == ["old"] * 2, "the control"


def _loads(pipe, method: str, end_with_rank: bool) -> None:
    """A rank with one loader process, which tells its PID; then it waits to be killed."""
    multiprocessing.set_start_method(method, force=True)
    init = launch.end_with_rank if end_with_rank else None
    loader = DataLoader([0.0] * 9, num_workers=1, worker_init_fn=init)
    batches = iter(loader)
    next(batches)
    pipe.send(loader._iterator._workers[0].pid if loader._iterator else batches._workers[0].pid)
    time.sleep(60)


def _loader_of_a_killed_rank(method: str, end_with_rank: bool) -> str:
    """Whether its loader survives SIGTERM, and then the end of its rank."""
    ours, theirs = context.Pipe()
    rank = context.Process(target=_loads, args=(theirs, method, end_with_rank))
    rank.start()
    loader = ours.recv()
    if end_with_rank:
        os.kill(loader, signal.SIGTERM)
        time.sleep(0.5)
        assert Path(f"/proc/{loader}").exists(), "SIGTERM has ended it"
    rank.kill()
    rank.join()
    deadline = time.monotonic() + 8  # torch's loaders look every 5 s
    while (alive := _runs(loader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        os.kill(loader, signal.SIGKILL)
    return "stays" if alive else "ends"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_loader_ends_with_its_rank_and_not_before(method):
    assert _loader_of_a_killed_rank(method, end_with_rank=True) == "ends"


def test_a_loader_of_a_fork_server_outlives_its_rank_in_torch_alone():
    """The control. A fork server is the default since Python 3.14."""
    assert _loader_of_a_killed_rank("forkserver", end_with_rank=False) == "stays"


def test_own_loop_is_what_the_readme_shows():
    """Its numbered lines, which are to be added to a loop, stand in survive/README.md."""
    own = (ROOT / "tests" / "own_loop.py").read_text().splitlines()
    marked = [line.strip() for line in own if re.search(r"  # \d+\. ", line)]
    assert len(marked) >= 10
    readme = (FOLDERS["survive"] / "README.md").read_text()
    assert [line for line in marked if line not in readme] == []
