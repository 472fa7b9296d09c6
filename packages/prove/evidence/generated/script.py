# ruff: noqa: E501  some are lines of scripts
"""From a seed a whole training script, and it is right: N ranks compute what one process would.

    python generate.py 7                # the script
    python generate.py 7 --reference    # one process, which gets the samples of two ranks
    python generate.py 7 --fault        # the same script, whose loss is divided by a local count

What a script learns is in pieces/, which tasks.py reads, and how a rank gets its samples in
loaders.py; what may not be combined is in `choices` and below it, and
oracle.py runs the script and its reference to show that each script is right.
"""

import argparse
import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import indent

from loaders import Loader, loader
from tasks import TASKS, Choices, Task, cells, task_of

IMPORTS = (  # each is written if the script uses one of the names
    ("import argparse", r"\bargparse\b"),
    ("import copy", r"\bcopy\."),
    ("import os", r"\bos\."),
    ("import random", r"(?<!\.)\brandom\."),
    ("import socket", r"\bsocket\."),
    ("from collections import UserDict", r"\bUserDict\b"),
    ("from collections import namedtuple", r"\bnamedtuple\b"),
    ("from contextlib import nullcontext", r"\bnullcontext\b"),
    ("from dataclasses import dataclass", r"@dataclass"),
    ("from itertools import islice", r"\bislice\b"),
    ("from typing import NamedTuple", r"\bNamedTuple\b"),
    ("import numpy as np", r"\bnp\."),
    ("import torch", r"torch"),
    ("import torch.distributed as dist", r"\bdist\."),
    ("import torch.distributed.nn.functional", r"torch\.distributed\.nn"),
    ("import torch.multiprocessing as mp", r"\bmp\."),
    ("from torch import nn", r"\bnn\."),
    ("from torch.func import functional_call, grad_and_value", r"\bgrad_and_value\("),
    ("from torch.distributed.device_mesh import init_device_mesh", r"\binit_device_mesh\b"),
    ("from torch.distributed.fsdp import fully_shard", r"\bfully_shard\b"),
    ("from torch.distributed.optim import ZeroRedundancyOptimizer", r"\bZeroRedundancyOptimizer\b"),
    ("from torch.nn import functional as F", r"\bF\."),
    ("from torch.nn.parallel import DistributedDataParallel as DDP", r"\bDDP\("),
    ("from torch.utils.checkpoint import checkpoint", r"(?<!\.)\bcheckpoint\("),
    ("from torch.utils.data import NAMES", r""),
)
DATA_NAMES = (
    "DataLoader", "Dataset", "DistributedSampler", "IterableDataset", "Sampler", "Subset", "default_collate",
    "get_worker_info",
)  # fmt: skip


@dataclass
class Script:
    seed: int
    text: str
    command: list[str]  # starts two ranks; the script is called train.py
    alone: str  # starts one rank, where the command does not say how many it starts
    pieces: dict[str, str]


# The step, of which pieces/step.py has the lines


STEP = {(cell.name, cell.condition.partition(" is ")[2]): cell.text for cell in cells("step")}


def choices_of(name: str) -> tuple[str, ...]:
    """What there is to choose from, for the cells of this name."""
    return tuple(choice for known, choice in STEP if known == name)


def piece(name: str, choice: str) -> list[str]:
    """The lines of this cell; none if this choice has none."""
    text = STEP.get((name, choice))
    return text.split("\n") if text else []


def averaging_lines(kind: str) -> list[str]:
    """Write the lines after backward that turn p.grad into that of all ranks."""
    return piece("average", kind)


def wrap_lines(kind: str, choose: Choices) -> list[str]:
    """Write the lines that make `model` from `net`."""
    if kind == "DDP":
        options = "net", "net, find_unused_parameters=False", "net, broadcast_buffers=False"
        return [f"model = DDP({choose('DDP', *options)})"]
    return piece("wrap", kind) or ["model = net"]


