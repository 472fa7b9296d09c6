"""convert/: small steps make DDP scripts that compute what the scripts for one GPU compute."""

import os
import re
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from difflib import unified_diff
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from common.chapters import load_chapter
from helpers.local_ranks import launch_script, on_ranks, run_on_ranks, run_script
from helpers.machine import scratch_folder
from helpers.outputs import differences
from helpers.prove_runs import TORCHRUN, run, verdicts
from helpers.stage_files import fresh_module, replace_once
from repository_pages import ROOT, fences, shell

CONVERT = ROOT / "beyond" / "convert"
CLASSIFIER, DETECTOR, EXAMPLES = (CONVERT / x for x in ("classifier", "detector", "examples"))
ONE_BLOCK = "models.ResNet(models.resnet.BasicBlock, [1] * 4)"  # half of resnet18, so quicker
SHALLOW = ("getattr(models, args.backbone)()", ONE_BLOCK)
SMALL = ("--image-size=64", "--batch-size=4", "--warmup=1", "--workers=0", "--device=cpu")


def load(name: str | Path, *changes: tuple[str, str], folder: Path = DETECTOR):
    return fresh_module(folder / name, [(str(name), *change) for change in changes])


def scenes(train: int = 8, val: int = 8, empty: float = 0.0) -> Path:
    """Scenes of 64 pixels, a share of them empty, and one not square. "val" has the first ones."""
    folder, module = scratch_folder(), load("scenes.py", ("EMPTY = 0.04", f"EMPTY = {empty}"))
    file = folder / "annotations" / "instances_train.json"
    module.write_scenes(folder, "train", ROOT / "common" / "digits", val, 64, seed=0)
    (folder / "train").rename(folder / "val")
    file.rename(file.with_stem("instances_val"))
    module.write_scenes(folder, "train", ROOT / "common" / "digits", train, 64, seed=0)
    Image.new("RGB", (90, 48)).save(folder / "train" / "000001.png")
    return folder


@cache
def converted(folder: Path) -> Path:
    """The script for many GPUs, which the last step leaves."""
    script = scratch_folder() / f"{folder.name}_ddp.py"
    script.write_text(load("apply_steps.py", folder=CONVERT).scripts(folder)[-1])
    return script


def launch(file: Path, *flags: str, ranks: int = 2) -> tuple:
    """The status of each rank, and the output of each; ranks=0 is plain python."""
    flags = (*SMALL, f"--run-dir={scratch_folder()}", *flags)
    joined = {"TORCH_DIST_INIT_BARRIER": "1"}  # a rank that ends at once lets the others join
    how = {"ranks": ranks, "env": joined}
    answers = launch_script(str(file), *flags, **how) if ranks else run_script(str(file), *flags)
    return tuple(zip(*answers, strict=True))


@pytest.mark.parametrize(("folder", "count", "lines"), [(CLASSIFIER, 6, 80), (DETECTOR, 8, 230)])
def test_the_diffs_lead_to_the_script_for_many_gpus_and_are_short(folder, count, lines):
    steps = load("apply_steps.py", folder=CONVERT)
    texts = steps.scripts(folder)
    diffs = [path.read_text() for path in steps.steps(folder)]
    readme = steps.PAGES[folder].read_text()
    assert steps.fresh_diffs(texts) == diffs, "run: python beyond/convert/apply_steps.py"
    assert steps.show(readme, diffs) == readme
    assert len(texts[0].splitlines()) <= lines
    changed = [sum(x[0] in "+-" for x in diff.splitlines()[2:]) for diff in diffs]
    assert (len(changed), max(changed) <= 15) == (count, True)
    with pytest.raises(ValueError, match="expected this text once"):  # the control: out of order
        steps.apply(diffs[-1], texts[1])


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


def proof(folder: Path, source: str, *options: str, flags: tuple = ()) -> dict[str, str]:
    """The verdict of each row of prove's table, of a script with these flags."""
    (folder / "mine.py").write_text(source)
    return verdicts(folder, "--batches=2", *options, *TORCHRUN, "mine.py", *flags)


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
    script = load("apply_steps.py", folder=CONVERT).scripts()[step]
    verdict_of, on_the_page = proof(tmp_path, script), verdicts_on_the_page()[step - 1]
    for check, verdict in on_the_page.items():
        assert verdict_of.get(check, "-").replace("not seen", "-") == verdict, check
    others = [verdict for check, verdict in verdict_of.items() if check not in on_the_page]
    assert {*others} == {"right"}


