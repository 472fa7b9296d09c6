"""prove: it finds planted mistakes, is silent about right scripts, and takes its options."""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import prove
from evidence.planted import planted_cases, right_script
from prove.checks import CHECKS
from prove.judge.table import ReplayCheck
from prove_cases import PACKAGE, planted, training_of
from prove_runs import TORCHRUN, one_line, run, verdict

PLANTED = planted_cases()
# Planted mistakes with words of their row: some for each script, and one for each check without
# another test. `python -m evidence planted` judges all mistakes, which takes minutes.
CHOSEN = {
    "layers that DDP has not been told of begin to train": "so DDP does not average it",
    "rank 0 counts more": "a weighted sum over the ranks, which count 0.75, 0.25 times",
    "the loss scale differs by rank": "as follows from the rows above",
    "drop_last, which the original has not": "",
    "a rest of the epoch, as in the original": "",
    "no zero_grad": "",
    "the optimizer holds another model": "",
    "clips scaled gradients": "",
    "running statistics differ at evaluation": "",
    "BatchNorm over a small local batch": "",
    "the last micro-batch is not synchronized": "",
    "an IterableDataset is not split by worker": "",
    "layers that begin to train are wrapped anew": "",
    "clean plain, 3 ranks": "",
    "clean accumulate, 2 ranks": "",
    "clean amp, 2 ranks": "",
    "clean iterable, 2 ranks": "",
    "clean own_step, 1 ranks": "",
}


@pytest.mark.parametrize("name", CHOSEN)
def test_prove_finds_a_planted_mistake_and_calls_nothing_wrong_that_is_right(name, tmp_path):
    case = PLANTED[name]
    for file, text in {"train.py": case.script, **case.files}.items():
        (tmp_path / file).write_text(text)
    ended = run(tmp_path, "--json=rows.json", *case.options, *case.command)
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        if row["verdict"] in ("WRONG", "warning"):  # a line that a reader sees, a program gets
            lines = {f"{at['file']}:{at['line']}" for at in row["lines"]}
            assert {*re.findall(r"train\.py:\d+", row["evidence"])} <= lines, row["evidence"]
    if case.check:
        assert verdict(ended, case.check) == case.verdict
    if case.verdict == "right":
        assert ended.returncode in (0, 4), ended.stdout + ended.stderr  # nothing is WRONG
    assert CHOSEN[name] in one_line(ended.stdout)


def test_every_check_is_asked_for_by_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    planted_for = {PLANTED[name].check for name in CHOSEN}
    names = [*(check.name for check in CHECKS), *(row.value for row in ReplayCheck)]
    control = "no" + " check"
    asked_for = {name for name in (*names, control) if f'"{name}"' in tests} | planted_for
    assert {*names, control} - asked_for <= {control, "ranks"}
    assert control not in asked_for


def test_the_page_says_how_many_mistakes_are_planted():
    page = r"plants (\d+) .+ finds all of them, (\d+) as WRONG and (\d+) as .+ (\d+) right scripts"
    counts_of_page = re.search(page, (PACKAGE / "README.md").read_text())
    assert counts_of_page, "the page does not say how many"
    count = Counter(case.verdict for case in PLANTED.values())
    mistakes = count["WRONG"] + count["warning"]
    expected = mistakes, count["WRONG"], count["warning"], count["right"]
    assert tuple(map(int, counts_of_page.groups())) == expected


GPU_SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", gpu)
torch.cuda.set_device(device)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
copies = torch.cuda.Stream()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model.cuda(gpu))
ddp = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
data = TensorDataset(torch.randn(40, 1, 4, 4), torch.arange(40) % 2)
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 10 // dist.get_world_size(), sampler=sampler, pin_memory=True):
        begin.record()
        with torch.cuda.device(gpu), torch.cuda.stream(copies):
            x, y = x.to(device, non_blocking=True), y.cuda()
        torch.cuda.current_stream().wait_stream(copies)
        x.record_stream(torch.cuda.current_stream())
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        end.record()
    print(begin.elapsed_time(end), "ms for the last step")
"""


def test_a_script_for_gpus_is_judged_on_cpus(prove_script, tmp_path):
    """The control: without --cpu. That a sum is WRONG there, too, is shown below."""
    ended = prove_script(GPU_SCRIPT, "--cpu")
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0)
    ended = prove_script(GPU_SCRIPT)
    assert (ended.returncode, ended.stdout) == (2, "")


SYNC_LAYERS = """
class Twice(nn.SyncBatchNorm):
    def forward(self, x):
        return 2 * super().forward(x)
