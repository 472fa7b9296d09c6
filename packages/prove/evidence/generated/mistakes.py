"""Mistakes that change the weights of a generated script, in the lines of its parts.

python -m evidence.generated.mistakes 7    # the script of seed 7, with the mistake of this seed
"""

import re
import sys
from functools import partial

from evidence.generated.choices import BY_HAND, IN_STEP, OF_AUTOGRAD, WITH_DDP
from evidence.generated.parts import MISTAKE_OF_LOSS, Change, Parts
from evidence.generated.script import generate

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
    """This script has no place for this mistake."""


def depth_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def nested(head: str, lines: list[str]) -> list[str]:
    return [head, *("    " + line for line in lines)]


def replace_lines(lines: list[str], old: list[str], new: list[str]) -> None:
    """Replace `old` wherever it stands, at any depth. Raises NotPlantedError if it is missing."""
    found = False
    for i in range(len(lines) - len(old), -1, -1):
        depth = depth_of(lines[i])
        if lines[i : i + len(old)] == [depth + line for line in old]:
            lines[i : i + len(old)] = [depth + line for line in new]
            found = True
    if not found:
        raise NotPlantedError


def since(epoch: int, lines: list[str]) -> list[str]:
    return nested(f"if epoch >= {epoch}:", lines) if epoch else lines


def not_averaged(parts: Parts, rows: str = "...", epoch: int = 0) -> None:
    """Leave one parameter, or some of its rows, unaveraged from this epoch on."""
    chosen = (int(parts.made["accumulation"]) + len(parts.setup)) % 2
    if parts.facts.layout == "sparse":
        chosen = -1
    if parts.averaging in WITH_DDP:
        not_averaged_by_ddp(parts, chosen, rows, epoch)
    elif parts.optimizer in OF_AUTOGRAD:
        divide = [] if parts.averaging == "all_reduce, sum" else ["    grad /= world"]
        loop = ["for grad in grads:", "    dist.all_reduce(grad)", *divide]
        tensor = f"grads[{chosen}]"
        replace_lines(parts.epoch, loop, restored(loop, tensor, rows, epoch))
    elif parts.averaging in BY_HAND:
        old = parts.average
        new = restored(old, f"params[{chosen}].grad", rows, epoch)
        if rows == "..." and not epoch:
            left = f"averaged = [p for p in params if p is not params[{chosen}]]"
            new = [left, *(line.replace("params", "averaged") for line in old)]
        replace_lines(parts.epoch, old, new)
    elif parts.averaging == "weights after step":
        old = ["for p in params:", "    dist.all_reduce(p.data)", "    p.data /= world"]
        replace_lines(parts.epoch, old, restored(old, f"params[{chosen}].data", rows, epoch))
    else:
        not_averaged_in_function(parts, chosen, rows, epoch)


def restored(averaging: list[str], tensor: str, rows: str, epoch: int) -> list[str]:
    put_back = since(epoch, [f"{tensor}[{rows}] = kept[{rows}]"])
    return [f"kept = {tensor}.clone()", *averaging, *put_back]


def not_averaged_by_ddp(parts: Parts, chosen: int, rows: str, epoch: int) -> None:
    if parts.facts.layout == "sparse":
        raise NotPlantedError
    if epoch:  # the model is called without DDP
        if int(parts.made["accumulation"]) > 1:
            raise NotPlantedError
        parts.epoch[:0] = since(epoch, ["model = net"])
        return
    parts.setup[:] = [line for line in parts.setup if "comm_hook" not in line]
    (wrapped,) = (i for i, line in enumerate(parts.setup) if line.startswith("model = DDP("))
    hook = f"model.register_comm_hook(params[{chosen}], average_most)"
    parts.setup.insert(wrapped + 1, hook)
    parts.prelude += ["", "", *HOOK.replace("ROWS", rows).strip().split("\n")]


def not_averaged_in_function(parts: Parts, chosen: int, rows: str, epoch: int) -> None:
    """Plant the mistake in a backward hook, or in step() of the script's own optimizer."""
    old = ["dist.all_reduce(p.grad)"]
    if parts.averaging not in IN_STEP:
        old.append("p.grad /= dist.get_world_size()")
    put_back = nested(f"if {LEFT_OUT}:", [f"p.grad[{rows}] = kept[{rows}]"])
    replace_lines(parts.prelude, old, ["kept = p.grad.clone()", *old, *put_back])
    mark = f"params[{chosen}].is_left_out = True"
    if epoch:
        parts.epoch[:0] = since(epoch, [mark])
    else:
        parts.setup.append(mark)