def test_the_page_shows_what_the_classifier_prints_and_what_prove_says_after_step_1(tmp_path):
    shutil.copytree(ROOT / "common" / "digits", tmp_path / "data" / "MNIST" / "raw")
    epochs, table = (fence.text for fence in fences("text", [CONVERT / "README.md"]))
    [(_, printed)] = run_script(str(CLASSIFIER / "classifier.py"), "--epochs=1", where=tmp_path)
    assert differences(epochs.splitlines()[0], printed, percent=0.02) == []
    script = load("apply_steps.py", folder=CONVERT).scripts()[1]
    (tmp_path / "mine.py").write_text(script)
    ended = run(tmp_path, *TORCHRUN, "mine.py")
    for part in table.split("...\n"):
        assert re.sub(r"in \d+ s", "", part) in re.sub(r"in \d+ s", "", ended.stdout)


def test_the_converted_classifier_is_its_original_and_twice_the_loss_is_not(tmp_path):
    few_digits(tmp_path)
    shutil.copy(CLASSIFIER / "classifier.py", tmp_path)
    original = "--original=torchrun --nproc-per-node=1 classifier.py"  # which prove can fork
    source = converted(CLASSIFIER).read_text()
    assert {*proof(tmp_path, source, original).values()} == {"right"}
    verdict_of = proof(tmp_path, source.replace("* world_size / divisor", "/ divisor"), original)
    assert (verdict_of["one rank"], verdict_of["the original"]) == ("WRONG", "WRONG")


@pytest.mark.parametrize("step", range(1, 9))
def test_the_script_runs_after_each_step_and_shows_what_the_readme_says(step, tmp_path):
    script = load("apply_steps.py", folder=CONVERT).scripts(DETECTOR)[step]
    (tmp_path / "mine.py").write_text(script.replace(*SHALLOW))
    status, output = launch(tmp_path / "mine.py", f"--data-dir={scenes(val=2)}", "--epochs=1")
    assert status == (0, 0), output
    assert ["rank 0 of 2" in output[0], "rank 1 of 2" in output[1]] == [True, True]
    losses = [re.findall(r"epoch 1  loss (\S+)", text) for text in output]
    assert (losses[0] == losses[1]) == (step < 3), "from step 3 on, the ranks see other images"
    assert [len(x) for x in losses] == [1, step < 8], "rank 0 alone logs"


@pytest.mark.parametrize(("step", "missing"), [(4, {"files", "weights"}), (8, set())])
def test_prove_says_what_the_detector_still_misses_after_a_step(step, missing, tmp_path):
    script = load("apply_steps.py", folder=CONVERT).scripts(DETECTOR)[step].replace(*SHALLOW)
    flags = (*SMALL, f"--data-dir={scenes(8, 2)}", "--epochs=1", "--image-size=48")
    verdict_of = proof(tmp_path, script, flags=flags)
    wrong = {check for check, verdict in verdict_of.items() if verdict == "WRONG"}
    assert (missing <= wrong, bool(wrong)) == (True, bool(missing)), verdict_of
    assert (verdict_of["one rank"] == "right") == (step == 8)


def _run(rank: int, name: str | Path, flags: tuple, *changes: tuple[str, str]) -> dict:
    module, result = load(name, SHALLOW, *changes), {}
    if FLOAT64 in changes:
        torch.set_default_dtype(torch.float64)
        module.nn.SyncBatchNorm.convert_sync_batchnorm = load_chapter(
            "05", "sync_batchnorm"
        ).convert_sync_batchnorm
    module.log = lambda _, values: result.update({x: values[x] for x in values if "mAP" in x})
    module.save = lambda *_, **parts: result.update(parts["model"].state_dict())
    sys.argv = [str(name), *SMALL, f"--run-dir={scratch_folder()}", *flags]
    module.main()
    return result


FLOAT64 = ("v2.ToDtype(torch.float32", "v2.ToDtype(torch.float64")
SAME_BATCHES = ("shuffle=True", "sampler=torch.utils.data.DistributedSampler(train_set, 1, 0)")
SYNC = ('if args.device.type == "cuda":  # torch', "if args.device:  # stage 05's, not torch")
LOCAL_COUNT = ("return GlobalSSD(", "return SSD(")
APART = ("torch.cat(tables)", "torch.cat(rows)")


