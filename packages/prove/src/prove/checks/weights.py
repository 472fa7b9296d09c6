"""Do all ranks hold the same weights after each step?

All weights that change are compared, whether an optimizer or the script itself changes them.
"""

from typing import NamedTuple

from prove.checks import zero_gradients
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import AVERAGE, LOSS, NO_DDP, STEP, amp, own_step, plain
from prove.judge.rank_steps import StepOfRanks, differ
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WRONG, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import Projection, RankRecord

NAME = "weights"
APART = "{apart} of {tensors} tensors differ between the ranks {when}: {names} ({at})"
WAS_FROZEN = "frozen when DDP was made ({wrapped_at}), so DDP does not average it"
WRAP_AGAIN = "wrap the model in DDP again after unfreezing"


class Sentence(Reason):
    MODEL_IS_DIVIDED = (
        "the ranks hold different parts of the model, or work in groups",
        "prove it without model-parallel layers and groups; or let the row one rank decide",
    )
    WEIGHTS_ALIKE = "the same on all ranks after {steps:n step}"
    WEIGHTS_AVERAGED_LATER = (
        f"{APART}, and agree again later",
        "meant so only for local SGD, which averages weights now and then",
        Heading.LOSS,
    )
    WEIGHTS_OUTSIDE_DDP = (
        f"{APART}; DDP does not hold {{outside}}",
        "wrap one module that holds all trained parameters",
        Heading.LOSS,
    )
    WEIGHTS_UNFROZEN = (f"{APART}; {WAS_FROZEN}", WRAP_AGAIN, Heading.LOSS)
    WEIGHTS_DIFFER = (
        APART,
        "DDP, or broadcast all weights once and average all gradients in each step",
        Heading.LOSS,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    if len(context.records) == 1 or context.rows_of(zero_gradients.CHECK):
        return []
    if context.model_is_divided():
        return [not_seen(NAME, Sentence.MODEL_IS_DIVIDED)]
    if not context.steps:
        return []
    weights = [
        each
        for each in held_weights(context.records, context.steps)
        if each.moved or each.source_line
    ]
    differing = [each for each in weights if each.differs_at]
    if not differing:
        return [right(NAME, Sentence.WEIGHTS_ALIKE, steps=len(context.steps))]
    for_good = [each for each in differing if not each.agrees_later]
    shown = for_good or differing
    first = min(each.differs_at[0] for each in shown)
    shown = [each for each in shown if each.differs_at[0] == first]
    after = phrase("after step {step}", step=first)
    facts = {
        "apart": len(shown), "tensors": len(weights), "at": shown[0].source_line, "step": first,
        "names": [each.name for each in shown],
        "when": after if first else phrase("before the first step"),
    }  # fmt: skip
    if not for_good:
        return [warning(NAME, Sentence.WEIGHTS_AVERAGED_LATER, **facts)]
    if all(each.unfrozen for each in shown):
        return [wrong(NAME, Sentence.WEIGHTS_UNFROZEN, wrapped_at=shown[0].unfrozen, **facts)]
    outside = [each.name for each in shown if not each.in_ddp]
    if outside and any(each.in_ddp for each in weights):
        return [wrong(NAME, Sentence.WEIGHTS_OUTSIDE_DDP, outside=outside, **facts)]
    return [wrong(NAME, Sentence.WEIGHTS_DIFFER, **facts)]


class HeldWeights(NamedTuple):
    """One parameter on all ranks: its projections after each counted step."""

    name: str
    in_ddp: bool
    source_line: str  # line of its first step
    held: list[tuple[int, tuple[Projection, ...]]]
    unfrozen: str = ""  # line of the DDP that found it frozen and so ignores it

    @property
    def differs_at(self) -> list[int]:
        return [steps for steps, ranks_weights in self.held if differ(ranks_weights)]

    @property
    def agrees_later(self) -> bool:
        first = self.differs_at[0]
        return any(
            steps > first and not differ(ranks_weights) for steps, ranks_weights in self.held
        )

    @property
    def moved(self) -> bool:
        """Has the parameter changed on some rank?"""
        return any(differ(of_rank) for of_rank in zip(*(own for _, own in self.held), strict=True))


def held_weights(records: list[RankRecord], steps: list[StepOfRanks]) -> list[HeldWeights]:
    """List the parameters of trained modules, as all ranks hold them between batches.

    If none of them changes, add the parameters that optimizers hold after each step.
    """
    places = {key: step.source_line for step in reversed(steps) for key in step.optimizer.keys}
    in_ddp = {key for ddp in records[0].ddps for key in ddp.keys}
    unfrozen = unfrozen_parameters(records[0])
    common = sorted(set.intersection(*({*rank.weights} for rank in records)))
    weights = {}
    for key in dict.fromkeys(key for count in common for key in records[0].weights[count]):
        held = [
            (count, tuple(rank.weights[count][key] for rank in records))
            for count in common
            if all(key in rank.weights[count] for rank in records)
        ]
        if len(held) > 1:
            name = key.partition(": ")[2]
            at, frozen_at = places.get(key, ""), unfrozen.get(key, "")
            weights[key] = HeldWeights(name, key in in_ddp, at, held, frozen_at)
    if any(each.moved for each in weights.values()):
        return [*weights.values()]  # an optimizer may hold only its part of master weights
    return [*weights.values(), *held_by_optimizers(steps, {*weights})]


def unfrozen_parameters(first: RankRecord) -> dict[str, str]:
    """Return, by key of each parameter that a DDP found frozen, the line that made the DDP."""
    return {key: ddp.source_line for ddp in first.ddps for key in ddp.unfrozen}


def held_by_optimizers(steps: list[StepOfRanks], known: set[str]) -> list[HeldWeights]:
    """List the parameters of optimizers that are not yet `known`."""
    found: dict[tuple[int, int], HeldWeights] = {}
    for step in steps:
        optimizer = step.optimizer
        after = step.by_parameter(lambda of_rank: of_rank.weights_after)
        before = step.by_parameter(lambda of_rank: of_rank.weights_before)
        for number, name in enumerate(optimizer.names):
            if optimizer.keys[number] in known:
                continue
            begin = [(step.step_number - 1, before[number])]
            fresh = HeldWeights(name, number not in optimizer.outside_ddp, step.source_line, begin)
            own = found.setdefault((id(optimizer), number), fresh)
            own.held.append((step.step_number, after[number]))
    return list(found.values())


IN_STEP = "                average(p.grad)\n"  # the step of own_step.py
PARAMS = "    params = list(model.parameters())\n"
UNFROZEN = "    model[0].requires_grad_(False)\n"
UNFROZEN += "    ddp = nn.parallel.DistributedDataParallel(model)\n"
PLANTED = (
    plain("no DDP", WRONG, NAME, *NO_DDP),
    plain(
        "trained parameters outside of DDP", WRONG, NAME,
        ("ddp = DDP(build_model())", "ddp = DDP(build_model())\n    head = nn.Linear(3, CLASSES)"),
        ("ddp.parameters(), lr", "[*ddp.parameters(), *head.parameters()], lr"),
        (LOSS, "F.cross_entropy(head(ddp(points)), labels)"),
    ),
    plain(
        "no broadcast of the first weights", WRONG, NAME,
        *NO_DDP,
        ("torch.manual_seed(0)\n", "torch.manual_seed(rank)\n"),
        (STEP, AVERAGE + STEP),
    ),
    amp(
        "one rank resumes", WRONG, NAME,
        (
            "    if os.path.exists(CHECKPOINT):\n"
            "        saved = torch.load(CHECKPOINT, weights_only=True)\n",
            "    if rank == 0:\n"
            "        saved = {'model': Net().state_dict(), 'epoch': 2,\n"
            "                 'optimizer': optimizer.state_dict()}\n",
        ),
    ),
    own_step(
        "the step averages no biases", WRONG, NAME,
        (IN_STEP, "                if p.ndim > 1:\n    " + IN_STEP),
    ),
    own_step(
        "the step averages a part of each tensor", WRONG, NAME,
        (IN_STEP, "                average(p.grad.view(-1)[: p.numel() // 2])\n"),
    ),
    own_step(
        "layers that DDP has not been told of begin to train", WRONG, NAME,
        (PARAMS, UNFROZEN + PARAMS),
        ("AveragingSGD(params, lr=0.1)", "torch.optim.SGD(params, lr=0.1)"),
        ("model(x)", "ddp(x)"),
        (
            "        sampler.set_epoch",
            "        model[0].requires_grad_(epoch > 1)\n        sampler.set_epoch",
        ),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, planted=PLANTED)
