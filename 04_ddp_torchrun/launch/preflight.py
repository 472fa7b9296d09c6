"""Can these machines talk? Says "ready" or the first cause, on every rank, within 60 seconds.

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=10.0.0.1 preflight.py
    srun python preflight.py
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python preflight.py

Copy this file to any Linux cluster: it needs torch alone. Where nodes never meet, torchrun waits
and starts nothing: then type the last line, on each node with its RANK. PREFLIGHT_SECONDS=120
doubles all limits. It looks at IPv4 addresses only. Exit status: 0 ready, 1 not ready, 2 the
variables make no sense.

How it works: `run` takes one step after the other, from the name of rank 0 to an all-reduce of
64 MB over nccl. In `together`, all ranks do a step, and tell each other in the store of rank 0 how
it went. So once they have met, all name the same cause; before that, each names its own. A rank is
a child of the process that you start, which ends it if it was stopped, or if nccl does not let go.

No GPU has run this yet: what asks CUDA or uses nccl was tried on pretended GPUs only.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read by the import: our words, not torch's
import torch
import torch.distributed as dist

NCCL = """. NCCL_DEBUG=INFO shows its last step. Then put in front of the command, one by one:
    NCCL_P2P_DISABLE=1      ready now? Direct copies between GPUs fail: boot with iommu=pt, or
                            switch off the IOMMU or PCI's ACS. The variable alone costs speed
    NCCL_SOCKET_IFNAME=...  the interface between the machines
    NCCL_IB_DISABLE=1       sockets in the place of InfiniBand"""
env, HOST = os.environ, socket.gethostname()
if "RANK" not in env and "SLURM_PROCID" in env:  # srun has other names for them
    slurm = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "STEP_NUM_TASKS"}
    env.update({name: env[f"SLURM_{theirs}"] for name, theirs in slurm.items()})
    first_node = re.sub(r"\[(\d+).*", r"\1", env["SLURM_JOB_NODELIST"].split(",")[0])
    env.setdefault("MASTER_ADDR", first_node)
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
RANK, LOCAL_RANK, N, PORT = (int(v) if (v := env.get(n, "")).isdecimal() else -1 for n in NAMES)
ADDRESS = env.get("MASTER_ADDR", "")
SECONDS = float(env.get("PREFLIGHT_SECONDS", 60))
STEP, GRACE, SLOW = SECONDS / 6, max(2, SECONDS / 20), 0.2  # seconds, and Gbit/s
LONG = timedelta(seconds=SECONDS)  # the limits of steps are ours, not torch's
POOL = ThreadPoolExecutor(64)  # a call that never ends stays behind in its thread
ON, GROUPS, KEPT = {}, {}, []  # the host of each rank; its groups; what must stay alive
STEPS = os.pipe()  # a rank tells them to its parent


class Fault(Exception):  # noqa: N818
    """What is wrong and where, and what to do about it."""


def check(good, text):
    if not good:
        raise Fault(text)


@contextmanager
def blame(text):
    """Say this, and the error in brackets, if the network has one."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise Fault(f"{text} ({str(error).splitlines()[0]})") from None


def read(path, pattern):
    with suppress(OSError):  # no such file on this machine
        return re.search(pattern, Path(path).read_text())[1]


def together(store, step, call, *args, seconds=STEP):
    """Call this on all ranks; return what each has returned, or raise what kept one from it."""
    keys, end = [f"{step} {rank}" for rank in range(N)], time.monotonic() + seconds + GRACE
    os.write(STEPS[1], f"{step}, ".encode())
    answer = {"host": HOST}
    try:
        answer["value"] = POOL.submit(call, *args).result(seconds)
    except Fault as fault:
        answer["fault"] = str(fault)
    except Exception as error:  # another rank may be the cause
        text = (str(error) or "no end of it").splitlines()[0]
        cure = NCCL if "nccl" in step else ""
        answer["trouble"] = f"{step}: {text}, says rank {RANK} on {HOST}{cure}"

    def exchange():
        store.set(keys[RANK], json.dumps(answer))
        with suppress(RuntimeError):  # some do not come
            store.wait(keys, timedelta(seconds=end - time.monotonic()))
        there = [rank for rank in range(N) if store.check([keys[rank]])]
        return {rank: json.loads(store.get(keys[rank])) for rank in there}

    answers = {}
    with suppress(Exception):  # RuntimeError or TimeoutError
        answers = POOL.submit(exchange).result(seconds + 2 * GRACE)
    check(answers, f"{step}: the store of rank 0 is silent. Was rank 0 stopped or killed?")
    ON.update({rank: answer["host"] for rank, answer in answers.items()})
    absent = [rank for rank in range(N) if rank not in answers]
    stopped = ", ".join(f"rank {rank} on {ON[rank]}" for rank in absent if rank in ON)
    there = ", ".join(f"rank {rank} on {ON[rank]}" for rank in answers)
    for answer in answers.values():
        check("fault" not in answer, answer.get("fault"))
    check(not stopped, f"{stopped} did not end the step {step!r}: was it stopped or killed?")
    if absent:
        compare([answer["value"] for answer in answers.values() if "value" in answer])
    text = "Start it, read what it prints there, or make WORLD_SIZE smaller"
    check(not absent, f"rank {absent} of {N} did not come, here are {there}. {text}")
    for answer in answers.values():
        check("trouble" not in answer, answer.get("trouble"))
    return [answers[rank]["value"] for rank in range(N)]


