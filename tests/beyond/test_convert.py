"""convert/: small steps make a DDP script that computes what the script for one GPU computes.

Its page on losses, on the last batch and on loaders: what it says is so.
"""

import json
import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from convert_cases import (
    CLASSIFIER,
    CONVERT,
    DETECTOR,
    converted,
    launch,
    load,
    proof,
    script_of,
    versions,
)
from helpers.on_ranks import on_ranks, run_on_ranks
from helpers.outputs import differences
from local_ranks.scripts import run_script
from markers import fences
from page_sources import shell
from prove_runs import TORCHRUN, run
from repository_pages import ROOT

SCRIPTS = [(CLASSIFIER, 80, [15] * 6), (DETECTOR, 230, [31, 14, 22])]


@pytest.mark.parametrize(("folder", "lines", "changed_at_most"), SCRIPTS)
def test_the_diffs_lead_to_the_script_for_many_gpus_and_are_short(folder, lines, changed_at_most):
    steps, script = load("apply_steps.py"), script_of(folder)
    texts = steps.versions_of(script)
    diffs = [path.read_text() for path in steps.diffs_of(script)]
    assert steps.fresh_diffs(texts) == diffs, "run: python beyond/convert/apply_steps.py"
    assert len(texts[0].splitlines()) <= lines
    changed = [sum(x[0] in "+-" for x in diff.splitlines()[2:]) for diff in diffs]
    assert all(n <= limit for n, limit in zip(changed, changed_at_most, strict=True)), changed
    with pytest.raises(ValueError, match="expected this text once"):  # the control: out of order
        steps.apply(diffs[-1], texts[0])


def few_digits(folder: Path) -> None:
    """The first digits of common/digits, where classifier.py looks for MNIST."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (ROOT / "common" / "digits").glob("*-ubyte"):
        count = 128 if file.name.startswith("train") else 33
        header, each = (16, 64) if "images" in file.name else (8, 1)
        data = file.read_bytes()
        cut = data[:4] + count.to_bytes(4, "big") + data[8 : header + count * each]
        (raw / file.name).write_bytes(cut)


def verdicts_on_the_page() -> list[dict[str, str]]:
    """What the page says that prove says, for each step: the verdict of each row."""
    page = (CONVERT / "README.md").read_text()
    table = page.partition("| row of prove")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", table, re.M)
    columns = zip(*(cells.replace("*", "").split(" | ") for _, cells in rows), strict=True)
    return [dict(zip([check for check, _ in rows], column, strict=True)) for column in columns]


@pytest.mark.parametrize("step", range(1, 7))
def test_after_each_step_prove_says_what_the_page_says(step, tmp_path):
    few_digits(tmp_path)
    (tmp_path / "mine.py").write_text(versions(CLASSIFIER)[step])
    ended = run(tmp_path, "--json=rows.json", "--batches=2", *TORCHRUN, "mine.py")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    said = {row["check"]: row["verdict"] for row in rows}
    on_the_page = verdicts_on_the_page()[step - 1]
    for check, verdict in on_the_page.items():
        assert said.get(check, "-").replace("not seen", "-") == verdict, check
    others = [verdict for check, verdict in said.items() if check not in on_the_page]
    assert {*others} == {"right"}
    if step == 1:  # the page shows this table
        _, table = (fence.text for fence in fences("text", [CONVERT / "README.md"]))
        for part in table.split("...\n"):
            assert re.sub(r"in \d+ s", "", part) in re.sub(r"in \d+ s", "", ended.stdout)


def test_the_page_shows_what_the_classifier_prints(tmp_path):
    shutil.copytree(ROOT / "common" / "digits", tmp_path / "data" / "MNIST" / "raw")
    epochs, _ = (fence.text for fence in fences("text", [CONVERT / "README.md"]))
    [(_, printed)] = run_script(str(CLASSIFIER / "classifier.py"), "--epochs=1", cwd=tmp_path)
    assert differences(epochs.splitlines()[0], printed, percent=0.02) == []


def test_the_converted_classifier_is_its_original_and_twice_the_loss_is_not(tmp_path):
    few_digits(tmp_path)
    shutil.copy(CLASSIFIER / "classifier.py", tmp_path)
    original = "--original=torchrun --nproc-per-node=1 classifier.py"  # which prove can fork
    source = converted(CLASSIFIER).read_text()
    assert {*proof(tmp_path, source, original).values()} == {"right"}
    verdict_of = proof(tmp_path, source.replace("* world_size / divisor", "/ divisor"), original)
    assert (verdict_of["one rank"], verdict_of["the original"]) == ("WRONG", "WRONG")


@pytest.mark.skipif(not shutil.which("patch"), reason="no program `patch`")
@pytest.mark.parametrize(
    ("folder", "steps", "original"), [(CONVERT, 6, CLASSIFIER), (DETECTOR, 3, DETECTOR)]
)
def test_the_commands_of_the_page_lead_to_the_script_for_many_gpus(
    folder, steps, original, tmp_path
):
    shown = fences("bash", [folder / "README.md"])
    first, *quick = [
        f"{x.text.strip()} {x.value.removeprefix('add ')}"
        for x in shown
        if "nothing" not in x.value
    ]
    (tmp_path / "root").mkdir()
    for name in ("beyond", "common"):
        (tmp_path / "root" / name).symlink_to(ROOT / name)
    here = tmp_path / folder.name
    shell(first, cwd=tmp_path / "root")
    for line in quick:
        if line.startswith("python "):
            _, script, *flags = line.split()
            assert run_script(str(here / script), *flags, cwd=here)[0][0] == 0
        else:
            printed = shell(line, cwd=here)
            if line.startswith("grep"):
                assert all(
                    word in printed
                    for word in ("weight=", "dataset)", "break", "torch.save", "print(")
                )
    patches = "; ".join(f"patch -s mine.py steps/{number}.diff" for number in range(1, steps + 1))
    shell(f"{patches}; cmp mine.py {converted(original)}", cwd=here)


def _weights_after_each_step(rank: int, samples: int, drop_last: bool) -> torch.Tensor:
    """Return the weights after each step of two epochs, in global batches of 12."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(samples, 5), torch.randn(samples, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer, weights = torch.optim.SGD(ddp.parameters(), 0.1), []
    sampler = DistributedSampler(data, drop_last=drop_last)
    local_batch = 12 // torch.distributed.get_world_size()
    loader = DataLoader(data, local_batch, sampler=sampler, drop_last=drop_last)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            weights.append(ddp.module.weight.detach().clone())
    return torch.stack(weights)


