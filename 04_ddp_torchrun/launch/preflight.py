"""Can these machines talk? Says "ready" or the first cause, on every rank, within 60 seconds.

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=10.0.0.1 preflight.py
    srun python preflight.py
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python preflight.py

Copy this file to any Linux cluster: it needs torch alone. Where nodes never meet, torchrun waits
and starts nothing: then type the last line, on each node with its RANK. All ranks do each step, and
tell each other through a store how it went, so all name the same cause. The parent of a rank ends
it if it was stopped, or if nccl does not let go. PREFLIGHT_SECONDS=120 doubles all limits.
Exit status: 0 ready, 1 not ready, 2 the variables make no sense.
No GPU has run this yet: what asks CUDA or uses nccl was tried on pretended GPUs only.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read by the import: our words, not torch's
import torch
import torch.distributed as dist

SECONDS = float(os.environ.get("PREFLIGHT_SECONDS", 60))
STEP, GRACE, SLOW = SECONDS / 6, max(2, SECONDS / 20), 0.2  # seconds; Gbit/s
POOL = ThreadPoolExecutor(64)  # a call that never ends is left behind in its thread
NEEDS = {
    "MB of /dev/shm": (512, "in Docker, --shm-size=1g or --ipc=host"),
    "open files": (1024, "ulimit -n 65536"),
    "MB of memory": (1024, "`top` shows who has it"),
}
NCCL = """. Its last step: NCCL_DEBUG=INFO. Then put these in front of the command, one by one:
    NCCL_P2P_DISABLE=1      ready now? Direct copies between GPUs fail: boot with iommu=pt, or
                            switch off the IOMMU or PCI's ACS. The variable alone costs speed
    NCCL_SOCKET_IFNAME=...  the interface between the machines
    NCCL_IB_DISABLE=1       sockets in the place of InfiniBand"""


class Fault(Exception):  # noqa: N818
    """What is wrong and where, and what to do about it."""


def check(good, text):
    if not good:
        raise Fault(text)


@contextmanager
def blame(text):
    """Say this in the place of an error of a socket or of torch."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise Fault(f"{text} ({str(error).splitlines()[0]})") from None


def read(path, pattern):
    with suppress(OSError):  # no such file on this machine
        return re.search(pattern, Path(path).read_text())[1]


def number(name, low, below):
    text, how = os.environ.get(name, ""), "start by torchrun or srun, or set all five variables"
    good = text.isdecimal() and low <= int(text) < below
    check(good, f"{name} is {text!r}, expected a number from {low} to {below - 1}: {how}")
    return int(text)


