"""A network of its own for the ranks of this machine, whose kernel counts what they send.

    sudo env "PATH=$PATH" python beyond/shard/traffic.py

The counter stands outside of torch: it is that of the loopback interface in a network namespace
that nobody else is in. See network_namespaces(7), and netdevice(7) for SIOCSIFFLAGS.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from common.options import Parser, UsageError, exit_on

CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x40000000, 0x8914, 0x1, 0x40


def is_allowed() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def enter_private_network(process: int | None = None) -> None:
    """This thread, and what it starts from now on, gets a new network, or that of a process.

    Sockets that are open already stay in the network where they were opened. Raises UsageError
    without root.
    """
    if not is_allowed():
        raise UsageError(
            "a network of its own needs Linux and root: try sudo env PATH=$PATH python"
        )
    system = ctypes.CDLL(None, use_errno=True)
    if process is None:
        failed = system.unshare(CLONE_NEWNET)
    else:
        with Path(f"/proc/{process}/ns/net").open() as namespace:
            failed = system.setns(namespace.fileno(), CLONE_NEWNET)
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise UsageError(f"the system refuses a network of its own ({reason}): try another machine")
    with socket.socket() as any_socket:
        up = struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # there is no other one


def bytes_sent_so_far() -> int:
    """What all processes of this network have sent so far, with the headers of TCP and IP."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split()[9])


def main() -> None:
    enter_private_network()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = bytes_sent_so_far()
        with socket.create_connection(server.getsockname()) as client:
            receiver, _ = server.accept()
            client.sendall(bytes(10**6))
            received = 0
            while received < 10**6:
                received += len(receiver.recv(10**6))
            print(f"1,000,000 bytes through a socket: {bytes_sent_so_far() - before:,} sent")


if __name__ == "__main__":
    with exit_on(UsageError):
        Parser(__doc__).parse_args()
        main()