@pytest.mark.parametrize(
    ("samples", "dropped_by_one", "dropped_by_two", "steps", "exact"),
    [
        (100, False, False, 18, 18),  # 2 + 2 samples are left for the last batch of an epoch
        (101, True, True, 16, 16),
        (101, False, False, 18, 8),  # 3 + 3, of which one comes twice: the last batch differs
        (101, False, True, 16, 8),  # the control: the other script trains in 18 steps
    ],
)
def test_the_last_batch_is_exact_if_the_ranks_share_its_samples_equally(
    samples, dropped_by_one, dropped_by_two, steps, exact
):
    [one_rank] = run_on_ranks(1, _weights_after_each_step, samples, dropped_by_one)
    two = run_on_ranks(2, _weights_after_each_step, samples, dropped_by_two)[0]
    assert (len(two), len(one_rank)) == (steps, 16 if dropped_by_one else 18)
    apart = (two - one_rank[:steps]).abs().amax((1, 2))
    assert int((apart < 1e-12).sum()) == exact
    assert bool((apart[:8] < 1e-12).all())


def test_the_search_finds_every_pattern_of_its_table():
    page = (CONVERT / "README.md").read_text()
    searches = re.findall(r"^grep -niE '(.+)' classifier.py$", page, re.M)
    assert (len(searches), max(map(len, searches)) <= 100) == (5, True), "as one would type them"
    search = re.compile("|".join(searches), re.I)
    rows = page.partition("| pattern |")[2].partition("\n\n")[0].splitlines()[2:]
    patterns = [code for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(patterns) > 30
    assert [code for code in patterns if not search.search(code)] == []
    assert not search.search("optimizer.step()"), "the control"


OTHER_LOSSES = ("contrastive", "Dice over the batch", "attention over the batch")
COUNTED = "mean over those that count"


def test_a_mean_over_samples_is_right_under_ddp_and_other_losses_are_not():
    errors = load("losses.py").measure()
    assert max(errors["mean over samples"]) < 1e-12
    assert errors["sum over samples"] == pytest.approx([1 / 2] * 12), "a factor of 1 / ranks"
    assert min(min(errors[name]) for name in OTHER_LOSSES) > 0.01
    assert median(errors[COUNTED]) > 0.01, "not in each batch, as the ranks may count alike"


@on_ranks(2)
def test_a_loss_of_all_ranks_outputs_is_right_whatever_it_is(rank):
    losses, rows = load("losses.py"), slice(16 * rank, 16 * rank + 16)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10).double()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.randn(32, 64, dtype=torch.float64)
    labels = torch.arange(16).repeat_interleave(2) % 10
    for name in ("mean over samples", COUNTED, *OTHER_LOSSES):
        exact = losses.gradient(losses.LOSSES[name](model(batch), labels), model)
        model.zero_grad()
        outputs = torch.cat(torch.distributed.nn.functional.all_gather(ddp(batch[rows])))
        losses.LOSSES[name](outputs, labels).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert (gradient - exact).norm() / exact.norm() < 1e-12, name