BY_HAND = choices_of("average")
WITH_DDP = (
    *("DDP", "DDP, static graph", "DDP, bucket views"),
    *("own comm hook", "library comm hook", "ZeRO"),
)
# Where else the ranks may average: in step() of the script's own optimizer, in backward, or the weights.
IN_STEP = ("in step", "owned in step", "orthogonal in step")
ELSEWHERE = (*IN_STEP, "fused in backward", "weights after step")
UPDATES = choices_of("update")  # updates by hand, with the gradients `grads`
OPTIMIZERS = tuple(kind for kind in choices_of("optimizer") if kind not in UPDATES)
NO_MOMENTUM = ("adamw, groups", "rmsprop", "ZeRO adam", "ZeRO sgd", "plain sgd", "adagrad", "own")
OF_AUTOGRAD = ("autograd.grad", "torch.func")  # these do not use p.grad
COPIES = ("master.grad = p.grad", "p.data.copy_(master.data)")  # before and after the step
EACH_STEP = ("cosine", "OneCycle", "warm-up")  # schedules; others step after an epoch


@dataclass
class Plan:
    """The choices of how a step is made; the rules say what may be combined."""

    averaging: str
    optimizer: str
    schedule: str
    precision: str
    accumulate: int
    clip: str
    evaluation: str
    saving: str
    launcher: str


def choices(choose: Choices, task: Task) -> Plan:
    styles = ("functions", "Trainer", "main", "module")
    # Spawned ranks import torch again, which takes longer than all the rest.
    launcher = choose("launcher", *(["spawn"] if choose.random.random() < 0.05 else styles))
    if task.gan:
        averaging = choose("averaging", "DDP", "all_reduce")
        choose.made.update(optimizer="two adams", precision="float32", accumulation="1")
        saving = choose("saving", "none", "rank 0")
        return Plan(averaging, "adam", "none", "float32", 1, "none", "none", saving, launcher)
    averaging = averaging_for(choose, task)
    optimizer = optimizer_for(choose, task, averaging)
    precision = precision_for(choose, task, averaging, optimizer)
    steps_once = averaging in ("gradient hooks", "fused in backward", "DDP, static graph")
    once = steps_once or optimizer in ("lbfgs", *OF_AUTOGRAD)
    accumulate = choose("accumulation", *(["1"] if once else ["1", "1", "1", "2", "4", "8"]))
    evaluation = evaluation_for(choose, task, averaging)
    return Plan(
        averaging=averaging,
        optimizer=optimizer,
        schedule=schedule_for(choose, task, optimizer, evaluation),
        precision=precision,
        accumulate=int(accumulate),
        clip=clip_for(choose, task, averaging, optimizer),
        evaluation=evaluation,
        saving=choose("saving", *(["none"] if averaging == "fully_shard" else ["none", "rank 0"])),
        launcher=launcher,
    )


def averaging_for(choose: Choices, task: Task) -> str:
    if task.layout == "sparse":
        return choose("averaging", "DDP", "all_reduce", "in step")
    if task.layout == "complex":
        elsewhere = [kind for kind in ELSEWHERE if "orthogonal" not in kind]
        each_alone = [kind for kind in BY_HAND if kind != "flattened"]
        return choose("averaging", *each_alone, *elsewhere)
    sharded = not task.batchnorm and not task.own_state and not task.frozen
    by_hand = (*BY_HAND, "gradient hooks")
    often = ["DDP", "DDP", *(by_hand[:2] * 4 if task.functional else [])]
    shards = ["fully_shard"] * 2 if sharded else []
    return choose("averaging", *WITH_DDP, *often, *by_hand, *ELSEWHERE, *shards)


def optimizer_for(choose: Choices, task: Task, averaging: str) -> str:
    if averaging in IN_STEP:
        return choose("optimizer", "own")
    if averaging == "fused in backward":
        return choose("optimizer", "one for each parameter")
    if averaging == "weights after step":  # the same, because these are linear in the gradient
        return choose("optimizer", "sgd", "plain sgd", "sgd, weight decay")
    if task.layout == "sparse":
        return choose("optimizer", "plain sgd", "adagrad")
    if task.layout == "complex":
        updates = [*UPDATES, *(OF_AUTOGRAD[:1] if averaging in BY_HAND[:2] else [])]
        return choose("optimizer", "sgd", "sgd", "adam", "foreach", "masters", *updates)
    steady = not task.draws and not task.own_state and not task.batchnorm and "DDP" in averaging
    seldom = ("lbfgs", "own", "masters", "ZeRO adam", "ZeRO sgd")
    optimizers = [name for name in OPTIMIZERS if name not in seldom]
    optimizers += ["lbfgs"] * steady
    updates = [*UPDATES, "masters", "masters"]
    if averaging == "fully_shard":
        optimizers, updates = ["sgd", "adam", "adamw, groups"], []
    if averaging == "ZeRO":
        optimizers, updates = ["ZeRO adam", "ZeRO sgd"], []
    autograd = list(OF_AUTOGRAD[:1]) * 3 if averaging in BY_HAND[:2] else []
    autograd += list(OF_AUTOGRAD[1:]) * 16 if autograd and task.functional else []
    return choose("optimizer", *optimizers, *optimizers, *updates, *autograd)


