"""What the records say about the model: are weights and gradients the same on all ranks?"""

from prove.table import NOT_SEEN, RIGHT, WARNING, WRONG, Row

LOSS = "the-loss-is-not-that-of-one-process"
UNUSED = "parameter-indices-which-did-not-receive-grad-for-rank-0-2-3"
BUFFERS = "training-is-good-evaluation-is-bad-batchnorms-running-statistics"
SMALL_BATCH = 16  # values per channel from which BatchNorm's statistics are good enough
TINY = 1e-12


def named(optimizer: dict, numbers: list[int]) -> str:
    names = [optimizer["names"][k] for k in numbers[:2]]
    return " and ".join(names) + (f" and {len(numbers) - 2} more" if len(numbers) > 2 else "")


def differ(values: list[list[float]], limit: float = 1e-5) -> bool:
    """Whether projections of what should be the same tensor differ."""
    scale = limit * max(TINY, *(norm for _, norm in values))
    return max(v for v, _ in values) - min(v for v, _ in values) > scale


def steps_of(ranks: list[dict]) -> list:
    """(optimizer, number of the step, the step on each rank)"""
    found = []
    for number, optimizer in enumerate(ranks[0]["optimizers"]):
        each = [r["optimizers"][number]["steps"] for r in ranks if len(r["optimizers"]) > number]
        if len(each) == len(ranks):
            found += [(optimizer, n, parts) for n, parts in enumerate(zip(*each, strict=False))]
    return [x for x in found if all("after" in step for step in x[2])]


def model_rows(ranks: list[dict]) -> list[Row]:
    if not any(rank["steps"] for rank in ranks):
        return []
    rows = clipping(ranks) + zero_gradients(ranks) + optimizer_rows(ranks)
    if len(ranks) == 1 or any(row.check == "zero gradients" for row in rows):
        return rows
    shapes = {
        str([[len(s["before"]) for s in o["steps"][:1]] for o in r["optimizers"]]) for r in ranks
    }
    if "groups of some ranks" in ranks[0]["notes"] or len(shapes) > 1:
        text = "the ranks hold different parts of the model, or work in groups"
        return [*rows, Row(NOT_SEEN, "weights", text)]
    same = weights(ranks)
    rows += same + gradients(ranks, same) + forward(ranks, same) + learning_rate(ranks)
    return rows + loss_scale(ranks) + buffers(ranks)


def weights(ranks: list[dict]) -> list[Row]:
    check, steps = "weights", steps_of(ranks)
    agreed_later, found = False, None
    for optimizer, n, parts in steps:
        if len({len(step["after"]) for step in parts}) > 1:
            return [Row(NOT_SEEN, check, "the optimizers of the ranks hold different tensors")]
        after = list(zip(*(step["after"] for step in parts), strict=True))
        before = list(zip(*(step["before"] for step in parts), strict=True))
        apart = [k for k, values in enumerate(after) if differ(list(values))]
        if apart and found is None:
            already = n == 0 and any(differ(list(before[k])) for k in apart)
            when = "before the first step" if already else f"after step {n + 1}"
            found = (optimizer, when, apart, len(after), parts[0]["at"])
        elif found is not None and not any(differ(list(values)) for values in before):
            agreed_later = True
    if found is None:
        return (
            [Row(RIGHT, check, f"the same on all ranks after {len(steps)} steps")] if steps else []
        )
    optimizer, when, apart, total, at = found
    text = f"{len(apart)} of {total} tensors differ between the ranks {when}: "
    text += f"{named(optimizer, apart)} ({at})"
    cure = "DDP, or broadcast all weights once and average all gradients in each step"
    if agreed_later:
        cure = "meant so only for local SGD, which averages weights now and then"
        return [Row(WARNING, check, text + ", and agree again later", cure, LOSS)]
    outside = [k for k in apart if k in optimizer["outside"]]
    if outside and ranks[0]["ddps"]:
        text += f"; DDP does not hold {named(optimizer, outside)}"
        cure = "wrap one module that holds all trained parameters"
    return [Row(WRONG, check, text, cure, LOSS)]


def factor(c: float, ranks: int) -> str:
    """A known factor, or nothing: a gradient may have been clipped or scaled on purpose."""
    for value, name in ((ranks, f"{ranks} times"), (1 / ranks, f"1/{ranks} of")):
        if abs(c - value) < 1e-3 * value:
            return name
    return ""


