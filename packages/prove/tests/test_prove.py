"""prove: it finds planted mistakes, is silent about scripts that are right, and harms nothing."""

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import prove
from check_pages import anchors
from helpers.local_ranks import SECONDS, launch_script, process_context, run_on_ranks, run_script
from helpers.prove_runs import TORCHRUN, run, verdict
from prove import (
    judge_effects,
    judge_numbers,
    judge_schedule,
    processes,
    table,
    watch_effects,
    watch_schedule,
    wording,
)
from prove.generators import worker_drew
from prove.planted.__main__ import changed
from prove.planted.mistakes import ONE_GPU
from prove.rank_record import Mode, ScheduleRecord, Settings
from prove.rank_run import RankRun
from prove.reasons import Phrase, Reason
from prove.samples import as_double, tensors_in

PACKAGE = Path(__file__).parents[1]


def planted(*changes: tuple[str, str]) -> str:
    """The plain script, with other lines."""
    return changed("plain", changes)


def test_it_finds_the_planted_mistakes_and_calls_nothing_wrong_that_is_right():
    [(status, output)] = run_script(
        str(PACKAGE / "src" / "prove" / "planted" / "__main__.py"), seconds=20 * SECONDS
    )
    count = r"(\d+) of (\d+) mistakes found, (\d+) .+ WRONG; (\d+) of (\d+) runs that are right"
    said = re.search(count, output)  # a library may say something after it
    assert said, output[-2000:]
    found, mistakes, as_wrong, false, right = map(int, said.groups())
    page = r"plants (\d+) .+ finds all of them, (\d+) as WRONG and (\d+) as .+ (\d+) right scripts"
    told = re.search(page, (PACKAGE / "README.md").read_text())
    assert told, "the page does not say how many"
    assert [mistakes, as_wrong, found - as_wrong, right] == [*map(int, told.groups())], output
    assert (status, found, false) == (0, mistakes, 0), output


GPU_SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", gpu)
torch.cuda.set_device(device)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
        x, y = x.to(device, non_blocking=True), y.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(ddp(x), y, reduction="mean")
        loss.backward()
        optimizer.step()
        end.record()
    print(begin.elapsed_time(end), "ms for the last step")
"""


def test_a_script_for_gpus_is_judged_on_cpus(prove_script, tmp_path):
    for reduction, expected in (("mean", "right"), ("sum", "WRONG")):
        source = GPU_SCRIPT.replace('"mean"', f'"{reduction}"')
        ended = prove_script(source, "--cpu")
        assert verdict(ended, "one rank") == expected
        assert ended.returncode == (expected == "WRONG")
    ended = prove_script(source)  # the control: without --cpu
    assert (ended.returncode, ended.stdout) == (2, "")


def test_the_original_shows_what_the_conversion_changed(prove_script, tmp_path):
    (tmp_path / "single.py").write_text(planted(*ONE_GPU))
    loss = "F.cross_entropy(ddp(points), labels)"
    twice_the_loss = planted((loss, f"2 * {loss}"))
    ended = prove_script(twice_the_loss, f"--original={sys.executable} single.py")
    assert verdict(ended, "the original") == "WRONG"
    assert verdict(ended, "one rank") == "right", "with itself it agrees"


def test_a_script_without_a_loader_is_replayed_from_what_goes_into_its_model(prove_script):
    source = """
import torch, torch.distributed as dist
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
text, ddp = torch.arange(500) ** 2 % 11, nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(ddp.parameters(), 0.1)
for step in range(100):
    at = torch.randint(400, (4,))
    x, y = torch.stack([text[i:i + 6] for i in at]), torch.stack([text[i + 1:i + 7] for i in at])
    optimizer.zero_grad()
    ddp(x, y).backward()
    optimizer.step()
