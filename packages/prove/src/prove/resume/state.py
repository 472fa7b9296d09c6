"""Does the resumed run begin with the weights, optimizer, rates and other modules of the stop?"""

from typing import Any

from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, not_seen, right, warning, wrong
from prove.resume.pairs import MOST_NOISE, Pairs, difference, largest
from prove.resume.record import StepStart

WEIGHTS, OPTIMIZER = "resume: weights", "resume: optimizer"
MODULES, RATE = "resume: evaluated model", "resume: learning rate"
SCALE = "resume: loss scale"
RATE_LIMIT = 1e-9


class Sentence(Reason):
    NOT_REPEATED = (
        "two runs of the script without a stop, with the same seed, differ by {noise:.0e}",
        "turn off what makes it so: torch.use_deterministic_algorithms(True), and fixed seeds",
    )
    NO_OPTIMIZER_STEP = (
        "no step of a torch optimizer was seen after the stop",
        "steps that a script makes by hand cannot be compared here",
    )
    SAME_WEIGHTS = "equal to {apart:.0e} before step {number}"
    OTHER_WEIGHTS = (
        "{name} differs by {apart:percent} before step {number} (rank {rank})",
        "load them into ddp.module, before the first forward, from what state_dict() gave after "
        "the last step",
        Heading.RESUME,
    )
    WEIGHTS_OF_STEP = (
        "they are those before step {found}, not before step {number} (rank {rank})",
        "save after the step, and the last checkpoint, not the best",
    )
    SAME_STATE = "{tensors:n tensor} equal to {apart:.0e} before step {number}"
    NO_STATE_TO_KEEP = "this optimizer keeps nothing between steps"
    STATE_ELSEWHERE = (
        "the optimizer of {at} keeps its state where prove does not look",
        "compare what it keeps yourself; the row of later weights shows whether it matters",
    )
    STATE_LOST = (
        "its first step begins without a state; without a stop, it has {names} of {parameters:n "
        "parameter} (rank {rank}, {at})",
        'save optimizer.state_dict(), and load it: optimizer.load_state_dict(saved["optimizer"])',
        Heading.RESUME,
    )
    OTHER_STATE = (
        "{name} differs by {apart:percent} before step {number} (rank {rank}, {at})",
        "load the optimizer's state on every rank, after the model is built, into the optimizer "
        "that steps",
        Heading.RESUME,
    )
    SAME_MODULES = "{tensors:n buffer and other tensor} equal to {apart:.0e}"
    OTHER_MODULES = (
        "{name} differs by {apart:percent} before step {number}",
        "save and load every module that the evaluation uses: a moving average begins anew if it "
        "is made from the loaded weights",
        Heading.RESUME,
    )
    BUFFERS_OF_OTHER_RANK = (
        "{name} is that of another rank: the checkpoint holds the buffers of one rank for all",
        "harmless if DDP sends the buffers of rank 0 before each forward",
    )
    SAME_RATE = "{rate:.6g} at step {number}{ahead}"
    OTHER_RATE = (
        "{setting} is {value:.6g} at step {number}, and {wanted:.6g} without a stop ({at})",
        "save scheduler.state_dict() and load it, once; make the scheduler before "
        "optimizer.load_state_dict(), because making one sets its first rate",
        Heading.RESUME,
    )
    OTHER_RATE_AHEAD = (
        "the scheduler goes on with {rates:each .6g}, and without a stop with {wanted:each .6g}",
        "save scheduler.state_dict() and load it; its length must count all epochs, not those left",
    )
    OTHER_METRICS = (
        "ReduceLROnPlateau has {name} = {value:.6g}, and without a stop {wanted:.6g}",
        "save scheduler.state_dict() and load it: the best metric and the epochs since are in it",
    )
    SAME_SCALE = "{scale:g} at step {number}"
    OTHER_SCALE = (
        "{name} is {value:g} at step {number}, and {wanted:g} without a stop",
        "save scaler.state_dict() and load it",
        Heading.RESUME,
    )


