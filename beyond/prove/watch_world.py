"""Watches what a rank shows to the world: collectives, files, printed lines."""

import builtins
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prove import record
from prove.record import Run, where

COLLECTIVES = [
    "all_reduce", "broadcast", "barrier", "monitored_barrier", "all_gather", "all_gather_object",
    "reduce", "gather", "scatter", "gather_object", "broadcast_object_list", "scatter_object_list",
    "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single",
]  # fmt: skip
MOST_CALLS = 1000

# Files that several processes write by agreement, or that are no result of the script.
IGNORED_FOLDERS = ("/dev/", "/proc/", "/sys/", "/tmp/torch", "/tmp/pymp", "/tmp/tmp")
IGNORED_PARTS = ("__pycache__", "/.cache/", ".lock", "torchinductor", "torchelastic", "/.triton/")


def watch_collectives(run: Run) -> None:
    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            inside = run.waiting is not None  # all_gather_object calls all_gather
            if inside or not run.joined or (group and dist.get_world_size(group) != run.world):
                return function(*args, **kwargs)
            line = where()
            if len(run.facts["collectives"]) < MOST_CALLS:
                run.facts["collectives"].append([name, line])
            if called_by("gather_for_metrics"):
                run.note("gather_for_metrics")
            run.events, run.waiting = run.events + 1, f"{name} at {line}"
            try:
                return function(*args, **kwargs)
            finally:
                run.events, run.waiting = run.events + 1, None

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    begin, end, new_group = dist.init_process_group, dist.destroy_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        record.join()

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        record.write("script")
        end(*args, **kwargs)

    def watched_new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and 1 < len(ranks) < run.world:
            run.note("groups of some ranks")
        return new_group(ranks, *args, **kwargs)

    dist.init_process_group, dist.new_group = init_process_group, watched_new_group
    dist.destroy_process_group = destroy_process_group
    join = torch.nn.parallel.DistributedDataParallel.join

    def watched_join(self: Any, *args: Any, **kwargs: Any) -> Any:
        run.note("join")
        return join(self, *args, **kwargs)

    torch.nn.parallel.DistributedDataParallel.join = watched_join  # type: ignore[method-assign]


def called_by(name: str) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def keep(path: str, folder: Path) -> None:
    """Before a file is changed for the first time: copy it, or note that there was none."""
    note = folder / f"file.{zlib.crc32(path.encode())}.path"
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        for _ in range(1000):  # another rank copies it: this one must not change it meanwhile
            if note.stat().st_size:
                break
            time.sleep(0.01)
        return
    if os.path.isfile(path):
        shutil.copy2(path, note.with_suffix(".copy"))
    note.write_text(path)


def restore(folder: Path) -> None:
    """Put back all files that a run has changed, and remove the files and folders it has made."""
    for note in folder.glob("file.*.path"):
        path, copy = note.read_text(), note.with_suffix(".copy")
        if copy.exists():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.move(copy, path)
        elif os.path.isfile(path) or os.path.islink(path):
            os.unlink(path)
        note.unlink()
    notes = list(folder.glob("folder.*"))
    for path in sorted((note.read_text() for note in notes), key=len, reverse=True):
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)
    for note in notes:
        note.unlink()


def in_folder(path: Any, descriptor: int) -> Any:
    """shutil.rmtree names files relative to an open folder."""
    folder = os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""
    return os.path.join(folder, os.fsdecode(path))


def watch_files(run: Run) -> None:
    busy = False

    def is_ignored(path: str) -> bool:
        ours = path.startswith(str(run.folder))
        return ours or path.startswith(IGNORED_FOLDERS) or any(x in path for x in IGNORED_PARTS)

    def changes(file: Any, mode: str | None) -> None:
        path = os.path.realpath(os.fspath(file))
        if isinstance(path, bytes) or is_ignored(path):
            return
        keep(path, run.folder)
        if mode is not None and len(run.facts["files"]) < MOST_CALLS:
            run.facts["files"].append([path, mode, where(), run.steps])

    def audit(event: str, args: tuple) -> None:
        nonlocal busy
        if busy or run.written or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        busy = True
        try:
            if event == "os.rename":
                changes(in_folder(args[0], args[2]), None)
                changes(in_folder(args[1], args[3]), None)
            elif event == "os.remove":
                changes(in_folder(*args), None)
            elif event == "os.mkdir":
                path = os.path.realpath(os.fspath(args[0]))
                if not os.path.exists(path) and not is_ignored(path):
                    (run.folder / f"folder.{zlib.crc32(path.encode())}").write_text(path)
            elif isinstance(args[0], str | bytes | os.PathLike):
                if isinstance(args[1], str):
                    if any(letter in args[1] for letter in "wax+"):
                        changes(args[0], args[1])
                elif args[2] & (os.O_WRONLY | os.O_RDWR):
                    changes(args[0], "os.open")
        except Exception as error:  # nothing that we note may end the user's call
            run.facts["audit"] = repr(error)
        finally:
            busy = False

    sys.addaudithook(audit)
    save = torch.save

    def watched_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):  # written in C++, which no audit hook sees
            changes(f, "w")
        save(obj, f, *args, **kwargs)

    torch.save = watched_save


def watch_prints(run: Run) -> None:
    show, terminal = builtins.print, (sys.stdout, sys.stderr)

    def watched_print(*values: Any, sep: Any = " ", file: Any = None, **kwargs: Any) -> None:
        target = sys.stdout if file is None else file  # redirect_stdout(None): nobody sees it
        if target in terminal and len(run.facts["prints"]) < MOST_CALLS:
            text = (" " if sep is None else sep).join(map(str, values))
            second = run.counts["second epoch"] or run.counts["fed all"] > 1
            run.facts["prints"].append([text, where(), run.steps, bool(second)])
        show(*values, sep=sep, file=file, **kwargs)

    builtins.print = watched_print


def install(run: Run) -> None:
    watch_collectives(run)
    watch_files(run)
    watch_prints(run)