"""
    ended = prove_script(source)
    assert (verdict(ended, "one rank"), verdict(ended, "samples")) == ("right", "right")
    ended = prove_script(source.replace("dist.get_rank()", "0"))
    assert verdict(ended, "samples") == "WRONG", "the control: the same on all ranks"


def training_of(model: str, classes: str = "") -> str:
    """A script that trains this model on 32 samples of 5 × 8 numbers, in global batches of 8."""
    return f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
{classes}
dist.init_process_group("gloo")
torch.manual_seed(0)
data, local_batch = torch.randn(32, 5, 8), 8 // dist.get_world_size()
model = {model}
optimizer, sampler = torch.optim.SGD(model.parameters(), 0.1), DistributedSampler(data)
torch.manual_seed(dist.get_rank())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, local_batch, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


TWO_DATA_SETS = (
    ("    train_set, test_set = ", "    more = Points(20, 0.0)\n    train_set, test_set = "),
    (
        "        test_loss, accuracy = evaluate(",
        "        with torch.no_grad():\n"
        "            sum(ddp.module(x).sum() for x, _ in DataLoader(more, 8))\n"
        "        test_loss, accuracy = evaluate(",
    ),
)


def test_without_a_loader_one_rank_gets_the_dropout_of_all(prove_script):
    """The next batch is drawn between forward and backward, which is no decision of a step. The
    control: a loss that is not averaged."""
    source = """
import torch, torch.distributed as dist
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dropout = nn.Embedding(11, 11), nn.Dropout(0.5)
    def forward(self, x, y):
        logits = self.dropout(self.table(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, y.flatten(), reduction="mean")
def batch():
    at = torch.randint(400, (4,))
    return torch.stack([text[i:i + 6] for i in at]), torch.stack([text[i + 1:i + 7] for i in at])
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
text, ddp = torch.arange(500) ** 2 % 11, nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
x, y = batch()
for step in range(100):
    for micro_batch in range(4 // dist.get_world_size()):
        loss = ddp(x, y)
        x, y = batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ended = prove_script(source.replace("4 // dist.get_world_size()", "1"))
    assert verdict(ended, "one rank") == "right", ended.stdout + ended.stderr
    assert verdict(ended, "random decisions").startswith("no row")
    in_sequence = source.replace("loss.backward", "(loss / (4 // dist.get_world_size())).backward")
    assert verdict(prove_script(in_sequence), "one rank") == "right"
    of_sums = source.replace("4 // dist.get_world_size()", "1").replace('"mean"', '"sum"')
    assert verdict(prove_script(of_sums), "one rank") == "WRONG"


def test_an_optimizer_that_is_made_anew_in_each_epoch_is_compared_in_the_first(prove_script):
    """The control: a loss that is not averaged."""
    epoch = "        sampler.set_epoch(epoch)\n"
    anew = (epoch, epoch + "        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)\n")
    ended = prove_script(planted(anew))
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0), ended.stdout
    loss = "F.cross_entropy(ddp(points), labels)"
    ended = prove_script(planted(anew, (loss, f"{loss} * len(labels)")))
    assert verdict(ended, "one rank") == "WRONG"


def test_a_row_names_each_place_that_is_a_cause(prove_script):
    """Two lines that all ranks print, and two data sets that each rank evaluates to the end."""
    everything = ("DataLoader(shard, batch_size=8)", "DataLoader(dataset, batch_size=8)")
    all_print = ("        if rank == 0:\n", "        if rank >= 0:\n")
    source = planted(*TWO_DATA_SETS, everything, all_print)
    ended = prove_script(source)
    for check, words in (("evaluation", "DataLoader(more DataLoader(dataset"),
                         ("printing", "print(f\"epoch print(f\"accuracy")):  # fmt: skip
        [row] = re.findall(rf"^warning +{check}\s+(.*(?:\n +[^-\s].*)*)", ended.stdout, re.M)
        for word in words.split():
            number = next(n for n, text in enumerate(source.splitlines(), 1) if word in text)
            assert f"train.py:{number})" in row, ended.stdout


SHARDED = """
class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.parts.values(), self):
            fully_shard(part, mesh=mesh)
    def forward(self, x):
        return self.parts["two"](self.parts["one"](x).relu())
"""


def test_a_script_with_fully_shard_is_compared_with_one_rank(prove_script):
    source = training_of("Sharded()", SHARDED)
    ended = prove_script(source)
    assert verdict(ended, "samples") == verdict(ended, "collectives") == "right", ended.stdout
    assert verdict(ended, "weights") == verdict(ended, "one rank") == "right", ended.stdout
    ended = prove_script(source.replace("mean()", "sum()"))  # the control
    assert verdict(ended, "one rank") == "WRONG", ended.stdout
    ended = prove_script(source.replace("sampler.set_epoch(epoch)", "pass"))
    assert verdict(ended, "order of an epoch") == "WRONG"


SHIFTED = """
class Shifted(nn.Module):
    def __init__(self, batch):
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(batch, 1, 8)), nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x + self.shift)
"""


def test_if_one_rank_cannot_be_compared_the_last_line_says_that_nothing_is_proven(
    prove_script, tmp_path
):
    of_each_sample, of_all_samples = (
        training_of(f"DistributedDataParallel(Shifted({batch}))", SHIFTED)
        for batch in ("local_batch", 1)
    )
    unknown = "so nothing is proven about"
    (tmp_path / "once.py").write_text(of_all_samples)
    ended = prove_script(of_each_sample, "--original", "torchrun --nproc-per-node=1 once.py")
    assert (verdict(ended, "one rank"), verdict(ended, "the original")) == ("not seen", "not seen")
    assert "shape [4, 1, 8], and [8, 1, 8]" in " ".join(ended.stdout.split())
    last_line = ended.stdout.splitlines()[-1]
    assert f"the original, {unknown} what is averaged and the conversion" in last_line
    ended = prove_script(of_each_sample)
    assert ended.stdout.endswith(f"not seen: one rank, {unknown} what is averaged\n")
    ended = prove_script(of_all_samples)  # the control: a parameter for all samples
    assert (verdict(ended, "one rank"), unknown in ended.stdout) == ("right", False)


HARMLESS = """        if rank == 0:
            import shutil
            shutil.rmtree("old")
            os.makedirs("new/deep", exist_ok=True)
            torch.save({}, "new/deep/file.pt")
            open("log.txt", "a").write("more")
            os.rename("a.txt", "b.txt")
        dist.barrier()
        return dist.destroy_process_group()
"""


def test_files_are_put_back_and_no_process_is_left(prove_script, tmp_path):
    (tmp_path / "old").mkdir()
    kept = {name: name for name in ("old/kept.txt", "log.txt", "a.txt")}
    for name in kept:
        (tmp_path / name).write_text(name)
    source = planted(("        scheduler.step()\n", "        scheduler.step()\n" + HARMLESS))
    ended = prove_script(source)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in files}
    assert texts == {"train.py": source} | kept
    assert not (tmp_path / "new").exists()
    assert processes_in(tmp_path) == []


