"""A mistake is planted in a generated script: does prove call it right all the same?

    python packages/prove/evidence/break_scripts.py 7    # the script of seed 7, with its mistake

A mistake counts if it changes the weights: in float64 they end elsewhere than those of one process
which gets the samples of both ranks (oracle.py, which knows nothing of prove). Then prove judges
the script. Status 0 without a warning is a false right: the worst that prove can do.
"""

import re
import sys
from functools import partial

from cases import WARNING, WRONG, generated_case
from generate import (
    BY_HAND,
    IN_STEP,
    OF_AUTOGRAD,
    WITH_DDP,
    Change,
    Parts,
    Plan,
    averaging_lines,
    generate,
    nested,
)
from judge import Counted, run_case
from oracle import DIFFERS, DIVERGED, weights_of_one_process, weights_of_ranks
from tasks import Task
from traces import FailedError, distance

LEFT_OUT = "getattr(p, 'is_left_out', False)"
HOOK = """
def average_most(left_out, bucket):
    grads = [g for p, g in zip(bucket.parameters(), bucket.gradients()) if p is left_out]
    kept = [g.clone() for g in grads]
    dist.all_reduce(bucket.buffer())
    bucket.buffer().div_(dist.get_world_size())
    for g, own in zip(grads, kept):
        g[ROWS] = own[ROWS]
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
"""


class NotPlantedError(Exception):
    """This mistake has no place in this script."""


def replace_lines(lines: list[str], old: list[str], new: list[str]) -> None:
    """Wherever `old` stands, at any depth. Raises NotPlantedError: nowhere."""
    found = False
    for i in range(len(lines) - len(old), -1, -1):
        depth = len(lines[i]) - len(lines[i].lstrip())
        if lines[i : i + len(old)] == [" " * depth + line for line in old]:
            lines[i : i + len(old)] = [" " * depth + line for line in new]
            found = True
    if not found:
        raise NotPlantedError


def since(epoch: int, lines: list[str]) -> list[str]:
    return nested(lines, f"if epoch >= {epoch}:") if epoch else lines


def not_averaged(parts: Parts, plan: Plan, task: Task, rows: str = "...", epoch: int = 0) -> None:
    """One parameter, or some of its rows, keeps the gradient of its rank; from this epoch on."""
    chosen = -1 if task.layout == "sparse" else (plan.accumulate + len(parts.setup)) % 2
    if plan.averaging in WITH_DDP:
        not_averaged_by_ddp(parts, plan, task, chosen, rows, epoch)
    elif plan.optimizer in OF_AUTOGRAD:
        divide = [] if plan.averaging == "all_reduce, sum" else ["    grad /= world"]
        loop = ["for grad in grads:", "    dist.all_reduce(grad)", *divide]
        tensor = f"grads[{chosen}]"
        replace_lines(parts.epoch, loop, restored(loop, tensor, rows, epoch))
    elif plan.averaging in BY_HAND:
        old = averaging_lines(plan.averaging)
        new = restored(old, f"params[{chosen}].grad", rows, epoch)
        if rows == "..." and not epoch:
            left = f"averaged = [p for p in params if p is not params[{chosen}]]"
            new = [left, *(line.replace("params", "averaged") for line in old)]
        replace_lines(parts.epoch, old, new)
    elif plan.averaging == "weights after step":
        old = ["for p in params:", "    dist.all_reduce(p.data)", "    p.data /= world"]
        replace_lines(parts.epoch, old, restored(old, f"params[{chosen}].data", rows, epoch))
    else:
        not_averaged_in_function(parts, plan, chosen, rows, epoch)


def restored(averaging: list[str], tensor: str, rows: str, epoch: int) -> list[str]:
    put_back = since(epoch, [f"{tensor}[{rows}] = kept[{rows}]"])
    return [f"kept = {tensor}.clone()", *averaging, *put_back]


