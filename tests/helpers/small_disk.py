"""A disk that can really be full: a tmpfs in a mount namespace, gone when its process ends."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

KILOBYTES = 2048
HOLD = ["unshare", "--mount", "sh", "-c"]
MOUNT = f"mount -t tmpfs -o size={KILOBYTES}k disk /mnt && echo mounted && exec cat"
CANNOT_MOUNT = "only root may mount a tmpfs, and not in every container"


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """Mount a disk; yield its folder, which all processes reach through /proc.

    Yields None where nobody may mount it.
    """
    try:
        holder = subprocess.Popen(
            [*HOLD, MOUNT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:  # not Linux
        yield None
        return
    with holder:
        mounted = holder.stdout.readline() == b"mounted\n"  # type: ignore[union-attr]
        try:
            yield Path(f"/proc/{holder.pid}/root/mnt") if mounted else None
        finally:
            holder.kill()


@cache
def can_mount() -> bool:
    with small_disk() as folder:
        return folder is not None


def fill(folder: Path) -> None:
    """Fill the disk to its last byte. To empty it again, delete the file."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
