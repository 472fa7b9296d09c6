# ruff: noqa: E501  some are lines of scripts
"""Put a script together: from what its seed chooses, and the cells of pieces/ that belong to it.

    python -m evidence.generated.script 7                # the script
    python -m evidence.generated.script 7 --reference    # one process, with the samples of two ranks

Its loss has a mean over the ranks that is the loss of one process with the samples of all ranks.
"""

import argparse
import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import indent

from evidence.generated.cells import fill, holes_of, texts
from evidence.generated.choices import OF_AUTOGRAD, UPDATES, WITH_DDP, Choices, Facts
from evidence.generated.loader import Loader, loader

MISTAKE_OF_LOSS = "MISTAKE_OF_LOSS"  # the line in which a mistake may change the loss
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


@dataclass
class Parts:
    """The lines of a script, which a mistake may change, and what it must know of them."""

    prelude: list[str]
    setup: list[str]  # after rank and world are known; some entries have several lines
    epoch: list[str]  # one epoch of training, which ends with mean_loss
    evaluation: list[str]
    end: list[str]  # of an epoch
    made: dict[str, str]
    facts: Facts
    average: list[str]  # the lines of `epoch` that average by hand
    unpack: list[str]  # those that unpack a batch
    local_count: str  # a number of the local batch: a loss divided by it is a mistake

    @property
    def averaging(self) -> str:
        return self.made["averaging"]

    @property
    def optimizer(self) -> str:
        return self.made["optimizer"]


Change = Callable[[Parts], None]


def generate(seed: int, is_reference: bool = False, change: Change | None = None) -> Script:
    """As a reference, one process gets in each step the samples that two ranks get together.

    change: of the parts, before they are joined to a script.
    """
    choices = Choices(seed)
    parts = parts_of(choices, is_reference)
    if change:
        change(parts)
    parts.epoch = [line for line in parts.epoch if line.strip() != MISTAKE_OF_LOSS]
    text = "\n".join([*parts.prelude, "", "", whole_text(parts)])
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    alone = ""
    if choices.made["launcher"] == "spawn":
        by_option = choices.made["ranks from"] == "option"
        command = ["python", "train.py", *(["--world-size", "2"] if by_option else [])]
        alone = "" if by_option else "env RANKS=1 python train.py"
    text = "\n".join([*imports_of(text), "", text, ""])
    return Script(seed, text, command, alone, choices.made)


def parts_of(choices: Choices, is_reference: bool) -> Parts:
    made, facts = choices.made, choices.facts
    made = made | {"window": window(made, facts), "steps": steps(made)}
    task = made["task"]
    holes = dict.fromkeys(("AFTER_STEP", "AFTER_WRAP", "EVALUATE", "GENERATORS"), "")
    holes |= holes_of(task, made) | holes_of("step", made) | holes_of("script", made)
    classes = [fill(text, holes) for text in texts(task, "classes", made)]
    collate = "collate" if any("def collate(" in text for text in classes) else ""
    data = loader(made, facts.tensors, collate, is_reference)
    dataset = re.search(r"class (\w+)\(Dataset\)", "\n".join(classes))
    assert dataset
    accumulate = made["accumulation"]
    holes |= {
        "DATASET": dataset[1],
        "ROWS": str(16 * 4 * int(accumulate)),
        "TEST_COLLATE": f", collate_fn={collate}" if collate else "",
        "OPTIONS_OF_DDP": made.get("DDP", ""),
        "WRAP": holes["WRAP"] or "model = net",
    }
    if made["weights"] == "alike" or made["averaging"] in WITH_DDP:
        holes["BROADCAST"] = ""
    if not facts.batchnorm:
        holes["BUFFERS"] = ""
    holes |= holes_of_step(made, facts, holes) | holes_of_epoch(made, facts, data)

    def lines(hole: str) -> list[str]:
        text = fill(holes[hole], holes)
        return text.split("\n") if text else []

    def statements(text: str) -> list[str]:
        return re.split(r"\n(?=\w)", text) if text else []

    setup = [
        *lines("DATA"),
        *statements(data.setup),
        *lines("MODEL"),
        *statements(holes["OPTIMIZER"]),
        *statements(holes["SCHEDULER"]),
        *lines("READY"),
    ]
    batch = "BATCH = 8  # on each rank" if made["batch size"] == "per rank" else "GLOBAL_BATCH = 16"
    constants = [
        "EPOCHS, LR = 3, 0.1",
        batch,
        f"STEPS = {4 * int(accumulate)}  # batches in an epoch",
        f"ACCUMULATE = {accumulate}",
    ]
    averaging = fill(holes["AVERAGING"], holes)
    classes += [*data.classes, *([averaging] if averaging else [])]
    return Parts(
        prelude=[*constants, "", "", *"\n\n\n".join(classes).split("\n")],
        setup=setup,
        epoch=lines("EPOCH"),
        evaluation=lines("EVALUATION"),
        end=lines("END"),
        made=made,
        facts=facts,
        average=lines("AVERAGE"),
        unpack=lines("UNPACK"),
        local_count=fill(holes["COUNT"], holes),
    )