def compare(seen):
    """Raise what differs between the hosts, but must not."""
    for name in seen[0]["same"] if seen else ():
        values = sorted({f"{facts['same'][name]} on {facts['host']}" for facts in seen})
        good = len({str(facts["same"][name]) for facts in seen}) == 1
        check(good, f"{name} differs: {', '.join(values)}. Make it the same on all hosts")


def meet():
    """Connect to the store, which rank 0 holds, or torchrun in its place."""
    global HOST
    place, where = (ADDRESS, PORT), f"{ADDRESS}:{PORT}"
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=STEP)}
    taken = f"port {PORT} of {HOST} is taken: by a second RANK=0, by an old run that `ss -ltnp` "
    taken += "shows, or by another program, so choose another MASTER_PORT"
    with blame(f"{HOST} cannot find MASTER_ADDR {ADDRESS!r}: give a number, such as 10.0.0.1"):
        socket.getaddrinfo(*place)
    if RANK == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with blame(taken):
            KEPT.append(dist.TCPStore("127.0.0.1", PORT, is_master=True, **options))
    store, text = None, "not started? Another MASTER_ADDR or MASTER_PORT? A firewall?"
    with suppress(Exception):  # nobody listens there, or nobody who answers
        store = POOL.submit(dist.TCPStore, *place, **options).result(2.2 * STEP)
    with blame(f"{HOST} cannot reach rank 0 at {where}: {text}"):
        route = socket.create_connection(place, GRACE).getsockname()[0]
    text = (
        f"{where} does not answer {HOST} as rank 0 does: is it another program, or another host? "
    )
    check(store, text + "Was rank 0 stopped?")
    HOST += "" if route.startswith("127.") else f" ({route})"
    return dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def check_numbers(store):
    """Has each rank come once? Adding nothing to a counter reads it."""
    for rank in range(N):
        text = f"two processes are rank {rank}, one of them on {ON.get(rank, HOST)}"
        check(store.add(f"rank {rank}", 0) < 2, f"{text}: each needs a number of its own")


def look_around(store):
    """Return what this host has, unless it is too little."""
    store.add(f"rank {RANK}", 1)
    check_numbers(store)
    shm, gpus = os.statvfs("/dev/shm"), torch.cuda.device_count()
    free = shm.f_bavail * shm.f_frsize >> 20
    check(free >= 512, f"/dev/shm on {HOST} has {free} MB left, in Docker try --shm-size=1g")
    files = int(read("/proc/self/limits", r"Max open files +(\d+)"))
    check(files >= 1024, f"{HOST} allows {files} open files: ulimit -n 65536")
    memory = int(read("/proc/meminfo", r"MemAvailable: +(\d+)")) >> 10
    check(memory >= 1024, f"{HOST} has {memory} MB of memory left: `top` shows who has it")
    text = f"LOCAL_RANK is {LOCAL_RANK} on {HOST}, which shows {gpus} GPUs: start one rank for each"
    check(gpus < 2 or gpus > LOCAL_RANK, text)
    code = b"".join(Path(name).read_bytes() for name in sys.argv if Path(name).is_file())
    same = {"WORLD_SIZE": N, "torch": torch.__version__, "CUDA": torch.version.cuda}
    same["NCCL"] = str(torch.cuda.nccl.version()) if dist.is_nccl_available() else None
    same["driver"] = read("/proc/driver/nvidia/version", r"Module +(\S+)")
    same |= {"Python": sys.version.split()[0], "script": hashlib.sha256(code).hexdigest()[:8]}
    same["a GPU?"] = gpus > 0
    has = {"GPUs": gpus, "/dev/shm": f"{free} MB", "files": files, "memory": f"{memory} MB"}
    return {"host": HOST, "same": same, "has": has}


