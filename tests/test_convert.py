"""convert/: eight steps lead from single.py to ddp.py, which computes what single.py computes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from repository_pages import ROOT, fences
from support import FOLDERS, chapter, command, fresh_module, launch_ranks, run_ranks, scratch_folder

CONVERT = ROOT / "beyond" / "convert"
SMALL = ("--image-size=64", "--batch-size=4", "--warmup=1", "--workers=0", "--device=cpu")


def load(name: str, *changes: tuple[str, str]):
    with patch.dict(FOLDERS, {"convert": CONVERT}):
        return fresh_module("convert", name, [(name, *change) for change in changes])


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


def launch(file: Path, *flags: str, ranks: int = 2) -> tuple:
    """The status of each rank, and the output of each; ranks=0 is plain python."""
    flags = (*SMALL, f"--run-dir={scratch_folder()}", *flags)
    ended = launch_ranks(str(file), *flags, ranks=ranks) if ranks else command(str(file), *flags)
    return tuple(zip(*ended, strict=True))


def test_the_diffs_lead_from_single_to_ddp_and_are_short():
    steps = load("steps.py")
    texts, diffs = steps.scripts(), [path.read_text() for path in steps.STEPS]
    readme = (CONVERT / "README.md").read_text()
    assert steps.fresh_diffs(texts) == diffs, "run: python beyond/convert/steps.py"
    assert texts[-1] == (CONVERT / "ddp.py").read_text()
    assert steps.show(readme, diffs) == readme
    assert len(texts[0].splitlines()) <= 220
    changed = [sum(x[0] in "+-" for x in diff.splitlines()[2:]) for diff in diffs]
    assert (len(changed), max(changed) <= 15) == (8, True)
    with pytest.raises(ValueError, match="expected this text once"):  # the control: without step 3
        steps.apply(diffs[6], texts[2])


@pytest.mark.parametrize("step", range(1, 9))
def test_the_script_runs_after_each_step_and_shows_what_the_readme_says(step, tmp_path):
    (tmp_path / "mine.py").write_text(load("steps.py").scripts()[step])
    status, output = launch(tmp_path / "mine.py", f"--data-dir={scenes()}", "--epochs=1")
    assert status == (0, 0), output
    assert ["rank 0 of 2" in output[0], "rank 1 of 2" in output[1]] == [True, True]
    losses = [re.findall(r"epoch 1  loss (\S+)", text) for text in output]
    assert (losses[0] == losses[1]) == (step < 3), "from step 3 on, the ranks see other images"
    assert [len(x) for x in losses] == [1, step < 8], "rank 0 alone logs"


def _run(rank: int, name: str, flags: tuple, *changes: tuple[str, str]) -> dict:
    module, result = load(name, *changes), {}
    if FLOAT64 in changes:
        torch.set_default_dtype(torch.float64)
        module.nn.SyncBatchNorm.convert_sync_batchnorm = chapter(
            "05", "sync_batchnorm"
        ).convert_sync_batchnorm
    module.log = lambda _, values: result.update({x: values[x] for x in values if "mAP" in x})
    module.save = lambda *_, **parts: result.update(parts["model"].state_dict())
    sys.argv = [name, *SMALL, f"--run-dir={scratch_folder()}", *flags]
    module.main()
    return result


FLOAT64 = ("v2.ToDtype(torch.float32", "v2.ToDtype(torch.float64")
SAME_BATCHES = ("shuffle=True", "sampler=torch.utils.data.DistributedSampler(train_set, 1, 0)")
SYNC = ('if args.device.type == "cuda":  # torch', "if args.device:  # stage 05's, not torch")
LOCAL_COUNT = ("return GlobalSSD(", "return SSD(")
APART = ("torch.cat(tables)", "torch.cat(rows)")


def test_c43_two_ranks_reach_the_weights_of_single_py_on_the_same_batches():
    flags = (f"--data-dir={scenes(8, 1, 0.3)}", "--epochs=1", "--image-size=48", "--eval-epochs")
    [single] = run_ranks(1, _run, "single.py", flags, FLOAT64, SAME_BATCHES)

    def distance(*changes: tuple[str, str]) -> float:
        ddp, _ = run_ranks(2, _run, "ddp.py", flags, FLOAT64, *changes)
        return max(float((ddp[key] - single[key]).abs().max()) for key in single)

    assert distance(SYNC) < 1e-10
    assert distance(SYNC, LOCAL_COUNT) > 1e-5
    assert distance() > 1e-5  # with BatchNorm over the local batch


def test_the_map_of_two_ranks_is_that_of_one_process_to_the_last_digit(tmp_path):
    by_heart = (CONVERT / "single.py").read_text().replace("else loader", "else list(loader) * 20")
    (tmp_path / "single.py").write_text(by_heart)
    flags = ("--batch-size=2", "--epochs=1", "--lr=0.2", "--eval-epochs", f"--run-dir={tmp_path}")
    assert launch(tmp_path / "single.py", f"--data-dir={scenes(4)}", *flags, ranks=0)[0] == (0,)
    for images in (1, 3):  # of one image, rank 1 gets none
        flags = (f"--data-dir={scenes(4, images)}", f"--resume={tmp_path}/last.pt", "--evaluate")
        [one] = run_ranks(1, _run, "single.py", flags)
        assert run_ranks(2, _run, "ddp.py", flags) == [one, one]
    assert one["mAP"] > 0
    assert run_ranks(2, _run, "ddp.py", flags, APART)[0] != one


def test_images_without_boxes_other_sizes_and_a_rank_with_fewer_batches_do_not_hang():
    flags = (f"--data-dir={scenes(5, 1, 0.8)}", "--epochs=2", "--augment")
    status, output = launch(CONVERT / "ddp.py", *flags)
    assert status == (0, 0), output
    assert re.search(r"epoch 2  loss \d", output[0])


@pytest.mark.parametrize(
    ("name", "ranks", "old", "new", "says"),
    [
        ("single.py", 0, "{", "", "JSONDecodeError"),
        ("single.py", 0, '"bbox": [', '"bbox": [1, ', "wrong annotation"),
        ("single.py", 0, ".png", ".jpg", "images without a file"),
        ("ddp.py", 2, "", "", "No such file"),
        ("ddp.py", 0, "", "", "start with torchrun"),
    ],
)
def test_bad_input_ends_in_one_line_and_status_2(name, ranks, old, new, says):
    folder, file = scratch_folder(), "annotations/instances_train.json"
    if old:
        shutil.copytree(scenes(), folder, dirs_exist_ok=True)
        (folder / file).write_text((folder / file).read_text().replace(old, new))
    status, output = launch(CONVERT / name, f"--data-dir={folder}", ranks=ranks)
    lines = [x for text in output for x in text.splitlines() if not x.startswith("rank ")]
    assert ({*status}, [x[:7] for x in lines]) == ({2}, ["error: "] * len(status)), output
    assert says in lines[0]


@pytest.mark.skipif(not shutil.which("patch"), reason="no program `patch`")
def test_the_commands_of_the_readme_lead_to_ddp_py(tmp_path):
    shown, here = fences("bash", [CONVERT / "README.md"]), tmp_path / "convert"
    first, *quick = [f"{x.text.strip()} {x.note[18:]}" for x in shown if "nothing" not in x.note]

    def bash(*lines: str, where: Path = here) -> None:
        subprocess.run(["bash", "-e", "-c", "\n".join(lines)], cwd=where, check=True)

    bash(
        "mkdir root",
        "cd root",
        f"ln -s {ROOT / 'beyond'} {ROOT / 'common'} .",
        first,
        where=tmp_path,
    )
    for line in quick:
        if line.startswith("python "):
            _, script, *flags = line.split()
            assert command(str(here / script), *flags, where=here)[0][0] == 0
        else:
            bash(line)
    patches = (f"patch -s mine.py steps/{number}.diff" for number in range(1, 9))
    bash(*patches, f"cmp mine.py {CONVERT / 'ddp.py'}")


def _gan(rank: int) -> dict[str, list[float]]:
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group("gloo")
    return load("gan.py").measure()


def test_a_gan_keeps_its_two_pairs_under_ddp_and_one_batch_is_another_training():
    """The errors in one process and on two ranks; the control is BatchNorm of each rank alone."""
    errors, same = run_ranks(2, _gan)
    assert errors == same
    assert max(errors["two pairs"]) < 1e-12
    assert max(errors["two forwards, one backward"]) < 1e-12
    assert min(errors["real and fake in one batch"]) > 0.5
    assert errors["two pairs, BatchNorm not synchronized"][1] > 1e-3


def test_a_mean_over_samples_is_right_under_ddp_and_other_losses_are_not():
    errors = load("losses.py").measure()
    assert max(errors["mean over samples"]) < 1e-12
    assert errors["sum over samples"] == pytest.approx([1 / 2] * 12), "a factor of 1 / ranks"
    assert min(errors["contrastive"] + errors["Dice over the batch"]) > 0.01


def _gathered(rank: int, name: str) -> float:
    torch.distributed.init_process_group("gloo")
    losses, rows = load("losses.py"), slice(16 * rank, 16 * rank + 16)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10).double()
    batch = torch.randn(32, 64, dtype=torch.float64)
    labels = torch.arange(16).repeat_interleave(2) % 10
    exact = losses.gradient(losses.LOSSES[name](model(batch), labels), model)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    outputs = torch.cat(torch.distributed.nn.functional.all_gather(ddp(batch[rows])))
    losses.LOSSES[name](outputs, labels).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["mean over samples", "contrastive", "Dice over the batch"])
def test_a_loss_of_all_ranks_outputs_is_right_whatever_it_is(name):
    assert max(run_ranks(2, _gathered, name)) < 1e-12


@pytest.mark.parametrize("word", ["accelerate", "Shard", "critic", "spare"])
def test_each_snippet_runs_on_two_ranks(word, tmp_path):
    [code] = [f.text for f in fences("python", [CONVERT / "questions.md"]) if word in f.text]
    assert len(code.splitlines()) <= 15
    pytest.importorskip("accelerate" if word == "accelerate" else "torch")
    (tmp_path / "snippet.py").write_text(code)
    status, output = launch(tmp_path / "snippet.py")
    assert status == (0, 0), output
    assert word != "Shard" or output[1] == "rank 1 reads [1, 3, 5]\n"
    assert (output[0].replace("rank 0", "rank 1") == output[1]) == (word != "Shard")
    if word == "spare":  # the control
        (tmp_path / "snippet.py").write_text(code.replace(", find_unused_parameters=True", ""))
        assert "Expected to have finished reduction" in launch(tmp_path / "snippet.py")[1][0]