def state_rows(pairs: Pairs) -> list[ReportRow]:
    if pairs.noise > MOST_NOISE:
        return [not_seen(WEIGHTS, Sentence.NOT_REPEATED, noise=pairs.noise)]
    if not any(pairs.first_steps(rank) for rank in range(len(pairs.ranks))):
        return [not_seen(WEIGHTS, Sentence.NO_OPTIMIZER_STEP)]
    return [
        *weight_rows(pairs), *optimizer_rows(pairs), *module_rows(pairs), *rate_rows(pairs),
        *scale_rows(pairs),
    ]  # fmt: skip


def weight_rows(pairs: Pairs) -> list[ReportRow]:
    worst = 0.0
    for rank in range(len(pairs.ranks)):
        for one, other in pairs.first_steps(rank):
            weights = list(zip(one.weights, other.weights, strict=False))
            apart, at = max((difference(a, b), n) for n, (a, b) in enumerate(weights))
            worst = max(worst, apart)
            if apart <= pairs.limit:
                continue
            facts = {"number": pairs.k + 1, "rank": rank}
            for earlier in pairs.straight.parts[rank].starts:
                is_same = earlier.optimizer == one.optimizer and all(
                    difference(a, b) <= pairs.limit
                    for a, b in zip(earlier.weights, other.weights, strict=False)
                )
                if is_same:
                    found = earlier.number + 1
                    return [wrong(WEIGHTS, Sentence.WEIGHTS_OF_STEP, found=found, **facts)]
            name = pairs.name_of(one.optimizer, at)
            return [wrong(WEIGHTS, Sentence.OTHER_WEIGHTS, name=name, apart=apart, **facts)]
    return [right(WEIGHTS, Sentence.SAME_WEIGHTS, apart=worst, number=pairs.k + 1)]


def optimizer_rows(pairs: Pairs) -> list[ReportRow]:
    worst, tensors = 0.0, 0
    for rank in range(len(pairs.ranks)):
        for one, other in pairs.first_steps(rank):
            facts: dict[str, Any] = {"number": pairs.k + 1, "rank": rank, "at": other.source_line}
            if any(one.state) and not any(other.state):
                facts |= {"names": [*next(filter(None, one.state))]}
                parameters = sum(map(bool, one.state))
                return [wrong(OPTIMIZER, Sentence.STATE_LOST, parameters=parameters, **facts)]
            for index, states in enumerate(zip(one.state, other.state, strict=False)):
                apart, key = largest(*states, names=states[0])
                worst, tensors = max(worst, apart), tensors + len(states[0])
                if apart > pairs.limit:
                    name = f"{key} of {pairs.name_of(one.optimizer, index)}"
                    facts |= {"name": name, "apart": apart}
                    return [wrong(OPTIMIZER, Sentence.OTHER_STATE, **facts)]
    if not tensors:
        others = [one for one, _ in pairs.first_steps(0) if not one.is_of_torch]
        if others:
            return [not_seen(OPTIMIZER, Sentence.STATE_ELSEWHERE, at=others[0].source_line)]
        return [right(OPTIMIZER, Sentence.NO_STATE_TO_KEEP)]
    facts = {"tensors": tensors, "apart": worst, "number": pairs.k + 1}
    return [right(OPTIMIZER, Sentence.SAME_STATE, **facts)]