def test_two_writers_are_seen_in_a_folder_that_mktemp_made():
    """What libraries write to /tmp/tmp... is ignored, but not what lies beside the script."""
    source = planted(("            torch.save(ddp", "        torch.save(ddp"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "train.py").write_text(source)
        ended = run(Path(folder), *TORCHRUN, "train.py")
    assert verdict(ended, "files") == "WRONG", ended.stdout


def processes_in(folder: Path) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if str(folder) in os.readlink(process / "cwd"):
                commands.append((process / "cmdline").read_text())
    return commands


def test_a_proof_that_is_ended_leaves_no_process_and_puts_files_back(tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    wait = '            open("log.txt", "w").write("theirs")\n'
    wait += '            __import__("time").sleep(99)\n'
    source = planted(("            loss.backward()\n", "            loss.backward()\n" + wait))
    (tmp_path / "train.py").write_text(source)
    started = subprocess.Popen([sys.executable, "-m", "prove", *TORCHRUN, "train.py"], cwd=tmp_path)
    end = time.monotonic() + 2 * SECONDS
    while (tmp_path / "log.txt").read_text() == "mine":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(processes_in(tmp_path)) == 3, "the control: prove and its two ranks"
    started.terminate()
    assert started.wait(SECONDS) == 143
    assert processes_in(tmp_path) == []
    assert (tmp_path / "log.txt").read_text() == "mine"


def test_random_numbers_of_the_script_are_those_of_an_unobserved_run(prove_script, tmp_path):
    note = """        if True:
            states = [torch.get_rng_state().tolist(), random.getstate()]
            states.append(np.random.get_state()[1:3])
            with open(os.environ['DIGEST'] + str(rank), 'a') as file:
                file.write(f'{zlib.crc32(str(states).encode())} ')
"""
    source = planted(
        ("from torch import nn\n", "from torch import nn\nimport zlib, sys\n"),
        ("SAMPLES, TEST_SAMPLES, CLASSES = 96", "SAMPLES, TEST_SAMPLES, CLASSES = 48"),
        ("        dist.all_reduce(total)\n", note + "        dist.all_reduce(total)\n"),
        ("nn.Dropout(0.1)", "nn.Identity()"),  # switched off, so it draws nothing
    )
    with tempfile.TemporaryDirectory() as folder:  # in /tmp/tmp..., whose files are not put back
        prove_script(source, "--float32", DIGEST=f"{folder}/seen")
        launch_script(str(tmp_path / "train.py"), env={"DIGEST": f"{folder}/plain"}, where=tmp_path)
        # Of rank 1, which takes no part in the replay:
        seen, plain = (Path(folder, f"{name}1").read_text().split() for name in ("seen", "plain"))
    assert seen[:2] == plain[:2]
    assert plain[0] != plain[1], "the control: they change from epoch to epoch"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no such script"),
        ("raise ValueError('my own mistake')", "my own mistake"),
        ("print('hello')", "no process group: each process trains for itself"),
        # Without the barrier, one rank may have left before the other has joined: gloo's error.
        ("import torch.distributed as d\nd.init_process_group()\nd.barrier()", "no optimizer"),
    ],
)
def test_if_nothing_can_be_judged_one_line_says_why(source, message, prove_script, tmp_path):
    ended = prove_script(source) if source else run(tmp_path, *TORCHRUN, "train.py")
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert last.startswith("error: ")
    assert message in last


