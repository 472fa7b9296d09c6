"""What the records say about the model: are weights and gradients the same on all ranks?

Tensors are compared by their projections, pairs of numbers: see watch_model.project.
"""

from dataclasses import dataclass

from prove.table import (
    BUFFERS,
    LOSS,
    NAN,
    RIGHT,
    UNUSED,
    WARNING,
    Row,
    count,
    not_seen,
    right,
    warning,
    wrong,
)  # fmt: skip

TINY = 1e-12


@dataclass
class Step:
    """One optimizer step, as each of the ranks wrote it down."""

    optimizer: dict
    number: int
    ranks: list[dict]

    def each(self, key: str) -> list[tuple]:
        """For each parameter what the ranks hold: weights "before" and "after", or "grads"."""
        return list(zip(*(own[key] for own in self.ranks), strict=True))

    def apart(self, key: str, limit: float = 1e-5) -> list[int]:
        """The parameters for which the ranks hold different tensors."""
        known = [(k, xs) for k, xs in enumerate(self.each(key)) if None not in xs]
        return [k for k, xs in known if differ(xs, limit)]

    @property
    def at(self) -> str:
        return str(self.ranks[0]["at"])


def differ(projections: tuple | list, limit: float = 1e-5) -> bool:
    """Whether projections of what should be the same tensor differ."""
    values, norms = zip(*projections, strict=True)
    return bool(max(values) - min(values) > limit * max(TINY, *norms))


def named(optimizer: dict, numbers: list[int]) -> str:
    names = [optimizer["names"][k] for k in numbers[:2]]
    return " and ".join(names) + (f" and {len(numbers) - 2} more" if len(numbers) > 2 else "")


def steps_of(ranks: list[dict]) -> list[Step]:
    found = []
    for number, optimizer in enumerate(ranks[0]["optimizers"]):
        each = [r["optimizers"][number]["steps"] for r in ranks if len(r["optimizers"]) > number]
        if len(each) == len(ranks):
            steps = enumerate(zip(*each, strict=False), start=1)
            found += [Step(optimizer, n, list(own)) for n, own in steps]
    return [step for step in found if all("after" in own for own in step.ranks)]


def model_rows(ranks: list[dict]) -> list[Row]:
    first, zero = ranks[0], zero_gradients(ranks)
    rows = clipping(first) + zero + held_by_optimizers(first) + accumulation(first)
    if len(ranks) == 1 or zero:
        return rows
    shapes = [[len(s["before"]) for o in r["optimizers"] for s in o["steps"][:1]] for r in ranks]
    if "groups of some ranks" in first["notes"] or any(s != shapes[0] for s in shapes):
        text = "the ranks hold different parts of the model, or work in groups"
        return [*rows, not_seen("weights", text)]
    steps = steps_of(ranks)
    if any(len({len(own["after"]) for own in step.ranks}) > 1 for step in steps):
        return [*rows, not_seen("weights", "the optimizers of the ranks hold different tensors")]
    same = weights(steps)
    rows += same + gradients(steps, same) + forward(first, same)
    return rows + learning_rate(ranks, steps) + loss_scale(steps) + buffers(ranks)


def weights(steps: list[Step]) -> list[Row]:
    check = "weights"
    differing = [step for step in steps if step.apart("after")]
    if not steps:
        return []
    if not differing:
        return [right(check, f"the same on all ranks after {count(len(steps), 'step')}")]
    step = differing[0]
    apart, optimizer = step.apart("after"), step.optimizer
    already = step.number == 1 and set(apart) & {*step.apart("before")}
    when = "before the first step" if already else f"after step {step.number}"
    text = f"{len(apart)} of {len(step.each('after'))} tensors differ between the ranks {when}: "
    text += f"{named(optimizer, apart)} ({step.at})"
    later = steps[steps.index(step) + 1 :]
    if any(not each.apart("before") for each in later):
        cure = "meant so only for local SGD, which averages weights now and then"
        return [warning(check, f"{text}, and agree again later", cure, LOSS)]
    outside = [k for k in apart if k in optimizer["outside"]]
    if outside and len(optimizer["outside"]) < len(optimizer["names"]):
        text += f"; DDP does not hold {named(optimizer, outside)}"
        return [wrong(check, text, "wrap one module that holds all trained parameters", LOSS)]
    cure = "DDP, or broadcast all weights once and average all gradients in each step"
    return [wrong(check, text, cure, LOSS)]