def listen():
    """Listen where gloo will: at GLOO_SOCKET_IFNAME, or at the name of this host."""
    wanted, address = env.get("GLOO_SOCKET_IFNAME", "").split(",")[0], "127.0.0.1"
    if wanted:
        names = ", ".join(name for _, name in socket.if_nameindex())
        with blame(f"GLOO_SOCKET_IFNAME is {wanted} on {HOST}, which has {names}"):
            request = wanted.encode().ljust(256, b"\0")
            answer = fcntl.ioctl(socket.socket(), 0x8915, request)  # SIOCGIFADDR
            address = socket.inet_ntoa(answer[20:24])
    else:
        with suppress(OSError):
            own = socket.gethostbyname(socket.gethostname())
            socket.create_server((own, 0)).close()  # otherwise, it is another host's
            address = own
    local = address.startswith("127.") and len(set(ON.values())) > 1
    text = f"gloo would listen on {address} of {HOST}, where no other host reaches it: set "
    text += "GLOO_SOCKET_IFNAME there to what `ip route get MASTER_ADDR` names after dev"
    check(not local, text)
    KEPT.append(socket.create_server((address, 0)))
    return KEPT[-1].getsockname()[:2]


def try_ports(places):
    """Connect to each other host where gloo will listen."""
    for host, (address, port) in {ON[rank]: place for rank, place in enumerate(places)}.items():
        text = f"{HOST} cannot connect to {host} at {address}:{port}, although MASTER_PORT is open"
        text += ": let the firewall pass all ports between hosts, or set GLOO_SOCKET_IFNAME"
        if host != HOST:
            with blame(text):
                socket.create_connection((address, port), STEP / 2).close()