def test_c43_two_ranks_reach_the_weights_of_one_process_on_the_same_batches():
    flags = (f"--data-dir={scenes(8, 1, 0.3)}", "--epochs=1", "--image-size=48", "--eval-epochs")
    [single] = run_on_ranks(1, _run, "detector.py", flags, FLOAT64, SAME_BATCHES)

    def distance(*changes: tuple[str, str]) -> float:
        ddp, _ = run_on_ranks(2, _run, converted(DETECTOR), flags, FLOAT64, *changes)
        return max(float((ddp[key] - single[key]).abs().max()) for key in single)

    assert distance(SYNC) < 1e-10
    assert distance(SYNC, LOCAL_COUNT) > 1e-5
    assert distance() > 1e-5  # with BatchNorm over the local batch


def test_the_map_of_two_ranks_is_that_of_one_process_to_the_last_digit(tmp_path):
    by_heart = (DETECTOR / "detector.py").read_text().replace(*SHALLOW)
    by_heart = by_heart.replace("else loader", "else list(loader) * 20")
    (tmp_path / "detector.py").write_text(by_heart)
    flags = ("--batch-size=2", "--epochs=1", "--lr=0.2", "--eval-epochs", f"--run-dir={tmp_path}")
    assert launch(tmp_path / "detector.py", f"--data-dir={scenes(4)}", *flags, ranks=0)[0] == (0,)
    for images in (1, 3):  # of one image, rank 1 gets none
        flags = (f"--data-dir={scenes(4, images)}", f"--resume={tmp_path}/last.pt", "--evaluate")
        [single] = run_on_ranks(1, _run, "detector.py", flags)
        assert run_on_ranks(2, _run, converted(DETECTOR), flags) == [single, single]
    assert single["mAP"] > 0
    assert run_on_ranks(2, _run, converted(DETECTOR), flags, APART)[0] != single


def test_images_without_boxes_other_sizes_and_a_rank_with_fewer_batches_do_not_hang():
    flags = (f"--data-dir={scenes(5, 1, 0.8)}", "--epochs=2", "--augment")
    status, output = launch(converted(DETECTOR), *flags)
    assert status == (0, 0), output
    assert re.search(r"epoch 2  loss \d", output[0])


@pytest.mark.parametrize(
    ("name", "ranks", "old", "new", "says"),
    [
        ("detector.py", 0, "{", "", "JSONDecodeError"),
        ("detector.py", 0, '"bbox": [', '"bbox": [1, ', "wrong annotation"),
        ("detector.py", 0, ".png", ".jpg", "images without a file"),
        ("converted", 2, "", "", "No such file"),
        ("converted", 0, "", "", "start with torchrun"),
    ],
)
def test_bad_input_ends_in_one_line_and_status_2(name, ranks, old, new, says):
    folder, file = scratch_folder(), "annotations/instances_train.json"
    if old:
        shutil.copytree(scenes(), folder, dirs_exist_ok=True)
        (folder / file).write_text((folder / file).read_text().replace(old, new))
    script = converted(DETECTOR) if name == "converted" else DETECTOR / name
    status, output = launch(script, f"--data-dir={folder}", ranks=ranks)
    lines = [x for text in output for x in text.splitlines() if not x.startswith("rank ")]
    assert ({*status}, [x[:7] for x in lines]) == ({2}, ["error: "] * len(status)), output
    assert says in lines[0]


@pytest.mark.skipif(not shutil.which("patch"), reason="no program `patch`")
@pytest.mark.parametrize(
    ("folder", "steps", "original"), [(CONVERT, 6, CLASSIFIER), (DETECTOR, 8, DETECTOR)]
)
def test_the_commands_of_the_page_lead_to_the_script_for_many_gpus(
    folder, steps, original, tmp_path
):
    shown = fences("bash", [folder / "README.md"])
    first, *quick = [f"{x.text.strip()} {x.note[18:]}" for x in shown if "nothing" not in x.note]
    (tmp_path / "root").mkdir()
    for name in ("beyond", "common"):
        (tmp_path / "root" / name).symlink_to(ROOT / name)
    here = tmp_path / folder.name
    shell(first, where=tmp_path / "root")
    for line in quick:
        if line.startswith("python "):
            _, script, *flags = line.split()
            assert run_script(str(here / script), *flags, where=here)[0][0] == 0
        else:
            printed = shell(line, where=here)
            if line.startswith("grep"):
                assert all(
                    word in printed
                    for word in ("weight=", "dataset)", "break", "torch.save", "print(")
                )
    patches = "; ".join(f"patch -s mine.py steps/{number}.diff" for number in range(1, steps + 1))
    shell(f"{patches}; cmp mine.py {converted(original)}", where=here)