def gradients(steps: list[Step], weight_rows: list[Row]) -> list[Row]:
    """p.grad at each step: is it the same on all ranks, and the mean of what backward gave them?"""
    check, verdicts = "averaged gradients", [row.verdict for row in weight_rows]
    for step in steps:
        apart = step.apart("grads", 1e-4)
        if apart and WARNING in verdicts:
            text = "each rank steps with its own: weights are averaged, it seems"
            return [not_seen(check, text)]
        if apart and verdicts != [RIGHT]:
            text = f"the ranks step with different gradients in {len(apart)} of "
            text += f"{len(step.each('grads'))} tensors: {named(step.optimizer, apart)} "
            text += f"(step {step.number} at {step.at})"
            cure = "forward and backward through DDP; no_sync for all micro-batches but the last"
            return [wrong(check, text, cure, LOSS)]
    kept = [s for s in steps if s.number > 1 and all(own["old_gradient"] for own in s.ranks)]
    if len(kept) > 1:
        text = f"at {len(kept)} steps, p.grad still held the gradient of the step before "
        cure = "optimizer.zero_grad() in each step"
        return [wrong("zero_grad", f"{text}({kept[0].at})", cure, NAN)]
    factors = [(times_the_mean(step), step) for step in steps]
    known = [(c, step) for c, step in factors if c is not None]
    if not known:
        text = "no multiple of the mean over the ranks: changed between backward and step?"
        return [not_seen(check, text)]
    c, step = max(known, key=lambda found: abs(found[0] - 1))
    if abs(c - 1) <= tolerance(step):
        return [right(check, f"the mean over the ranks, in {count(len(known), 'step')}")]
    text = f"changed before the step: {c:.4g} times the mean (step {step.number} at {step.at})"
    return [not_seen(check, text)]


def tolerance(step: Step) -> float:
    return {"torch.float64": 1e-6, "torch.float32": 2e-3}.get(step.ranks[0]["dtype"], 5e-2)


