"""A model that DDP cannot train under a memory limit, and FSDP can.

    python beyond/shard/memory_limit.py
    python beyond/shard/memory_limit.py --ranks 4 --limit-mib 120

Each rank may take so many MiB more than it has when torch and the process group are there. Linux
enforces it (RLIMIT_DATA), as a GPU does with its own memory. FSDP gets its model on the meta
device, and makes and divides one layer after the other, so that no rank ever holds all of it.
"""

import ctypes
import re
import resource
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim import AdamW

from common.options import Parser, UsageError, exit_on, int_at_least
from levels import LEVELS, by_hand
from local_ranks.ranks import RankError, run_ranks
from text_model import BYTES, Transformer

MIB = 2**20
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # options of mallopt(3)
WIDTH, LAYERS, TOKENS, STEPS = 320, 10, 32, 3
# What torch, the C library, C++ and Python say.
NO_ROOM = re.compile("(can't|cannot) allocate memory|bad_alloc|MemoryError", re.IGNORECASE)
NAMES = dict(zip(LEVELS, ("DDP", "ZeRO-1", "ZeRO-2", "FSDP"), strict=True))


def used_bytes() -> int:
    """Return the private memory of this process that can be written: what RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmData:\s*(\d+)", status)[0])


def train(level: str, width: int, layers: int) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    with torch.device("meta" if level == "parameters" else "cpu"):
        model = Transformer(width, layers)
    training = by_hand(level, model, AdamW, lr=1e-3)
    tokens, losses = torch.arange(TOKENS).unsqueeze(0), []
    for _ in range(STEPS):
        logits = training.model(tokens).flatten(0, 1)  # (32, 256)
        loss = F.cross_entropy(logits, tokens.roll(-1).flatten() % BYTES)
        training.optimizer.zero_grad()
        loss.backward()
        training.finish()
        training.optimizer.step()
        losses.append(round(loss.item(), 2))
    return losses


def train_within(rank: int, level: str, limit_bytes: int) -> str:
    """Train on one rank, and return what it says at the end."""
    libc = ctypes.CDLL(None)
    # Otherwise, glibc keeps freed tensors for itself, and the limit would count them. What is
    # smaller than a tensor comes from 8 MiB that are taken before: only tensors find no room.
    libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    libc.mallopt(M_TOP_PAD, 8 * MIB)
    libc.mallopt(M_TRIM_THRESHOLD, 16 * MIB)
    train(level, width=4, layers=1)  # torch loads parts of itself when they are first used
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes() + limit_bytes, hard))
    try:
        return f"trains: losses {', '.join(map(str, train(level, WIDTH, LAYERS)))}"
    except (RuntimeError, MemoryError) as error:
        message = f"{type(error).__name__}: {error}"
        if NO_ROOM.search(message):
            return "ends: can't allocate memory"
        return f"ends: {message}"  # another rank had no room, and is gone
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # leaving the group takes memory


def main() -> None:
    parser, positive = Parser(__doc__), int_at_least(1)
    parser.add_argument("--ranks", default=2, type=positive, help="processes")
    parser.add_argument("--limit-mib", default=165, type=positive, help="for each of them")
    parser.add_argument("--levels", default=["none", "parameters"], nargs="+", choices=LEVELS)
    args = parser.parse_args()
    with torch.device("meta"):
        parameters = list(Transformer(WIDTH, LAYERS).parameters())
    size = sum(parameter.nbytes for parameter in parameters) / MIB
    print(f"{size:.0f} MiB of parameters, {4 * size:.0f} MiB with gradients and AdamW's state")
    print(f"{args.ranks} ranks, and each may take {args.limit_mib} MiB:")
    for level in args.levels:
        try:
            outcomes = run_ranks(args.ranks, train_within, level, args.limit_mib * MIB, quiet=True)
        except RankError as error:  # a thread of gloo had no room: C++ ends the rank
            outcomes = [f"ends: can't allocate memory, {error}"]
        print(
            f"{NAMES[level]:7} {max(outcomes, key=lambda outcome: 'allocate' in outcome)}",
            flush=True,
        )


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