# In float64, with the same global batches and the same noise; SyncBatchNorm is stage 05's.
EXAMPLE = {
    "gan": (
        ("if gpu else model", "if True else model"),
        ("manual_seed(1 + rank)", "manual_seed(1)"),
        ("torch.randn(len(real), 8, generator=noise)",
         "torch.randn(len(real) * world_size, 8, generator=noise)[rank::world_size]"),
        ("torch.randn(64 // world_size, 8, generator=noise)",
         "torch.randn(64, 8, generator=noise)[rank::world_size]"),
    ),
    "language": (),
    "contrastive": (),
    "segmentation": (),
}  # fmt: skip
WRONG_LINES = [  # an example, a line, and what looks as good
    ("gan", "critic_loss(ddp_critic(real), 1.0).backward()",
     "both = ddp_critic(torch.cat([real, fake.detach()]))\n"
     "        losses = critic_loss(both[:len(real)], 1.0), critic_loss(both[len(real):], 0.0)\n"
     "        sum(losses).backward()"),
    ("gan", "if True else model", "if False else model"),
    ("language", "to_columns(text[:5000], COLUMNS)[:, own_columns]",
     "to_columns(text[rank:5000:world_size], local_columns)"),
    ("contrastive", "first, second = (torch.cat(all_gather(x)) for x in (first, second))",
     "BATCH = len(first)"),
    ("segmentation", "all_reduce(dice_sums(logits.softmax(dim=1)[:, 1], masks))",
     "dice_sums(logits.softmax(dim=1)[:, 1], masks)"),
    ("segmentation", "dist.all_reduce(labeled)", "labeled *= world_size"),
]  # fmt: skip


def _example(rank: int, name: str, *changes: tuple[str, str]) -> dict:
    """The weights after the script has run, and what it has printed."""
    os.chdir(scratch_folder())
    source = replace_once((EXAMPLES / f"{name}.py").read_text(), *changes)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = load_chapter(
        "05", "sync_batchnorm"
    ).convert_sync_batchnorm
    torch.set_default_dtype(torch.float64)
    Path("script.py").write_text(source)
    with redirect_stdout(StringIO()) as printed:
        names = runpy.run_path("script.py", run_name="__main__")
    models = [names[key] for key in ("model", "generator", "critic") if key in names]
    weights = [p.detach() for model in models for p in model.parameters()]
    return {"weights": torch.cat([p.flatten() for p in weights]), "printed": printed.getvalue()}


@cache
def original_of(name: str) -> dict:
    """In the order of a DistributedSampler, if it shuffles."""
    epochs, sampler = (
        "for epoch in range(3):\n",
        "torch.utils.data.DistributedSampler(train_set, 1, 0)",
    )
    changes = (
        ("\nloader =", f"\nsampler = {sampler}\nloader ="),
        ("shuffle=True", "sampler=sampler"),
        (epochs, f"{epochs}    sampler.set_epoch(epoch)\n"),
    )
    shuffles = "shuffle=True" in (EXAMPLES / f"{name}.py").read_text()
    return run_on_ranks(1, _example, name, *changes * shuffles)[0]


@pytest.mark.parametrize("name", EXAMPLE)
def test_an_example_trains_on_two_ranks_what_one_process_trains(name):
    single = original_of(name)
    first, second = run_on_ranks(2, _example, f"{name}_ddp", *EXAMPLE[name])
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - single["weights"]).abs().max() < 1e-10
    assert (single["printed"] != "", second["printed"]) == (True, ""), "only rank 0 prints"
    if name in ("language", "segmentation"):  # these print an evaluation, which is exact
        assert first["printed"] == single["printed"]
    lines = [(EXAMPLES / f"{name}{end}.py").read_text().splitlines() for end in ("", "_ddp")]
    changed = [x for x in unified_diff(*lines, lineterm="") if x[0] in "+-"][2:]
    assert 15 <= len(changed) <= 40


@pytest.mark.parametrize(("name", "old", "new"), WRONG_LINES)
def test_with_one_line_that_looks_as_good_an_example_trains_something_else(name, old, new):
    changes = [*EXAMPLE[name], (old, new)]
    if "both" in new:
        changes.append(("critic_loss(ddp_critic(fake.detach()), 0.0).backward()", "pass"))
    weights = run_on_ranks(2, _example, f"{name}_ddp", *changes)[0]["weights"]
    assert (weights - original_of(name)["weights"]).abs().max() > 1e-5