def times_the_mean(step: Step) -> float | None:
    """The factor c if p.grad is c times the mean over the ranks of their local gradients."""
    pairs = []
    for own, local in zip(step.each("grads"), step.each("local"), strict=True):
        if None not in own and None not in local and own[0][1] > TINY:
            mean = sum(local) / len(local) / step.ranks[0]["scale"]
            pairs.append((own[0][0], mean, own[0][1]))
    sure = sorted(mine / mean for mine, mean, norm in pairs if abs(mean) > 0.05 * norm)
    if not sure:
        return None
    c, limit = sure[len(sure) // 2], tolerance(step)
    agree = all(abs(mine - c * mean) <= limit * norm for mine, mean, norm in pairs)
    return c if agree else None


def forward(first: dict, weight_rows: list[Row]) -> list[Row]:
    rows, check = [], "forward through DDP"
    for ddp in first["ddps"]:
        if ddp["direct"] and any(row.verdict != RIGHT for row in weight_rows):
            text = f"{sum(ddp['direct'].values())} training forwards go around DDP at "
            text += f"{', '.join(ddp['direct'])}, {ddp['forwards']} through it"
            rows.append(wrong(check, text, "call ddp(x), not ddp.module(x) or model(x)", LOSS))
        elif ddp["forwards"]:
            rows.append(right(check, count(ddp["forwards"], "training forward")))
    if not first["ddps"]:
        rows.append(not_seen(check, "no DDP: see whether the gradients are averaged by hand"))
    return rows


def held_by_optimizers(first: dict) -> list[Row]:
    rows, check = [], "optimizer"
    for ddp in first["ddps"]:
        missing, total = ddp["in_no_optimizer"], ddp["parameters"]
        unused = [name for name in ddp["no_gradient"] if name not in missing]
        if not missing:
            rows.append(right(check, f"it holds the {total} parameters of the model"))
        elif len(missing) == total and ddp["forwards"]:
            at = ", ".join(optimizer["at"] for optimizer in first["optimizers"])
            text = f"no optimizer ({at}) holds a parameter of the model that DDP wraps at "
            cure = "make the optimizer from ddp.parameters(), after wrapping"
            rows.append(wrong(check, f"{text}{ddp['at']}", cure))
        else:
            text = f"{len(missing)} of {total} parameters are in no optimizer: "
            cure = "add them, or requires_grad_(False)"
            rows.append(warning(check, text + ", ".join(missing[:3]), cure))
        if unused and ddp["forwards"]:
            text = f"no gradient ever reached {', '.join(unused[:3])} ({len(unused)} parameters)"
            rows.append(warning("unused parameters", text, "use them, or freeze them", UNUSED))
    return rows


def accumulation(first: dict) -> list[Row]:
    """Several backwards before the first step, of a loss that no operation has divided."""
    backwards = [b for b in first["backwards"] if b["step"] == 0]
    lines = {b["at"] for b in backwards}
    if len(backwards) < 2 or len(lines) > 1 or len(first["optimizers"]) != 1:
        return []
    if any(b["scaled"] for b in backwards):
        return []
    n = len(backwards)
    text = f"{n} backwards at {lines.pop()} add up, and the loss is not divided"
    cure = f"loss / {n}; meant so only if the loss is a sum, or the rate is divided"
    return [warning("accumulation", text, cure)]


def zero_gradients(ranks: list[dict]) -> list[Row]:
    steps = [s for rank in ranks for optimizer in rank["optimizers"] for s in optimizer["steps"]]
    norms = [grad[1] for step in steps for grad in step["grads"] if grad]
    if not norms or max(norms) > 0:
        return []
    text = f"all gradients are exactly zero in all steps ({steps[0]['at']})"
    cure = "the loss does not depend on the weights: is it a cross-entropy over one class?"
    return [wrong("zero gradients", text, cure)]


def clipping(first: dict) -> list[Row]:
    if at := first["notes"].get("clips scaled gradients"):
        text = f"gradients are clipped while they are multiplied by the loss scale ({at})"
        return [wrong("clipping", text, "scaler.unscale_(optimizer) before clipping")]
    if "clips" in first["notes"]:
        return [right("clipping", "of gradients that are not scaled")]
    return []


def learning_rate(ranks: list[dict], steps: list[Step]) -> list[Row]:
    seen = [([s["lr"] for s in step.ranks], f"at step {step.number}, {step.at}") for step in steps]
    epochs = zip(*(rank["lr_in_epochs"] for rank in ranks), strict=False)
    seen += [(list(rates), f"after epoch {n}") for n, rates in enumerate(epochs, start=1)]
    for rates, when in seen:
        if any(own != rates[0] for own in rates):
            text = f"{[own[0] for own in rates]} on the ranks {when}"
            cure = "the same schedule on all ranks: average what it depends on first"
            return [wrong("learning rate by rank", text, cure, LOSS)]
    return []


def loss_scale(steps: list[Step]) -> list[Row]:
    for step in steps:
        scales = [own["scale"] for own in step.ranks]
        if len({*scales}) > 1:
            text = f"{scales} on the ranks at step {step.number} ({step.at})"
            return [wrong("loss scale", text, "the same GradScaler settings on all ranks")]
    return []


def buffers(ranks: list[dict]) -> list[Row]:
    check, rows = "buffers", []
    for ddps in zip(*(rank["ddps"] for rank in ranks), strict=False):
        when = "evaluation" if all(ddp["evaluation"] for ddp in ddps) else "the end"
        states = [ddp["evaluation"] or ddp.get("buffers_at_end") or [] for ddp in ddps]
        each = list(zip(*states, strict=False))  # (name, *projection) of each rank
        apart = [own[0][0] for own in each if differ([(x, norm) for _, x, norm in own])]
        if apart:
            text = f"{len(apart)} of {len(each)} differ between the ranks at {when}: {apart[0]}"
            cure = "broadcast them from rank 0 before evaluation, or SyncBatchNorm"
            rows.append(warning(check, text, cure, BUFFERS))
        elif each:
            rows.append(right(check, f"the same on all ranks at {when}"))
    return rows
