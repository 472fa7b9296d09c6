"""A run that was stopped anywhere goes on as if it had not been; checkpoints are never torn."""

import json
import random
import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torchvision
from faults import Fault
from faults import run as run_with
from support import ROOT, Run, command, free_port, load_stage, run_ranks, train, train_once
from test_bad_input import launcher
from test_stages import FP32, same_run

from common.checkpoint import END, read_checkpoint, read_latest
from common.data import load_dataset, make_loader, start_epoch
from common.options import UsageError, make_parser, reseed

STAGES = [("01", 1), ("02", 1), ("03", 2), ("04", 2), ("04", 3), ("05", 2), ("05", 3)]


def stopped_and_resumed(key, ranks, *flags, stop=7, folder=None, **more) -> tuple[Run, Run]:
    """The same run twice: in one piece, and ended after a few steps and resumed."""
    whole = train(key, ranks, *flags, **more)
    part = train(key, ranks, *flags, f"--max-steps={stop}", folder=folder, **more)
    assert part.checkpoint["epoch_step"] == stop, "it ended inside the first epoch"
    return whole, train(key, ranks, *flags, "--resume=auto", folder=part.folder, **more)


def printed(run: Run) -> list[str]:
    """Its line of every epoch, without the speed."""
    return re.findall(r"epoch .*%", run.output)


@pytest.mark.parametrize(("key", "ranks"), STAGES)
def test_resuming_inside_an_epoch_equals_not_having_stopped(key, ranks, without=()):
    """To the bit, with dropout: weights, momenta, the loss of every step and of every epoch."""
    # In 02, the threads of one device share one stream of random numbers: no dropout there.
    flags = ("--model=net" if key != "02" else "--model=net-bn", "--epochs=2")
    whole, resumed = stopped_and_resumed(key, ranks, *flags, **FP32, without=without)
    assert same_run(whole, resumed)
    assert printed(whole) == printed(resumed)


def test_04_resumes_to_the_bit_inside_an_epoch(without=()):
    """Three ranks: their sums depend on the layout of DDP's buckets."""
    test_resuming_inside_an_epoch_equals_not_having_stopped("04", 3, without)


def test_01_resumes_to_the_bit_inside_an_epoch(without=()):
    test_resuming_inside_an_epoch_equals_not_having_stopped("01", 1, without)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Twelve small random PNG files in two classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for part in ("train", "test"):
        for i in range(12):
            path = folder / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
            torchvision.io.write_png(image, str(path))
    return folder


@pytest.mark.parametrize("key", ["01", "04"])
def test_random_crops_resume_to_the_bit_with_any_number_of_workers(key, pictures, tmp_path):
    """Ended with no loader process, resumed with two."""
    ranks = 1 if key == "01" else 2
    flags = ("--dataset=imagefolder", f"--data-dir={pictures}", "--batch-size=2", "--epochs=2")
    whole = train(key, ranks, *flags, **FP32)
    part = train(key, ranks, *flags, "--max-steps=4", **FP32)
    resumed = train(key, ranks, *flags, "--resume=auto", "--workers=2", **FP32, folder=part.folder)
    assert same_run(whole, resumed)


def test_what_is_drawn_for_a_picture_depends_on_its_epoch_and_not_on_who_draws(pictures):
    flags = ["--dataset=imagefolder", f"--data-dir={pictures}", "--batch-size=2"]
    train_set, _ = load_dataset(make_parser("", "").parse_args(flags))
    order = torch.utils.data.SequentialSampler(train_set)

    def batches(epoch: int, done: int, noise: int) -> list[torch.Tensor]:
        loader = make_loader(train_set, 2, order)
        torch.manual_seed(noise)
        return [images for images, _ in start_epoch(loader, epoch, done)]

    first, again, later = batches(0, 0, noise=1), batches(0, 0, noise=2), batches(1, 0, noise=1)
    rest = batches(0, 4, noise=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[4:], rest, strict=True))
    assert not torch.equal(first[0], later[0]), "the control: another epoch crops otherwise"


