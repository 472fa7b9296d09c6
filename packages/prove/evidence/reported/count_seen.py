#!/usr/bin/env python3
"""Who sees the mistakes that others reported? Each is here as a script, and once more cured.

    python count_seen.py now [NAME ...]    what prove says of both: results/now.json
    python count_seen.py page              README.md, from results/*.json

Each pair is in one of the first counts, before.json and before_second.json in results, which were
made before prove was changed for any of their pairs and are not made again.
Nor is results/torch_debug.json, which is what TORCH_DISTRIBUTED_DEBUG=DETAIL prints for the pairs
of the first; its program is in commit 6fc7624.

A mistake is seen if prove says WRONG, or gives a warning that the cured script has not. A false
alarm is WRONG for the cured script, which is proven if its row `one rank` is right.
Two scripts run at a time, each in a copy of its folder.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE / "README.md"
FIRST_COUNTS = ("before", "before_second")  # of prove; each pair is in one of them
SECONDS, JOBS = 180, 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

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

`python packages/prove/evidence/reported/count_seen.py now` counts again, and `page` writes this \
page.
"""
DEBUGGED = """\
`TORCH_DISTRIBUTED_DEBUG=DETAIL` (torch {torch}), which checks that collectives match, says \
something of {helped} of the {pairs} mistakes of the first set: an error, a hang, or a line that \
sounds like a warning and that the cured script does not print. On CPUs it needed a hook, without \
which DDP's constructor crashes. This was counted once; the program and its hook are in the \
history: `git show 6fc7624:packages/prove/faults/run_faults.py`.

TrainCheck 0.2.0 is not in the table. It installs beside torch 2.14, but here, without a GPU, \
none of the scripts that we tried came through its instrumentation: it asks for the driver, and \
without that line one script ended in a KeyError and another in a segmentation fault.
"""


@dataclass(frozen=True)
class Pair:
    name: str
    kind: str
    report: str
    fault: str

    def source(self, file: str) -> str:
        """Of train.py, which has the mistake, or of right.py, which cure.diff makes of it."""
        folder = HERE / "pairs" / self.name
        source = (folder / "train.py").read_text()
        return (
            apply_diff(source, (folder / "cure.diff").read_text()) if file == "right.py" else source
        )

    def write_to(self, file: str, folder: Path) -> Path:
        script = folder / file
        script.write_text(self.source(file))
        return script


def apply_diff(source: str, diff: str) -> str:
    """What `patch` would make of it. Raises ValueError: a part is not, once, in the source."""
    parts = re.split(r"^@@ .* @@.*\n", diff, flags=re.M)[1:]
    for part in parts:
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in (" -", " +"))
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in the script, expected once: {old}")
        source = source.replace(old, new)
    return source


def pairs(names: list[str] | None = None) -> list[Pair]:
    known = [Pair(**entry) for entry in json.loads((HERE / "reported.json").read_text())]
    unknown = set(names or []) - {pair.name for pair in known}
    if unknown:
        raise SystemExit(f"count_seen.py: no such pair: {', '.join(sorted(unknown))}")
    return [pair for pair in known if not names or pair.name in names]


def command_of(script: Path) -> list[str]:
    """As a user types it; a script that spawns its ranks is told how many."""
    if "mp.spawn(" in script.read_text():
        return [sys.executable, script.name, "--world-size", "2"]
    return [sys.executable, *TORCHRUN, script.name]


def run(command: list[str], folder: Path) -> tuple[int | None, str]:
    """Its status, None if it had to be ended, and all that it printed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # prove and torchrun end their ranks
            try:
                output, _ = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            return None, output


def judge(pair: Pair, file: str) -> dict:
    """The rows of prove's table by verdict, with what it says of the WRONG ones."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as of_table:
        script, table = pair.write_to(file, Path(folder)), Path(of_table, "table.json")
        prove = [sys.executable, "-m", "prove", "--json", str(table)]
        status, output = run([*prove, *command_of(script)], script.parent)
        written = json.loads(table.read_text()) if table.exists() else {"rows": [], "error": None}
    by_verdict: dict[str, list[str]] = {}
    for row in written["rows"]:
        by_verdict.setdefault(row["verdict"], []).append(row["check"])
    evidence = {
        row["check"]: row["evidence"] for row in written["rows"] if row["verdict"] != "right"
    }
    answer: dict = {"status": status, "rows": by_verdict, "evidence": evidence}
    if not by_verdict:
        last = (output.strip().splitlines() or [""])[-1]
        answer["said"] = (written["error"] or last)[-200:]
    return answer


def judge_pair(pair: Pair) -> dict:
    answers = {"fault": judge(pair, "train.py"), "cure": judge(pair, "right.py")}
    print(f"{pair.name}: {cell_of_fault(answers)}; {cell_of_cure(answers)}", flush=True)
    return answers


