"""Rank, local rank, world size: the numbers that torchrun gives, for nodes of any size.

    python 04_ddp_torchrun/launch/rank_variables.py --nodes 8 8

For each node, a real torchrun starts on this machine, and starts that many processes: shells that
print what torchrun has put into their environment. No GPU is used: `rank % GPUs` is computed from
these ranks, for nodes with one GPU per process. The last part is computed too: the ranks that
SLURM's cyclic distribution would give to the same nodes.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from common.options import Parser, UsageError, exit_on, int_at_least

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
PRINTED_VARIABLES = " ".join(f"${name}" for name in NAMES)


@dataclass(frozen=True)
class Process:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def torchrun(nodes: list[int], node: int, port: int) -> list[str]:
    """The command for that node. --no-python: its processes are shells, which start at once."""
    size = f"--nnodes={len(nodes)} --node-rank={node} --nproc-per-node={nodes[node]}"
    meeting_point = f"--master-addr=127.0.0.1 --master-port={port}"
    return [
        *f"torchrun {size} {meeting_point} --no-python sh -c".split(),
        f"echo {PRINTED_VARIABLES}",
    ]


def launch(nodes: list[int]) -> list[list[Process]]:
    """The processes of each node, in the order of their ranks."""
    with socket.socket() as probe:  # a free port, where the torchruns meet
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = [sys.executable, "-m", "torch.distributed.run"]
    agents = [
        subprocess.Popen(
            [*run, *torchrun(nodes, node, port)[1:]],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(len(nodes))
    ]
    try:
        outputs = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, (_, errors) in zip(agents, outputs, strict=True):
        if agent.returncode:
            raise RuntimeError(f"torchrun ended with {agent.returncode}: {errors}")
    processes = [
        [Process(*map(int, line.split())) for line in output.splitlines()] for output, _ in outputs
    ]
    return [sorted(node, key=lambda process: process.rank) for node in processes]


def cyclic(nodes: list[int]) -> list[list[int]]:
    """The ranks of each node when they are dealt to the nodes in turn, as `srun -m cyclic` does."""
    turns = [(turn, node) for node, size in enumerate(nodes) for turn in range(size)]
    dealt: list[list[int]] = [[] for _ in nodes]
    for rank, (_, node) in enumerate(sorted(turns)):
        dealt[node].append(rank)
    return dealt


def verdict(ranks: list[int]) -> str:
    """Whether rank % GPUs is the local rank, on a node with as many GPUs as ranks."""
    gpus = [rank % len(ranks) for rank in ranks]
    shared = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    if shared:
        return f"ranks share GPU {', '.join(map(str, shared))}"
    if gpus == list(range(len(ranks))):
        return "the local rank"
    return "another GPU than LOCAL_RANK names"


def print_row(name: str, numbers: list[int], note: str = "") -> None:
    cells = "".join(f"{number:>4}" for number in numbers)
    print(f"  {name:<12}{cells}" + (f"   {note}" if note else ""))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--nodes",
        nargs="+",
        default=[8, 8],
        type=int_at_least(1, below=65),
        metavar="N",
        help="processes on each node",
    )
    nodes = parser.parse_args().nodes
    if sum(nodes) > 64:
        raise UsageError(f"--nodes makes {sum(nodes)} processes on this machine: try 64 at most")
    for node, processes in enumerate(launch(nodes)):
        ranks = [process.rank for process in processes]
        command = torchrun(nodes, node, 29500)[:4]
        print(f"node {node}: {' '.join(command)} ...")
        print_row("RANK", ranks)
        print_row("LOCAL_RANK", [process.local_rank for process in processes])
        print_row(f"rank % {len(ranks)}", [rank % len(ranks) for rank in ranks], verdict(ranks))
        process = processes[0]
        print(f"  WORLD_SIZE {process.world_size}, LOCAL_WORLD_SIZE {process.local_world_size}")
    if len(nodes) > 1:
        print("\nunder srun -m cyclic (computed: the tasks are dealt to the nodes in turn)")
        for node, ranks in enumerate(cyclic(nodes)):
            print_row(f"node {node}", ranks)
            print_row(f"rank % {len(ranks)}", [rank % len(ranks) for rank in ranks], verdict(ranks))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
