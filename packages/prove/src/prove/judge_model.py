"""Do all ranks train one model? Weights, gradients and buffers, by their projections."""

from collections.abc import Sequence
from dataclasses import dataclass

from prove.record import OptimizerRecord, OptimizerStep, Projection, RankRecord
from prove.table import (
    RIGHT,
    WARNING,
    ReportRow,
    See,
    count,
    listed,
    not_seen,
    right,
    warning,
    wrong,
)

TINY = 1e-12


@dataclass
class StepOfRanks:
    """One optimizer step, as each of the ranks wrote it down."""

    optimizer: OptimizerRecord
    number: int
    steps: list[OptimizerStep]

    def by_parameter(self, name: str) -> list[tuple]:
        """What the ranks hold: "weights_before", "weights_after", "gradients", ..."""
        return list(zip(*(getattr(step, name) for step in self.steps), strict=True))

    def apart(self, name: str, limit: float = 1e-5) -> list[int]:
        """The numbers of the parameters for which the ranks hold different tensors."""
        numbered = enumerate(self.by_parameter(name))
        return [number for number, held in numbered if None not in held and differ(held, limit)]

    @property
    def at(self) -> str:
        return self.steps[0].at


def differ(projections: Sequence[Projection], limit: float = 1e-5) -> bool:
    """Whether projections of what should be the same tensor differ."""
    values, norms = zip(*projections, strict=True)
    return bool(max(values) - min(values) > limit * max(TINY, *norms))


def parameter_names(optimizer: OptimizerRecord, numbers: list[int]) -> str:
    return listed([optimizer.names[number] for number in numbers])


def steps_of(records: list[RankRecord]) -> list[StepOfRanks]:
    steps = []
    for optimizers in zip(*(rank.optimizers for rank in records), strict=False):
        of_ranks = zip(*(optimizer.steps for optimizer in optimizers), strict=False)
        for number, of_each in enumerate(of_ranks, start=1):
            if all(step.weights_after for step in of_each):
                steps.append(StepOfRanks(optimizers[0], number, list(of_each)))
    return steps


def is_divided(records: list[RankRecord]) -> bool:
    return not records[0].notes.keys().isdisjoint(("groups of some ranks", "the model is divided"))


def model_rows(records: list[RankRecord]) -> list[ReportRow]:
    first, zero = records[0], zero_gradient_rows(records)
    rows = clipping_rows(first) + zero + optimizer_rows(first) + accumulation_rows(first)
    if len(records) == 1 or zero:
        return rows
    steps = steps_of(records)
    tensors = [{len(of_rank.weights_before) for of_rank in step.steps} for step in steps]
    if is_divided(records) or any(len(counts) > 1 for counts in tensors):  # the latter by ZeRO
        text = "the ranks hold different parts of the model, or work in groups"
        return [*rows, not_seen("weights", text)]
    same = weight_rows(steps)
    rows += same + averaged_gradient_rows(steps, same) + forward_rows(first, same)
    return rows + learning_rate_rows(records, steps) + loss_scale_rows(steps) + buffer_rows(records)


def weight_rows(steps: list[StepOfRanks]) -> list[ReportRow]:
    check = "weights"
    differing = [step for step in steps if step.apart("weights_after")]
    if not steps:
        return []
    if not differing:
        return [right(check, f"the same on all ranks after {count(len(steps), 'step')}")]
    step = differing[0]
    apart, optimizer = step.apart("weights_after"), step.optimizer
    already = step.number == 1 and set(apart) & {*step.apart("weights_before")}
    when = "before the first step" if already else f"after step {step.number}"
    text = f"{len(apart)} of {len(optimizer.names)} tensors differ between the ranks {when}: "
    text += f"{parameter_names(optimizer, apart)} ({step.at})"
    later = steps[steps.index(step) + 1 :]
    if any(not other.apart("weights_before") for other in later):
        cure = "meant so only for local SGD, which averages weights now and then"
        return [warning(check, f"{text}, and agree again later", cure, See.LOSS)]
    outside = [number for number in apart if number in optimizer.outside_ddp]
    if outside and len(optimizer.outside_ddp) < len(optimizer.names):
        text += f"; DDP does not hold {parameter_names(optimizer, outside)}"
        return [wrong(check, text, "wrap one module that holds all trained parameters", See.LOSS)]
    cure = "DDP, or broadcast all weights once and average all gradients in each step"
    return [wrong(check, text, cure, See.LOSS)]