def test_a_project_keeps_its_script_right_with_a_test(tmp_path, monkeypatch):
    def quick_run(call: list[str], **_: object) -> subprocess.CompletedProcess:
        assert call[:3] == [sys.executable, "-m", "prove"]
        return run(Path.cwd(), *call[3:])

    monkeypatch.setattr(prove.subprocess, "run", quick_run)
    line = [*TORCHRUN, str(tmp_path / "train.py")]
    with pytest.raises(prove.NotJudgedError, match="no such script"):
        prove.check(line)
    (tmp_path / "train.py").write_text(planted())
    right = prove.check(line)
    assert right.proven
    assert right.wrong == right.warnings == []
    (tmp_path / "train.py").write_text(planted(("ddp(points)", "ddp.module(points)")))
    found = prove.check(line)
    assert "forward through DDP" in {row.check for row in found.wrong}
    assert not found.proven
    assert not replace(right, unseen=["one rank"]).proven, "what was not compared is not proven"


class Batch(UserDict):
    """As transformers' BatchEncoding: no dict, and read by attribute."""

    x = property(lambda self: self["x"])


def test_a_batch_of_a_class_of_its_own_becomes_float64_and_stays_of_that_class():
    batch = as_double([Batch(x=torch.ones(2)), {"y": (torch.ones(1, dtype=torch.int), "text")}])
    assert [tensor.dtype for tensor in tensors_in(batch)] == [torch.float64, torch.int32]
    assert batch[0].x.tolist() == [1, 1]
    assert batch[1]["y"][1] == "text"


OWN_BATCH = """
from collections import UserDict
class Batch(UserDict):
    x = property(lambda self: self["x"])
"""


def test_batches_of_a_class_of_the_script_are_replayed_from_all_ranks(prove_script):
    """Only the replay reads them, once the script has made the class."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))", OWN_BATCH)
    for old, new in (
        ("sampler=sampler)", "sampler=sampler, collate_fn=lambda xs: Batch(x=torch.stack(xs)))"),
        ("model(x)", "model(x.x)"),
    ):
        source = source.replace(old, new)
    ended = prove_script(source)
    assert verdict(ended, "one rank") == "right", ended.stdout + ended.stderr
    ended = prove_script(source.replace("mean()", "sum()"))  # the control
    assert verdict(ended, "one rank") == "WRONG", ended.stdout + ended.stderr


def test_a_rank_that_cannot_be_watched_says_why(tmp_path):
    environment = {"OMP_NUM_THREADS": "1"}  # and no PROVE, which install() reads
    log = tmp_path / "log"
    rank = process_context.Process(
        target=processes.become_rank, args=(["train.py"], environment, log)
    )
    rank.start()
    rank.join(SECONDS)
    assert rank.exitcode == 1
    assert log.read_text().splitlines()[-1] == "KeyError: 'PROVE'"


def collectives_seen(_, folder, names, watched_names):
    """Which calls are recorded, if the collectives of these names are in prove's table."""
    for name in names:  # planted: an older torch lacks the newest names
        setattr(dist, name, lambda: None)
    watch_effects.COLLECTIVES = watched_names
    run_of_rank = RankRun(Settings(str(folder), Mode.OBSERVE, False, True, 1, 0, 1))
    watch_effects.install(run_of_rank)
    run_of_rank.joined = True
    for name in names:
        getattr(dist, name)()
    return [collective.name for collective in run_of_rank.record.collectives]


