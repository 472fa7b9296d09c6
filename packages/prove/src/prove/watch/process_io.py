"""Watch the effects of a rank outside its process: collectives, files and printed lines."""

import builtins
import io
import logging
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import Join

from prove.comparable import precision
from prove.rank_record import (
    DDP_CALLS,
    MAX_COLLECTIVES,
    Collective,
    Ended,
    Flag,
    PrintedText,
    RankFile,
)
from prove.watch.rank_run import OWN_FOLDERS, RankRun, callers, source_line, wrap, wrap_everywhere

COLLECTIVES = [
    "all_reduce", "broadcast", "barrier", "monitored_barrier", "all_gather", "all_gather_object",
    "reduce", "gather", "scatter", "gather_object", "broadcast_object_list", "scatter_object_list",
    "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "all_gather_single", "reduce_scatter_single", "gather_single",
    "gather_into_tensor",
]  # fmt: skip
POINT_TO_POINT = [
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list",
]  # fmt: skip
MAX_PRINTED_TEXTS = 1000
TORCH = os.path.dirname(torch.__file__)

# Folders whose files several processes share by agreement, or that hold no results.
IGNORED_FOLDERS = ("/dev/", "/proc/", "/sys/", "/tmp/torch", "/tmp/pymp", "/tmp/tmp")
IGNORED_PARTS = ("__pycache__", "/.cache/", "torchinductor", "torchelastic", "/.triton/")


def watch_collective(run: RankRun, name: str, printed_name: str = "") -> None:
    @wrap(dist, name)
    def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
        group = args[0] if name in DDP_CALLS else kwargs.get("group")
        progress, world_size = run.record.progress, run.record.world_size
        inside = progress.collective is not None  # all_gather_object calls all_gather
        run.exchanges += run.joined
        if inside or not run.joined or (group and dist.get_world_size(group) != world_size):
            return original(*args, **kwargs)
        progress.collective = Collective(
            printed_name or name, source_line(), run.running_batchnorm(), calling_library()
        )
        if len(run.record.collectives) < MAX_COLLECTIVES:
            run.record.collectives.append(progress.collective)
            with run.file(RankFile.CALLS).open("a") as f:
                f.write("\t".join(progress.collective) + "\n")
        note_precision(run, [*args, *kwargs.values()])
        if has_no_backward(run, progress.collective, args):
            run.flag(Flag.REDUCES_WITHOUT_BACKWARD)
        if any(caller == "gather_for_metrics" for *_, caller in callers()):
            run.flag(Flag.GATHERS_FOR_METRICS)
        run.note_event()
        try:
            return original(*args, **kwargs)
        finally:
            progress.collective = None
            run.note_event()


def note_precision(run: RankRun, arguments: list) -> None:
    """Record the precision of the numbers that this rank sends.

    Gradients may be sent in 16 bits, by fp16_compress_hook or p.grad.half(). A single number does
    not count, because it is mostly a loss to be printed.
    """
    parts = [part for each in arguments for part in (each if isinstance(each, list) else [each])]
    coarse = [
        precision(part.dtype)
        for part in parts
        if isinstance(part, torch.Tensor) and part.numel() > 1 and part.dtype.itemsize <= 2
    ]
    run.record.exchange_precision = max(run.record.exchange_precision, *coarse, 0.0)


def has_no_backward(run: RankRun, call: Collective, args: tuple) -> bool:
    """Does this call sum a tensor with a gradient, but not the gradient in backward?

    The functions of torch.distributed.nn.functional sum the gradient, too.
    """
    if call.name != "all_reduce" or call.library or run.record.step_count or not args:
        return False
    return isinstance(args[0], torch.Tensor) and args[0].grad_fn is not None


def calling_library() -> str:
    file = next(own for own, *_ in callers() if os.path.dirname(own) not in OWN_FOLDERS)
    return "torch" if file.startswith(TORCH) else ""


def call_that_may_wait(run: RankRun, name: str, function: Callable, *args: Any, **more: Any) -> Any:
    """Call a function that may wait for another rank, and record meanwhile that it runs."""
    progress = run.record.progress
    inside = progress.collective is not None or progress.waits_in is not None
    if inside or not run.joined or threading.current_thread() is not threading.main_thread():
        return function(*args, **more)
    progress.waits_in = Collective(name, source_line())
    run.note_event()
    try:
        return function(*args, **more)
    finally:
        progress.waits_in = None
        run.note_event()


def watch_point_to_point(run: RankRun, name: str) -> None:
    @wrap_everywhere(dist.distributed_c10d, name)  # P2POp compares the functions there
    def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
        peer = kwargs.get("src", kwargs.get("dst", args[1] if len(args) > 1 else None))
        direction = "from" if "recv" in name else "to"
        printed_name = f"{name} {direction} rank {peer}" if isinstance(peer, int) else name
        run.exchanges += 1
        return call_that_may_wait(run, printed_name, original, *args, **kwargs)