def averaged_gradient_rows(
    steps: list[StepOfRanks], rows_of_weights: list[ReportRow]
) -> list[ReportRow]:
    """p.grad at each step: is it the same on all ranks, and the mean of what backward gave them?"""
    check, verdicts = "averaged gradients", [row.verdict for row in rows_of_weights]
    for step in steps:
        apart = step.apart("gradients", 1e-4)
        if apart and WARNING in verdicts:
            text = "each rank steps with its own: weights are averaged, it seems"
            return [not_seen(check, text)]
        if apart and verdicts != [RIGHT]:
            text = f"the ranks step with different gradients in {len(apart)} of "
            text += (
                f"{len(step.optimizer.names)} tensors: {parameter_names(step.optimizer, apart)} "
            )
            text += f"(step {step.number} at {step.at})"
            cure = "forward and backward through DDP; no_sync for all micro-batches but the last"
            return [wrong(check, text, cure, See.LOSS)]
    old = [
        step
        for step in steps
        if step.number > 1 and all(of_rank.has_old_gradient for of_rank in step.steps)
    ]
    if len(old) > 1:
        text = f"at {len(old)} steps, p.grad still held the gradient of the step before "
        cure = "optimizer.zero_grad() in each step"
        return [wrong("zero_grad", f"{text}({old[0].at})", cure, See.NAN)]
    factors = [(times_the_mean(step), step) for step in steps]
    known = [(factor, step) for factor, step in factors if factor is not None]
    if not known:
        text = "no multiple of the mean over the ranks: changed between backward and step?"
        return [not_seen(check, text)]
    factor, step = max(known, key=lambda pair: abs(pair[0] - 1))
    if abs(factor - 1) <= tolerance(step):
        return [right(check, f"the mean over the ranks, in {count(len(known), 'step')}")]
    text = f"changed before the step: {factor:.4g} times the mean (step {step.number} at {step.at})"
    return [not_seen(check, text)]


def tolerance(step: StepOfRanks) -> float:
    return {"torch.float64": 1e-6, "torch.float32": 2e-3}.get(step.steps[0].dtype, 5e-2)