@pytest.mark.parametrize("left_out", ["", "all_gather_single"])
def test_collectives_are_seen_by_their_old_and_new_names(left_out, tmp_path):
    """The control: a name that is not in the table."""
    names = ["all_gather_into_tensor", "all_gather_single", "reduce_scatter_single"]
    names += ["gather_single", "gather_into_tensor"]
    watched = [name for name in watch_effects.COLLECTIVES if name != left_out]
    [seen] = run_on_ranks(1, collectives_seen, tmp_path, names, watched)
    assert seen == [name for name in names if name != left_out]


def test_the_page_shows_what_prove_prints(tmp_path):
    page = (PACKAGE / "README.md").read_text()
    [command] = re.findall(r"```bash\n(python -m prove .*wrong.py)\n```", page)
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.S)
    wrong, right = re.findall(r"```text\n(.*?)```", page, re.S)[1:3]
    folder = tmp_path / "packages/prove"
    folder.mkdir(parents=True)
    script = (PACKAGE / "wrong.py").read_text()
    without = [line for line in diff.splitlines(True) if line[0] != "+"]
    with_lines = [line for line in diff.splitlines(True) if line[0] != "-"]
    old, new = ("".join(line[1:] for line in lines) for lines in (without, with_lines))
    assert script.count(old) == 1, "the diff of the page fits"
    # Numbers that may differ on another machine, and where the page lies as seen from the folder.
    shape = re.compile(r"\d+%|\de-\d+|in \d+ s|(?<=\()\S*(?=/cures\.md#)")
    for source, shown in ((script, wrong), (script.replace(old, new), right)):
        (folder / "wrong.py").write_text(source)
        ended = run(tmp_path, *command.split()[3:])
        for part in shown.split("...\n"):
            text = shape.sub("#", " ".join(part.split()))
            assert text in shape.sub("#", " ".join(ended.stdout.split())), ended.stdout


def test_every_cure_links_to_a_heading_that_exists():
    links = {reason.link for reason in Reason} - {""}
    assert len(links) >= 8
    assert links - anchors(table.PAGE) == set()


def test_a_row_that_was_written_as_json_says_the_same_again():
    differing = [
        wording.part(
            Phrase.PRINTED, name="loss", of_ranks="0.25", of_one="0.5", world_size=n, at="?"
        )
        for n in range(2, 7)
    ]
    row = table.warning("printed numbers", Reason.NUMBERS_DIFFER, numbers=differing)
    row = replace(row, also=({"numbers": differing[:1]},))
    again = table.ReportRow.from_json(json.loads(json.dumps(row.as_json())))
    assert (again.evidence, again.cure, again.link) == (row.evidence, row.cure, row.link)
    assert "on 4 ranks and 0.5 on one (?) and 2 more; after the same steps, loss" in row.evidence


def test_a_reason_writes_its_facts_as_numbers_with_nouns_lists_and_shares():
    def written(template: str, **facts: object) -> str:
        return wording.in_words(template, facts)

    assert written("{n:n step}, {m:n step}", n=1, m=2) == "1 step, 2 steps"
    assert written("{a:percent} {b:percent} {a:.1f}", a=0.25, b=0.00015) == "25% 1.5e-04 0.2"
    assert written("{names} | {names: + }", names=[*"abcd"]) == "a, b, c and 1 more | " + (
        "a + b + c and 1 more"
    )
    assert written("{rates:each .2g}", rates=[0.123, 4.0]) == "0.12, 4"
    assert written("{text}", text="{not} a {field}") == "{not} a {field}", "a script's own words"
    with pytest.raises(KeyError):  # the control
        written("{steps} steps", step=1)


def test_a_link_leads_to_the_page_from_the_folder_of_the_user(tmp_path, monkeypatch):
    facts = {"at": "train.py:1", "sampler": "RandomSampler"}
    rows = [table.wrong("order of an epoch", Reason.EPOCH_NOT_SET, **facts)]
    monkeypatch.chdir(tmp_path)
    [path] = re.findall(r"\((\S+)#every-epoch-has-the-same-order\)", table.table(rows))
    assert Path(path).samefile(PACKAGE / "src" / "prove" / "cures.md")