def count(names: list[str]) -> None:
    """Those that are not named keep what was counted last."""
    chosen = pairs(names)
    with ThreadPoolExecutor(JOBS) as pool:
        answers = list(pool.map(judge_pair, chosen))
    kept = load("now")["pairs"] if names else {}
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True
    ).strip()
    counted = kept | {pair.name: answer for pair, answer in zip(chosen, answers, strict=True)}
    result = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "commit": commit,
        "pairs": counted,
    }
    (RESULTS / "now.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def new_warnings(answers: dict) -> list[str]:
    """Warnings that the cured script has not."""
    known = answers["cure"]["rows"].get("warning", [])
    return [check for check in answers["fault"]["rows"].get("warning", []) if check not in known]


def is_seen(answers: dict) -> bool:
    return bool(answers["fault"]["rows"].get("WRONG") or new_warnings(answers))


def is_false_alarm(answers: dict) -> bool:
    return bool(answers["cure"]["rows"].get("WRONG"))


def is_proven(answers: dict) -> bool:
    return not is_false_alarm(answers) and "one rank" in answers["cure"]["rows"].get("right", [])


def without_table(answers: dict) -> int:
    return sum(not answer["rows"] for answer in answers.values())


def debug_alarm(answers: dict) -> str:
    """What DETAIL says of the mistake and not of the cure."""
    fault, cure = answers["fault"], answers["cure"]
    if cure is None:
        return ""
    if fault["status"] is None and cure["status"] is not None:
        return "hangs"
    if fault["status"] and not cure["status"]:
        return "ends with an error"
    news = [line for line in fault["alarms"] if line not in cure["alarms"]]
    return f"prints “{news[0].partition('Warning: ')[2][:80] or news[0][:80]}”" if news else ""


def cell_of_fault(answers: dict) -> str:
    if not answers["fault"]["rows"]:
        return "no table"
    wrong = answers["fault"]["rows"].get("WRONG", [])
    return (
        f"**WRONG** {', '.join(wrong)}"
        if wrong
        else ", ".join(f"warning {w}" for w in new_warnings(answers)) or "missed"
    )


def cell_of_cure(answers: dict) -> str:
    if not answers["cure"]["rows"]:
        return "no table"
    wrong = answers["cure"]["rows"].get("WRONG", [])
    return (
        f"**false** {', '.join(wrong)}"
        if wrong
        else "proven"
        if is_proven(answers)
        else "not proven"
    )


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def counts_table(first: dict, now: dict) -> list[str]:
    """Of the pairs that are in this first count."""
    counts = {f"before: {len(first['pairs'])} pairs": first, "now": now}
    titles = [f"{name} ({of['date']}, `{of['commit']}`)" for name, of in counts.items()]
    lines = [f"| prove | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for label, count_of, runs in (
        ("mistakes seen", is_seen, 1),
        ("cured scripts called WRONG", is_false_alarm, 1),
        ("cured scripts proven on one rank", is_proven, 1),
        ("runs that ended without a table", without_table, 2),
    ):
        numbers = [
            sum(count_of(of["pairs"][name]) for name in first["pairs"]) for of in (first, now)
        ]
        cells = [f"{number} of {runs * len(first['pairs'])}" for number in numbers]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def report_link(pair: Pair) -> str:
    owner, repository, _, number = pair.report.removeprefix("https://github.com/").split("/")
    return f"[{owner}/{repository}#{number}]({pair.report})"


def page() -> str:
    firsts, now, debugged = [load(name) for name in FIRST_COUNTS], load("now"), load("torch_debug")
    before = {name: answers for first in firsts for name, answers in first["pairs"].items()}
    rows = []
    for pair in sorted(pairs(), key=lambda pair: pair.kind):
        counted = before[pair.name], now["pairs"][pair.name]
        cells = [f"{cell_of_fault(answers)}; {cell_of_cure(answers)}" for answers in counted]
        detail = "not counted"
        if pair.name in debugged["pairs"]:
            detail = debug_alarm(debugged["pairs"][pair.name]) or "nothing"
        folder = f"pairs/{pair.name}"
        scripts = f"[{pair.name}]({folder}/train.py), [cure]({folder}/cure.diff)"
        said = f"{pair.fault} {report_link(pair)}"
        rows.append(f"| {pair.kind} | {said} | {scripts} | {' | '.join(cells)} | {detail} |")
    helped = sum(bool(debug_alarm(answers)) for answers in debugged["pairs"].values())
    sizes = " and ".join(f"{len(first['pairs'])} pairs" for first in firsts)
    tables = [line for first in firsts for line in (*counts_table(first, now), "")]
    columns = "prove before: mistake; cure | prove now: mistake; cure"
    return "\n".join(
        [
            "# Mistakes that others reported",
            "",
            INTRODUCTION.format(pairs=len(pairs()), sizes=sizes),
            *tables,
            DEBUGGED.format(helped=helped, pairs=len(debugged["pairs"]), torch=debugged["torch"]),
            f"| kind | what was reported | script | {columns} | DETAIL |",
            "|---" * 6 + "|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("now", "page"))
    parser.add_argument("names", nargs="*", help="of pairs; default: all")
    args = parser.parse_args()
    if args.what == "page":
        PAGE.write_text(page())
    else:
        count(args.names)


if __name__ == "__main__":
    main()