def is_manual(optimizer: str) -> bool:
    """The script itself changes the weights."""
    return optimizer in UPDATES or optimizer in OF_AUTOGRAD


def precision_for(choose: Choices, task: Task, averaging: str, optimizer: str) -> str:
    if task.layout or optimizer == "torch.func":
        return choose("precision", "float32")
    unscaled = averaging in ("fully_shard", "ZeRO", "all_reduce, sum", *ELSEWHERE)
    scaled = not unscaled and not is_manual(optimizer) and optimizer not in ("lbfgs", "masters")
    scaling = ["scaler", "autocast with scaler"] if scaled else []
    return choose("precision", "float32", "float32", "autocast", *scaling)


def clip_for(choose: Choices, task: Task, averaging: str, optimizer: str) -> str:
    unclipped = optimizer in ("lbfgs", *OF_AUTOGRAD) or averaging in ELSEWHERE or task.layout
    clips = ["none"] if unclipped else ["none", "none", *choices_of("clip")]
    if averaging == "fully_shard":
        clips = ["none", "norm"]
    return choose("clipping", *clips)


def evaluation_for(choose: Choices, task: Task, averaging: str) -> str:
    evaluations = ["none"]
    if task.evaluate:
        evaluations = ["strided", "strided", "none"]
        if averaging != "fully_shard":
            evaluations += ["rank 0", "rank 0, broadcast"]
    return choose("evaluation", *evaluations)


def schedule_for(choose: Choices, task: Task, optimizer: str, evaluation: str) -> str:
    unscheduled = is_manual(optimizer) or optimizer in ("lbfgs", "one for each parameter")
    schedules = [] if unscheduled else [*choices_of("scheduler")]
    if "plateau" in schedules and (evaluation in ("none", "rank 0") or task.batchnorm):
        schedules.remove("plateau")
    if optimizer in NO_MOMENTUM and "OneCycle" in schedules:
        schedules.remove("OneCycle")
    return choose("schedule", "none", "none", *schedules)


def optimizer_lines(plan: Plan) -> list[str]:
    """One entry for each statement."""
    text = STEP.get(("optimizer", plan.optimizer))
    return re.split(r"\n(?=\w)", text) if text else []


def nested(lines: list[str], head: str = "") -> list[str]:
    """The lines as one block below a head, as lines of their own without one."""
    return [head, *indent("\n".join(lines), "    ").split("\n")] if head else lines


def gan_lines(plan: Plan, task: Task, fault: bool) -> list[str]:
    lines = []
    for line in task.forward:
        if line == "AVERAGE":
            params = "params" if "critic_optimizer.step()" in lines else "critic_params"
            average = averaging_lines(plan.averaging)
            lines += [each.replace("params", params) for each in average]
        elif line == "FAULT":
            lines += [f"loss = loss / (1 + {task.count})"] * fault
        else:
            lines.append(line)
    return lines


def forward_lines(plan: Plan, task: Task, fault: bool) -> list[str]:
    """Write the lines that compute `loss` from an unpacked batch."""
    summed = plan.averaging == "all_reduce, sum"
    times = "" if summed else " * world"
    forward = [line.replace(" * WORLD", times) for line in task.forward]
    if summed and not task.divides:
        forward.append("loss = loss / world")
    if fault:
        forward.append(f"loss = loss / (1 + {task.count})")
    autocast = "with torch.autocast('cpu', dtype=torch.bfloat16):"
    return nested(forward, autocast if plan.precision.startswith("autocast") else "")


