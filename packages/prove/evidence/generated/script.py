"""Generate a whole script from a seed, as functions, a class or one module.

python -m evidence.generated.script 7                # the script
python -m evidence.generated.script 7 --reference    # one process, with the samples of two ranks
"""

import argparse
import ast
import json
import re
from dataclasses import dataclass

from evidence.generated.cells import fill, holes_of
from evidence.generated.choices import Choices
from evidence.generated.parts import MISTAKE_OF_LOSS, Change, Parts, parts_of

IMPORTS = (  # an import is written if the script uses one of its names
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
    *("DataLoader", "Dataset", "DistributedSampler", "IterableDataset", "Sampler"),
    *("Subset", "default_collate", "get_worker_info"),
)


@dataclass
class Script:
    seed: int
    text: str
    command: list[str]  # starts two ranks; the script is called train.py
    alone: str  # starts one rank, if the command has no number of ranks
    pieces: dict[str, str]


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
    """Return the names that these statements assign, without loop variables."""
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