def not_averaged_by_ddp(
    parts: Parts, plan: Plan, task: Task, chosen: int, rows: str, epoch: int
) -> None:
    if task.layout == "sparse":
        raise NotPlantedError
    if epoch:  # the model is called without DDP
        if plan.accumulate > 1:
            raise NotPlantedError
        parts.epoch[:0] = since(epoch, ["model = net"])
        return
    parts.setup[:] = [line for line in parts.setup if "comm_hook" not in line]
    (wrapped,) = (i for i, line in enumerate(parts.setup) if line.startswith("model = DDP("))
    hook = f"model.register_comm_hook(params[{chosen}], average_most)"
    parts.setup.insert(wrapped + 1, hook)
    parts.prelude += ["", "", *HOOK.replace("ROWS", rows).strip().split("\n")]


def not_averaged_in_function(parts: Parts, plan: Plan, chosen: int, rows: str, epoch: int) -> None:
    """A hook of backward, or step() of the script's own optimizer."""
    old = ["dist.all_reduce(p.grad)"]
    if plan.averaging not in IN_STEP:
        old.append("p.grad /= dist.get_world_size()")
    put_back = nested([f"p.grad[{rows}] = kept[{rows}]"], f"if {LEFT_OUT}:")
    replace_lines(parts.prelude, old, ["kept = p.grad.clone()", *old, *put_back])
    mark = f"params[{chosen}].is_left_out = True"
    if epoch:
        parts.epoch[:0] = since(epoch, [mark])
    else:
        parts.setup.append(mark)


def parameter(parts: Parts, plan: Plan, task: Task) -> None:
    not_averaged(parts, plan, task)


def part_of_tensor(parts: Parts, plan: Plan, task: Task) -> None:
    not_averaged(parts, plan, task, rows=":1")


def dtype(parts: Parts, plan: Plan, task: Task) -> None:
    """Complex parameters are not averaged, or only their real parts are."""
    if task.layout != "complex" or plan.averaging not in BY_HAND:
        raise NotPlantedError
    if plan.optimizer in OF_AUTOGRAD:
        replace_lines(parts.epoch, ["dist.all_reduce(grad)"], ["dist.all_reduce(grad.real)"])
        return
    old = averaging_lines(plan.averaging)
    if plan.averaging == "all_reduce":
        new = [line.replace("all_reduce(p.grad)", "all_reduce(p.grad.real)") for line in old]
    else:
        left = "averaged = [p for p in params if not p.is_complex()]"
        new = [left, *(line.replace("params", "averaged") for line in old)]
    replace_lines(parts.epoch, old, new)


STEP = re.compile(
    r"\s*(optimizer\.step\(\)|scaler\.unscale_\(optimizer\)|scaler\.step\(optimizer\)"
    r"|grads = \[p\.grad|nn\.utils\.clip|norm = torch\.cat|for p, master in zip)"
)


def factor(parts: Parts, plan: Plan, task: Task, epoch: int = 0) -> None:
    """The gradient of one parameter is multiplied by the number of ranks."""
    if plan.averaging == "fused in backward":
        if epoch:
            raise NotPlantedError
        old = ["p.grad /= dist.get_world_size()"]
        replace_lines(
            parts.prelude, old, [*old, f"if {LEFT_OUT}:", "    p.grad *= dist.get_world_size()"]
        )
        parts.setup.append("params[0].is_left_out = True")
        return
    if plan.optimizer in OF_AUTOGRAD:
        old = ["with torch.no_grad():"]
        doubled, pattern = "grads[0].mul_(world)", re.compile(r"\s*with torch\.no_grad\(\):")
    else:
        doubled, pattern = "params[0].grad.mul_(world)", STEP
    first = next((i for i, line in enumerate(parts.epoch) if pattern.match(line)), None)
    if first is None:
        raise NotPlantedError
    depth = len(parts.epoch[first]) - len(parts.epoch[first].lstrip())
    parts.epoch[first:first] = [" " * depth + line for line in since(epoch, [doubled])]