def step_lines(plan: Plan, task: Task, fault: bool) -> list[str]:
    """Write the lines that lead from an unpacked batch to the next weights."""
    if task.gan:
        return gan_lines(plan, task, fault)
    forward = forward_lines(plan, task, fault)
    if plan.optimizer == "lbfgs":
        mean = ["value = loss.detach().clone()", "dist.all_reduce(value)", "return value / world"]
        average = averaging_lines(plan.averaging)
        body = ["optimizer.zero_grad()", *forward, "loss.backward()", *average, *mean]
        return [*nested(body, "def closure():"), "loss = optimizer.step(closure)", *task.after_step]
    if plan.optimizer in OF_AUTOGRAD:
        divide = [] if plan.averaging == "all_reduce, sum" else ["    grad /= world"]
        differentiate = [*forward, "grads = torch.autograd.grad(loss, params)"]
        if plan.optimizer == "torch.func":
            forward = [
                re.sub(r"\bmodel\(x\)", "functional_call(net, values, x)", line) for line in forward
            ]
            differentiate = [
                *nested([*forward, "return loss"], "def loss_of(values):"),
                "names = [name for name, p in net.named_parameters()]",
                "grads, loss = grad_and_value(loss_of)(dict(zip(names, params)))",
                "grads = list(grads.values())",
            ]
        return [
            *differentiate,
            "for grad in grads:",
            "    dist.all_reduce(grad)",
            *divide,
            *nested(piece("update", "p -= lr * grad"), "with torch.no_grad():"),
            *task.after_step,
        ]
    return accumulated([*forward, backward_line(plan)], update_lines(plan, task), plan)


def backward_line(plan: Plan) -> str:
    if "scaler" in plan.precision:
        divided = "loss / ACCUMULATE" if plan.accumulate > 1 else "loss"
        return f"scaler.scale({divided}).backward()"
    return "(loss / ACCUMULATE).backward()" if plan.accumulate > 1 else "loss.backward()"


def update_lines(plan: Plan, task: Task) -> list[str]:
    """Write the lines that lead from p.grad of this rank to the next weights."""
    update, scaler = averaging_lines(plan.averaging), "scaler" in plan.precision
    if plan.clip != "none":
        update += (["scaler.unscale_(optimizer)"] if scaler else []) + piece("clip", plan.clip)
    if plan.averaging == "fused in backward":
        return task.after_step
    if plan.optimizer in UPDATES:
        update.append("grads = [p.grad for p in params]")
        update += nested(piece("update", plan.optimizer), "with torch.no_grad():")
    else:
        copied = [["for p, master in zip(params, masters):", f"    {line}"] for line in COPIES]
        before, after = copied if plan.optimizer == "masters" else ([], [])
        step = ["scaler.step(optimizer)", "scaler.update()"] if scaler else ["optimizer.step()"]
        update += [*before, *step, *after]
    if plan.averaging == "weights after step":
        update += ["for p in params:", "    dist.all_reduce(p.data)", "    p.data /= world"]
    if plan.schedule in EACH_STEP:
        update.append("scheduler.step()")
    return update + task.after_step


def accumulated(backward: list[str], update: list[str], plan: Plan) -> list[str]:
    """The update after every batch, or after as many as make a step."""
    by_hand = plan.optimizer in (*UPDATES, "masters", "one for each parameter")
    zero = ["for p in params:", "    p.grad = None"] if by_hand else ["optimizer.zero_grad()"]
    last = "(step + 1) % ACCUMULATE == 0"
    if plan.accumulate == 1:
        return [*zero, *backward, *update]
    if plan.averaging == "fully_shard":
        return [f"last = {last}", "model.set_requires_gradient_sync(last)", *backward,
                *nested([*update, *zero], "if last:")]  # fmt: skip
    if "DDP" not in plan.averaging and "hook" not in plan.averaging and plan.averaging != "ZeRO":
        return [*backward, *nested([*update, *zero], f"if {last}:")]
    together = nested(backward, "with nullcontext() if last else model.no_sync():")
    return [f"last = {last}", *together, *nested([*update, *zero], "if last:")]


def evaluation_lines(plan: Plan, task: Task) -> list[str]:
    """They end with val_loss."""
    loop = [
        "with torch.no_grad():",
        "    for batch in test_loader:",
        *indent(
            "\n".join([*task.unpack, *task.evaluate, "totals[0] += value", "totals[1] += n"]),
            " " * 8,
        ).split("\n"),
    ]
    buffers = (
        ["for buffer in net.buffers():", "    dist.broadcast(buffer, src=0)"]
        if task.batchnorm
        else []
    )
    begin = [*buffers, "net.eval()", "totals = torch.zeros(2)"]
    if plan.evaluation == "strided":
        return [
            *begin,
            *loop,
            "dist.all_reduce(totals)",
            "net.train()",
            "val_loss = totals[0] / totals[1]",
        ]
    end = ["net.train()"]
    if "broadcast" in plan.evaluation:
        return [*begin, *nested(loop, "if rank == 0:"), "dist.broadcast(totals, src=0)", *end,
                "val_loss = totals[0] / totals[1]"]  # fmt: skip
    return [
        *begin,
        *nested(loop, "if rank == 0:"),
        *end,
        "val_loss = totals[0] / totals[1].clamp(min=1)",
    ]


