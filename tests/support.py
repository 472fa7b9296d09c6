"""How the tests run the stages: ranks of a preloaded forkserver, real commands, lines left out."""

import importlib
import json
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
FOLDERS = {path.name[:2]: path for path in sorted(ROOT.glob("0?_*"))}
FOLDERS["survive"] = ROOT / "beyond" / "survive"
REAL_DATA = ROOT.parent / "shared" / "data"
HAS_MNIST = (REAL_DATA / "MNIST" / "raw").is_dir()
SECONDS = 60  # more than any rank takes; a hang ends here

Line = tuple[str, ...]  # a file of a stage and a line of it; or a file, its text, and another text


def patience(seconds: float) -> float:
    """A time limit that only a hang reaches: as much longer as processes wait for a core."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


torch.set_num_threads(1)  # as every rank has: two tests that run side by side have two cores
context = multiprocessing.get_context("forkserver")  # has imported torch: ranks are there at once
SLOW = "torchvision common.checkpoint common.models pytest matplotlib.pyplot PIL.Image tabulate"
SLOW += " torchvision.transforms.v2 pycocotools.cocoeval ipykernel.kernelapp nbclient"
context.set_forkserver_preload(SLOW.split())


def changed_source(key: str, file: str, changes: Sequence[Line]) -> str:
    """The text of a file of a stage, with lines left out or texts replaced."""
    source = (FOLDERS[key] / file).read_text()
    for other, old, *new in changes:
        if other != file:
            continue
        if new:
            assert source.count(old) == 1, f"{FOLDERS[key].name}/{file} has not, once: {old}"
            source = source.replace(old, new[0])
            continue
        lines = source.splitlines()  # without their indent and their comment:
        places = [i for i, line in enumerate(lines) if line.split("  #")[0].strip() == old]
        assert places, f"{FOLDERS[key].name}/{file} has no line {old!r}"
        for place in places:
            lines[place] = lines[place].replace(old, "pass")
        source = "\n".join([*lines, ""])
    return source


def fresh_module(key: str, file: str, without=(), register=False) -> types.ModuleType:
    """A file of a stage as a new module, changed. register: others import it, not the file."""
    folder, name = FOLDERS[key], Path(file).stem if file != "train.py" else f"stage_{key}"
    if str(folder) not in sys.path:  # a script finds the files beside it
        sys.path.insert(0, str(folder))
    module = types.ModuleType(name)
    module.__file__ = str(folder / file)
    if register:
        sys.modules[name] = module
    source = changed_source(key, file, without)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def load_stage(key: str, without: tuple[Line, ...] = ()) -> types.ModuleType:
    """A stage's train.py as a module, with the given lines of the stage's files left out."""
    files = dict.fromkeys([*(file for file, *_ in without), "train.py"])
    return [fresh_module(key, file, without, register=True) for file in files][-1]


def run_main(stage: types.ModuleType, rank: int, *flags: str) -> str:
    """Run the main of a stage in this process, one of its ranks; returns what it prints."""

    def spawn(train: Callable, args: tuple, nprocs: int) -> None:  # 03 starts no process: quicker
        train(rank, *args[:-1], int(os.environ["MASTER_PORT"]))

    sys.argv = ["train.py", *flags]
    with patch.object(torch.multiprocessing, "spawn", spawn), redirect_stdout(StringIO()) as output:
        stage.main()
    if dist.is_initialized():
        dist.destroy_process_group()
    return output.getvalue()


def chapter(key: str, name: str) -> types.ModuleType:
    """A file beside a stage's train.py, imported as the stage imports it."""
    if str(FOLDERS[key]) not in sys.path:
        sys.path.insert(0, str(FOLDERS[key]))
    return importlib.import_module(name)


def default_start() -> None:
    """For loaders, as in a rank of torchrun; else each rank would have a forkserver of its own."""
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)