def watch_waits(run: RankRun) -> None:
    """Watch waits for the end of a call, and for the keys of a store."""
    for owner, name in ((dist.Work, "wait"), (dist.Store, "get"), (dist.Store, "wait")):

        @wrap(owner, name)
        def wait(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
            printed_name = f"{type(self).__name__}.{original.__name__}()"
            return call_that_may_wait(run, printed_name, original, self, *args, **kwargs)


def watch_groups(run: RankRun) -> None:
    c10d = dist.distributed_c10d  # init_device_mesh calls functions of this module

    @wrap_everywhere(c10d, "init_process_group")
    def begin(original: Callable, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        run.join_group()

    @wrap(dist, "destroy_process_group")
    def end(original: Callable, group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            run.write(Ended.FINISHED)
        original(group)

    @wrap_everywhere(c10d, "new_group")
    def new_group(original: Callable, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and 1 < len(ranks) < run.record.world_size:
            run.flag(Flag.HAS_GROUPS)
        return original(ranks, *args, **kwargs)

    @wrap(Join, "__init__")  # DDP.join makes a Join, too
    def join(original: Callable, *args: Any, **kwargs: Any) -> None:
        run.flag(Flag.JOINS)
        original(*args, **kwargs)


def keep_copy(path: str, folder: Path) -> None:
    """Copy a file before it is changed for the first time, or note that there was none."""
    note = folder / f"file.{zlib.crc32(path.encode())}.path"
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        for _ in range(1000):  # while another rank copies the file, this one must not change it
            if note.stat().st_size:
                break
            time.sleep(0.01)
        return
    if os.path.isfile(path):
        shutil.copy2(path, copy_of(path, folder))
    note.write_text(path)


def copy_of(path: str, folder: Path) -> Path:
    return folder / f"file.{zlib.crc32(path.encode())}.copy"


def restore_files(folder: Path) -> None:
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


class WatchedText(io.TextIOWrapper):
    """A text file whose writes are watched."""

    note: Callable[[str], None]

    def write(self, text: str) -> int:
        self.note(text)
        return super().write(text)


class FileWatcher:
    """Notes which files a rank changes, by an audit hook.

    Python calls the hook before it opens, renames or removes a file.
    """

    def __init__(self, run: RankRun) -> None:
        self.run, self.folder = run, Path(run.settings.folder)
        self.inside = threading.local()  # the thread that writes the record also opens files

    def watch_text(self, text: io.TextIOWrapper, newline: str | None) -> io.TextIOWrapper:
        """Return an open text file as a WatchedText."""
        path, mode = os.path.realpath(os.fsdecode(text.name)), text.mode
        encoding, errors, buffering = text.encoding, text.errors, text.line_buffering
        watched = WatchedText(text.detach(), encoding, errors, newline, buffering)
        watched.mode = mode  # type: ignore[misc]

        def note(part: str) -> None:
            for tell in self.run.events.texts:
                tell(path, part)

        watched.note = note
        note("")
        return watched

    def is_ignored(self, path: str) -> bool:
        if any(part in path for part in IGNORED_PARTS) or path.startswith(str(self.folder)):
            return True
        # A file in the current folder belongs to the script, even if the folder is in /tmp.
        return path.startswith(IGNORED_FOLDERS) and not path.startswith(f"{os.getcwd()}/")

    def note_change(self, file: Any, mode: str | None = None) -> None:
        """Copy a file that is about to change. mode: that of open(); None to rename or remove."""
        path = os.path.realpath(os.fsdecode(file))
        if self.is_ignored(path):
            return
        keep_copy(path, self.folder)
        for tell in self.run.events.file_changes:
            tell(path, mode)

    def note_rename(self, old: Any, new: Any) -> None:
        """Note a file or a folder that is about to get another name."""
        old, new = os.path.realpath(os.fsdecode(old)), os.path.realpath(os.fsdecode(new))
        if not os.path.isdir(old):
            self.note_change(old)
            self.note_change(new)
            return
        for folder, _, names in os.walk(old):
            self.note_new_folder(new + folder[len(old) :])
            for name in names:
                path = os.path.join(folder, name)
                self.note_change(path)
                self.note_change(new + path[len(old) :])

    def note_new_folder(self, file: Any) -> None:
        path = os.path.realpath(os.fsdecode(file))
        if not os.path.exists(path) and not self.is_ignored(path):
            (self.folder / f"folder.{zlib.crc32(path.encode())}").write_text(path)

    def note_opening(self, file: Any, mode: str | None, flags: int) -> None:
        if not isinstance(file, str | bytes | os.PathLike):  # a file descriptor
            return
        if mode is None and flags & (os.O_WRONLY | os.O_RDWR):
            self.note_change(file, "os.open")
        elif mode is not None and set(mode) & set("wax+"):
            self.note_change(file, mode)
        elif self.run.events.file_reads:
            path = os.path.realpath(os.fsdecode(file))
            if not self.is_ignored(path):
                for tell in self.run.events.file_reads:
                    tell(path)

    def audit(self, event: str, args: tuple) -> None:
        if getattr(self.inside, "audit", False) or self.run.written:
            return
        self.inside.audit = True  # this code opens files, too
        with suppress(Exception):  # an error here must not end the user's call
            if event == "open":
                self.note_opening(*args)
            elif event == "os.rename":
                self.note_rename(in_folder(args[0], args[2]), in_folder(args[1], args[3]))
            elif event == "os.remove":
                self.note_change(in_folder(*args))
            elif event == "os.mkdir":
                self.note_new_folder(args[0])
        self.inside.audit = False


def in_folder(path: Any, descriptor: int) -> Any:
    """Complete a path that is relative to an open folder, as shutil.rmtree gives it."""
    folder = os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""
    return os.path.join(folder, os.fsdecode(path))


def watch_files(run: RankRun) -> FileWatcher:
    watcher = FileWatcher(run)
    sys.addaudithook(watcher.audit)

    @wrap(torch, "save")
    def save(original: Callable, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):  # C++ writes the file, which no audit hook sees
            watcher.note_change(f, "w")
            for tell in run.events.saves:
                tell(os.path.realpath(f), lambda file: original(obj, file, *args, **kwargs))
        original(obj, f, *args, **kwargs)

    # Put the file of a file:// rendezvous back, or the next run would find old addresses.
    @wrap(sys.modules["torch.distributed.rendezvous"], "FileStore")
    def meet(original: Callable, path: str, *args: Any) -> Any:
        keep_copy(os.path.realpath(path), watcher.folder)
        return original(path, *args)

    return watcher


def watch_written_text(watcher: FileWatcher) -> None:
    @wrap(builtins, "open")
    def open_file(original: Callable, *args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        is_new = type(file) is io.TextIOWrapper and isinstance(file.name, str | bytes)
        if is_new and set(file.mode) & set("wax+"):
            return watcher.watch_text(file, kwargs.get("newline", (*args, *[None] * 6)[5]))
        return file

    io.open = builtins.open  # pathlib calls io.open


class PrintWatcher:
    """Records what the script prints, logs, or writes to its terminal."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.terminal = (sys.stdout, sys.stderr)
        self.last_logged: logging.LogRecord | None = None  # several handlers may get one record
        self.noted_logged = False  # was last_logged recorded?
        self.inside = threading.local()  # print and logging write to the terminal, too

    def note(self, text: str, on_terminal: bool, outside: str = "") -> bool:
        record = self.run.record
        if len(record.printed) >= MAX_PRINTED_TEXTS or not text.strip():
            return False
        at, first_epoch = source_line(outside=outside), not self.run.in_second_epoch
        record.printed.append(PrintedText(text, at, record.step_count, first_epoch, on_terminal))
        return True

    def call_inside(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        inside, self.inside.print = getattr(self.inside, "print", False), True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside.print = inside

    def watch_print(self) -> None:
        @wrap(builtins, "print")
        def show(
            original: Callable, *values: Any, sep: Any = " ", file: Any = None, **more: Any
        ) -> None:
            target = sys.stdout if file is None else file  # redirect_stdout(None): nobody sees it
            if target in self.terminal:
                text = (" " if sep is None else sep).join(map(str, values))
                self.note(text, True, outside="print")
            self.call_inside(original, *values, sep=sep, file=file, **more)

    def watch_logging(self) -> None:
        @wrap(logging.Handler, "handle")
        def handle(original: Callable, handler: Any, record: logging.LogRecord) -> Any:
            on_terminal = getattr(handler, "stream", None) in self.terminal
            printed = self.run.record.printed
            if record is not self.last_logged:
                self.last_logged, self.noted_logged = record, False
                with suppress(Exception):  # logging itself reports arguments that do not fit
                    self.noted_logged = self.note(record.getMessage(), on_terminal)
            elif on_terminal and self.noted_logged:  # an earlier handler wrote it to a file
                printed[-1] = printed[-1]._replace(on_terminal=True)
            return self.call_inside(original, handler, record)

    def watch_writes(self) -> None:
        """Watch writes to stdout, except progress bars, which rewrite their line."""
        with suppress(AttributeError):  # not every stream lets its methods be replaced

            @wrap(sys.stdout, "write")
            def write(original: Callable, text: str) -> Any:
                if not getattr(self.inside, "print", False) and "\r" not in text:
                    self.note(text, True, outside="write")
                return original(text)


def watch_prints(run: RankRun) -> None:
    watcher = PrintWatcher(run)
    watcher.watch_print()
    watcher.watch_logging()
    watcher.watch_writes()


def install(run: RankRun) -> None:
    for name in filter(partial(hasattr, dist), COLLECTIVES):  # some exist only from torch 2.14 on
        watch_collective(run, name)
    for name, printed_name in DDP_CALLS.items():
        watch_collective(run, name, printed_name)
    for name in POINT_TO_POINT:
        watch_point_to_point(run, name)
    watch_waits(run)
    watch_groups(run)
    watch_written_text(watch_files(run))
    watch_prints(run)
