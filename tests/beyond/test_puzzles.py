"""Find the mistake, fill the gap: each answer is called right, others are refused, and why."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import mean, stdev

import pytest

import grade_class
import judge_answer
from local_ranks.chapters import ROOT
from local_ranks.machine import (
    SECONDS,
    scratch_folder,
    timeout_under_load,
    use_default_start_method,
)
from local_ranks.ranks import PROCESS_DEFAULTS
from local_ranks.scripts import run_script
from local_ranks.stage_files import replace_once

PUZZLES = {puzzle.number: puzzle for puzzle in judge_answer.MISTAKES}
GAPS = {name: puzzle for name, puzzle in judge_answer.PUZZLES.items() if puzzle.is_gap}
each_puzzle = pytest.mark.parametrize("number", PUZZLES)

STEP = re.compile(r"^( +)[\w.]*(?:step|scaler\.update)\(.*\)$", re.M)
MOVED = {  # what makes another mistake of the answer, which one rank alone does not have
    1: ("        dist.all_reduce(right)\n", ""),
    2: (
        "dist.all_reduce(flat)\n        flat /= dist.get_world_size()",
        "dist.broadcast(flat, src=0)",
    ),
    3: ("dist.get_rank(), None, dist", "0, None, dist"),
    4: ("(model(patches), next_bytes)", "(model(patches), next_bytes) / dist.get_world_size()"),
    5: ("= (number + 1) % accumulate == 0", "= False"),
    6: ("(world_size * token", "(token"),
    7: ("dist.all_reduce(totals)", "dist.all_reduce(totals[:1])"),
    8: (
        "            self.net[0].requires_grad_(True)\n            self.model = DDP(self.net)\n",
        "            self.model = DDP(self.net)\n            self.net[0].requires_grad_(True)\n",
    ),
    9: ("if self.steps %", "if dist.get_rank() == 0 and self.steps %"),
    10: ("both = critic(", "both = critic.module("),
    11: (" + dist.get_rank() * len(first)", ""),
    12: ("torch.manual_seed(dist.get_rank())", "torch.manual_seed(0)"),
}
ISLICE = ("\n\nimport torch\n", "\n\nfrom itertools import islice\n\nimport torch\n")
SHARE = "islice(lines(192, seed=1), dist.get_rank(), None, dist.get_world_size()"
OTHER_ANSWERS = {  # what each changes in the script; all are as right as ours
    # The source is dealt out before it is shuffled, so the order is another one.
    3: [ISLICE, ("lines(192, seed=1)", f"{SHARE})")],
    5: [("= number % accumulate == 0", "= number % accumulate == accumulate - 1")],
    12: [
        (
            "        if dist.get_rank() == 0:\n            state",
            '        torch.save(torch.get_rng_state(), f"random_{dist.get_rank()}.pt")\n'
            "        if dist.get_rank() == 0:\n            state",
        ),
        ("rng_state(random_state)", 'rng_state(torch.load(f"random_{dist.get_rank()}.pt"))'),
    ],
}

HALF_ANSWERS = {  # they look like answers
    3: [  # half of the lines, each once, in as many steps
        ISLICE,
        ("lines(192, seed=1)", f"{SHARE} ** 2)"),
        ("batch_size=16 // world_size", "batch_size=16 // world_size**2"),
    ],
    7: [
        ("torch.tensor(loss / words).exp()", "torch.tensor(loss / words)"),
        ("result.item() / dist.get_world_size()", "(result / dist.get_world_size()).exp().item()"),
    ],
    12: [("    torch.set_rng", "    if dist.get_rank() == 0:\n        torch.set_rng")],
}


def wrong_answers(puzzle) -> dict[str, str]:
    source = puzzle.story.script
    moved = replace_once(puzzle.story.cure, MOVED[puzzle.number])
    wrong = {"nothing": f"{source}\n# looks right to me\n", "moved": moved}
    if puzzle.number == 1:  # one rank no longer trains, which is found in the same way in all
        wrong["emptied"] = STEP.sub(r"\1pass", source)
    if puzzle.number in HALF_ANSWERS:
        wrong["half"] = replace_once(source, *HALF_ANSWERS[puzzle.number])
    return wrong


def _judge(puzzle: judge_answer.Puzzle, sources: dict[str, str], file: Path) -> None:
    """Judge answers to a puzzle in a fork that has imported torch; its ranks are forks of it."""
    use_default_start_method()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(file.parent)
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    verdicts = {}
    for name, source in sources.items():
        judge_answer.Story.diff = None  # a class may get the puzzles without the answers
        verdicts[name] = judge_answer.judge(puzzle, source)
    file.write_text(json.dumps(verdicts))


def verdicts(puzzle: judge_answer.Puzzle, sources: dict[str, str]) -> dict[str, tuple[bool, str]]:
    file = scratch_folder() / "verdicts.json"
    process = PROCESS_DEFAULTS.context().Process(target=_judge, args=(puzzle, sources, file))
    process.start()
    process.join(timeout_under_load(5 * SECONDS))
    if process.is_alive():
        process.terminate()
        raise TimeoutError(puzzle.name)
    return json.loads(file.read_text())


@each_puzzle
def test_the_answer_is_right_and_others_are_refused(number):
    puzzle = PUZZLES[number]
    sources = {"ours": puzzle.story.cure, **wrong_answers(puzzle)}
    if number in OTHER_ANSWERS:
        sources["other"] = replace_once(puzzle.story.script, *OTHER_ANSWERS[number])
    said = verdicts(puzzle, sources)
    right = {name for name, (is_right, _) in said.items() if is_right}
    assert right == {"ours", "other"} & {*sources}, said
    if "emptied" in said:
        assert "one rank alone no longer computes" in said["emptied"][1]
    # These are seen by the check of its own, before prove is asked.
    seen = "two ranks do not compute|the two ranks|in .+ has been drawn before"
    for name in {"nothing", "moved", "half"} & {*said}:
        assert re.match(seen, said[name][1]), said


@each_puzzle
def test_a_script_is_short_and_its_report_public(number):
    puzzle = PUZZLES[number]
    assert 40 <= len(puzzle.story.script.splitlines()) <= 60
    changed = judge_answer.changed_lines(puzzle.story.script, puzzle.story.cure)
    assert changed <= judge_answer.MOST_LINES // 2
    reported = judge_answer.stories("reported-50", "reported-20")
    assert puzzle.story.report in {story.report for story in reported}


TAUGHT = {  # what a reader cannot guess, and where the list of the puzzles sends to learn it
    3: "IterableDataset",
    5: "no_sync",
    8: "Freezing, unfreezing",
    9: "EMA",
    10: "A gradient penalty",
    11: "gather",
}


@pytest.mark.parametrize("number", TAUGHT)
def test_the_section_that_a_puzzle_names_teaches_what_it_needs(number):
    page, _, anchor = PUZZLES[number].belongs_to.partition("#")
    _, *parts = re.split(r"^#+ (.+)\n", (ROOT / page).read_text(), flags=re.M)
    sections = {
        title.lower().replace(" ", "-"): text
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert TAUGHT[number] in sections[anchor]


# What may stand in a gap, and what is said of it.

BY_PARAMETER = """\
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""
FLAT = """\
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
"""
BUCKETED = """\
    bucket, numbers = [], 0
    for parameter in reversed(list(model.parameters())):
        bucket.append(parameter.grad)
        numbers += parameter.grad.numel()
        if numbers >= 49 or parameter is next(model.parameters()):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket])):
                gradient.copy_(part.view_as(gradient))
            bucket, numbers = [], 0
"""
OF_A_COPY = """\
    for parameter in model.parameters():
        mean = parameter.grad / dist.get_world_size()
        dist.all_reduce(mean)
"""
CLIP = "    nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)\n"
UNSCALE = "    scaler.unscale_(optimizer)\n"
BROADCAST = """\
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
"""
BY_HAND = textwrap.indent(BY_PARAMETER, " " * 8)
ON_ONE_RANK = f"    if dist.get_rank() == 0:\n{BY_PARAMETER.replace('    ', '        ')}"