def _enter(rank: int, pipe: Any, env: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    default_start()
    try:
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # send() would hand tensors over as shared memory


def launcher(port: int, ranks: int = 2) -> dict[str, str]:
    """What torchrun would tell each rank; see `command`."""
    own = {"RANK": "{RANK}", "LOCAL_RANK": "{RANK}"}
    all_ = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return own | all_ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_ranks(world_size: int, function: Callable, *args: Any, dying: tuple = ()) -> list:
    """What function(rank, *args) returns on each rank, None if it is dying; an error ends all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, told = [], launcher(store.port, world_size) | {"TORCHELASTIC_RESTART_COUNT": "0"}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is the test's, as it is torchrun's
    for rank in range(world_size):
        torchrun = told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_enter, args=(rank, theirs, torchrun, function, args))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    results: dict[int, Any] = {}
    deadline = time.monotonic() + patience(SECONDS)
    try:
        while len(results) < world_size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in results}
            ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"ranks {list(waiting.values())} did not end in {SECONDS} s")
            for pipe in ready:
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    expected = waiting[pipe] in dying
                    good, value = expected, None if expected else "it died without a word"
                if not good:
                    raise AssertionError(f"rank {waiting[pipe]}: {value}")
                results[waiting[pipe]] = value
        return [results[rank] for rank in range(world_size)]
    finally:
        for process, pipe in ranks:
            process.join(0 if sys.exc_info()[0] else 10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Run:
    """What a run of a stage left behind: files, each rank's last weights, what rank 0 printed."""

    folder: Path
    states: list[dict[str, torch.Tensor]]
    output: str

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor([line["loss"] for line in self.metrics], dtype=torch.float64)

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def checkpoint(self) -> dict:
        return torch.load(self.folder / "checkpoint.pt", weights_only=True)


def _train(rank: int, key: str, flags: tuple, dtype: torch.dtype, without) -> tuple[dict, str]:
    stage = load_stage(key, without)
    models = []
    build = stage.build_model
    stage.build_model = lambda *args: models.append(build(*args)) or models[-1]
    with default_dtype(dtype):
        output = run_main(stage, rank, *flags)
    state = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
    return state, output


def train(
    key: str, world_size: int, *flags: str, dtype=torch.float64, without=(), folder=None
) -> Run:
    """Run a stage's main on that many ranks (01 and 02: always one), in float64 if not said."""
    folder = folder or scratch_folder()
    flags = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}", *flags)
    flags += (f"--world-size={world_size}",) if key == "03" else ()
    ranks = run_ranks(world_size, _train, key, flags, dtype, without)
    return Run(folder, [state for state, _ in ranks], ranks[0][1])


@cache
def train_once(key: str, world_size: int, *flags: str, **more: Any) -> Run:
    """As train, but the same run is made once: for tests that only look at it."""
    return train(key, world_size, *flags, **more)


def scratch_folder() -> Path:
    """A new one, gone when the tests end."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="stages-", ignore_cleanup_errors=True)


def forked(start: Callable) -> Callable:
    return lambda *args, **more: start(*args, **{**more, "start_method": "fork"})


def _command(rank: int, script: str, flags: tuple, where: str, out: str, forks: bool) -> None:
    torch.set_num_threads(1)  # OMP_NUM_THREADS is read when torch is imported: before this process
    default_start()
    os.chdir(where)
    with open(f"{out}.{rank}", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(write_through=False, line_buffering=True)  # a line is written as one
    sys.argv = [script, *flags]
    sys.path[0:0] = [str(Path(script).parent)]
    if forks:  # ranks that the script starts need not import torch again
        start = forked(torch.multiprocessing.start_processes)
        patch.multiple(torch.multiprocessing, spawn=start, start_processes=start).start()
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command(
    script: str, *flags: str, ranks=1, env=None, where=ROOT, seconds=SECONDS, forks=True
) -> list[tuple[int, str]]:
    """Run `python SCRIPT FLAGS` as that many processes; exit status and output of each.
    env: what a launcher adds; {RANK} in a value becomes the rank. forks: not where the script
    computes gradients before it starts ranks."""
    out = tempfile.mkdtemp(dir=_scratch().name) + "/out"
    processes = []
    for rank in range(ranks):
        extra = {key: value.replace("{RANK}", str(rank)) for key, value in (env or {}).items()}
        args = (rank, str(ROOT / script), flags, str(where), out, forks)
        processes.append(context.Process(target=_with_env, args=(extra, _command, args)))
        processes[-1].start()
    deadline = time.monotonic() + patience(seconds)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            for other in processes:
                other.kill()
            raise TimeoutError(f"{script} {' '.join(flags)} did not end in {seconds} s")
    return [
        (process.exitcode or 0, Path(f"{out}.{rank}").read_text())
        for rank, process in enumerate(processes)
    ]


def launch_ranks(script: str, *flags: str, ranks=2, env=None, **how: Any) -> list[tuple[int, str]]:
    """As `command`, for ranks on this machine that think torchrun has started them: this process
    keeps the store where they meet. env: more variables; how: see `command`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = launcher(store.port, ranks) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return command(script, *flags, ranks=ranks, env=torchrun | (env or {}), **how)


def _with_env(env: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(env)
    function(*args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