def block(norm_layer=nn.BatchNorm1d):
    layers = [nn.Flatten(0, 1), nn.Linear(8, 8), norm_layer(8), Twice(8), nn.Dropout(0.3)]
    return nn.Sequential(*layers)
"""


def test_sync_batchnorm_and_seeds_of_gpus_work_on_cpus(prove_script):
    """Layers that nothing converts, and a GPU that is seeded alone. The controls: a sum, and a seed
    of the GPU that is the same on all ranks."""
    model = "DistributedDataParallel(block(norm_layer=nn.SyncBatchNorm).cuda())"
    source = training_of(model, SYNC_LAYERS).replace('"gloo"', '"nccl"')
    seed = "torch.manual_seed(dist.get_rank())"
    own_seeds = source.replace(seed, "torch.cuda.manual_seed(dist.get_rank())")
    ended = prove_script(own_seeds, "--cpu")
    assert verdict(ended, "one rank") == "right"
    assert verdict(ended, "dropout") == "right"
    one_seed = source.replace(seed, f"{seed}; torch.cuda.manual_seed_all(0)")
    ended = prove_script(one_seed.replace(".mean()", ".sum()"), "--cpu")
    assert verdict(ended, "one rank") == "WRONG"
    assert verdict(ended, "dropout") == "warning"


def test_no_rank_is_forked_from_a_process_that_has_asked_cuda(prove_script):
    """A GPU would refuse such a rank, in prove's controls too. The control asserts otherwise."""
    sums = planted(("F.cross_entropy(ddp(points), labels)", "ddp(points).square().sum()"))
    for no, status in (("not", 1), ("", 2)):
        can_start = f"import torch\nassert {no} torch.cuda._is_in_bad_fork()\n"
        ended = prove_script(can_start + sums)
        assert ended.returncode == status
    assert "the script fails by itself" in ended.stderr


def test_the_original_shows_what_the_conversion_changed(prove_script, tmp_path):
    (tmp_path / "single.py").write_text(right_script("plain.one_gpu"))
    loss = "F.cross_entropy(ddp(points), labels)"
    twice_the_loss = planted((loss, f"2 * {loss}"))
    ended = prove_script(twice_the_loss, f"--original={sys.executable} single.py")
    assert verdict(ended, "the original") == "WRONG"
    assert verdict(ended, "one rank") == "right", "with itself it agrees"


def test_torch_is_not_imported_before_it_is_needed():
    """The spare process imports torch meanwhile; a test that calls prove.check needs none."""

    def error_without_torch(module: str) -> bytes:
        code = f"import sys; sys.modules['torch'] = None; import {module}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True).stderr

    assert error_without_torch("prove.__main__") == b""
    assert b"import of torch halted" in error_without_torch("prove.checks"), "the control"


def test_a_project_keeps_its_script_right_with_a_test(tmp_path, monkeypatch):
    def quick_run(call: list[str], **_: object) -> subprocess.CompletedProcess:
        assert call[:3] == [sys.executable, "-m", "prove"]
        return run(Path.cwd(), *call[3:])

    monkeypatch.setattr(prove.api.subprocess, "run", quick_run)
    line = [*TORCHRUN, str(tmp_path / "train.py")]
    with pytest.raises(prove.NotJudgedError, match="no such script"):
        prove.check(line)
    (tmp_path / "train.py").write_text(planted())
    right = prove.check(line)
    assert right.proven
    assert right.wrong == right.warnings == []
    one_seed = planted(("torch.manual_seed(rank + 1)", "torch.manual_seed(1)"))
    (tmp_path / "train.py").write_text(one_seed)  # one seed on all ranks, which is only a warning
    assert not prove.check(line, strict=True).proven
    ended = run(tmp_path, "--strict", *line)
    assert ended.returncode == 1
    last_line = ended.stdout.splitlines()[-1]
    assert last_line.startswith("0 WRONG and 2 warnings of ")
    assert last_line.endswith("; --strict counts warnings as WRONG")
    (tmp_path / "train.py").write_text(planted(("ddp(points)", "ddp.module(points)")))
    found = prove.check(line)
    assert "forward through DDP" in {row.check for row in found.wrong}
    assert not found.proven
    assert not replace(right, unproven=["one rank"]).proven, "what was not compared is not proven"