# The whole script


@dataclass
class Parts:
    prelude: list[str]
    setup: list[str]  # lines after rank and world are known
    epoch: list[str]  # one epoch of training, which ends with mean_loss
    evaluate: list[str]
    after_epoch: list[str]


Change = Callable[[Parts, Plan, Task], None]


def constants(plan: Plan, per_rank: bool) -> list[str]:
    batch = "BATCH = 8  # on each rank" if per_rank else "GLOBAL_BATCH = 16"
    lines = ["EPOCHS, LR = 3, 0.1", batch, f"STEPS = {4 * plan.accumulate}  # batches in an epoch"]
    return [*lines, f"ACCUMULATE = {plan.accumulate}"]


def parts_of(
    choose: Choices, task: Task, plan: Plan, data: Loader, per_rank: bool, fault: bool
) -> Parts:
    dataset = re.search(r"class (\w+)\(Dataset\)", "\n".join(task.prelude))
    assert dataset
    setup = [f"train_set = {dataset[1]}({16 * 4 * plan.accumulate}, seed=1)"]
    setup += test_set_lines(choose, task, plan, dataset[1])
    setup += data.setup
    setup += model_lines(choose, task, plan)
    setup += optimizer_lines(plan)
    if plan.schedule != "none":
        setup.append(STEP["scheduler", plan.schedule])
    if "scaler" in plan.precision:
        setup.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)')
    setup += task.generators
    setup.append("torch.manual_seed(1000 + rank)")
    epoch = epoch_lines(choose, task, plan, data, fault)
    evaluate = evaluation_lines(plan, task) if plan.evaluation != "none" else []
    prelude = [*constants(plan, per_rank), "", ""]
    averaging = STEP.get(("classes", plan.averaging))
    classes = [*task.prelude, *data.prelude, *([averaging] if averaging else [])]
    prelude += "\n\n\n".join(classes).split("\n")
    return Parts(prelude, setup, epoch, evaluate, after_epoch_lines(plan))


def test_set_lines(choose: Choices, task: Task, plan: Plan, dataset: str) -> list[str]:
    if plan.evaluation == "none":
        return []
    collate = f", collate_fn={task.collate}" if task.collate else ""
    loader_of = "test_loader = DataLoader(test_set, batch_size=4"
    if plan.evaluation == "strided":
        rows = "range(rank, len(test_set), world)"
        if choose("test loader", "Subset", "sampler") == "Subset":
            loader_of = f"test_loader = DataLoader(Subset(test_set, {rows}), batch_size=4"
        else:
            loader_of += f", sampler={rows}"
    return [f"test_set = {dataset}(24, seed=2)", f"{loader_of}{collate})"]


def model_lines(choose: Choices, task: Task, plan: Plan) -> list[str]:
    """Who averages by hand, and who divides the weights, must make the same ones on all ranks."""
    ways = ["alike"]
    if plan.averaging != "fully_shard":
        ways.append("by rank, broadcast")
    way = choose("weights", *ways)
    if task.gan and plan.averaging != "DDP":
        way = choose.made["weights"] = "alike"
    lines = ["torch.manual_seed(0)" if way == "alike" else "torch.manual_seed(rank)", *task.build]
    lines.append("params = [p for p in net.parameters() if p.requires_grad]")
    if way != "alike" and plan.averaging not in WITH_DDP:
        lines += ["for tensor in net.state_dict().values():", "    dist.broadcast(tensor, src=0)"]
    lines += wrap_lines(plan.averaging, choose)
    if plan.averaging == "fully_shard":
        lines.append("params = list(model.parameters())")
    wrap = "DDP(critic)" if plan.averaging == "DDP" else "critic"
    return lines + [line.replace("WRAP(critic)", wrap) for line in task.after_wrap]


