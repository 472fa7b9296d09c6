"""convert/detector: after three steps, two ranks train and judge it as one process does."""

import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import sync_batchnorm
from convert_cases import DETECTOR, SMALL, converted, launch, load, versions
from helpers.on_ranks import run_on_ranks
from local_ranks.machine import scratch_folder
from repository_pages import ROOT

ONE_BLOCK = "models.ResNet(models.resnet.BasicBlock, [1] * 4)"  # half of resnet18, so quicker
SHALLOW = ("getattr(models, args.backbone)()", ONE_BLOCK)


def scenes(train: int = 8, val: int = 8, empty: float = 0.0) -> Path:
    """Scenes of 64 pixels, a share of them empty, and one not square. "val" has the first ones."""
    folder, module = (
        scratch_folder(),
        load("scenes.py", ("EMPTY = 0.04", f"EMPTY = {empty}"), folder=DETECTOR),
    )
    file = folder / "annotations" / "instances_train.json"
    module.write_scenes(folder, "train", ROOT / "common" / "digits", val, 64, seed=0)
    (folder / "train").rename(folder / "val")
    file.rename(file.with_stem("instances_val"))
    module.write_scenes(folder, "train", ROOT / "common" / "digits", train, 64, seed=0)
    Image.new("RGB", (90, 48)).save(folder / "train" / "000001.png")
    return folder


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_script_runs_after_each_step_and_shows_what_the_readme_says(step, tmp_path):
    script = versions(DETECTOR)[step]
    (tmp_path / "mine.py").write_text(script.replace(*SHALLOW))
    status, output = launch(tmp_path / "mine.py", f"--data-dir={scenes(val=2)}", "--epochs=1")
    assert status == (0, 0), output
    assert ["rank 0 of 2" in output[0], "rank 1 of 2" in output[1]] == [True, True]
    losses = [re.findall(r"epoch 1  loss (\S+)", text) for text in output]
    assert losses[0] != losses[1], "the ranks see other images"
    assert [len(x) for x in losses] == [1, step < 3], "rank 0 alone logs"


def _run(rank: int, name: str | Path, flags: tuple, *changes: tuple[str, str]) -> dict:
    module, result = load(name, SHALLOW, *changes, folder=DETECTOR), {}
    if FLOAT64 in changes:
        torch.set_default_dtype(torch.float64)
        module.nn.SyncBatchNorm.convert_sync_batchnorm = sync_batchnorm.convert_sync_batchnorm
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
    for images in (1, 3):  # with one image, rank 1 gets none
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