def move(kind, size, device, backend):
    """All-reduce so many numbers, or pass them around a ring; return the seconds it took."""
    if backend == "nccl":
        torch.cuda.set_device(device)  # of this thread
        if backend not in GROUPS:  # with a GPU, this is nccl's first step, which may hang, too
            GROUPS[backend] = dist.new_group(backend=backend, timeout=LONG, device_id=device)
    group = GROUPS.get(backend)  # of gloo, the default one
    before, after = (RANK - 1) % N, (RANK + 1) % N
    mine, other = torch.full((2, size), RANK + 1.0, device=device)
    start = time.perf_counter()
    if kind == "all-reduce":
        dist.all_reduce(mine, group=group)
        got, expected = mine, N * (N + 1) / 2
    else:
        send = dist.P2POp(dist.isend, mine, after, group)
        receive = dist.P2POp(dist.irecv, other, before, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        got, expected = other, before + 1
    got[-1].item()  # waits for the GPU
    seconds = time.perf_counter() - start
    check(bool((got == expected).all()), f"rank {RANK} on {HOST} has wrong numbers after {kind}")
    return seconds


def try_links(store, device, megabytes, backend="gloo"):
    """Move one number, then many; return a line on how fast that was."""
    for size in (1, megabytes * 2**20 // 4):  # float32 has 4 bytes
        what, step = (size, device, backend), f"of {4 * size} bytes over {backend}"
        sums = together(store, f"all-reduce {step}", move, "all-reduce", *what, seconds=2 * STEP)
        rings = [sums]
        if N > 1:  # the quickest of three, because a busy host is not a slow link
            rings = [together(store, f"ring {n} {step}", move, "ring", *what) for n in range(3)]
    if N == 1:
        return f"{backend}: rank 0 is alone, so nothing was sent"
    ring = [min(times) for times in zip(*rings, strict=True)]
    links = [min(ring[rank], ring[(rank + 1) % N]) for rank in range(N)]
    rank, rate = links.index(max(links)), (megabytes << 23) / 1e9 / max(links)
    here, there = ON[rank], ON[(rank + 1) % N]
    text = f"{backend}: all-reduce of {megabytes} MB in {1000 * max(sums):.0f} ms; slowest link "
    text += f"{rate:.2f} Gbit/s, from rank {rank} on {here} to rank {(rank + 1) % N} on {there}"
    check(here == there or rate > SLOW, f"{text}: the wrong interface? `ethtool` shows its speed")
    return text


def open_gpu():
    """Return the name of this rank's GPU, and to which GPUs it can copy directly."""
    mine, gpus = LOCAL_RANK % torch.cuda.device_count(), range(torch.cuda.device_count())
    torch.cuda.set_device(mine)
    near = [gpu for gpu in gpus if gpu != mine and torch.cuda.can_device_access_peer(mine, gpu)]
    return str(torch.cuda.get_device_properties(mine).uuid), near


def check_variables():
    given = ", ".join(f"{name} {env.get(name, 'is not set')}" for name in NAMES)
    good = 0 <= RANK < N and 0 <= LOCAL_RANK < N and 0 < PORT < 65536
    check(good, f"{given}: start it by torchrun or srun, or set all of them")
    good = ADDRESS and not ADDRESS.lower().startswith("fe80")  # IPv6, link-local
    check(good, f"MASTER_ADDR is {ADDRESS!r}: give an address that every host can reach")


def run():
    """Take the steps, each of which needs those before it; return what to print if all is well."""
    store = meet()
    seen = together(store, "meeting", look_around, store, seconds=2 * STEP)
    check_numbers(store)
    compare(seen)
    clocks = together(store, "comparing clocks", time.time)
    places = together(store, "opening a port", listen)
    together(store, "connecting to all hosts", try_ports, places)
    group = {"backend": "gloo", "store": store, "rank": RANK, "world_size": N, "timeout": LONG}
    together(store, "connecting over gloo", lambda: dist.init_process_group(**group))
    together(store, "barrier", dist.monitored_barrier, None, timedelta(seconds=0.8 * STEP), True)
    lines = [try_links(store, torch.device("cpu"), 4)]
    if torch.cuda.device_count():
        gpus = together(store, "opening the GPUs", open_gpu, seconds=2 * STEP)
        for gpu, near in gpus:
            ranks = [rank for rank, (other, _) in enumerate(gpus) if other == gpu]
            check(len(ranks) == 1, f"ranks {ranks} have one GPU: torch.cuda.set_device(LOCAL_RANK)")
            lines.append(f"rank {ranks[0]} can copy directly (P2P) to the GPUs {near} of its host")
        gpu = torch.device("cuda", LOCAL_RANK % torch.cuda.device_count())
        lines.append(try_links(store, gpu, 64, "nccl"))
    time.sleep(GRACE)  # a second process of a rank may come late
    together(store, "parting", check_numbers, store)
    table = [["rank on host", *seen[0]["has"], "clock"]]
    for rank, facts in enumerate(seen):
        clock = f"{clocks[rank] - clocks[0]:+.1f} s"
        table.append([f"{rank} on {facts['host']}", *map(str, facts["has"].values()), clock])
    for row in table:
        cells = zip(row, zip(*table, strict=True), strict=True)
        lines.append("  ".join(cell.ljust(max(map(len, column))) for cell, column in cells))
    return "\n".join([*lines, f"ready (ranks: {N}, hosts: {len(set(ON.values()))})"])


def main():
    child, end = os.fork(), time.monotonic() + 0.95 * SECONDS
    while child:  # this is the parent
        ended, status = os.waitpid(child, os.WNOHANG)
        code, state = os.waitstatus_to_exitcode(status), read(f"/proc/{child}/stat", r"\) (\w)")
        if ended and code >= 0:
            sys.exit(code)
        if ended or time.monotonic() > end:
            steps = os.read(STEPS[0], 9999).decode()
            how = f"died of signal {-code}" if ended else f"did not end (state {state}, T: stopped)"
            ended or os.kill(child, signal.SIGKILL)
            cure = NCCL if "nccl" in steps else ". `kill -CONT` lets a stopped one go on"
            text = f"rank {RANK} on {HOST}: NOT READY: it {how}. It began: {steps.rstrip(', ')}"
            sys.exit(text + cure)
        time.sleep(0.1)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # if the parent ends
    os.write(STEPS[1], b"reaching rank 0, ")
    status, verdict = 2, f"rank {RANK} on {HOST}: NOT READY: "
    try:
        check_variables()
        status = 1
        verdict = run()
        status = 0
    except Fault as fault:
        verdict += str(fault)
    if status or LOCAL_RANK == 0:
        print(verdict, flush=True)
    time.sleep(GRACE if RANK == 0 and status != 2 else 0)  # the others still read its store
    os._exit(status)  # leaves threads behind


if __name__ == "__main__":
    main()