def epoch_lines(choose: Choices, task: Task, plan: Plan, data: Loader, fault: bool) -> list[str]:
    """They end with mean_loss."""
    rate = []
    if is_manual(plan.optimizer):
        rate = [f"lr = {choose('lr by hand', 'LR', 'LR * 0.9**epoch')}"]
    is_sum_of_parts = plan.averaging == "all_reduce, sum" and plan.optimizer != "lbfgs"
    mean = "total / STEPS" if is_sum_of_parts else "total / STEPS / world"
    body = [*data.index, *task.unpack, *step_lines(plan, task, fault), f"total += {task.logged}"]
    return [
        *data.epoch,
        *rate,
        "model.train()",
        "total = torch.zeros(())",
        *nested(body, f"for step, batch in enumerate({data.batches}):"),
        "dist.all_reduce(total)",
        f"mean_loss = {mean}",
    ]


def after_epoch_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.schedule not in ("none", *EACH_STEP):
        lines.append(
            "scheduler.step(val_loss)" if plan.schedule == "plateau" else "scheduler.step()"
        )
    said = 'print(f"epoch {epoch}  loss {mean_loss:.4f}'
    said += '  test {val_loss:.4f}")' if plan.evaluation != "none" else '")'
    save = ["states = {'model': net.state_dict(), 'epoch': epoch}", "torch.save(states, 'last.pt')"]
    lines += nested([said, *(save if plan.saving == "rank 0" else [])], "if rank == 0:")
    if plan.saving == "rank 0":
        lines.append("dist.barrier()")
    return lines


# How it is written: functions, a class, one module


def assigned(lines: list[str]) -> set[str]:
    """The names that these statements make, not those of their loops."""
    names = set()
    for statement in ast.parse("\n".join(lines)).body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                names |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names


def used(lines: list[str]) -> set[str]:
    return {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}