# The step


def window(made: dict[str, str], facts: Facts) -> str:
    """What a step is made of."""
    averaging = made["averaging"]
    if facts.gan:
        return "of a gan"
    if made["optimizer"] == "lbfgs":
        return "of lbfgs"
    if made["optimizer"] in OF_AUTOGRAD:
        return "of autograd"
    if made["accumulation"] == "1":
        return "a batch"
    if averaging == "fully_shard":
        return "several batches, with fully_shard"
    if averaging in WITH_DDP:
        return "several batches, with DDP"
    return "several batches"


def steps(made: dict[str, str]) -> str:
    """Who changes the weights."""
    if made["averaging"] == "fused in backward":
        return "in backward"
    if made["optimizer"] == "masters":
        return "of masters"
    if made["optimizer"] in UPDATES:
        return "by hand"
    return "by a scaler" if "scaler" in made["precision"] else "by an optimizer"


def holes_of_step(made: dict[str, str], facts: Facts, holes: dict[str, str]) -> dict[str, str]:
    is_sum = made["averaging"] == "all_reduce, sum"
    loss = "loss" if made["accumulation"] == "1" else "loss / ACCUMULATE"
    backward = f"({loss}).backward()" if "/" in loss else f"{loss}.backward()"
    return {
        "FORWARD": forward(made, facts, holes),
        "AVERAGE_CRITIC": holes["AVERAGE"].replace("params", "critic_params"),
        "DIVIDE": "" if is_sum else "grad /= world",
        "BACKWARD": f"scaler.scale({loss}).backward()"
        if "scaler" in made["precision"]
        else backward,
        "UNSCALE": holes["UNSCALE"] if made["clipping"] != "none" else "",
    }


def forward(made: dict[str, str], facts: Facts, holes: dict[str, str]) -> str:
    """Write the lines that compute `loss` from an unpacked batch."""
    if facts.gan:
        return holes["FORWARD"]
    is_sum = made["averaging"] == "all_reduce, sum"
    text = holes["FORWARD"].replace(" * WORLD", "" if is_sum else " * world")
    if is_sum and not facts.divides:
        text += "\nloss = loss / world"
    text = fill(f"{text}\n{MISTAKE_OF_LOSS}", holes)
    if made["optimizer"] == "torch.func":
        text = re.sub(r"\bmodel\(x\)", "functional_call(net, values, x)", text)
    if made["precision"].startswith("autocast"):
        return f"with torch.autocast('cpu', dtype=torch.bfloat16):\n{indent(text, '    ')}"
    return text


def holes_of_epoch(made: dict[str, str], facts: Facts, data: Loader) -> dict[str, str]:
    is_sum_of_parts = made["averaging"] == "all_reduce, sum" and made["optimizer"] != "lbfgs"
    return {
        "LOADER_OF_EPOCH": data.epoch,
        "BATCHES": data.batches,
        "INDEX": data.index,
        "LOGGED": facts.logged,
        "MEAN": "total / STEPS" if is_sum_of_parts else "total / STEPS / world",
    }


# How it is written: functions, a class, one module


def whole_text(parts: Parts) -> str:
    holes = holes_of("script", parts.made)
    setup, epoch, evaluation, end = parts.setup, parts.epoch, parts.evaluation, parts.end
    if parts.made["launcher"] == "Trainer":
        names = assigned(setup) | {"rank", "world"}
        setup, epoch, evaluation, end = (
            of_self(lines, names) for lines in (setup, epoch, evaluation, end)
        )
    names = assigned([*holes["JOIN"].split("\n"), *setup])
    holes |= {
        "SETUP": "\n".join(setup),
        "EPOCH": "\n".join(epoch),
        "EVALUATION": "\n".join(evaluation),
        "END": "\n".join(end),
        "TRAINING_NEEDS": ", ".join([*sorted(used(epoch) & names), "epoch"]),
        "EVALUATION_NEEDS": ", ".join(sorted(used(evaluation) & names)),
    }
    if not evaluation:
        holes |= {"EVALUATE_FUNCTION": "", "EVALUATE_CALL": ""}
    return fill(holes["SCRIPT"], holes)


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
    if not lines:
        return []
    tree = AttributesOfSelf(names).visit(ast.parse("\n".join(lines)))
    return ast.unparse(ast.fix_missing_locations(tree)).split("\n")


def imports_of(text: str) -> list[str]:
    lines = []
    for line, pattern in IMPORTS:
        if "NAMES" in line:
            names = [name for name in DATA_NAMES if re.search(rf"\b{name}\b", text)]
            lines += [line.replace("NAMES", ", ".join(names))] if names else []
        elif re.search(pattern, text):
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    script = generate(args.seed, args.reference)
    print(f"# {' '.join(script.command)}\n# {json.dumps(script.pieces)}\n{script.text}", end="")


if __name__ == "__main__":
    main()