def times_the_mean(step: StepOfRanks) -> float | None:
    """The one factor by which p.grad differs from the mean over the ranks of what backward gave."""
    averaged, local = step.by_parameter("gradients"), step.by_parameter("local_gradients")
    known = []  # of each parameter: p.grad and the mean, both projected, and the norm of p.grad
    for gradients, local_gradients in zip(averaged, local, strict=True):
        if None in gradients or None in local_gradients or gradients[0][1] <= TINY:
            continue
        gradient, norm = gradients[0]
        mean = sum(local_gradients) / len(local_gradients) / step.steps[0].loss_scale
        known.append((gradient, mean, norm))
    sure = sorted(gradient / mean for gradient, mean, norm in known if abs(mean) > 0.05 * norm)
    if not sure:
        return None
    factor, limit = sure[len(sure) // 2], tolerance(step)
    agree = all(abs(gradient - factor * mean) <= limit * norm for gradient, mean, norm in known)
    return factor if agree else None


def forward_rows(first: RankRecord, rows_of_weights: list[ReportRow]) -> list[ReportRow]:
    rows, check = [], "forward through DDP"
    for ddp in first.ddps:
        if ddp.forwards_around and any(row.verdict != RIGHT for row in rows_of_weights):
            text = f"{sum(ddp.forwards_around.values())} training forwards go around DDP at "
            text += f"{listed(list(ddp.forwards_around))}, {ddp.forwards} through it"
            rows.append(wrong(check, text, "call ddp(x), not ddp.module(x) or model(x)", See.LOSS))
        elif ddp.forwards:
            rows.append(right(check, count(ddp.forwards, "training forward")))
    if not first.ddps:
        rows.append(not_seen(check, "no DDP: see whether the gradients are averaged by hand"))
    return rows


def optimizer_rows(first: RankRecord) -> list[ReportRow]:
    rows, check = [], "optimizer"
    for ddp in first.ddps:
        missing, total = ddp.in_no_optimizer, ddp.parameters
        unused = [name for name in ddp.without_gradient if name not in missing]
        if not missing:
            rows.append(right(check, f"it holds the {total} parameters of the model"))
        elif len(missing) == total and ddp.forwards:
            at = listed([optimizer.at for optimizer in first.optimizers])
            text = f"no optimizer ({at}) holds a parameter of the model that DDP wraps at "
            cure = "make the optimizer from ddp.parameters(), after wrapping"
            rows.append(wrong(check, f"{text}{ddp.at}", cure))
        else:
            text = f"{len(missing)} of {total} parameters are in no optimizer: "
            cure = "add them, or requires_grad_(False)"
            rows.append(warning(check, text + listed(missing), cure))
        if unused and ddp.forwards:
            text = f"no gradient ever reached {listed(unused)}"
            rows.append(warning("unused parameters", text, "use them, or freeze them", See.UNUSED))
    return rows


def accumulation_rows(first: RankRecord) -> list[ReportRow]:
    """Several backwards before the first step, of a loss that no operation has divided."""
    backwards = [backward for backward in first.backwards if backward.steps_before == 0]
    places, n = {backward.at for backward in backwards}, len(backwards)
    if n < 2 or len(places) > 1 or len(first.optimizers) != 1:
        return []
    if any(backward.is_scaled for backward in backwards):
        return []
    text = f"{n} backwards at {places.pop()} add up, and the loss is not divided"
    cure = f"loss / {n}; meant so only if the loss is a sum, or the rate is divided"
    return [warning("accumulation", text, cure)]


def zero_gradient_rows(records: list[RankRecord]) -> list[ReportRow]:
    optimizers = [optimizer for rank in records for optimizer in rank.optimizers]
    steps = [step for optimizer in optimizers for step in optimizer.steps]
    norms = [gradient[1] for step in steps for gradient in step.gradients if gradient]
    if not norms or max(norms) > 0:
        return []
    text = f"all gradients are exactly zero in all steps ({steps[0].at})"
    cure = "the loss does not depend on the weights: is it a cross-entropy over one class?"
    return [wrong("zero gradients", text, cure)]


def clipping_rows(first: RankRecord) -> list[ReportRow]:
    if at := first.notes.get("clips scaled gradients"):
        text = f"gradients are clipped while they are multiplied by the loss scale ({at})"
        return [wrong("clipping", text, "scaler.unscale_(optimizer) before clipping")]
    if "clips" in first.notes:
        return [right("clipping", "of gradients that are not scaled")]
    return []


def learning_rate_rows(records: list[RankRecord], steps: list[StepOfRanks]) -> list[ReportRow]:
    rates = [
        ([of_rank.learning_rates for of_rank in step.steps], f"at step {step.number}, {step.at}")
        for step in steps
    ]
    epochs = zip(*(rank.rates_after_epochs for rank in records), strict=False)
    rates += [(list(of_ranks), f"after epoch {n}") for n, of_ranks in enumerate(epochs, start=1)]
    for of_ranks, when in rates:
        if any(of_rank != of_ranks[0] for of_rank in of_ranks):
            text = f"{[of_rank[0] for of_rank in of_ranks]} on the ranks {when}"
            cure = "the same schedule on all ranks: average what it depends on first"
            return [wrong("learning rate by rank", text, cure, See.LOSS)]
    return []


def loss_scale_rows(steps: list[StepOfRanks]) -> list[ReportRow]:
    for step in steps:
        scales = [of_rank.loss_scale for of_rank in step.steps]
        if len({*scales}) > 1:
            text = f"{scales} on the ranks at step {step.number} ({step.at})"
            return [wrong("loss scale", text, "the same GradScaler settings on all ranks")]
    return []


def buffer_rows(records: list[RankRecord]) -> list[ReportRow]:
    check, rows = "buffers", []
    for ddps in zip(*(rank.ddps for rank in records), strict=False):
        evaluated = all(ddp.buffers_at_evaluation for ddp in ddps)
        when = "evaluation" if evaluated else "the end"
        of_ranks = [ddp.buffers_at_evaluation or ddp.buffers_at_end for ddp in ddps]
        names = [name for name in of_ranks[0] if all(name in of_rank for of_rank in of_ranks)]
        apart = [name for name in names if differ([of_rank[name] for of_rank in of_ranks])]
        if apart:
            text = f"{len(apart)} of {len(names)} differ between the ranks at {when}: "
            cure = "broadcast them from rank 0 before evaluation, or SyncBatchNorm"
            rows.append(warning(check, text + listed(apart), cure, See.BUFFERS))
        elif names:
            rows.append(right(check, f"the same on all ranks at {when}"))
    return rows