def lost_sample(parts: Parts, plan: Plan, task: Task, epoch: int = 0) -> None:
    """Rank 1 leaves out the last sample of the last batch of an epoch."""
    cuts = {"x": "x, y = x[:-1], y[:-1]", "words": "words = words[:-1]"}
    made = {line.split(" = ")[0].split(",")[0] for line in task.unpack}
    names = [name for name in cuts if name in made]
    last = [i for i, line in enumerate(parts.epoch) if line.strip() == task.unpack[-1]]
    if not names or not last or task.fixed_batch:
        raise NotPlantedError
    depth = len(parts.epoch[last[0]]) - len(parts.epoch[last[0]].lstrip())
    condition = "if step == STEPS - 1 and rank == 1" + f" and epoch >= {epoch}" * bool(epoch)
    lines = nested([cuts[names[0]]], f"{condition}:")
    parts.epoch[last[0] + 1 : last[0] + 1] = [" " * depth + line for line in lines]


def later(parts: Parts, plan: Plan, task: Task, epoch: int) -> None:
    """One of the others, which begins in this epoch; the first is 0."""
    ways: list[Change] = [
        partial(not_averaged, epoch=epoch),
        partial(factor, epoch=epoch),
        partial(lost_sample, epoch=epoch),
    ]
    first = len(parts.setup) % len(ways)
    for way in ways[first:] + ways[:first]:
        try:
            return way(parts, plan, task)
        except NotPlantedError:
            continue
    raise NotPlantedError


KINDS: dict[str, Change] = {
    "parameter": parameter,
    "part of a tensor": part_of_tensor,
    "dtype": dtype,
    "factor": factor,
    "lost sample": lost_sample,
    "second epoch": partial(later, epoch=1),
    "third epoch": partial(later, epoch=2),
}


def plantable(seed: int, kind: str = "") -> dict[str, Change]:
    """The mistakes that this script has a place for, that of its seed first."""
    first = seed % len(KINDS)
    names = [kind] if kind else [*KINDS][first:] + [*KINDS][:first]
    found = {}
    for name in names:
        try:
            generate(seed, change=KINDS[name])
        except NotPlantedError:
            continue
        found[name] = KINDS[name]
    return found


def changed_weights(seed: int, change: Change) -> float | None:
    """How far they end from those of one process; None if ranks end apart from each other."""
    one = weights_of_one_process(seed)
    try:
        return distance(weights_of_ranks(generate(seed, change=change)), one)
    except FailedError as error:
        if str(error) == DIVERGED:
            return None
        raise


def search(seed: int) -> Counted:
    """The first mistake that changes the weights of this script, and what prove says of it."""
    not_counted: dict[str, str] = {}
    facts = {"not counted": not_counted}
    for name, change in plantable(seed).items():
        try:
            apart = changed_weights(seed, change)
        except FailedError as error:
            not_counted[name] = f"does not run: {str(error)[-300:]}"
            continue
        if apart is None or apart > DIFFERS:
            weights = "differ between the ranks" if apart is None else apart
            return judge_broken(seed, change, facts | {"kind": name, "weights": weights})
        not_counted[name] = f"the weights end {apart:.1e} away"
    return Counted("no mistake", True, facts=facts)


def judge_broken(seed: int, change: Change, facts: dict) -> Counted:
    case = generated_case(seed, WRONG, change=change)
    answer = run_case(case, case.script)
    outcome = "no table" if answer.error else "not seen"
    if not answer.error:
        for verdict in (WARNING, WRONG):
            outcome = verdict if answer.checks(verdict) else outcome
        if outcome == "not seen" and answer.is_proven:
            outcome = "false right"
    return Counted(outcome, outcome != "false right", {"script": answer}, facts)


if __name__ == "__main__":
    SEED = int(sys.argv[1])
    name, change = next(iter(plantable(SEED).items()))
    print(f"# {name}\n{generate(SEED, change=change).text}", end="")