def test_a_rate_that_only_rank_0_lowers_lets_the_ranks_train_apart():
    worse = ("test_loss < best", "epoch != 1")
    same = run_on_ranks(2, _example, "language_ddp", worse)
    lowered = (
        'optimizer.param_groups[0]["lr"] /= 4',
        'optimizer.param_groups[0]["lr"] /= 4 - 3 * rank',
    )
    apart = run_on_ranks(2, _example, "language_ddp", worse, lowered)
    assert torch.equal(same[0]["weights"], same[1]["weights"])
    assert (apart[0]["weights"] - apart[1]["weights"]).abs().max() > 1e-2


def _weights_after_each_step(rank: int, samples: int, drop_last: bool) -> torch.Tensor:
    """Of two epochs, in global batches of 12."""
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


def test_columns_that_do_not_divide_by_the_ranks_are_refused_in_one_line():
    """8 of them, on 3 ranks: without the check, two would never be read. On 2, see above."""
    script = f"{EXAMPLES.relative_to(ROOT)}/language_ddp.py"
    answers = launch_script(script, ranks=3, where=scratch_folder())
    assert answers == [(2, "error: 8 columns do not divide by 3 ranks\n")] * 3


def test_the_search_finds_every_pattern_of_its_table():
    page = (CONVERT / "README.md").read_text()
    searches = re.findall(r"^grep -niE '(.+)' classifier.py$", page, re.M)
    assert (len(searches), max(map(len, searches)) <= 100) == (4, True), "as one would type them"
    search = re.compile("|".join(searches), re.I)
    rows = page.partition("| pattern |")[2].partition("\n\n")[0].splitlines()[2:]
    patterns = [code for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(patterns) > 30
    assert [code for code in patterns if not search.search(code)] == []
    assert not search.search("optimizer.step()"), "the control"


def test_the_page_shows_the_diffs_of_the_examples():
    page = (EXAMPLES / "README.md").read_text()
    assert load("apply_steps.py", folder=CONVERT).show_examples(page) == page, (
        "run: python apply_steps.py"
    )


OTHER_LOSSES = ("contrastive", "Dice over the batch", "attention over the batch")


def test_a_mean_over_samples_is_right_under_ddp_and_other_losses_are_not():
    errors = load("losses.py", folder=CONVERT).measure()
    assert max(errors["mean over samples"]) < 1e-12
    assert errors["sum over samples"] == pytest.approx([1 / 2] * 12), "a factor of 1 / ranks"
    assert min(min(errors[name]) for name in OTHER_LOSSES) > 0.01


@on_ranks(2)
def test_a_loss_of_all_ranks_outputs_is_right_whatever_it_is(rank):
    losses, rows = load("losses.py", folder=CONVERT), slice(16 * rank, 16 * rank + 16)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10).double()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.randn(32, 64, dtype=torch.float64)
    labels = torch.arange(16).repeat_interleave(2) % 10
    for name in ("mean over samples", *OTHER_LOSSES):
        exact = losses.gradient(losses.LOSSES[name](model(batch), labels), model)
        model.zero_grad()
        outputs = torch.cat(torch.distributed.nn.functional.all_gather(ddp(batch[rows])))
        losses.LOSSES[name](outputs, labels).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert (gradient - exact).norm() / exact.norm() < 1e-12, name


@pytest.mark.parametrize("word", ["seeds", "Dealt", "Shard"])
def test_each_snippet_runs_on_two_ranks(word, tmp_path):
    [code] = [f.text for f in fences("python", [CONVERT / "questions.md"]) if word in f.text]
    (tmp_path / "snippet.py").write_text(code)
    status, output = launch(tmp_path / "snippet.py")
    assert status == (0, 0), output
    assert word != "Shard" or output[1] == "rank 1 reads [1, 3, 5]\n"
    assert (output[0].replace("rank 0", "rank 1") == output[1]) == (word not in ("Dealt", "Shard"))
    if word == "Dealt":
        seeded = torch.Generator().manual_seed(0)
        order = list(RandomSampler(range(9), replacement=True, generator=seeded))
        assert list(output) == [f"rank {rank} reads {order[rank:8:2]}\n" for rank in (0, 1)]
