"""All ranks against one rank: the gradient of the first step, the weights after the last one,
learning rates, printed numbers. This is the proof; all other rows explain it."""

import re
from itertools import zip_longest

import torch
from torch import Tensor

from prove.judge_model import named
from prove.judge_run import NUMBER
from prove.launch import Outcome
from prove.table import NOT_SEEN, RIGHT, WARNING, WRONG, Row

LOSS = "the-loss-is-not-that-of-one-process"
RATE = "a-larger-batch-learns-worse-which-learning-rate"
ACCURACY = "test-accuracy-differs-with-the-number-of-ranks"
STATISTIC = re.compile(
    r"(loss|acc\w*|accuracy|error|top.?[15]|mAP|ppl|perplexity|correct)\W{0,12}"
    rf"({NUMBER.pattern})",
    re.I,
)
RANDOM = "the step draws random numbers"
CURE = "what the loss divides by must be a number of all ranks, not of one: see beyond/convert"


class Replay:
    """A finished replay, beside the run that it replays."""

    def __init__(self, observed: Outcome, outcome: Outcome, folder: str, mode: str) -> None:
        self.mode, self.outcome, self.observed = mode, outcome, observed
        self.first, self.ranks = observed.ranks[0], len(observed.ranks)
        self.one = outcome.ranks[0] if outcome.ranks else None
        self.ours = torch.load(f"{folder}/observe.0.tensors.pt", weights_only=False)
        path = f"{folder}/{mode}.0.tensors.pt"
        self.theirs = torch.load(path, weights_only=False) if self.stepped else {}

    @property
    def stepped(self) -> bool:
        return self.one is not None and self.one["steps"] > 0 and self.one["ended"] != "killed"

    def pairs(self, number: int) -> list[tuple[int, Tensor, Tensor]]:
        """Gradients of the first step of an optimizer: (parameter, all ranks', one rank's)."""
        mine = self.ours.get(f"gradients.{number}", [])
        other = self.theirs.get(f"gradients.{number}", [])
        found = [(k, x, y) for k, (x, y) in enumerate(zip(mine, other, strict=False))]
        return [(k, x, y) for k, x, y in found if x is not None and y is not None]

    def equals(self, other: "Replay") -> bool:
        """Two replays computed the same gradients in all steps."""
        if self.one is None or other.one is None:
            return False
        pairs = [
            (mine["grads"], theirs["grads"])
            for a, b in zip(self.one["optimizers"], other.one["optimizers"], strict=True)
            for mine, theirs in zip_longest(a["steps"], b["steps"], fillvalue={"grads": []})
        ]
        return all(len(x) == len(y) and gradient_apart(x, y) < 1e-9 for x, y in pairs)

    def takes_more_batches(self) -> bool:
        """One rank takes the batches of several steps for one step: accumulation was divided."""
        if self.one is None or not self.stepped:
            return self.one is not None and not self.one["steps"]
        mine = [o["steps"][0]["batch"] for o in self.first["optimizers"] if o["steps"]]
        other = [o["steps"][0]["batch"] for o in self.one["optimizers"] if o["steps"]]
        backwards = [sum(b[2] == 0 for b in r["backwards"]) for r in (self.first, self.one)]
        more = backwards[1] >= backwards[0] * self.ranks > 0
        return bool(mine and other) and (other[0] > mine[0] or more)


def limit_of(replay: Replay, pairs: list) -> float:
    dtypes = {x.dtype for _, x, _ in pairs}
    if dtypes & {torch.bfloat16, torch.float16}:
        return 5e-2
    if torch.float32 in dtypes:
        return 3e-2 if replay.first["autocast"] else 3e-3
    return 1e-9 if dtypes == {torch.float64} else 1e-5


def gradient_of(replay: Replay, check: str, explained: bool, sequence: Replay | None) -> list[Row]:
    rows = []
    for number, optimizer in enumerate(replay.first["optimizers"]):
        pairs = replay.pairs(number)
        if not pairs:
            continue
        if any(x.shape != y.shape for _, x, y in pairs) or (replay.one or {})["notes"].get(
            "other parameters"
        ):
            rows.append(Row(NOT_SEEN, check, "the one rank trains other parameters"))
            continue
        x = torch.cat([a.double().flatten() for _, a, _ in pairs])
        y = torch.cat([b.double().flatten() for _, _, b in pairs])
        if not x.any() and not y.any():
            continue
        rows.append(compare(replay, check, explained, sequence, number, optimizer, pairs, x, y))
    return rows


