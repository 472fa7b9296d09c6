"""All ranks against one rank: the gradient of the first step, the weights after the last one,
learning rates, printed numbers. This is the proof; all other rows explain it."""

import re
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from prove.judge_model import named
from prove.judge_run import NUMBER, error_of
from prove.launch import Outcome
from prove.table import ACCURACY, LOSS, RATE, Row, not_seen, right, warning, wrong

SMALL_BATCH = 16  # values per channel from which BatchNorm's statistics are good enough
RANDOM = "the step draws random numbers"
CURE = "what the loss divides by must be a number of all ranks, not of one; or a layer mixes the "
CURE += "samples of a batch (attention over the batch): see beyond/convert"
STATISTIC = re.compile(
    r"(loss|acc\w*|accuracy|error|top.?[15]|mAP|ppl|perplexity|correct)\W{0,12}"
    rf"({NUMBER.pattern})",
    re.I,
)


class Replay:
    """A finished replay, beside the run that it replays."""

    def __init__(self, observed: Outcome, outcome: Outcome, folder: str, mode: str) -> None:
        self.mode, self.ranks = mode, observed.ranks
        self.observed = observed.ranks[0]
        self.error = error_of(outcome) if outcome.status else ""
        self.replayed = outcome.ranks[0] if outcome.ranks else None
        replayed = self.replayed
        self.stepped = bool(replayed and replayed["steps"] and replayed["ended"] != "killed")
        self.observed_tensors = torch.load(f"{folder}/observe.0.tensors.pt", weights_only=False)
        path = f"{folder}/{mode}.0.tensors.pt"
        self.replayed_tensors = torch.load(path, weights_only=False) if self.stepped else {}

    def steps(self, number: int) -> list[tuple[dict, dict]]:
        """The steps of an optimizer in both runs: all ranks', one rank's."""
        runs = self.observed, self.replayed
        lists = (run["optimizers"][number]["steps"] for run in runs)  # type: ignore[index]
        return list(zip(*lists, strict=False))

    def gradients(self, number: int) -> list[tuple[int, Tensor, Tensor]]:
        """Of the first step of an optimizer: (parameter, all ranks', one rank's)."""
        runs = self.observed_tensors, self.replayed_tensors
        lists = (run.get(f"gradients.{number}", []) for run in runs)
        found = [(k, x, y) for k, (x, y) in enumerate(zip(*lists, strict=False))]
        return [(k, x, y) for k, x, y in found if x is not None and y is not None]

    def equals(self, other: "Replay") -> bool:
        """Two replays computed the same gradients in all steps."""
        if self.replayed is None or other.replayed is None:
            return False
        pairs = [
            (mine["grads"], theirs["grads"])
            for a, b in zip(self.replayed["optimizers"], other.replayed["optimizers"], strict=True)
            for mine, theirs in zip_longest(a["steps"], b["steps"], fillvalue={"grads": []})
        ]
        return all(len(x) == len(y) and gradient_apart(x, y) < 1e-9 for x, y in pairs)

    def takes_more_batches(self) -> bool:
        """One rank takes the batches of several steps for one step: accumulation was divided."""
        if self.replayed is None or not self.stepped:
            return self.replayed is not None and not self.replayed["steps"]
        runs = (self.observed, self.replayed)
        batch, more = (
            [o["steps"][0]["batch"] for o in r["optimizers"] if o["steps"]] for r in runs
        )
        backwards, of_one = (sum(b["step"] == 0 for b in r["backwards"]) for r in runs)
        later = bool(batch and more) and more[0] > batch[0]
        return later or of_one >= backwards * len(self.ranks) > 0