OWN_ARGUMENTS = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
args = parser.parse_args()
assert "RANK" not in os.environ
"""


def test_a_script_that_is_told_its_rank_by_an_argument_is_started_with_it(tmp_path):
    """The control: without the number of ranks, the word is the script's own."""
    group = f"'gloo', init_method='file://{tmp_path}/met' + str(args.world_size), "
    group += "rank=args.rank, world_size=args.world_size"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))", OWN_ARGUMENTS)
    (tmp_path / "train.py").write_text(source.replace('"gloo"', group))
    command = (sys.executable, "train.py", "--rank={rank}")
    ended = run(tmp_path, *command, "--world-size", "{world_size}")
    assert verdict(ended, "one rank") == "right"
    ended = run(tmp_path, *command)
    assert "invalid int value: '{rank}'" in ended.stderr


def test_a_script_that_is_told_its_rank_may_spawn_it(tmp_path):
    """One command for each node, which starts its ranks: what watches, and --cpu, must reach them.
    Each run begins without the file in which the last one met."""
    group = f"'nccl', init_method='file://{tmp_path}/met' + str(args.world_size), "
    group += "rank=args.rank + gpu, world_size=args.world_size"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))", OWN_ARGUMENTS)
    imports, body = source.replace('"gloo"', group).split("dist.init_process_group")
    lines = f"dist.init_process_group{body}".splitlines()
    source = "\n".join([imports, "def main(gpu):", *(f"    {line}" for line in lines)])
    source += "\nif __name__ == '__main__':\n    torch.multiprocessing.spawn(main, nprocs=1)\n"
    script = str(tmp_path / "train.py")  # a spawned process looks where the first one began
    command = (sys.executable, script, "--rank={rank}", "--world-size={world_size}")
    (tmp_path / "train.py").write_text(source)
    ended = run(tmp_path, "--cpu", *command)
    assert verdict(ended, "one rank") == "right"
    assert not (tmp_path / "met2").exists()


def test_the_page_shows_what_prove_prints(tmp_path):
    page = (PACKAGE / "README.md").read_text()
    [command] = re.findall(r"```bash\n(python -m prove .*two_mistakes.py)\n```", page)
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.S)
    wrong, right = re.findall(r"```text\n(.*?)```", page, re.S)[1:3]
    folder = tmp_path / "packages/prove/examples"
    folder.mkdir(parents=True)
    script = (PACKAGE / "examples/two_mistakes.py").read_text()
    without = [line for line in diff.splitlines(True) if line[0] != "+"]
    with_lines = [line for line in diff.splitlines(True) if line[0] != "-"]
    old, new = ("".join(line[1:] for line in lines) for lines in (without, with_lines))
    assert script.count(old) == 1, "the diff of the page fits"
    # Numbers of the page that may differ on another machine are not compared.
    shape = re.compile(r"\d+%|\de-\d+|in \d+ s")
    for source, shown in ((script, wrong), (script.replace(old, new), right)):
        (folder / "two_mistakes.py").write_text(source)
        ended = run(tmp_path, *command.split()[3:])
        for part in shown.split("...\n"):
            text = shape.sub("#", " ".join(part.split()))
            assert text in shape.sub("#", one_line(ended.stdout))


def test_the_page_shows_what_is_lost_by_resuming(tmp_path):
    page = (PACKAGE / "README.md").read_text()
    [command] = re.findall(r"```bash\n(python -m prove --resume .*?)\n```", page, re.S)
    [shown] = [text for text in re.findall(r"```text\n(.*?)```", page, re.S) if "resume:" in text]
    folder = tmp_path / "packages/prove/examples"
    folder.mkdir(parents=True)
    (folder / "resumes.py").write_text((PACKAGE / "examples/resumes.py").read_text())
    ended = run(tmp_path, *shlex.split(command.replace("\\\n", ""))[3:])
    shape = re.compile(r"in \d+ s")
    for part in shown.split("...\n"):
        assert shape.sub("#", one_line(part)) in shape.sub("#", one_line(ended.stdout))
    assert not (tmp_path / "last.pt").exists(), "prove puts the files back"
