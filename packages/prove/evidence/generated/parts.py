"""Make the parts of a script from the choices of its seed and the cells of pieces/.

Each task ends in a `loss` whose mean over the ranks is the loss of one process that has the samples
of all ranks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import indent

from evidence.generated.cells import fill, holes_of, texts
from evidence.generated.choices import OF_AUTOGRAD, UPDATES, WITH_DDP, Choices, Facts
from evidence.generated.loader import loader

MISTAKE_OF_LOSS = "MISTAKE_OF_LOSS"  # the line in which a mistake may change the loss


@dataclass
class Parts:
    """The lines of a script by part, with the facts that a planted mistake needs."""

    prelude: list[str]
    setup: list[str]  # after rank and world are known; some entries have several lines
    epoch: list[str]  # one epoch of training, which ends with mean_loss
    evaluation: list[str]
    end: list[str]  # lines at the end of an epoch
    made: dict[str, str]
    facts: Facts
    average: list[str]  # the lines of `epoch` that average by hand
    unpack: list[str]  # lines that unpack a batch
    local_count: str  # a number of the local batch: a loss divided by it is a mistake

    @property
    def averaging(self) -> str:
        return self.made["averaging"]

    @property
    def optimizer(self) -> str:
        return self.made["optimizer"]


Change = Callable[[Parts], None]


def parts_of(choices: Choices, is_reference: bool) -> Parts:
    made, facts = choices.made, choices.facts
    made = made | {"window": window(made, facts), "steps": steps(made)}
    task, accumulate = made["task"], int(made["accumulation"])
    holes = dict.fromkeys(("AFTER_STEP", "AFTER_WRAP", "EVALUATE", "GENERATORS"), "")
    holes |= holes_of(task, made) | holes_of("step", made) | holes_of("script", made)
    classes = [fill(text, holes) for text in texts(task, "classes", made)]
    collate = "collate" if any("def collate(" in text for text in classes) else ""
    data = loader(made, facts.tensors, collate, is_reference)
    dataset = re.search(r"class (\w+)\(Dataset\)", "\n".join(classes))
    assert dataset
    holes |= {
        "DATASET": dataset[1],
        "ROWS": str(16 * 4 * accumulate),
        "BATCHES_IN_AN_EPOCH": str(4 * accumulate),
        "BATCHES_IN_A_STEP": str(accumulate),
        "TEST_COLLATE": f", collate_fn={collate}" if collate else "",
        "LOADER_OF_EPOCH": data.epoch,
        "BATCHES": data.batches,
        "INDEX": data.index,
        "LOGGED": facts.logged,
    }
    holes |= holes_of_model(made, facts, holes)
    holes |= holes_of_step(made, facts, holes)

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
    averaging = fill(holes["AVERAGING"], holes)
    classes += [*data.classes, *([averaging] if averaging else [])]
    return Parts(
        prelude=[*lines("CONSTANTS"), "", "", *"\n\n\n".join(classes).split("\n")],
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


def holes_of_model(made: dict[str, str], facts: Facts, holes: dict[str, str]) -> dict[str, str]:
    is_alike = made["weights"] == "alike" or made["averaging"] in WITH_DDP  # DDP broadcasts them
    return {
        "BROADCAST": "" if is_alike else holes["BROADCAST"],
        "BUFFERS": holes["BUFFERS"] if facts.batchnorm else "",
        "OPTIONS_OF_DDP": made.get("DDP", ""),
        "WRAP": holes["WRAP"] or "model = net",
    }


def window(made: dict[str, str], facts: Facts) -> str:
    """Name the kind of step, for the conditions `if window is ...` of pieces/step.py."""
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
    """Name what changes the weights, for the conditions `if steps is ...`."""
    if made["averaging"] == "fused in backward":
        return "in backward"
    if made["optimizer"] == "masters":
        return "of masters"
    if made["optimizer"] in UPDATES:
        return "by hand"
    return "by a scaler" if "scaler" in made["precision"] else "by an optimizer"


def holes_of_step(made: dict[str, str], facts: Facts, holes: dict[str, str]) -> dict[str, str]:
    is_sum = made["averaging"] == "all_reduce, sum"
    is_sum_of_parts = is_sum and made["optimizer"] != "lbfgs"
    loss = "loss" if made["accumulation"] == "1" else "loss / ACCUMULATE"
    backward = f"({loss}).backward()" if "/" in loss else "loss.backward()"
    if "scaler" in made["precision"]:
        backward = f"scaler.scale({loss}).backward()"
    return {
        "FORWARD": forward(made, facts, holes),
        "AVERAGE_CRITIC": holes["AVERAGE"].replace("params", "critic_params"),
        "DIVIDE": "" if is_sum else "grad /= world",
        "MEAN": "total / STEPS" if is_sum_of_parts else "total / STEPS / world",
        "BACKWARD": backward,
        "UNSCALE": holes["UNSCALE"] if made["clipping"] != "none" else "",
    }


def forward(made: dict[str, str], facts: Facts, holes: dict[str, str]) -> str:
    """Write the lines that compute `loss` from an unpacked batch.

    The mean of `loss * WORLD` over the ranks is the loss of one process with the samples of all;
    where the ranks take the sum of their gradients, it is the loss itself.
    """
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