class AttributesOfSelf(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        return ast.Attribute(ast.Name("self", ast.Load()), node.id, node.ctx)


def of_self(lines: list[str], names: set[str]) -> list[str]:
    tree = AttributesOfSelf(names).visit(ast.parse("\n".join(lines)))
    return ast.unparse(ast.fix_missing_locations(tree)).split("\n")


JOIN = ['dist.init_process_group("gloo")', "rank, world = dist.get_rank(), dist.get_world_size()"]
JOIN_BY_ENV = [
    'rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
    'dist.init_process_group("gloo", rank=rank, world_size=world)',
]
LEAVE = ["dist.destroy_process_group()"]


def loop_lines(parts: Parts) -> list[str]:
    return nested(
        [*parts.epoch, *parts.evaluate, *parts.after_epoch], "for epoch in range(EPOCHS):"
    )


def as_main(parts: Parts, join: list[str]) -> list[str]:
    body = [*join, *parts.setup, *loop_lines(parts), *LEAVE]
    return [*nested(body, "def main():"), "", "", 'if __name__ == "__main__":', "    main()"]


def as_module(parts: Parts, join: list[str]) -> list[str]:
    return [*join, *parts.setup, *loop_lines(parts), *LEAVE]


def as_functions(parts: Parts, join: list[str]) -> list[str]:
    names = assigned([*join, *parts.setup])
    train = ", ".join([*sorted(used(parts.epoch) & names), "epoch"])
    lines = [*nested([*parts.epoch, "return mean_loss"], f"def train_one_epoch({train}):"), "", ""]
    calls = [f"mean_loss = train_one_epoch({train})"]
    if parts.evaluate:
        needs = ", ".join(sorted(used(parts.evaluate) & names))
        lines += [*nested([*parts.evaluate, "return val_loss"], f"def evaluate({needs}):"), "", ""]
        calls.append(f"val_loss = evaluate({needs})")
    loop = nested([*calls, *parts.after_epoch], "for epoch in range(EPOCHS):")
    body = [*join, *parts.setup, *loop, *LEAVE]
    return [
        *lines,
        *nested(body, "def main():"),
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]


def as_trainer(parts: Parts, join: list[str]) -> list[str]:
    names = assigned(parts.setup) | {"rank", "world"}
    methods = [
        nested(["self.rank, self.world = rank, world", *of_self(parts.setup, names)],
               "def __init__(self, rank, world):"),
        nested([*of_self(parts.epoch, names), "return mean_loss"], "def train_epoch(self, epoch):"),
    ]  # fmt: skip
    calls = ["mean_loss = self.train_epoch(epoch)"]
    if parts.evaluate:
        methods.append(
            nested([*of_self(parts.evaluate, names), "return val_loss"], "def evaluate(self):")
        )
        calls.append("val_loss = self.evaluate()")
    after = of_self(parts.after_epoch, names)
    methods.append(
        nested(nested([*calls, *after], "for epoch in range(EPOCHS):"), "def fit(self):")
    )
    body = [line for method in methods for line in ("", *method)][1:]
    main = [*join, "Trainer(rank, world).fit()", *LEAVE]
    return [
        *nested(body, "class Trainer:"), "", "", *nested(main, "def main():"), "", "",
        'if __name__ == "__main__":', "    main()",
    ]  # fmt: skip


def as_spawned(parts: Parts, option: bool) -> list[str]:
    ports = [
        "with socket.socket() as probe:",
        '    probe.bind(("127.0.0.1", 0))',
        '    os.environ["MASTER_ADDR"] = "127.0.0.1"',
        '    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])',
    ]
    join = ['dist.init_process_group("gloo", rank=rank, world_size=world)']
    body = [*join, *parts.setup, *loop_lines(parts), *LEAVE]
    arguments = [
        "parser = argparse.ArgumentParser()",
        'parser.add_argument("--world-size", type=int, default=2)',
        "world = parser.parse_args().world_size",
    ]
    by_environment = ['world = int(os.environ.get("RANKS", 2))']
    start = [
        *(arguments if option else by_environment),
        *ports,
        "mp.spawn(run, args=(world,), nprocs=world)",
    ]
    return [
        *nested(body, "def run(rank, world):"),
        "",
        "",
        *nested(start, 'if __name__ == "__main__":'),
    ]


def imports_of(text: str) -> list[str]:
    lines = []
    for line, pattern in IMPORTS:
        if "NAMES" in line:
            names = [name for name in DATA_NAMES if re.search(rf"\b{name}\b", text)]
            lines += [line.replace("NAMES", ", ".join(names))] if names else []
        elif re.search(pattern, text):
            lines.append(line)
    return lines


def generate(
    seed: int,
    reference: bool = False,
    fault: bool = False,
    change: Change | None = None,
) -> Script:
    """Reference: one process gets, in each step, the samples that the two ranks get together.

    change: of the parts, before they are joined to a script.
    """
    choose = Choices(seed)
    name = choose.made["task"] = TASKS[seed % len(TASKS)]
    task = task_of(name, choose)
    plan = choices(choose, task)
    guarded = plan.launcher != "module"
    own_batches = task.tensors or task.fixed_batch  # they cut the global batch
    per_rank = choose("batch size", "global", "per rank") == "per rank" and not own_batches
    batch = "BATCH" if per_rank else "GLOBAL_BATCH // world"
    state = choose.random.getstate()
    data = loader(choose, task, batch, reference, guarded)
    if data.varying and per_rank:  # the same once more, with a global batch to cut
        choose.random.setstate(state)
        per_rank, batch = False, "GLOBAL_BATCH // world"
        choose.made["batch size"] = "global"
        data = loader(choose, task, batch, reference, guarded)
    choose.random.seed(f"{seed} after the data")
    parts = parts_of(choose, task, plan, data, per_rank, fault)
    if change:
        change(parts, plan, task)
    by_env = choose("join", "get_rank", "environment") == "environment"
    join = JOIN_BY_ENV if by_env else JOIN
    if plan.launcher == "spawn":
        option = choose("ranks from", "option", "environment") == "option"
        lines = as_spawned(parts, option)
        command = ["python", "train.py", *(["--world-size", "2"] if option else [])]
        alone = "" if option else "env RANKS=1 python train.py"
    else:
        write = {
            "main": as_main,
            "module": as_module,
            "functions": as_functions,
            "Trainer": as_trainer,
        }
        lines, alone = write[plan.launcher](parts, join), ""
        command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    text = "\n".join([*parts.prelude, "", "", *lines])
    text = "\n".join([*imports_of(text), "", text, ""])
    return Script(seed, text, command, alone, dict(choose.made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()
    script = generate(args.seed, args.reference, args.fault)
    print(f"# {' '.join(script.command)}\n# {json.dumps(script.pieces)}\n{script.text}", end="")


if __name__ == "__main__":
    main()