def dtype(parts: Parts) -> None:
    """Leave complex parameters unaveraged, or average only their real parts."""
    if parts.facts.layout != "complex" or parts.averaging not in BY_HAND:
        raise NotPlantedError
    if parts.optimizer in OF_AUTOGRAD:
        replace_lines(parts.epoch, ["dist.all_reduce(grad)"], ["dist.all_reduce(grad.real)"])
        return
    old = parts.average
    if parts.averaging == "all_reduce":
        new = [line.replace("all_reduce(p.grad)", "all_reduce(p.grad.real)") for line in old]
    else:
        left = "averaged = [p for p in params if not p.is_complex()]"
        new = [left, *(line.replace("params", "averaged") for line in old)]
    replace_lines(parts.epoch, old, new)


BEFORE_STEP = re.compile(
    r"\s*(optimizer\.step\(\)|scaler\.unscale_\(optimizer\)|scaler\.step\(optimizer\)"
    r"|grads = \[p\.grad|nn\.utils\.clip|norm = torch\.cat|for p, master in zip)"
)


def factor(parts: Parts, epoch: int = 0) -> None:
    """Multiply the gradient of one parameter by the number of ranks."""
    if parts.averaging == "fused in backward":
        if epoch:
            raise NotPlantedError
        old = ["p.grad /= dist.get_world_size()"]
        replace_lines(
            parts.prelude, old, [*old, f"if {LEFT_OUT}:", "    p.grad *= dist.get_world_size()"]
        )
        parts.setup.append("params[0].is_left_out = True")
        return
    if parts.optimizer in OF_AUTOGRAD:
        old = ["with torch.no_grad():"]
        doubled, pattern = "grads[0].mul_(world)", re.compile(r"\s*with torch\.no_grad\(\):")
    else:
        doubled, pattern = "params[0].grad.mul_(world)", BEFORE_STEP
    first = next((i for i, line in enumerate(parts.epoch) if pattern.match(line)), None)
    if first is None:
        raise NotPlantedError
    depth = depth_of(parts.epoch[first])
    parts.epoch[first:first] = [depth + line for line in since(epoch, [doubled])]


def lost_sample(parts: Parts, epoch: int = 0) -> None:
    """Let rank 1 leave out the last sample of the last batch of an epoch."""
    cuts = {"x": "x, y = x[:-1], y[:-1]", "words": "words = words[:-1]"}
    made = {line.split(" = ")[0].split(",")[0] for line in parts.unpack}
    names = [name for name in cuts if name in made]
    last = [i for i, line in enumerate(parts.epoch) if line.strip() == parts.unpack[-1]]
    if not names or not last or parts.facts.fixed_batch:
        raise NotPlantedError
    depth = depth_of(parts.epoch[last[0]])
    condition = "if step == STEPS - 1 and rank == 1" + f" and epoch >= {epoch}" * bool(epoch)
    lines = nested(f"{condition}:", [cuts[names[0]]])
    parts.epoch[last[0] + 1 : last[0] + 1] = [depth + line for line in lines]


def later(parts: Parts, epoch: int) -> None:
    """Plant one of the other mistakes, but let it begin in this epoch, counted from 0."""
    ways: list[Change] = [
        partial(not_averaged, epoch=epoch),
        partial(factor, epoch=epoch),
        partial(lost_sample, epoch=epoch),
    ]
    first = len(parts.setup) % len(ways)
    for way in ways[first:] + ways[:first]:
        try:
            return way(parts)
        except NotPlantedError:
            continue
    raise NotPlantedError


def local_divisor(parts: Parts) -> None:
    """Divide the loss by a count of the local batch."""
    divided = f"loss = loss / (1 + {parts.local_count})"
    replace_lines(parts.epoch, [MISTAKE_OF_LOSS], [divided])


MISTAKES: dict[str, Change] = {
    "parameter": not_averaged,
    "part of a tensor": partial(not_averaged, rows=":1"),
    "dtype": dtype,
    "factor": factor,
    "lost sample": lost_sample,
    "second epoch": partial(later, epoch=1),
    "third epoch": partial(later, epoch=2),
    "local divisor": local_divisor,
}


def plantable(seed: int) -> dict[str, Change]:
    """List the mistakes that this script has a place for, that of its seed first."""
    # A local divisor has a place in every script.
    names = [name for name in MISTAKES if name != "local divisor"]
    first = seed % len(names)
    found = {}
    for name in names[first:] + names[:first]:
        try:
            generate(seed, change=MISTAKES[name])
        except NotPlantedError:
            continue
        found[name] = MISTAKES[name]
    return found


if __name__ == "__main__":
    SEED = int(sys.argv[1])
    name, change = next(iter(plantable(SEED).items()))
    print(f"# {name}\n{generate(SEED, change=change).text}", end="")