DECIDES = """
import copy, logging, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 4)
data, valid = TensorDataset(x, x.sum(1, keepdim=True)), torch.randn(30, 4)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
valid_loader = DataLoader(valid, 5, sampler=range(rank, len(valid), world_size))
ddp = DistributedDataParallel(nn.Linear(4, 1))
average = copy.deepcopy(ddp.module)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
batches = len(loader)
by_batch = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * batches)
by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(6):
    loader.sampler.set_epoch(epoch)
    began = time.time()
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(points), labels).backward()
        optimizer.step()
        by_batch.step()
        with torch.no_grad():
            for own, trained in zip(average.parameters(), ddp.module.parameters()):
                own.lerp_(trained, 0.5)
    with torch.no_grad():
        sums = torch.stack([torch.stack([average(p).sum(), torch.tensor(len(p))])
                            for p in valid_loader]).sum(0)
    dist.all_reduce(sums)
    metric = float(sums[0] / sums[1])
    by_metric.step(metric)
    if rank == 0:
        logging.info("epoch %d: height %.4f, %.4f per batch", epoch, metric, time.time() - began)
"""


def test_what_is_evaluated_logged_and_decided_by_is_compared(prove_script):
    """Beside a schedule that is counted in batches. The control: the script as it is."""
    changes = (
        ("    own.lerp_(", "    rank or own.lerp_("),
        ("    dist.all_reduce(sums)\n", ""),
        ("batches = len(loader)", "batches = len(data) // 4"),
    )
    source = DECIDES
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    checks = ("evaluated model", "learning rate by rank", "printed numbers", "schedule")
    ended, ended_right = prove_script(source), prove_script(DECIDES)
    assert [verdict(ended, check) for check in checks] == ["warning"] * 4, ended.stdout
    assert [verdict(ended_right, check) for check in checks] == ["right"] * 4, ended_right.stdout
    one_rank = verdict(ended, "one rank"), verdict(ended_right, "one rank")
    assert one_rank == ("right", "right"), ended.stdout
    text = " ".join(ended.stdout.split())
    assert "height" in text
    assert "144 batches on any number of ranks: 12 epochs of 12 batches on 2 ranks, 6 of" in text
    assert "per " not in text.partition("after the same steps")[2][:200], "a time is no result"


def test_an_evaluation_that_prove_itself_cuts_is_not_said_to_stop_early(prove_script):
    """Its gradients are switched off in each batch only, so it looks like training at first. The
    control: a script that stops by itself."""
    loop = "for points, labels in DataLoader(shard, batch_size=8):\n"
    cut = "for points, labels in DataLoader(shard, batch_size=2, shuffle=True):\n"
    stops = (loop, cut + "        if totals[2] == 4: break\n")
    no_grad = ("@torch.no_grad()\n", "")
    for changes, expected in (([no_grad, (loop, cut)], "right"), ([stops], "warning")):
        ended = prove_script(planted(*changes))
        assert verdict(ended, "evaluation") == expected, ended.stdout + ended.stderr


def test_data_sets_that_belong_to_one_rank_each_are_not_taken_for_one_that_few_evaluate(
    prove_script,
):
    """The control: one data set, which rank 0 alone evaluates."""
    loop = "for points, labels in DataLoader(shard, batch_size=8):\n"
    own = loop.replace("shard", "[(shard[i][0] + rank, shard[i][1]) for i in range(len(shard))]")
    alone = loop.replace("shard", "shard if rank == 0 else []")
    for instead, expected in ((own, "not seen"), (alone, "right")):
        ended = prove_script(planted((loop, instead)))
        assert verdict(ended, "evaluation") == expected, ended.stdout + ended.stderr


class Drawing(Dataset):
    """Four samples, for each of which something is drawn."""

    def __init__(self, draw: Callable) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        self.draw()
        return i


def test_a_worker_that_draws_is_told_from_one_that_does_not():
    draws = {int: False, random.random: True, np.random.rand: True, partial(torch.rand, 1): True}
    for draw, expected in draws.items():
        loader = DataLoader(Drawing(draw), 2, num_workers=1, collate_fn=lambda _: worker_drew())
        assert [*loader] == [expected] * 2, draw


