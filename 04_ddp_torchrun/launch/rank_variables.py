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
from typing import NamedTuple

from common.options import Parser, UsageError, exit_on, int_at_least


class Process(NamedTuple):
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


PRINT_THEM = f"echo {' '.join(f'${name.upper()}' for name in Process._fields)}"  # $RANK ...


def arguments_of(nodes: list[int], node: int) -> list[str]:
    """Return the arguments of torchrun on that node."""
    return f"--nnodes={len(nodes)} --node-rank={node} --nproc-per-node={nodes[node]}".split()


def launch(nodes: list[int]) -> list[list[Process]]:
    """Return the processes of each node, in the order of their ranks."""
    with socket.socket() as probe:  # a free port, where the torchruns meet
        probe.bind(("127.0.0.1", 0))
        meeting_point = f"--master-addr=127.0.0.1 --master-port={probe.getsockname()[1]}".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting_point]
    shell = ["--no-python", "sh", "-c", PRINT_THEM]  # the shell starts at once
    pipe, env = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*torchrun, *arguments_of(nodes, node), *shell],
            env=env,
            stdout=pipe,
            stderr=pipe,
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
    return [
        sorted(Process(*map(int, line.split())) for line in output.splitlines())
        for output, _ in outputs
    ]


def cyclic(nodes: list[int]) -> list[list[int]]:
    """The ranks of each node when they are dealt to the nodes in turn, as `srun -m cyclic` does."""
    turns = sorted((turn, node) for node, size in enumerate(nodes) for turn in range(size))
    return [
        [rank for rank, (_, of) in enumerate(turns) if of == node] for node in range(len(nodes))
    ]


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


def print_modulo(ranks: list[int]) -> None:
    print_row(f"rank % {len(ranks)}", [rank % len(ranks) for rank in ranks], verdict(ranks))


def main() -> None:
    parser = Parser(__doc__)
    count = int_at_least(1, below=65)
    parser.add_argument(
        "--nodes", nargs="+", default=[8, 8], type=count, metavar="N", help="processes on each node"
    )
    nodes = parser.parse_args().nodes
    if sum(nodes) > 64:
        raise UsageError(f"--nodes makes {sum(nodes)} processes on this machine: try 64 at most")
    for node, processes in enumerate(launch(nodes)):
        ranks, local_ranks, world_size, local_world_size = map(list, zip(*processes, strict=True))
        print(f"node {node}: torchrun {' '.join(arguments_of(nodes, node))} ...")
        print_row("RANK", ranks)
        print_row("LOCAL_RANK", local_ranks)
        print_modulo(ranks)
        print(f"  WORLD_SIZE {world_size[0]}, LOCAL_WORLD_SIZE {local_world_size[0]}")
    if len(nodes) > 1:
        print("\nunder srun -m cyclic (computed: the tasks are dealt to the nodes in turn)")
        for node, ranks in enumerate(cyclic(nodes)):
            print_row(f"node {node}", ranks)
            print_modulo(ranks)


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