def compare(
    replay: Replay, check: str, explained: bool, sequence: Replay | None,
    number: int, optimizer: dict, pairs: list, x: Tensor, y: Tensor,
) -> Row:  # fmt: skip
    limit, at = limit_of(replay, pairs), optimizer["steps"][0]["at"]
    length = float(y.norm()) or float(x.norm())
    off = float((x - y).norm()) / length
    if off <= limit:
        text = f"gradient of step 1 equal to {off:.0e} of its length"
        return weights_of(replay, check, number, optimizer, limit, text, at, explained)
    c = float(x @ y / (y @ y)) if y.any() else 0.0
    left = float((x - c * y).norm() / x.norm()) if x.any() else 1.0
    if left < max(limit, 1e-6):
        text = f"the gradient is {multiple(c, replay.ranks)} that of one rank ({at})"
    else:
        far = max(pairs, key=lambda p: float((p[1] - p[2]).norm() / (p[2].norm() + 1e-30)))
        text = f"the gradient differs by {percent(off)} of its length from that of one rank, "
        text += f"most in {named(optimizer, [far[0]])} ({at})"
    if replay.first["random_in_step"]:
        return Row(NOT_SEEN, check, f"{RANDOM}: no verdict. {text}")
    has_loader = any(p["steps"] for p in replay.first["passes"])
    if not has_loader and not replay.first["loss_inside"]:
        text = "no DataLoader, and the loss is computed outside of the model: no labels to replay"
        return Row(NOT_SEEN, check, text)
    if explained:
        return Row(NOT_SEEN, check, f"{text}, as follows from the rows above")
    divided = left < 1e-3 and abs(c * replay.ranks - 1) < 1e-3
    if divided and sequence is not None and is_sum_over_local_batch(replay, sequence, number):
        cure = "take the mean; meant so only if the rate was chosen for the sum over one rank"
        text += ": the loss is a sum, or is divided by a constant, and DDP takes the mean of it"
        return Row(WARNING, check, text, cure, LOSS)
    if divided:
        text += ": a sum where a mean belongs, or divided by the number of ranks once more"
    return Row(WRONG, check, text, CURE, LOSS)


def weights_of(
    replay: Replay,
    check: str,
    number: int,
    optimizer: dict,
    limit: float,
    text: str,
    at: str,
    explained: bool,
) -> Row:
    """After the last step whose local batches were equal: are the weights those of one rank?"""
    ours, theirs = optimizer["steps"], replay.one["optimizers"][number]["steps"]  # type: ignore[index]
    steps = []
    for n, parts in enumerate(zip(ours, theirs, strict=False)):
        sizes = {str(r["optimizers"][number]["steps"][n]["size"]) for r in replay.observed.ranks}
        if len(sizes) > 1 or not all("after" in step for step in parts):
            break
        steps.append(parts)
    if not steps:
        return Row(RIGHT, check, text)
    a, b = steps[-1]
    moved = (
        sum((x - y) ** 2 for (x, _), (y, _) in zip(a["after"], steps[0][0]["before"], strict=True))
        ** 0.5
    )
    off = sum((x - y) ** 2 for (x, _), (y, _) in zip(a["after"], b["after"], strict=True)) ** 0.5
    apart = off / moved if moved else 0.0
    text += f", weights after step {len(steps)} to {apart:.0e} of their change"
    # A rounding error grows from step to step, and Adam divides by small gradients.
    if apart <= max(1e4 * limit, 1e-5):
        return Row(RIGHT, check, text)
    if replay.first["random_in_step"]:
        return Row(NOT_SEEN, check, f"{RANDOM}: no verdict. {text}")
    if explained:
        return Row(NOT_SEEN, check, f"{text}, as follows from the rows above")
    if limit > 1e-9:
        return Row(NOT_SEEN, check, f"{text}: too little precision to tell")
    for n, (mine, other) in enumerate(steps, start=1):
        off = gradient_apart(mine["grads"], other["grads"])
        if off > 1e-6:
            text = f"the gradient of step {n} differs by {percent(off)} of its length "
            return Row(WRONG, check, f"{text}from that of one rank ({at})", CURE, LOSS)
    return Row(
        WRONG,
        check,
        f"{text} ({at})",
        "something between backward and step depends on the ranks",
        LOSS,
    )


def gradient_apart(mine: list, other: list) -> float:
    """How far two gradients are apart, in units of their length, as their projections tell."""
    pairs = [(a, b) for a, b in zip(mine, other, strict=False) if a is not None and b is not None]
    length = sum(norm**2 for _, (_, norm) in pairs) ** 0.5
    apart = sum((a - b) ** 2 for (a, _), (b, _) in pairs) ** 0.5
    return apart / length if length else 0.0


def multiple(c: float, ranks: int) -> str:
    for value, name in (
        (ranks, f"{ranks} times"),
        (1 / ranks, f"1/{ranks} of"),
        (ranks**2, f"{ranks**2} times"),
    ):
        if abs(c - value) < 1e-3 * value:
            return name
    return f"{c:.4g} times"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