@pytest.mark.parametrize("word", ["seeds", "Dealt", "Parts", "Shard", "patient", "mean_and_std"])
def test_each_snippet_runs_on_two_ranks(word, tmp_path):
    [code] = [f.text for f in fences("python", [CONVERT / "questions.md"]) if word in f.text]
    (tmp_path / "snippet.py").write_text(code)
    status, output = launch(tmp_path / "snippet.py")
    assert status == (0, 0), output
    assert word != "Shard" or output[1] == "rank 1 reads [1, 3, 5]\n"
    alike = word in ("seeds", "mean_and_std")
    assert (output[0].replace("rank 0", "rank 1") == output[1]) == alike
    assert word != "mean_and_std" or "subtracts 2.50 and divides by 1.87" in output[0]
    if word == "Parts":
        parts = ([[5, 8], [0], [3, 6]], [[2], [7], [1, 4]])
        assert list(output) == [f"rank {rank} reads {parts[rank]}\n" for rank in (0, 1)]
    if word == "Dealt":
        seeded = torch.Generator().manual_seed(0)
        order = list(RandomSampler(range(9), replacement=True, generator=seeded))
        assert list(output) == [f"rank {rank} reads {order[rank:8:2]}\n" for rank in (0, 1)]


CURES = ("init_process_group", "set_timeout", "barrier of a group", "monitored barrier of a group")


def _wait_for_a_busy_rank_0(rank: int, cure: str) -> str:
    """Rank 0 works for two seconds, and whoever waits for it may do so for one."""
    short, long = timedelta(seconds=1), timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=long if cure == "init_process_group" else short)
    group = dist.new_group(backend="gloo", timeout=long) if "of a group" in cure else None
    if cure == "set_timeout":
        dist.set_timeout(long)
    if rank == 0:
        if "dies" in cure:
            os._exit(1)
        time.sleep(2)
    try:
        if cure == "argument of monitored_barrier":
            dist.monitored_barrier(timeout=long)
        elif "monitored" in cure:
            dist.monitored_barrier(group)
        else:
            dist.barrier(group)
    except RuntimeError as error:
        return str(error)
    return "goes on"


@pytest.mark.parametrize("cure", CURES)
def test_the_others_wait_for_a_busy_rank_0_only_with_a_longer_limit(cure):
    if cure == "set_timeout" and not hasattr(dist, "set_timeout"):
        pytest.skip("came with torch 2.14")
    assert run_on_ranks(2, _wait_for_a_busy_rank_0, cure) == ["goes on"] * 2


@pytest.mark.parametrize(
    ("cure", "error"),
    [
        ("none", r"Timed out waiting 1000ms|Application timeout"),
        ("argument of monitored_barrier", "errors while waiting for send/recv from rank 0"),
    ],
)
def test_the_others_give_up_on_a_busy_rank_0_if_the_cure_is(cure, error):
    assert re.search(error, run_on_ranks(2, _wait_for_a_busy_rank_0, cure)[1])


def test_however_long_the_limit_the_others_notice_that_rank_0_has_died():
    cure = "barrier of a group, and rank 0 dies"
    [_, error] = run_on_ranks(2, _wait_for_a_busy_rank_0, cure, may_die=(0,))
    assert re.search("Connection (closed|reset) by peer", error)


def test_set_timeout_leaves_the_store_as_it_was():
    assert run_on_ranks(1, _limit_of_the_store) == [timedelta(minutes=30)]


def _limit_of_the_store(rank: int) -> timedelta:
    dist.init_process_group("gloo")
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(hours=12))
    return dist.distributed_c10d._get_default_store().timeout
