"""Mistakes that are planted in a script, each with the verdict that a check must give."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """Texts to replace in one of the scripts of packages/prove/evidence/right_scripts."""

    name: str
    script: str
    verdict: str
    check: str
    changes: tuple[tuple[str, str], ...]


def planted_in(script: str) -> Callable[..., Mistake]:
    """Make a function that plants mistakes in one of these scripts."""

    def plant(name: str, verdict: str, check: str, *changes: tuple[str, str]) -> Mistake:
        return Mistake(name, script, verdict, check, changes)

    return plant


plain, accumulate, amp = planted_in("plain"), planted_in("accumulate"), planted_in("amp")
iterable, own_step = planted_in("iterable"), planted_in("own_step")


# Texts of plain.py that several mistakes replace, and their replacements
SAMPLER = "sampler = DistributedSampler(train_set, seed=0)"
LOADING = "batch_size=12 // world_size, sampler=sampler)"
NO_SET_EPOCH = ("        sampler.set_epoch(epoch)\n", "")
STEP = "            optimizer.step()\n"
LOSS = "F.cross_entropy(ddp(points), labels)"
NO_DDP = (
    ("ddp = DDP(build_model())", "ddp = build_model()\n    object.__setattr__(ddp, 'module', ddp)"),
)
AVERAGE = """            for p in ddp.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world_size
"""