@dataclass
class Comparison:
    """The gradient of one optimizer's first step, on all ranks and on one rank."""

    replay: Replay
    check: str
    number: int
    optimizer: dict
    pairs: list[tuple[int, Tensor, Tensor]]
    explained: bool  # by rows above: the ranks do not train one model

    @property
    def all_ranks(self) -> Tensor:
        return torch.cat([x.double().flatten() for _, x, _ in self.pairs])

    @property
    def one_rank(self) -> Tensor:
        return torch.cat([y.double().flatten() for _, _, y in self.pairs])

    @property
    def limit(self) -> float:
        """How far rounding alone can bring two equal gradients apart, in units of their length."""
        dtypes = {x.dtype for _, x, _ in self.pairs}
        if dtypes & {torch.bfloat16, torch.float16}:
            return 5e-2
        if torch.float32 in dtypes:
            return 3e-2 if self.replay.observed["autocast"] else 3e-3
        return 1e-9

    @property
    def at(self) -> str:
        return str(self.optimizer["steps"][0]["at"])

    def row(self, sequence: Replay | None) -> Row:
        x, y = self.all_ranks, self.one_rank
        off = float((x - y).norm()) / (float(y.norm()) or float(x.norm()))
        if off <= self.limit:
            text = f"gradient of step 1 equal to {off:.0e} of its length"
            if self.limit > 1e-9:
                text += f" (not in float64: less than {percent(self.limit)} is not seen)"
            return self.row_of_weights(text)
        c = float(x @ y / (y @ y)) if y.any() else 0.0
        left = float((x - c * y).norm() / x.norm()) if x.any() else 1.0
        if left < max(self.limit, 1e-6) and abs(c - 1) > 1e-4:
            text = f"the gradient is {multiple(c, len(self.replay.ranks))} that of one rank"
        else:
            far = max(self.pairs, key=lambda p: float((p[1] - p[2]).norm() / (p[2].norm() + 1e-30)))
            text = f"the gradient differs by {percent(off)} of its length from that of one rank, "
            text += f"most in {named(self.optimizer, [far[0]])}"
        text = f"{text} ({self.at})"
        if doubt := self.doubt(text):
            return not_seen(self.check, doubt)
        if left >= 1e-3 or abs(c * len(self.replay.ranks) - 1) >= 1e-3:
            return wrong(self.check, text, CURE, LOSS)
        if sequence is not None and self.is_sum_over_local_batch(sequence):
            text += ": the loss is a sum, or is divided by a constant, and DDP takes the mean of it"
            cure = "take the mean; meant so only if the rate was chosen for the sum over one rank"
            return warning(self.check, text, cure, LOSS)
        text += ": a sum where a mean belongs, or divided by the number of ranks once more"
        return wrong(self.check, text, CURE, LOSS)

    def doubt(self, text: str) -> str:
        """Why a difference between the runs does not show a mistake."""
        first = self.replay.observed
        if first["random_in_step"]:
            return f"{RANDOM}: no verdict. {text}"
        if first["samples_elsewhere"]:
            return (
                "the first dimension of a batch is not its samples, so ranks cannot be put together"
            )
        if not any(p["steps"] for p in first["passes"]) and not first["loss_inside"]:
            return "no DataLoader, and the loss is computed outside of the model: nothing to replay"
        return f"{text}, as follows from the rows above" if self.explained else ""

    def row_of_weights(self, text: str) -> Row:
        """After the last step whose local batches were equal: are the weights those of one rank?"""
        steps = []
        for n, pair in enumerate(self.replay.steps(self.number)):
            ranks = [rank["optimizers"][self.number]["steps"][n] for rank in self.replay.ranks]
            if any(own["size"] != ranks[0]["size"] for own in ranks) or "after" not in pair[1]:
                break
            steps.append(pair)
        if not steps:
            return right(self.check, text)
        mine, other = steps[-1]
        moved = distance(mine["after"], steps[0][0]["before"])
        apart = distance(mine["after"], other["after"]) / (moved or 1.0)
        text += f", weights after step {len(steps)} to {apart:.0e} of their change"
        # A rounding error grows from step to step, and Adam divides by small gradients.
        if apart <= max(1e4 * self.limit, 1e-5):
            return right(self.check, text)
        if doubt := self.doubt(text):
            return not_seen(self.check, doubt)
        if self.limit > 1e-9:
            return not_seen(self.check, f"{text}: too little precision to tell")
        offs = [gradient_apart(mine["grads"], other["grads"]) for mine, other in steps]
        for n, off in enumerate(offs, start=1):
            if off > 1e-6:
                text = f"the gradient of step {n} differs by {percent(off)} of its length from "
                return wrong(self.check, f"{text}that of one rank ({self.at})", CURE, LOSS)
        mine, other = steps[0]
        started = distance(mine["after"], other["after"]) / (moved or 1.0)
        if self.replay.observed["optimizers"][self.number]["adaptive"] and started <= 1e-5:
            # A bias whose gradient is only rounding (before BatchNorm, of attention's keys) grows
            # from step to step, because the optimizer divides by that gradient. A mistake between
            # two steps would show in the gradient of the second.
            text += (
                f", though all gradients agree to {max(offs):.0e}, and the weights after step 1 "
            )
            return right(self.check, f"{text}to {started:.0e}: rounding, divided by rounding")
        cure = "something between backward and step depends on the ranks"
        return wrong(self.check, f"{text} ({self.at})", cure, LOSS)

    def is_sum_over_local_batch(self, sequence: Replay) -> bool:
        """Rank 0 computed from its own batch what one rank computes from it: the loss did not know
        of the ranks, and is a sum. With a batch size per rank, this may be meant so."""
        sizes = [p["batch_size"] for p in self.replay.observed["passes"] if p["steps"]]
        if not sequence.stepped or not sizes:
            return False
        if sequence.replayed["own_batch_size"] != sizes[0]:  # type: ignore[index]
            return False
        mine, alone = (step["local"] for step in sequence.steps(self.number)[0])
        pairs = [(a or 0.0, b or 0.0) for a, b in zip(mine, alone, strict=True)]
        return all(abs(a - b) <= 1e-3 * (abs(a) + abs(b)) for a, b in pairs)