RIGHT = {  # changes of our answer that leave it right, and words of the verdict
    ("gap1", "by parameter"): ([], "sends 4 messages"),
    ("gap1", "flat"): ([(BY_PARAMETER, FLAT)], "sends 1 message, as few as can be"),
    ("gap1", "bucketed"): ([(BY_PARAMETER, BUCKETED)], "sends 2 messages"),
    ("gap2", "in turn"): ([], "each sample once"),
    ("gap2", "in blocks"): (
        [("[rank::world_size]", "[rank * 320 // world_size : (rank + 1) * 320 // world_size]")],
        "each sample once",
    ),
    ("gap3", "ours"): ([], "one model"),
    ("gap4", "ours"): ([], "scaled back"),
}
WRONG = {  # changes that make it wrong, and the first thing that differs
    ("gap1", "sum"): (
        [("        parameter.grad /= dist.get_world_size()\n", "")],
        "two ranks do not compute .+2 times as long: a sum in place of the mean",
    ),
    ("gap1", "mean of a copy"): (
        [(BY_PARAMETER, OF_A_COPY)],
        "do not train one model: after step 1.+sent 4 messages. Is p.grad itself",
    ),
    ("gap1", "one rank"): ([(BY_PARAMETER, ON_ONE_RANK)], "a rank is left alone"),
    ("gap1", "what all_reduce returns"): (
        [
            (
                BY_PARAMETER.split("\n", 1)[1],
                "        parameter.grad = dist.all_reduce(parameter.grad)\n",
            )
        ],
        "No weight moves: is p.grad None",
    ),
    ("gap1", "two in place of the world size"): (
        [("/= dist.get_world_size()", "/= 2")],
        "one rank alone no longer .+Is there a 2 where the number",
    ),
    ("gap2", "seed of the rank"): ([("seed(epoch)", "seed(rank)")], "in epoch 0, .+ come again"),
    ("gap2", "one order"): ([("seed(epoch)", "seed(0)")], "epochs 0 and 1 have the same order"),
    ("gap2", "overlap"): ([("seed(epoch)", "seed(epoch + rank)")], "in epoch 0, .+ come again"),
    ("gap2", "whatever has drawn"): (
        [(", generator=torch.Generator().manual_seed(epoch)", "")],
        "in epoch 0, .+ come again",
    ),
    ("gap2", "all of it"): ([("order[rank::world_size]", "order")], "160 steps, where one .+ 80"),
    ("gap3", "model called"): ([("ddp(points)", "model(points)")], "one model.+ Is it the wrapper"),
    ("gap3", "averaged by hand"): (
        [
            ("    ddp = DDP(model)\n", BROADCAST),
            ("ddp(points)", "model(points)"),
            ("            optimizer.step()\n", f"{BY_HAND}            optimizer.step()\n"),
        ],
        "right, but Sequential is called, and this one is about DistributedDataParallel",
    ),
    ("gap3", "epoch not heard"): (
        [("        sampler.set_epoch(epoch)\n", "")],
        "epochs 0 and 1 have the same order",
    ),
    ("gap3", "no sampler"): ([("sampler=sampler", "shuffle=True")], "160 steps, where one .+ 80"),
    ("gap4", "clipped first"): (
        [(f"{UNSCALE}{CLIP}", f"{CLIP}{UNSCALE}")],
        "one rank alone no longer computes .+ Does clipping get the gradient unscaled",
    ),
    ("gap4", "no update"): (
        [("    scaler.update()\n", "")],
        r"the script fails: line \d+: RuntimeError.+ the scale updated",
    ),
    ("gap4", "overflow not skipped"): (
        [("scaler.step(optimizer)", "optimizer.step()")],
        "fp16 to nan: does the step happen even if",
    ),
    ("gap4", "bf16"): ([("torch.float16", "torch.bfloat16")], "forward computes in torch.bfloat16"),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_filled_in_several_ways_and_the_first_difference_is_said(name):
    puzzle = GAPS[name]
    changed = {case: changes for case, (changes, _) in (RIGHT | WRONG).items() if case[0] == name}
    sources = {case: replace_once(puzzle.story.cure, *changed[case]) for case in changed}
    said = verdicts(
        puzzle, {"gap": puzzle.story.script, **{case[1]: sources[case] for case in sources}}
    )
    assert not said["gap"][0], "as it is handed out"
    assert name != "gap1" or said["gap"][1].endswith("a rank sent no messages")
    for cases, is_right in ((RIGHT, True), (WRONG, False)):
        for case in cases.keys() & changed.keys():
            assert said[case[1]][0] == is_right, (case, said)
            assert re.search(cases[case][1], said[case[1]][1]), (case, said)


def test_a_class_is_judged_and_nothing_runs_on(tmp_path):
    anna, bob = tmp_path / "anna", tmp_path / "bob"
    for student in (anna, bob):
        [(status, _)] = run_script("beyond/puzzles/check_answer.py", "gap1", f"--folder={student}")
        assert status == 0
    (anna / "gap1" / "train.py").write_text(GAPS["gap1"].story.cure)
    [(status, _)] = run_script("beyond/puzzles/check_answer.py", "gap1", f"--folder={anna}")
    assert status == 0
    endless = ["import subprocess", "def main():", "    open('started', 'w')"]
    endless += ["    left = subprocess.Popen(['sleep', '987'], start_new_session=True)"]
    endless += [
        f"    print(left.pid, file=open({str(tmp_path / 'pids')!r}, 'a'))",
        "    return 1.0",
    ]
    (bob / "gap1" / "train.py").write_text("\n".join(endless))
    (bob / "02").mkdir()
    (tmp_path / "note.txt").write_text("not a student")
    anna.rename(tmp_path / "runs")  # a whole folder of runs
    anna.mkdir()
    (tmp_path / "runs").rename(anna / "puzzles")
    folders = ["--folder", str(anna), str(bob), str(tmp_path / "note.txt")]
    folders += ["--csv", str(tmp_path / "class.csv")]
    folders = ["gap1", "2", *folders]
    [(status, output)] = run_script("beyond/puzzles/check_answer.py", *folders)
    assert status == 0
    assert re.search(r"^anna +gap1 +right +\d+ +Two ranks train .+ 4 messages", output, re.M), (
        output
    )
    assert re.search(r"^anna +2 +missing +not handed in$", output, re.M), output
    assert re.search(r"^bob +2 +not yet +\S*02/train.py is gone", output, re.M), output
    assert re.search(
        r"^bob +gap1 +not yet +one rank alone no longer .+ 0 optimizer steps, expected 80",
        output,
        re.M,
    ), output
    assert re.findall(r"^(\w+) +(\d of \d) right$", output, re.M) == [
        ("anna", "1 of 2"),
        ("bob", "0 of 2"),
    ]
    assert "note.txt is no folder, so it is left out" in output
    rows = [line.split(",")[:3] for line in (tmp_path / "class.csv").read_text().splitlines()]
    assert rows[1:] == [
        ["anna", "gap1", "right"],
        ["anna", "2", "missing"],
        ["bob", "gap1", "not yet"],
        ["bob", "2", "not yet"],
    ]
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert started, "the control: the answer has started something"
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git archive copies a clone")
def test_the_copy_for_a_class_has_no_answer_and_can_be_judged(tmp_path):
    copy = tmp_path / "copy"
    done = subprocess.run(
        ["make", "class-copy", f"TO={copy}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    texts = [path for path in copy.rglob("*") if path.is_file() and path.suffix != ".svg"]
    everything = "\n".join(path.read_text(errors="replace") for path in texts)
    for puzzle in PUZZLES.values():
        for text in (puzzle.story.mistake, puzzle.story.report, puzzle.why_unseen):
            assert not text or text not in everything, (puzzle.name, text)
        changed = [line for line in puzzle.story.diff.splitlines()[2:] if line[0] in "+-"]
        assert not all(line in everything for line in changed), puzzle.name
        assert puzzle.purpose in everything, "the control: what is there is found"
    (tmp_path / "01").mkdir()
    (tmp_path / "01" / "train.py").write_text(PUZZLES[1].story.cure)
    script = copy / "beyond" / "puzzles" / "check_answer.py"
    ours = [str(copy), str(copy / "packages" / "prove" / "src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(ours), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, "1", f"--folder={tmp_path}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Right: two ranks compute what one rank computes."), done


def _judge_apart(copy: Path, file: Path) -> None:
    """In a fork of its own, because whatever this process has started is ended."""
    grade_class.adopt_orphans()
    verdict = grade_class.judge_apart(GAPS["gap1"], copy, seconds=8)
    file.write_text(json.dumps([verdict, list(grade_class.children())]))


def test_an_answer_that_does_not_end_is_ended(tmp_path):
    copy = tmp_path / "train.py"
    copy.write_text("import time\ndef main():\n    time.sleep(1000)\n")
    file = tmp_path / "verdict.json"
    process = PROCESS_DEFAULTS.context().Process(target=_judge_apart, args=(copy, file))
    process.start()
    process.join(timeout_under_load(SECONDS))
    verdict, left = json.loads(file.read_text())
    assert verdict == [False, "it has not ended within 8 s"]
    assert left == []


def test_the_notebook_has_four_of_the_scripts_as_they_are():
    path = ROOT / "notebooks" / "05_find_the_mistake.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    cells = [source.split("\n", 1) for source in sources if source.startswith("%%puzzle")]
    assert len(cells) == 4
    for first, script in cells:
        assert f"{script}\n" == PUZZLES[int(first.split()[1])].story.script, first


def test_prove_finds_eight_of_twelve_and_two_need_thought_beyond_it():
    counted = json.loads(judge_answer.COST.read_text())["puzzles"]
    styles = {puzzle.style for puzzle in judge_answer.MISTAKES}
    assert len(PUZZLES) == len(counted) == len(styles) == 12
    wrong = {int(number) for number, runs in counted.items() if runs["WRONG"]}
    unseen = {number for number, puzzle in PUZZLES.items() if not puzzle.rows}
    assert len(wrong) >= 8
    assert len(unseen) >= 2
    assert not wrong & unseen
    assert all(PUZZLES[number].why_unseen for number in unseen)


HIGHER_IS_BETTER = {"accuracy", "share of views found"}


@each_puzzle
def test_a_mistake_costs_more_than_the_seeds_do(number):
    runs = json.loads(judge_answer.COST.read_text())["puzzles"][str(number)]
    sign = -1 if PUZZLES[number].measure in HIGHER_IS_BETTER else 1
    costs = [sign * (a - b) for a, b in zip(runs["with"], runs["without"], strict=True)]
    assert mean(costs) > 2 * stdev(costs) / len(costs) ** 0.5


def test_a_folder_that_is_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "run").write_text("mine")
    script = "beyond/puzzles/check_answer.py"
    [(status, output)] = run_script(script, "3", "--folder=run", cwd=tmp_path)
    assert (status, output.count("\n")) == (2, 1), output
    assert output.startswith("error: [Errno 20] Not a directory: ")


def test_a_reader_gets_a_script_corrects_it_and_is_told_what_it_cost(tmp_path):
    def puzzle_3(*flags: str) -> tuple[int, str]:
        flags = ("3", "--folder=.", *flags)
        return run_script("beyond/puzzles/check_answer.py", *flags, cwd=tmp_path)[0]

    copy = tmp_path / "03" / "train.py"
    status, output = puzzle_3()
    assert (status, copy.read_text()) == (0, PUZZLES[3].story.script)
    assert re.search(r"one rank prints +two ranks print\n +epoch 0: .+ epoch 0: ", output)
    status, output = puzzle_3()
    assert (status, output[:8]) == (1, "Not yet:")
    status, output = puzzle_3("--hint")
    assert (status, output[:20].split()) == (0, ["WRONG", "samples"])

    copy.write_text("def main(:\n")
    assert puzzle_3() == (2, "error: 03/train.py, line 1: invalid syntax\n")
    copy.write_text(PUZZLES[3].story.script.replace("DDP(nn", "DDP(nm"))
    status, output = puzzle_3()
    assert (status, output.count("\n")) == (1, 1)
    assert "NameError: name 'nm' is not defined" in output
    copy.unlink()
    status, output = puzzle_3()
    assert (status, output.count("\n")) == (2, 1)
    assert output.startswith("error: 03/train.py is gone")

    copy.write_text(PUZZLES[3].story.cure, encoding="utf-8-sig")  # as some editors write
    status, output = puzzle_3()
    assert (status, output[:6]) == (0, "Right:")
    assert "What it cost: test loss " in output
    assert PUZZLES[3].story.report in output
    assert output.endswith("1 of 16 are solved; make puzzle lists them.\n")
    [(_, output)] = run_script("beyond/puzzles/check_answer.py", f"--folder={tmp_path}")
    assert [line.split()[0] for line in output.splitlines() if "  solved  " in line] == ["3"]
    shutil.rmtree(copy.parent)
    assert puzzle_3()[1].startswith("Puzzle 3"), "deleted, it begins again"