def module_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare what no optimizer holds. DDP sends the buffers of rank 0 in forward."""
    worst, tensors = 0.0, 0
    for rank, (ones, others) in enumerate(pairs.ranks):
        if not ones or not others:
            continue
        one, other = ones[0].other_tensors, others[0].other_tensors
        names = [n for n in one if n in other and not (rank and n.endswith("(buffer)"))]
        apart, name = largest(one, other, names)
        worst, tensors = max(worst, apart), tensors + len(names)
        if apart <= pairs.limit:
            continue
        of_others = [starts[0].other_tensors for starts, _ in pairs.ranks if starts]
        if all(
            any(difference(each.get(n), other[n]) <= pairs.limit for each in of_others)
            for n in names
        ):
            pairs.same_samples = False  # so weights may part from here on
            return [warning(MODULES, Sentence.BUFFERS_OF_OTHER_RANK, name=name)]
        facts = {"name": name, "apart": apart, "number": pairs.k + 1}
        return [wrong(MODULES, Sentence.OTHER_MODULES, **facts)]
    return [right(MODULES, Sentence.SAME_MODULES, tensors=tensors, apart=worst)] if tensors else []


def rate_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare learning rates and the like at each step, and what schedulers would do next."""
    first, resumed = (starts[0] for starts in pairs.ranks[0])
    different = other_settings(pairs) or other_rates_ahead(first, resumed)
    different = different or other_metrics(first, resumed, pairs.limit)
    if different:
        return [different]
    if not first.groups or "lr" not in first.groups[0]:
        return []
    ahead = ", and so does the schedule go on" if any(first.rates_ahead.values()) else ""
    facts = {"rate": first.groups[0]["lr"], "number": pairs.k + 1, "ahead": ahead}
    return [right(RATE, Sentence.SAME_RATE, **facts)]


def other_settings(pairs: Pairs) -> ReportRow | None:
    for one, other in pairs.ranks:
        for a, b in zip(one, other, strict=False):
            if a.optimizer != b.optimizer:
                break
            for wanted, given in zip(a.groups, b.groups, strict=False):
                apart, setting = largest(wanted, given)
                if apart > RATE_LIMIT:
                    values = [held.get(setting, float("nan")) for held in (given, wanted)]
                    facts = {"value": values[0], "wanted": values[1], "number": a.number + 1}
                    at = b.source_line
                    return wrong(RATE, Sentence.OTHER_RATE, setting=setting, at=at, **facts)
    return None


def other_rates_ahead(first: StepStart, resumed: StepStart) -> ReportRow | None:
    for name in first.rates_ahead.keys() & resumed.rates_ahead.keys():
        wanted, given = first.rates_ahead[name], resumed.rates_ahead[name]
        common = min(len(wanted), len(given))
        pairs = enumerate(zip(wanted, given, strict=False))
        bad = next((n for n, pair in pairs if difference(*pair) > RATE_LIMIT), None)
        if bad is None and len(wanted) != len(given):
            bad = max(0, common - 1)
        if bad is not None:
            rates, others = given[bad : bad + 3], wanted[bad : bad + 3]
            return wrong(RATE, Sentence.OTHER_RATE_AHEAD, rates=rates, wanted=others)
    return None


def other_metrics(first: StepStart, resumed: StepStart, limit: float) -> ReportRow | None:
    for scheduler in first.metrics.keys() & resumed.metrics.keys():
        wanted, given = first.metrics[scheduler], resumed.metrics[scheduler]
        apart, name = largest(wanted, given)
        if apart > max(limit, RATE_LIMIT):
            facts = {"name": name, "value": given[name], "wanted": wanted[name]}
            return wrong(RATE, Sentence.OTHER_METRICS, **facts)
    return None


def scale_rows(pairs: Pairs) -> list[ReportRow]:
    one, other = (starts[0] for starts in pairs.ranks[0])
    if not one.loss_scale or not other.loss_scale:
        return []
    apart, name = largest(one.loss_scale, other.loss_scale)
    facts: dict[str, Any] = {"number": pairs.k + 1}
    if apart > 0:
        facts |= {"value": other.loss_scale[name], "wanted": one.loss_scale[name]}
        return [wrong(SCALE, Sentence.OTHER_SCALE, name=name, **facts)]
    return [right(SCALE, Sentence.SAME_SCALE, scale=one.loss_scale["scale"], **facts)]