class Rank:
    def __init__(self):
        env, self.host, self.seen, self.server = os.environ, socket.gethostname(), (), ()
        if "RANK" not in env and "SLURM_PROCID" in env:  # srun has other names for them
            slurm = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "STEP_NUM_TASKS"}
            env.update({name: env[f"SLURM_{theirs}"] for name, theirs in slurm.items()})
            first_node = re.match(r"([^\[,]+)(?:\[(\d+))?", env["SLURM_JOB_NODELIST"]).groups("")
            env.setdefault("MASTER_ADDR", "".join(first_node))
            env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))
        self.world_size = number("WORLD_SIZE", 1, 10**6)
        self.rank = number("RANK", 0, self.world_size)
        self.local_rank = number("LOCAL_RANK", 0, self.world_size)
        self.address, self.port = env.get("MASTER_ADDR", ""), number("MASTER_PORT", 1, 65536)
        good = self.address and not self.address.lower().startswith("fe80")  # IPv6, link-local
        check(good, f"MASTER_ADDR is {self.address!r}: give an address that every host can reach")

    def meet(self):
        """Connect to the store, which rank 0 holds, or torchrun in its place."""
        place, where = (self.address, self.port), f"{self.address}:{self.port}"
        options = {"wait_for_workers": False, "timeout": timedelta(seconds=STEP)}
        text = f"{self.host} cannot find MASTER_ADDR {self.address!r}: give a number like 10.0.0.1"
        with blame(text):
            socket.getaddrinfo(*place)
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with blame(f"port {self.port} of {self.host} is taken: choose another MASTER_PORT"):
                self.server = dist.TCPStore("127.0.0.1", self.port, is_master=True, **options)
        try:
            store = dist.TCPStore(*place, **options)
        except RuntimeError:
            text = (
                "is rank 0 not started, is MASTER_ADDR or MASTER_PORT wrong, or a firewall between?"
            )
            with blame(f"{self.host} cannot reach rank 0 at {where}: {text}"):
                socket.create_connection(place, GRACE).close()
            raise Fault(f"{where} is not the store of rank 0: choose another MASTER_PORT") from None
        self.store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        with socket.create_connection(place, GRACE) as connection:
            route = connection.getsockname()[0]
        self.host += "" if route.startswith("127.") else f" ({route})"

    def together(self, step, call, *values, seconds=STEP):
        """Call this on all ranks; return what each has returned, or raise what was first to fail."""
        keys, end = (
            [f"{step} {rank}" for rank in range(self.world_size)],
            time.monotonic() + seconds,
        )
        try:
            answer = {"value": POOL.submit(call, *values).result(seconds)}
        except Fault as fault:
            answer = {"fault": str(fault)}
        except Exception as error:  # perhaps another rank is the cause
            text = str(error).splitlines()[0] if str(error) else "no end of it"
            answer = {"trouble": f"{step}: {text}, on rank {self.rank} on {self.host}"}

        def exchange():
            self.store.set(keys[self.rank], json.dumps(answer))
            with suppress(RuntimeError):
                left = max(0, end - time.monotonic()) + GRACE
                self.store.wait(keys, timedelta(seconds=left))
            there = [rank for rank, key in enumerate(keys) if self.store.check([key])]
            return {rank: json.loads(self.store.get(keys[rank])) for rank in there}

        try:
            answers = POOL.submit(exchange).result(seconds + 2 * GRACE)
        except Exception:
            text = f"{step}: the store of rank 0 is silent. Was rank 0 stopped or killed?"
            raise Fault(text) from None
        faults = [answer["fault"] for answer in answers.values() if "fault" in answer]
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        troubles = [answer["trouble"] for answer in answers.values() if "trouble" in answer]
        if silent and not self.seen:
            compare([answer["value"] for answer in answers.values() if "value" in answer])
            there = ", ".join(f"rank {rank} on {a['value']['host']}" for rank, a in answers.items())
            text = "Start it, read what it prints there, or make WORLD_SIZE smaller"
            faults.append(
                f"rank {silent} of {self.world_size} is missing, here are {there}. {text}"
            )
        for rank in silent if self.seen else ():
            text = (
                f"rank {rank} on {self.seen[rank]['host']} has fallen silent in the step {step!r}"
            )
            faults.append(f"{text}: was it stopped or killed, or is the host gone?")
        for text in [*faults, *troubles]:
            raise Fault(text + (NCCL if "nccl" in step else ""))
        return [answers[rank]["value"] for rank in range(self.world_size)]

    def look_around(self):
        """Return what this machine has, unless it has too little."""
        shm, gpus = os.statvfs("/dev/shm"), torch.cuda.device_count()
        has = {"GPUs": gpus, "MB of /dev/shm": shm.f_bavail * shm.f_frsize >> 20}
        has["open files"] = int(read("/proc/self/limits", r"Max open files +(\d+)"))
        has["MB of memory"] = int(read("/proc/meminfo", r"MemAvailable: +(\d+)")) >> 10
        for name, (least, cure) in NEEDS.items():
            text = f"{self.host} has {has[name]} {name}, expected {least} or more: {cure}"
            check(has[name] >= least, text)
        text = f"LOCAL_RANK is {self.local_rank} on {self.host}, which shows {gpus} GPUs"
        check(self.local_rank < gpus or gpus < 2, f"{text}: start one rank for each GPU")
        files = [__file__, *filter(os.path.isfile, sys.argv)]
        code = b"".join(Path(name).read_bytes() for name in files)
        same = {"torch": torch.__version__, "CUDA": torch.version.cuda, "GPUs?": gpus > 0}
        same["NCCL"] = str(torch.cuda.nccl.version()) if dist.is_nccl_available() else None
        same["driver"] = read("/proc/driver/nvidia/version", r"Module +(\S+)")
        same |= {"Python": sys.version.split()[0], "WORLD_SIZE": self.world_size}
        same["script"] = hashlib.sha256(code).hexdigest()[:8]
        return {"host": self.host, "has": has, "same": same}

    def listen(self):
        """Listen where gloo will: at GLOO_SOCKET_IFNAME, or at the name of this host."""
        wanted, address = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], "127.0.0.1"
        if wanted:
            there = ", ".join(name for _, name in socket.if_nameindex())
            with blame(f"GLOO_SOCKET_IFNAME={wanted} on {self.host}, which has {there}"):
                probe, request = socket.socket(), wanted.encode().ljust(256, b"\0")
                address = socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])
        else:
            with suppress(OSError):
                mine = socket.gethostbyname(socket.gethostname())
                socket.create_server((mine, 0)).close()  # otherwise, it is of another host
                address = mine
        self.server = self.server, socket.create_server((address, 0))
        many = len({facts["host"] for facts in self.seen}) > 1
        text = f"gloo would listen on {address} of {self.host}, where no other host reaches it"
        cure = "export GLOO_SOCKET_IFNAME there, as `ip route get MASTER_ADDR` names it after dev"
        check(not (many and address.startswith("127.")), f"{text}: {cure}")
        return self.server[1].getsockname()[:2]

    def try_ports(self, places):
        tried = {self.host}
        for facts, place in zip(self.seen, places, strict=True):
            host, text = (
                facts["host"],
                "open all ports between the hosts, or set GLOO_SOCKET_IFNAME",
            )
            if host not in tried:
                tried.add(host)
                with blame(
                    f"{self.host} reaches port {self.port} of rank 0, but not {host} at {place}: {text}"
                ):
                    socket.create_connection(place, STEP / 2).close()

    def open_gpu(self):
        self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.group = dist.new_group(backend="nccl", timeout=timedelta(seconds=SECONDS))
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def move(self, kind, size, device, group):
        """All-reduce so many numbers, or pass them to the next rank; return how long it took."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        n, before, after = (
            self.world_size,
            (self.rank - 1) % self.world_size,
            (self.rank + 1) % self.world_size,
        )
        mine, other = (
            torch.full((size,), self.rank + 1.0, device=device),
            torch.zeros(size, device=device),
        )
        start = time.perf_counter()
        if kind == "ring":
            send = dist.P2POp(dist.isend, mine, after, group)
            receive = dist.P2POp(dist.irecv, other, before, group)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            result, right = other, before + 1
        else:
            dist.all_reduce(mine, group=group)
            result, right = mine, n * (n + 1) / 2
        result[-1].item()  # waits for the GPU
        seconds = time.perf_counter() - start
        check(
            bool((result == right).all()),
            f"rank {self.rank} on {self.host} has wrong numbers after the {kind}",
        )
        return seconds

    def try_links(self, backend, device, megabytes, group=None):
        """Move one number and many; return a line that names the slowest link."""
        n = self.world_size
        for size in (1, megabytes << 18):
            name = f"of {4 * size} bytes over {backend}"
            times = self.together(
                f"all-reduce {name}", self.move, "all-reduce", size, device, group
            )
            ring = (
                self.together(f"ring {name}", self.move, "ring", size, device, group)
                if n > 1
                else times
            )
        line = f"{backend}: all-reduce of {megabytes} MB in {1000 * max(times):.0f} ms"
        links = [min(ring[rank], ring[(rank + 1) % n]) for rank in range(n)]
        rank, rate = links.index(max(links)), megabytes / 119.2 / max(links)
        hosts = [self.seen[rank]["host"], self.seen[(rank + 1) % n]["host"]]
        line += f"; slowest link: {rate:.2f} Gbit/s from rank {rank} on {hosts[0]} to rank {(rank + 1) % n} on {hosts[1]}"
        check(
            hosts[0] == hosts[1] or rate > SLOW,
            f"{line}: is it the right interface? `ethtool` shows its speed",
        )
        return line

    def run(self):
        limit = timedelta(seconds=SECONDS)
        self.meet()
        self.seen = self.together("start", self.look_around, seconds=2 * STEP)
        compare(self.seen)
        clocks = self.together("clocks", time.time)
        places = self.together("listening", self.listen)
        self.together("connecting to a port of each host", self.try_ports, places)
        numbers = {"rank": self.rank, "world_size": self.world_size}
        join = partial(dist.init_process_group, "gloo", store=self.store, timeout=limit, **numbers)
        self.together("connecting over gloo", join)
        late = timedelta(seconds=0.8 * STEP)
        self.together("barrier", partial(dist.monitored_barrier, timeout=late, wait_all_ranks=True))
        lines = [self.try_links("gloo", torch.device("cpu"), 4)]
        if torch.cuda.device_count():
            gpus = self.together("opening the GPUs", self.open_gpu, seconds=2 * STEP)
            for gpu in gpus:
                ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
                check(
                    len(ranks) == 1,
                    f"ranks {ranks} have one GPU of {self.host}: torch.cuda.set_device(LOCAL_RANK)",
                )
            lines.append(self.try_links("nccl", self.device, 64, self.group))
        if self.rank == 0:
            rows = [["host", *self.seen[0]["has"], "clock"]]
            for rank, facts in enumerate(self.seen):
                clock = f"{clocks[rank] - clocks[0]:+.2f} s"
                rows.append([f"{rank}: {facts['host']}", *facts["has"].values(), clock])
            widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
            for row in rows:
                print(*(f"{cell!s:{w}}" for cell, w in zip(row, widths, strict=True)), sep="  ")
            print(*lines, sep="\n")
        hosts = len({facts["host"] for facts in self.seen})
        return f"ready: {self.world_size} ranks on {hosts} hosts"


def compare(seen):
    for name in seen[0]["same"]:
        values = {str(facts["same"][name]) for facts in seen}
        text = ", ".join(sorted({f"{facts['same'][name]} on {facts['host']}" for facts in seen}))
        check(len(values) == 1, f"{name} differs: {text}. Make it the same on all hosts")


def run_rank():
    """In the child: print the verdict and end, whatever a thread still waits for."""
    ctypes.CDLL(None).prctl(1, 9)  # if the parent dies, SIGKILL
    status, name = 2, "?"
    try:
        rank = Rank()
        status, name = 1, f"rank {rank.rank} on {rank.host}"
        verdict = rank.run()
        status = 0
    except Fault as fault:
        verdict = f"NOT READY: {fault}"
    if status or rank.local_rank == 0:
        print(f"{name}: {verdict}", flush=True)
    if status != 2 and rank.rank == 0:
        time.sleep(GRACE)  # others still read the store
    os._exit(status)


def main():
    """Start the rank, and end it if it does not end by itself."""
    child = subprocess.Popen([sys.executable, __file__, "--child", *sys.argv[1:]])
    with suppress(subprocess.TimeoutExpired):
        status = child.wait(0.95 * SECONDS)
        if status < 0:
            print(f"a rank on {socket.gethostname()} died of signal {-status}")
        sys.exit(abs(status))
    state = read(f"/proc/{child.pid}/stat", r"\) (\w)")
    child.kill()
    print(f"a rank on {socket.gethostname()} did not end (state {state}; T means stopped)")
    sys.exit(1)


if __name__ == "__main__":
    run_rank() if "--child" in sys.argv else main()