def is_sum_over_local_batch(replay: Replay, sequence: Replay, number: int) -> bool:
    """Rank 0 computed from its own batch what one rank computes from it: the loss did not know
    of the ranks, and is a sum. With a batch size per rank, this may be meant so."""
    own = (sequence.one or {}).get("own_batch_size")
    sizes = [p["batch_size"] for p in replay.first["passes"] if p["steps"]]
    if not sizes or own != sizes[0] or not sequence.stepped:
        return False
    local = replay.first["optimizers"][number]["steps"][0]["local"]
    alone = sequence.one["optimizers"][number]["steps"][0]["local"]  # type: ignore[index]
    pairs = [(a[0], b[0]) for a, b in zip(local, alone, strict=True)]
    return all(abs(a - b) <= 1e-3 * (abs(a) + abs(b)) for a, b in pairs)


def schedule(replay: Replay) -> list[Row]:
    """The learning rates that the script gives one rank, at the same steps."""
    check, one = "schedule", replay.one or {}
    cure = "meant so only if you scale the rate with the global batch on purpose"
    for mine, other in zip(replay.first["optimizers"], one["optimizers"], strict=False):
        for n, (a, b) in enumerate(zip(mine["steps"], other["steps"], strict=False)):
            if far(a["lr"], b["lr"]):
                text = (
                    f"learning rate {a['lr'][0]:.4g} on {replay.ranks} ranks and {b['lr'][0]:.4g} "
                )
                text += f"on one, at step {n + 1} ({a['at']})"
                return [Row(WARNING, check, text, cure, RATE)]
    for mine, other in zip(replay.first["lr_in_epochs"][:1], one["lr_in_epochs"][:1], strict=False):
        if any(far(a, b) for a, b in zip(mine, other, strict=False)):
            text = (
                f"learning rate {mine[0][0]:.4g} on {replay.ranks} ranks and {other[0][0]:.4g} on "
            )
            cure = "one scheduler.step() per epoch or step on each rank, not one per rank"
            return [Row(WARNING, check, f"{text}one, after epoch 1", cure, RATE)]
    return [Row(RIGHT, check, "the learning rates of one rank")]


def far(a: list[float], b: list[float]) -> bool:
    return any(abs(x - y) > 1e-6 * (abs(x) + abs(y)) for x, y in zip(a, b, strict=False))


def printed(replay: Replay) -> list[Row]:
    """Losses and accuracies that the script prints in the first epoch."""
    check, seen = "printed numbers", 0
    texts = []
    for rank in (replay.first, replay.one or {}):
        lines: dict = {}
        for text, at, steps, second_epoch in rank["prints"]:
            if steps and not second_epoch:
                lines.setdefault(at, []).append(text)
        texts.append(lines)
    for at, lines in texts[0].items():
        for mine, other in zip_longest(lines, texts[1].get(at, []), fillvalue=""):
            for (name, a), (_, b) in zip(
                STATISTIC.findall(mine), STATISTIC.findall(other), strict=False
            ):
                seen += 1
                unit = 10 ** -len(a.partition(".")[2].split("e")[0])
                if abs(float(a) - float(b)) > max(2 * unit, 1e-3 * abs(float(b))):
                    text = f"{name} {a} on {replay.ranks} ranks and {b} on one, "
                    text += f"after the same steps ({at})"
                    cure = "add sums and counts up over the ranks, then divide; "
                    cure += "meant so only if each rank reports on its own samples"
                    return [Row(WARNING, check, text, cure, ACCURACY)]
    return [Row(RIGHT, check, f"{seen} losses or accuracies are those of one rank")] if seen else []


def batchnorm(replay: Replay, whole: Replay | None) -> list[Row]:
    """Layers that normalize each local batch, where it is small."""
    check, counted = "batchnorm", replay.first["batchnorm"]
    if not counted:
        return []
    layers, rows = next(iter(counted.items()))[0], min(least for _, least in counted.values())
    if whole is None or not whole.stepped:
        return [Row(RIGHT, check, f"{layers} per rank, over at least {rows} values")]
    pairs = whole.pairs(0)
    off = sum(float((x - y).norm()) ** 2 for _, x, y in pairs) ** 0.5
    length = sum(float(y.norm()) ** 2 for _, _, y in pairs) ** 0.5 or 1.0
    text = f"{layers} normalizes {rows} values on each rank; with those of all ranks, the gradient "
    text += f"differs by {percent(off / length)}"
    cure = "SyncBatchNorm; meant so if the local batch on the real machine is larger"
    return [Row(WARNING, check, text, cure, LOSS)]


def no_replay(replay: Replay, check: str) -> Row:
    one = replay.one
    if one and one["error"]:
        kind, message, at = one["error"]
        return Row(NOT_SEEN, check, f"one rank cannot run it: {kind} at {at}: {message[:120]}")
    return Row(NOT_SEEN, check, "one rank made no step with the recorded batches")