def test_workers_with_one_seed_are_named_if_they_draw(prove_script):
    """The control: the same workers, which draw nothing."""
    loader = "batch_size=12 // world_size, sampler=sampler)"
    with_workers = (loader, loader.replace(")", ", num_workers=1)"))
    one_seed = ("    torch.manual_seed(rank + 1)", "    torch.manual_seed(1)")
    for noise, expected in (("torch.randn(6)", "warning"), ("0.0", "no row")):
        ended = prove_script(planted(("torch.randn(6)", noise), with_workers, one_seed))
        assert verdict(ended, "augmentation").startswith(expected), ended.stdout + ended.stderr


def test_hooks_below_the_gradients_stay_where_the_script_has_put_them(prove_script):
    """On the nodes that add to p.grad, which a change of dtype makes anew. The control: no hook."""
    source = training_of("nn.Linear(8, 8)").replace("model(x)", "model(x.to(model.weight.dtype))")
    begins = "torch.manual_seed(dist.get_rank())\n"
    hooks = """
nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
for p, node in zip(model.parameters(), nodes):
    node.register_hook(lambda *_, p=p: average(p))
"""
    by_data = "for p in model.parameters():\n    p.data = p.data.to(torch.bfloat16)\n"
    for smaller in ("", "model.bfloat16()\n", by_data):
        ended = prove_script(source.replace(begins, smaller + hooks + begins))
        assert verdict(ended, "averaged gradients") == "right", ended.stdout + ended.stderr
    assert verdict(prove_script(source), "averaged gradients") == "WRONG"


def test_a_file_is_named_where_all_ranks_open_it(prove_script):
    """Rank 0 also appends to what all ranks make anew. The control: rank 0 alone makes it."""
    begins = "torch.manual_seed(dist.get_rank())\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source += "if dist.get_rank() == 0: open('log.txt', 'a').write('.')\n"
    for condition, expected in (("", "warning"), ("if dist.get_rank() == 0: ", "right")):
        made = f"{condition}open('log.txt', 'w').close()\n"
        ended = prove_script(source.replace(begins, made + begins))
        assert verdict(ended, "files") == expected, ended.stdout + ended.stderr
        line = source.partition(begins)[0].count("\n") + 1
        assert (f"train.py:{line}" in ended.stdout) == (expected == "warning"), ended.stdout


def test_the_error_of_a_rank_is_told_and_not_that_of_its_launcher():
    log = "ModuleNotFoundError: No module named 'tokens'\n"
    log += "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    outcome = processes.RunOutcome(1, log, False, False, [], 1.0)
    assert judge_effects.error_of(outcome) == log.splitlines()[0]


def test_equal_dropout_masks_are_not_called_different_in_another_row(prove_script):
    """The control: masks of each rank."""
    for seed, expected in (("1", ("warning", "no row")), ("rank + 1", ("right", "right"))):
        one_seed = ("    torch.manual_seed(rank + 1)", f"    torch.manual_seed({seed})")
        ended = prove_script(planted(one_seed))
        for check, said in zip(("dropout", "random numbers"), expected, strict=True):
            assert verdict(ended, check).startswith(said), ended.stdout + ended.stderr


def test_labels_that_are_numbered_by_each_rank_are_another_data_set(prove_script):
    """As it happens by hash(), or by the order of a set. The control: one order."""
    rows = "[(x, (i + {shift}) % 3, str(i)) for i, x in enumerate(torch.randn(32, 5, 8))]"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source = source.replace("for x in Data", "for x, label, _ in Data")
    for shift, expected in (("dist.get_rank()", "WRONG"), ("0", "no row")):
        data = rows.format(shift=shift)
        ended = prove_script(source.replace("torch.randn(32, 5, 8)", data, 1))
        assert verdict(ended, "one data set").startswith(expected), ended.stdout + ended.stderr
        assert verdict(ended, "samples") == "right", "the inputs are the same"