def gradients(ranks: list[dict], weight_rows: list[Row]) -> list[Row]:
    """p.grad at each step against the mean over the ranks of what backward gave each of them."""
    check, n, seen = "averaged gradients", len(ranks), 0
    weights_agree = all(row.verdict == RIGHT for row in weight_rows)
    left_over, factors = [], []
    for optimizer, number, parts in steps_of(ranks):
        where = f"step {number + 1} at {parts[0]['at']}"
        narrow = "float64" not in parts[0]["dtype"]
        limit = 2e-3 if parts[0]["dtype"] == "torch.float32" else 5e-2 if narrow else 1e-6
        apart, pairs = [], []
        for k, values in enumerate(zip(*(step["grads"] for step in parts), strict=True)):
            if None in values:
                continue
            if differ(list(values), 1e-4):
                apart.append(k)
            (mine, norm), local = values[0], [step["local"][k] for step in parts]
            if norm < TINY or not all(arrivals for *_, arrivals in local):
                continue
            means = [sum(x[i] for x in local) / n / parts[0]["scale"] for i in (0, 1)]
            mean = min(means, key=lambda x: abs(x - mine))
            pairs.append((mine, mean, norm, k))
            if number and not any(zeroed for _, _, zeroed, _ in local):
                left_over.append(number)
        if apart and any(row.verdict == WARNING for row in weight_rows):
            return [
                Row(NOT_SEEN, check, "each rank steps with its own: weights are averaged, it seems")
            ]
        if apart and not weights_agree:
            text = f"the ranks step with different gradients in {len(apart)} of "
            text += f"{len(parts[0]['grads'])} tensors: {named(optimizer, apart)} ({where})"
            cure = "forward and backward through DDP; no_sync for all micro-batches but the last"
            return [Row(WRONG, check, text, cure, LOSS)]
        if apart or any(step["other_hooks"] for step in parts) or "comm hook" in ranks[0]["notes"]:
            continue
        sure = sorted(mine / mean for mine, mean, norm, _ in pairs if abs(mean) > 0.05 * norm)
        if not sure:
            continue
        c = sure[len(sure) // 2]
        if all(abs(mine - c * mean) <= limit * norm for mine, mean, norm, _ in pairs):
            seen += 1
            factors.append((c, where, limit, parts[0]["backwards"]))
    if left_over and len({*left_over}) > 1:
        text = f"at {len({*left_over})} steps, p.grad still held the gradient of the step before"
        return [Row(WRONG, check, text, "optimizer.zero_grad() in each step", LOSS)]
    if not seen:
        text = "no multiple of the mean over the ranks: changed between backward and step?"
        return [Row(NOT_SEEN, check, text)]
    c, where, limit, backwards = max(factors, key=lambda x: abs(x[0] - 1))
    name = factor(c, n)
    if abs(c - 1) <= limit:
        return [Row(RIGHT, check, f"the mean over the ranks, in {seen} steps")]
    if name and len({factor(x[0], n) for x in factors}) == 1 and backwards * abs(c) != 1:
        text = f"the gradient is {name} the mean over the ranks ({where})"
        return [Row(WARNING, check, text, "average once: DDP divides by the number of ranks", LOSS)]
    return [Row(NOT_SEEN, check, f"changed before the step: {c:.4g} times the mean ({where})")]


def forward(ranks: list[dict], weight_rows: list[Row]) -> list[Row]:
    rows, check = [], "forward through DDP"
    for ddp in ranks[0]["ddps"]:
        direct = sum(ddp["direct"].values())
        if direct and not all(row.verdict == RIGHT for row in weight_rows):
            lines = ", ".join(ddp["direct"])
            text = (
                f"{direct} training forwards go around DDP at {lines}, {ddp['forwards']} through it"
            )
            rows.append(Row(WRONG, check, text, "call ddp(x), not ddp.module(x) or model(x)", LOSS))
        elif ddp["forwards"]:
            rows.append(Row(RIGHT, check, f"{ddp['forwards']} training forwards"))
    if not ranks[0]["ddps"]:
        rows.append(Row(NOT_SEEN, check, "no DDP: see whether the gradients are averaged by hand"))
    return rows


def optimizer_rows(ranks: list[dict]) -> list[Row]:
    rows, check, first = [], "optimizer", ranks[0]
    at = ", ".join(o["at"] for o in first["optimizers"])
    for ddp in first["ddps"]:
        missing, total = ddp["in_no_optimizer"], ddp["parameters"]
        unused = [name for name in ddp["no_gradient"] if name not in missing]
        if missing and len(missing) == total and ddp["forwards"]:
            text = (
                f"no optimizer ({at}) holds a parameter of the model that DDP wraps at {ddp['at']}"
            )
            rows.append(
                Row(WRONG, check, text, "make the optimizer from ddp.parameters(), after wrapping")
            )
        elif missing:
            text = f"{len(missing)} of {total} parameters are in no optimizer: "
            text += ", ".join(missing[:3])
            rows.append(Row(WARNING, check, text, "add them, or requires_grad_(False)"))
        else:
            rows.append(Row(RIGHT, check, f"it holds the {total} parameters of the model"))
        if unused and ddp["forwards"]:
            text = f"no gradient ever reached {', '.join(unused[:3])} ({len(unused)} parameters)"
            rows.append(Row(WARNING, "unused parameters", text, "use them, or freeze them", UNUSED))
    backwards = [b for b in first["backwards"] if b[2] == 0]
    lines = {line for line, *_ in backwards}
    divided = any(
        op in name for _, names, _ in backwards for name in names for op in ("Div", "Mul")
    )
    steps = first["optimizers"][0]["steps"] if first["optimizers"] else []
    if (
        len(backwards) > 1
        and len(lines) == 1
        and not divided
        and steps
        and len(first["optimizers"]) == 1
    ):
        text = f"{len(backwards)} backwards at {lines.pop()} add up, and the loss is not divided"
        cure = (
            f"loss / {len(backwards)}; meant so only if the loss is a sum, or the rate is divided"
        )
        rows.append(Row(WARNING, "accumulation", text, cure))
    return rows


def zero_gradients(ranks: list[dict]) -> list[Row]:
    norms = [
        grad[1]
        for rank in ranks
        for optimizer in rank["optimizers"]
        for step in optimizer["steps"]
        for grad in step["grads"]
        if grad is not None
    ]
    if norms and max(norms) == 0:
        at = ranks[0]["optimizers"][0]["steps"][0]["at"]
        text = f"all gradients are exactly zero in all steps ({at})"
        cure = "the loss does not depend on the weights: is it a cross-entropy over one class?"
        return [Row(WRONG, "zero gradients", text, cure)]
    return []


def clipping(ranks: list[dict]) -> list[Row]:
    at = ranks[0]["notes"].get("clips scaled gradients")
    if at:
        text = f"gradients are clipped while they are multiplied by the loss scale ({at})"
        return [Row(WRONG, "clipping", text, "scaler.unscale_(optimizer) before clipping")]
    clipped = [s for o in ranks[0]["optimizers"] for s in o["steps"] if s["clipped"]]
    return [Row(RIGHT, "clipping", "of gradients that are not scaled")] if clipped else []


def learning_rate(ranks: list[dict]) -> list[Row]:
    check = "learning rate by rank"
    for _, n, parts in steps_of(ranks):
        if any(step["lr"] != parts[0]["lr"] for step in parts):
            rates = [step["lr"][0] for step in parts]
            text = f"{rates} on the ranks at step {n + 1} ({parts[0]['at']})"
            cure = "the same schedule on all ranks: average what it depends on first"
            return [Row(WRONG, check, text, cure, LOSS)]
    for epoch, each in enumerate(zip(*(rank["lr_in_epochs"] for rank in ranks), strict=False)):
        if any(rates != each[0] for rates in each):
            text = f"{[rates[0][0] for rates in each]} on the ranks after epoch {epoch + 1}"
            cure = "the same schedule on all ranks: average what it depends on first"
            return [Row(WRONG, check, text, cure, LOSS)]
    return []


def loss_scale(ranks: list[dict]) -> list[Row]:
    for _, n, parts in steps_of(ranks):
        scales = [step["scale"] for step in parts]
        if len({*scales}) > 1:
            text = f"{scales} on the ranks at step {n + 1} ({parts[0]['at']})"
            return [Row(WRONG, "loss scale", text, "the same GradScaler settings on all ranks")]
    return []


def buffers(ranks: list[dict]) -> list[Row]:
    check, rows = "buffers", []
    for number in range(len(ranks[0]["ddps"])):
        if not all(len(rank["ddps"]) > number for rank in ranks):
            continue
        seen = [rank["ddps"][number] for rank in ranks]
        when = "evaluation" if all(ddp["evaluation"] for ddp in seen) else "the end"
        states = [ddp["evaluation"] or ddp.get("buffers_at_end") or [] for ddp in seen]
        each = list(zip(*states, strict=False))
        apart = [b[0][0] for b in each if differ([x[1:] for x in b])]
        if apart:
            text = f"{len(apart)} of {len(each)} differ between the ranks at {when}: {apart[0]}"
            cure = "broadcast them from rank 0 before evaluation, or SyncBatchNorm"
            rows.append(Row(WARNING, check, text, cure, BUFFERS))
        elif each:
            rows.append(Row(RIGHT, check, f"the same on all ranks at {when}"))
    return rows