def gradient_rows(
    replay: Replay, check: str, explained: bool = False, sequence: Replay | None = None
) -> list[Row]:
    rows = []
    for number, optimizer in enumerate(replay.observed["optimizers"]):
        pairs = replay.gradients(number)
        others = (replay.replayed or {})["other_parameters"].get(str(number))
        if others is None and any(x.shape != y.shape for _, x, y in pairs):
            others = []
        if others is not None and optimizer["steps"]:
            text = "the one rank's optimizer holds other parameters"
            for k, ours, theirs in others[:1]:
                text += (
                    f": {named(optimizer, [k])} has the shape {ours}, and {theirs} on one rank; "
                )
                text += "it must not depend on the batch size"
            rows.append(not_seen(check, text))
        elif any(x.any() or y.any() for _, x, y in pairs):
            compared = Comparison(replay, check, number, optimizer, pairs, explained)
            rows.append(compared.row(sequence))
    return rows or [not_seen(check, "all gradients are zero: there is nothing to compare")]


def distance(mine: list, other: list) -> float:
    """Between two lists of tensors, as far as their projections tell."""
    return float(sum((x - y) ** 2 for (x, _), (y, _) in zip(mine, other, strict=True)) ** 0.5)


def gradient_apart(mine: list, other: list) -> float:
    """How far two gradients are apart, in units of their length."""
    known = [(a, b) for a, b in zip(mine, other, strict=False) if a is not None and b is not None]
    length = sum(norm**2 for _, (_, norm) in known) ** 0.5
    return distance([a for a, _ in known], [b for _, b in known]) / (length or 1.0)


def multiple(c: float, ranks: int) -> str:
    names = {ranks: f"{ranks} times", 1 / ranks: f"1/{ranks} of", ranks**2: f"{ranks**2} times"}
    near = [name for value, name in names.items() if abs(c - value) < 1e-3 * value]
    return near[0] if near else f"{c:.4g} times"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