def _seen(rank: int, flags: tuple[str, ...]) -> tuple[list[int], str]:
    """The samples that this rank trains on, in their order, and what it prints."""
    stage = load_stage("04")
    seen: list[int] = []
    load = stage.load_dataset

    def watched(args):
        train_set, test_set = load(args)
        get = type(train_set).__getitems__

        class Watched(type(train_set)):
            def __getitems__(self, indices):
                seen.extend(indices)
                return get(self, indices)

        train_set.__class__ = Watched
        return train_set, test_set

    stage.load_dataset = watched
    sys.argv = ["train.py", *flags]
    with redirect_stdout(StringIO()) as output:
        stage.main()
    return seen, output.getvalue()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_ranks_sees_each_other_sample_once(before, after, tmp_path):
    """Of 1,500 samples, 12 batches of 120 make an epoch, whoever cuts them."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}", "--device=cpu", "--epochs=1")
    first = run_ranks(before, _seen, (*flags, "--max-steps=5"))
    rest = run_ranks(after, _seen, (*flags, "--resume=auto"))
    samples = [
        index for parts in (first, rest) for seen, _ in parts for index in seen if index is not None
    ]
    counts = torch.bincount(torch.tensor(samples), minlength=1500)
    counts[0] -= 2 * (before + after)  # each rank looks at sample 0, for its shape, in two places
    assert counts.max() == 1
    assert counts.sum() == 1440
    assert f"written by {before} ranks, this run has {after}" in rest[0][1]
    assert "dropout masks" in rest[0][1], "it says what cannot be the same"


def test_05_on_another_number_of_ranks_computes_the_same(tmp_path):
    """With SyncBatchNorm and without dropout, in float64, only rounding depends on the ranks."""
    flags = ("--model=net-bn", "--epochs=1", "--batch-size=60")
    whole = train_once("05", 2, *flags)
    part = train("05", 2, *flags, "--max-steps=7")
    resumed = train("05", 3, *flags, "--resume=auto", folder=part.folder)
    assert (whole.losses - resumed.losses).abs().max() < 1e-10
    other = train("04", 3, *flags, "--resume=auto", f"--run-dir={tmp_path}", folder=tmp_path)
    assert (whole.losses - other.losses).abs().max() > 1e-3, "the control: local BatchNorm"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch-size=60",), ("--batch-size 120", "--batch-size 60")),
        (("--seed=5",), ("--seed 1234", "--seed 5")),
    ],
)
def test_the_rest_of_an_epoch_needs_its_order(flags, words, tmp_path):
    base = ("01_single_gpu/train.py", f"--run-dir={tmp_path}", "--device=cpu")
    assert command(*base, "--max-steps=3")[0][0] == 0
    before = (tmp_path / "metrics.jsonl").read_text()
    [(status, output)] = command(*base, "--resume=auto", *flags)
    assert status == 2
    assert all(word in output for word in words)
    assert (tmp_path / "metrics.jsonl").read_text() == before, "nothing is lost"


@pytest.mark.parametrize("now", [("03", 3), ("04", 2)], ids=["three-ranks", "stage-04"])
def test_the_shards_of_03_are_those_of_its_world_size(now, tmp_path):
    part = train("03", 2, "--max-steps=3")
    with pytest.raises(AssertionError, match="another order than this call: go on as there"):
        train(*now, "--resume=auto", folder=part.folder)
    assert train("03", 2, "--epochs=1", "--resume=auto", folder=part.folder).summary["steps"] == 12


def test_ranks_that_would_start_from_different_steps_are_refused(tmp_path):
    """--run-dir on a disk of each machine: only one of them has the checkpoint."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    flags = ("--device=cpu", "--max-steps=2", f"--run-dir={tmp_path / '0'}")
    assert command("04_ddp_torchrun/train.py", *flags)[0][0] == 0
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.argv.append('--run-dir={tmp_path}/' + os.environ['RANK'])\n"
        f"runpy.run_path({str(ROOT / '04_ddp_torchrun' / 'train.py')!r}, run_name='__main__')\n"
    )

    answers = command(
        str(script), "--device=cpu", "--resume=auto", ranks=2, env=launcher(free_port())
    )
    assert [status for status, _ in answers] == [2, 2], answers
    said = "".join(output for _, output in answers)
    assert "from step 0 here, from 2 on rank 0" in said
    assert said.count("error: ") == 1


@pytest.fixture
def two(tmp_path):
    """A run-dir with two checkpoints: of step 4, and of step 2 before it."""
    flags = ("--max-steps=4", "--checkpoint-every-steps=2", f"--run-dir={tmp_path}")
    [(status, output)] = command("04_ddp_torchrun/train.py", "--device=cpu", *flags)
    assert status == 0, output
    assert [read_checkpoint(tmp_path / name)["step"] for name in NAMES] == [4, 2]
    return tmp_path


