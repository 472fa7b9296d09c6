"""Write reported.md, the page about mistakes that others reported and prove judged.

Each case is in one of the first counts, such as reported_before.json in results, which were made
before prove was changed for any of their cases and are not made again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from evidence import resumed
from evidence.case import said_of_cure, said_of_mistake
from evidence.reported import Story, stories
from evidence.run_prove import PROOF, Answer

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "reported.md"
FIRST_COUNTS = ("reported_before", "reported_before_second")  # each case is in one of these files
INTRODUCTION = """\
prove finds every mistake that we planted, but we knew them when we wrote it. So here are {pairs} \
mistakes that others reported. We read each report and wrote a small script that makes the same \
mistake, and once more cured: the two differ by a few lines. That each cure is right was shown \
without prove, in float64 against one process that gets the samples of both ranks, or by counting \
where it is about data.

The first count was made before prove was changed for any of them. There are two sets, each with \
a first count of its own: {sizes}. The second has kinds that the first lacks, such as optimizers \
that communicate in `step()`, complex and sparse gradients, and rollouts instead of a loader. A \
mistake is *seen* if prove says WRONG or gives a warning that the cured script has not. WRONG for \
the cured script is a false alarm, and the script is *proven* if its row `one rank` is right.

`cd packages/prove && python -m evidence reported` counts again, and writes this page.
"""
RESUMED = """\
## When a run is resumed

The next mistakes begin when a run is stopped and goes on, so prove sees none of them unless it \
is asked with [`--resume`](../README.md#does-it-resume). Each script was run twice without prove: \
once without a stop, and once stopped and resumed. The two end differently, and those of its cure \
are equal to the bit. A cure is *proven* if nothing is WRONG and its row `resume: weights` is right.

`python -m evidence resume_reported` counts again.
"""
OTHER_TOOLS = """\
PyTorch's own `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which checks that collectives match, said \
something of 5 of the 50 mistakes of the first set: an error, a hang, or a warning that the cured \
script does not print. It was counted once with torch 2.14.1; the program is in the history: \
`git show 6fc7624:packages/prove/faults/run_faults.py`.

TrainCheck 0.2.0 is not compared. It installs beside torch 2.14, but here, without a GPU, none of \
the scripts that we tried came through its instrumentation: it asks for the driver, and without \
that line one script ended in a KeyError and another in a segmentation fault.
"""


class Pair(NamedTuple):
    """The answers of prove for a script and for its cure."""

    script: Answer
    cure: Answer
    proof: str = PROOF  # the row that must be right in the cured script

    @property
    def is_seen(self) -> bool:
        return self.script.is_wrong or bool(self.script.new_warnings(self.cure))

    @property
    def is_false_alarm(self) -> bool:
        return self.cure.is_wrong

    @property
    def is_proven(self) -> bool:
        return said_of_cure(self.cure, self.proof) == "proven"

    @property
    def without_table(self) -> int:
        return sum(not answer.rows for answer in (self.script, self.cure))

    @property
    def cell(self) -> str:
        mistake = said_of_mistake(self.script, self.cure)
        return f"{mistake}; {said_of_cure(self.cure, self.proof)}"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def pairs(counted: dict, proof: str = PROOF) -> dict[str, Pair]:
    return {
        name: Pair(Answer(**answers["script"]), Answer(**answers["cure"]), proof)
        for name, answers in counted["cases"].items()
    }


ROWS: dict[str, tuple[Callable[[Pair], int], int]] = {  # a count, and the number of runs per case
    "mistakes seen": (lambda pair: pair.is_seen, 1),
    "cured scripts called WRONG": (lambda pair: pair.is_false_alarm, 1),
    "cured scripts proven": (lambda pair: pair.is_proven, 1),
    "runs that ended without a table": (lambda pair: pair.without_table, 2),
}


def counts_table(first: dict, now: dict, proof: str = PROOF) -> list[str]:
    """Compare the first count with the present one, over the cases of the first."""
    counts = {f"before: {len(first['cases'])} pairs": first, "now": now}
    titles = [f"{name} ({of['date']}, `{of['commit']}`)" for name, of in counts.items()]
    lines = [f"| prove | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for label, (count_of, runs) in ROWS.items():
        numbers = [
            sum(count_of(pairs(of, proof)[name]) for name in first["cases"])
            for of in counts.values()
        ]
        cells = [f"{number} of {runs * len(first['cases'])}" for number in numbers]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def report_link(story: Story) -> str:
    owner, repository, _, number = story.report.removeprefix("https://github.com/").split("/")
    return f"[{owner}/{repository}#{number}]({story.report})"


def stories_table(known: list[Story], before: dict[str, Pair], now: dict[str, Pair]) -> list[str]:
    """Tell what was reported, and what prove said and says of it."""
    columns = "prove before: mistake; cure | prove now: mistake; cure"
    lines = [f"| kind | what was reported | script | {columns} |", "|---" * 5 + "|"]
    for story in sorted(known, key=lambda story: story.kind):
        folder = f"mistakes/{story.name}"
        scripts = f"[{story.name}]({folder}/train.py), [cure]({folder}/cure.diff)"
        said = f"{story.mistake} {report_link(story)}"
        cells = f"{before[story.name].cell} | {now[story.name].cell}"
        lines.append(f"| {story.kind} | {said} | {scripts} | {cells} |")
    return lines


def page() -> str:
    firsts = [load(name) for name in FIRST_COUNTS]
    counted = load("reported")
    before = pairs(firsts[0]) | pairs(firsts[1])
    known = stories("reported-50", "reported-20")
    sizes = " and ".join(f"{len(first['cases'])} pairs" for first in firsts)
    first_resumed, now_resumed = load("resume_reported_before"), load("resume_reported")
    both = [pairs(each, resumed.PROOF) for each in (first_resumed, now_resumed)]
    return "\n".join(
        [
            "# Mistakes that others reported",
            "",
            INTRODUCTION.format(pairs=len(known), sizes=sizes),
            *(line for first in firsts for line in counts_table(first, counted)),
            OTHER_TOOLS,
            *stories_table(known, before, pairs(counted)),
            "",
            RESUMED,
            *counts_table(first_resumed, now_resumed, resumed.PROOF),
            *stories_table(stories("resume"), *both),
            "",
        ]
    )


def write_page() -> None:
    PAGE.write_text(page())