def schedule(replay: Replay) -> list[Row]:
    """The learning rates that the script gives one rank, at the same steps."""
    check, first, one = "schedule", replay.observed, replay.replayed or {}
    text = "learning rate {:.4g} on {} ranks and {:.4g} on one, {}"
    for number in range(min(len(first["optimizers"]), len(one["optimizers"]))):
        for n, (mine, other) in enumerate(replay.steps(number), start=1):
            if far(mine["lr"], other["lr"]):
                at = f"at step {n} ({mine['at']})"
                rates = text.format(mine["lr"][0], len(replay.ranks), other["lr"][0], at)
                cure = "meant so only if you scale the rate with the global batch on purpose"
                return [warning(check, rates, cure, RATE)]
    for mine, other in zip(first["lr_in_epochs"][:1], one["lr_in_epochs"][:1], strict=False):
        if far(mine, other):
            rates = text.format(mine[0], len(replay.ranks), other[0], "after epoch 1")
            cure = "one scheduler.step() per epoch or step on each rank, not one per rank"
            return [warning(check, rates, cure, RATE)]
    return [right(check, "the learning rates of one rank")]


def far(a: list[float], b: list[float]) -> bool:
    return any(abs(x - y) > 1e-6 * (abs(x) + abs(y)) for x, y in zip(a, b, strict=False))


def printed(replay: Replay) -> list[Row]:
    """Losses and accuracies that the script prints in the first epoch."""
    check, seen = "printed numbers", 0
    mine, other = printed_lines(replay.observed), printed_lines(replay.replayed or {})
    for at, lines in mine.items():
        for line, of_one in zip(lines, other.get(at, []), strict=False):
            pairs = zip(STATISTIC.findall(line), STATISTIC.findall(of_one), strict=False)
            for (name, a), (_, b) in pairs:
                seen += 1
                unit = 10 ** -len(a.partition(".")[2].split("e")[0])  # of its last digit
                if abs(float(a) - float(b)) > max(2 * unit, 1e-3 * abs(float(b))):
                    text = f"{name} {a} on {len(replay.ranks)} ranks and {b} on one, "
                    cure = "add sums and counts up over the ranks, then divide; meant so only if "
                    cure += "each rank reports on its own samples, or on some that it has drawn"
                    return [warning(check, f"{text}after the same steps ({at})", cure, ACCURACY)]
    text = f"losses and accuracies are those of one rank ({seen} compared)"
    return [right(check, text)] if seen else []


def printed_lines(rank: dict) -> dict[str, list[str]]:
    """What each line of the script printed in the first epoch, after a step."""
    lines: dict[str, list[str]] = {}
    for text, at, steps, second_epoch in rank["prints"]:
        if steps and not second_epoch:
            lines.setdefault(at, []).append(text)
    return lines


def smallest_batchnorm(rank: dict) -> int:
    """How many values per channel the smallest local BatchNorm normalizes; 0: there is none."""
    return min(rank["batchnorm"].values(), default=0)


def batchnorm(replay: Replay, whole: Replay | None) -> list[Row]:
    """Layers that normalize each local batch, and what a batch of all ranks would change."""
    values = smallest_batchnorm(replay.observed)
    if not values:
        return []
    layers = next(iter(replay.observed["batchnorm"]))
    if whole is None or not whole.stepped:
        return [right("batchnorm", f"{layers} per rank, over at least {values} values")]
    pairs = whole.gradients(0)
    off = sum(float((x - y).norm()) ** 2 for _, x, y in pairs) ** 0.5
    length = sum(float(y.norm()) ** 2 for _, _, y in pairs) ** 0.5 or 1.0
    text = f"{layers} normalizes {values} values on each rank; with those of all ranks, the "
    text += f"gradient differs by {percent(off / length)}"
    cure = "SyncBatchNorm; meant so if the local batch on the real machine is larger"
    return [warning("batchnorm", text, cure, LOSS)]


def no_replay(replay: Replay, check: str) -> Row:
    if replay.replayed and replay.replayed["error"]:
        kind, message, at = replay.replayed["error"]
        return not_seen(check, f"one rank cannot run it: {kind} at {at}: {message[:120]}")
    text = "one rank made no step with the recorded batches"
    return not_seen(check, f"{text}: {replay.error}" if replay.error else text)
