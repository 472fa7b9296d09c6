"""Let generated scripts stop and go on: a few lines save and load all that has a state.

The oracle decides what is right. Where a stop changes nothing, prove must say nothing against the
script. Then one part is not loaded, and if a stop changes the weights now, prove must not call the
script right.
"""

import re
from random import Random

from evidence.case import Counted, run_case
from evidence.generated.script import generate
from evidence.resume_oracle import what_changes
from evidence.resumed import PROOF, Resumed
from evidence.run_prove import RIGHT, WARNING, Answer
from evidence.traces import FailedError

LOOP = "for epoch in range(EPOCHS):"
LOAD = """\
import os as files
holders = {**globals(), **locals(), **(vars(self) if "self" in locals() else {})}
parts = {name: part for name, part in holders.items() if hasattr(part, "load_state_dict")}
parts = {name: part for name, part in parts.items() if not isinstance(part, type)}
generators = {name: g for name, g in holders.items() if isinstance(g, torch.Generator)}
path, first_epoch = f"resume{dist.get_rank()}.pt", 0
if files.path.exists(path):
    saved = torch.load(path, weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    for name, generator in generators.items():
        generator.set_state(saved[name])
    torch.set_rng_state(saved["random"])
    first_epoch = saved["epoch"]
for epoch in range(first_epoch, EPOCHS):
"""
SAVE = """\
saved = {name: part.state_dict() for name, part in parts.items()}
saved.update((name, generator.get_state()) for name, generator in generators.items())
torch.save({**saved, "random": torch.get_rng_state(), "epoch": epoch + 1}, path)
"""
LEFT_OUT = {  # what a fault leaves out
    "optimizer": (
        "        part.load_state_dict(saved[name])\n",
        "        if not isinstance(part, torch.optim.Optimizer):\n"
        "            part.load_state_dict(saved[name])\n",
    ),
    "schedule": (
        "        part.load_state_dict(saved[name])\n",
        '        if "scheduler" not in name:\n            part.load_state_dict(saved[name])\n',
    ),
    "weights": (
        "        part.load_state_dict(saved[name])\n",
        "        if not isinstance(part, torch.nn.Module):\n"
        "            part.load_state_dict(saved[name])\n",
    ),
    "random state": ('    torch.set_rng_state(saved["random"])\n', ""),
    "epoch": ('    first_epoch = saved["epoch"]\n', ""),
    "one of two epochs": ('saved["epoch"]', 'saved["epoch"] + 1'),
}


def indented(text: str, indent: str) -> str:
    return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))


def resumed_script(seed: int, left_out: str = "") -> Resumed:
    """Write the script of this seed, which goes on by itself, perhaps without one part."""
    script, load = generate(seed), LOAD
    if left_out:
        load = load.replace(*LEFT_OUT[left_out])
    lines = script.text.splitlines(keepends=True)
    [begin] = [number for number, line in enumerate(lines) if line.strip() == LOOP]
    indent = lines[begin].partition("for")[0]
    ends = (
        number
        for number, line in enumerate(lines)
        if number > begin and line.strip() and not re.match(rf"{indent}\s", line)
    )
    end = next(ends, len(lines))
    changed = [*lines[:begin], indented(load, indent), *lines[begin + 1 : end]]
    changed += [indented(SAVE, indent + "    "), *lines[end:]]
    launcher = " ".join(script.command)
    text = "".join(changed)
    return Resumed(f"{seed}", text, "", launcher=launcher, resumed_by=launcher)


def said(answer: Answer, known: Answer | None = None) -> str:
    """Tell in a word what prove made of a script."""
    if answer.is_wrong:
        return "WRONG"
    if known and answer.new_warnings(known):
        return f"{WARNING} {', '.join(answer.new_warnings(known))}"
    if answer.status != 0:
        return "not proven"
    return "proven" if PROOF in answer.checks(RIGHT) else "not proven"


def judge_generated(seed: int) -> Counted:
    script, left_out = resumed_script(seed), Random(seed).choice([*LEFT_OUT])
    without = resumed_script(seed, left_out)
    try:
        # The oracle cannot read shards without a process group.
        if "fully_shard" in script.script or what_changes(script) != "nothing":
            return Counted("these lines do not resume it", True)
        changes = what_changes(without)
    except FailedError as error:
        return Counted("not run", True, facts={"error": str(error)[-300:]})
    right = run_case(script.case, script.script)
    answers = {"script": right}
    outcome, is_as_expected = f"right: {said(right)}", not right.is_wrong
    if changes == "nothing":
        return Counted(f"{outcome}; without {left_out} the same", is_as_expected, answers)
    answers["fault"] = run_case(without.case, without.script)
    of_fault = said(answers["fault"], right)
    outcome += f"; without {left_out}, which changes {changes}: {of_fault}"
    is_false_right = changes == "weights" and of_fault == "proven"
    return Counted(outcome, is_as_expected and not is_false_right, answers)