NAMES = ("checkpoint.pt", "checkpoint.before.pt")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, two):
    path = two / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    new = {"cut": data[:-1], "flipped": data, "empty": b"", "missing": None}[damage]
    path.unlink() if new is None else path.write_bytes(new)
    flags = ("--device=cpu", "--max-steps=5", f"--run-dir={two}", "--resume=auto")
    [(status, output)] = command("04_ddp_torchrun/train.py", *flags)
    assert status == 0, output
    assert "going on from" in output
    assert "checkpoint.before.pt, at step 2" in output
    assert read_checkpoint(path)["step"] == 5
    lines = (two / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_every_single_bit_counts(two):
    """200 flips at random places, each of them noticed; unflipped, it is read."""
    path, chance = two / "checkpoint.pt", random.Random(1)
    good = path.read_bytes()
    for _ in range(200):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        assert read_latest(path)["step"] == 2, "the one before"
    path.write_bytes(good)
    assert read_latest(path)["step"] == 4


def test_two_damaged_checkpoints_are_refused(two):
    for name in NAMES:
        (two / name).write_bytes((two / name).read_bytes()[:-1])
    with pytest.raises(UsageError, match="is cut off, damaged"):
        read_latest(two / "checkpoint.pt")
    assert read_latest(two / "nowhere.pt") is None


def test_a_checkpoint_is_read_by_plain_torch_too(two):
    """The checksum behind its end disturbs nobody."""
    path = two / "checkpoint.pt"
    assert path.read_bytes()[-END:].startswith(b"\nsha256 ")
    assert torch.load(path, weights_only=True)["step"] == 4


def test_a_new_run_does_not_go_on_from_the_checkpoint_of_an_old_one(two):
    """Killed before its first checkpoint, it leaves none; the old one is kept by another name."""
    fault = Fault("kill", ranks=1, step=1)
    flags = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={two}")
    statuses, *_ = run_with("04", 1, flags, fault)
    assert statuses == [-9]
    assert read_latest(two / "checkpoint.pt") is None
    assert read_checkpoint(two / "checkpoint.old.pt")["step"] == 4


def test_an_old_checkpoint_alone_is_moved_as_well(two):
    """A kill between two renames leaves the one before, and no last one."""
    (two / "checkpoint.pt").unlink()
    flags = ("--device=cpu", f"--data-dir={ROOT / 'data'}", f"--run-dir={two}")
    statuses, *_ = run_with("04", 1, flags, Fault("kill", ranks=1, step=1))
    assert statuses == [-9]
    assert read_latest(two / "checkpoint.pt") is None


def test_a_path_in_another_spelling_is_the_same_checkpoint(two):
    flags = ("--device=cpu", "--max-steps=5", f"--run-dir={two}")
    other = f"--resume={two / '..' / two.name / 'checkpoint.pt'}"
    [(status, output)] = command("04_ddp_torchrun/train.py", *flags, other)
    assert status == 0, output
    assert not (two / "checkpoint.old.pt").exists()
    assert read_checkpoint(two / "checkpoint.before.pt")["step"] == 4


def test_metrics_of_another_run_are_not_taken_for_ones_own(two, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    flags = ("04_ddp_torchrun/train.py", "--device=cpu", "--max-steps=6", f"--run-dir={folder}")
    assert command(*flags, "--seed=7")[0][0] == 0
    assert command(*flags, f"--resume={two / 'checkpoint.pt'}")[0][0] == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]


def test_checkpoints_inside_an_epoch_change_nothing_but_the_disk():
    flags = ("--epochs=2", "--model=net-bn")
    often = train("04", 2, *flags, "--checkpoint-every-steps=5")
    never = train_once("04", 2, *flags)
    assert torch.equal(often.losses, never.losses)
    assert often.summary["train_loss"] == pytest.approx(never.summary["train_loss"], abs=1e-12)
    assert (often.folder / "checkpoint.before.pt").exists()


def test_random_numbers_of_a_step_depend_on_its_place_alone():
    drawn = []
    for key in ((1, 0, 3, 0), (1, 0, 3, 1), (1, 0, 4, 0), (1, 0, 3, 0)):
        torch.rand(7)
        reseed(*key)
        drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