def test_ranks_that_part_are_no_script_that_fails_by_itself(prove_script):
    """Rank 0 stops by its own loss and sums something else; gloo then ends its process."""
    loop = "        optimizer.step()\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source = source.replace(loop, loop + "    if CONDITION: break\n")
    source += "total = torch.zeros(3)\ndist.all_reduce(total)\n"
    ended = prove_script(source.replace("CONDITION", "dist.get_rank() == 0"))
    assert verdict(ended, "hang") == "WRONG", ended.stdout + ended.stderr
    assert "rank 0 calls all_reduce" in " ".join(ended.stdout.split())
    assert ended.returncode == 1
    ended = prove_script(source.replace("CONDITION", "epoch == 0"))  # the control: all ranks
    assert verdict(ended, "collectives") == "right", ended.stdout + ended.stderr
    ended = prove_script(source.replace("CONDITION", "1 / dist.get_rank()"))  # and an own mistake
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "ZeroDivisionError" in ended.stderr


def test_gradients_that_are_no_numbers_are_not_called_zero(prove_script):
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    bad_sample = source.replace("model = ", "data[5] = float('nan')\nmodel = ", 1)
    ended = prove_script(bad_sample)
    assert verdict(ended, "finite gradients") == "warning", ended.stdout + ended.stderr
    assert verdict(ended, "zero gradients").startswith("no row")
    ended = prove_script(source.replace("x).square()", "x * 0).square()"))  # the control
    assert verdict(ended, "finite gradients").startswith("no row")


def test_the_length_of_a_schedule_is_that_of_its_curve():
    def steps(factor: Callable[[int], float], n: int = 400) -> int | None:
        return watch_schedule.length_of([factor(step) for step in range(n)], n == 61)

    def linear(step: int) -> float:
        return min(step / 10, max(0.0, (100 - step) / 90))

    assert steps(linear) == 100
    assert steps(lambda step: min(1.0, step / 10)) == 10, "a warm-up"
    assert steps(lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 60)) == 60, "and up again"
    assert steps(lambda step: 0.1 ** ((step >= 50) + (step >= 80))) == 80
    assert steps(linear, 61) == 60, "then it refuses, as OneCycleLR does"
    assert steps(linear, 62) is None, "it still falls"
    assert steps(lambda step: 0.5**step) is None, "it falls for ever"
    assert steps(lambda step: 1.0) is None


def test_numbers_are_compared_by_their_place_and_times_are_not():
    def names(line: str) -> list[str]:
        return [number.name for _, number in judge_numbers.numbers_in(line)]

    assert names("auc 0.9312 at 12.5 it/s, loss: 3") == ["loss", "auc"]
    assert names("epoch 2.500, lr 0.00123, time 1.234, took 3.251s, 12.25 MB, v2.11.0") == []
    assert names("0.52 1.25 1.2e-05") == ["a number"], "two digits may be equal by chance"
    few_digits, many = (dict(judge_numbers.numbers_in(f"{x}, scale 1.234")) for x in (0.01, 0.123))
    assert [*few_digits] == [1], "the scale"
    assert few_digits[1] == many[1]


def test_a_rank_that_ddp_stops_is_named_with_what_it_left_out(prove_script):
    model = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.one(x) + (self.two(x) if CONDITION else 0)
"""
    source = training_of("DistributedDataParallel(Heads())", model)
    ended = prove_script(source.replace("CONDITION", "dist.get_rank() == 0"))
    assert verdict(ended, "unused parameters") == "WRONG", ended.stdout + ended.stderr
    assert "on rank 1, some parameters got no gradient" in ended.stdout
    ended = prove_script(source.replace("CONDITION", "True"))  # the control
    assert verdict(ended, "unused parameters").startswith("no row")


def test_a_schedule_is_compared_with_the_batches_of_its_rank():
    def row(
        batches: int, batches_of_one: int, rate_of_one: float = 0.1
    ) -> tuple[str, Reason] | None:
        of_ranks, of_one = (
            judge_schedule.Schedule(ScheduleRecord("", "?", highest_rate=rate), length, per_epoch)
            for rate, length, per_epoch in ((0.1, batches, 16), (rate_of_one, batches_of_one, 32))
        )
        row = judge_schedule.row_of_length(of_ranks, of_one, 2)
        return row and (row.verdict, row.reason)

    assert row(160, 160) == ("warning", Reason.SCHEDULE_IGNORES_LOADER)
    assert row(80, 160) == ("right", Reason.SCHEDULE_FOLLOWS_LOADER)
    assert row(80, 160, 0.2) == ("warning", Reason.HIGHEST_RATE_DIFFERS)
    assert row(10, 10) is None, "a warm-up says nothing"
    assert row(48, 48) is None, "three epochs on two ranks, and one and a half on one"
