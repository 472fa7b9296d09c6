"""survive/: a run resumes from any step with the same bits, and checkpoints survive damage."""

import json
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from support import (
    ROOT,
    Run,
    chapter,
    command,
    free_port,
    load_stage,
    run_main,
    run_ranks,
    train,
    train_once,
)
from test_bad_input import launcher, refused
from test_stages import FP32, random_pictures, same_run

from common.data import load_dataset, make_loader
from common.options import make_parser

SCRIPT = "survive/train.py"
durable = chapter("survive", "durable")


def stopped_and_resumed(ranks, *flags, stop=7, **more) -> tuple[Run, Run]:
    """The same run twice: in one part, and ended after a few steps and resumed."""
    whole = train("survive", ranks, *flags, **more)
    part = train("survive", ranks, *flags, f"--max-steps={stop}", **more)
    assert part.checkpoint["epoch_step"] == stop, "it ended inside the first epoch"
    return whole, train("survive", ranks, *flags, "--resume=auto", folder=part.folder, **more)


def printed(run: Run) -> list[str]:
    """The line of each epoch, without the speed."""
    return re.findall(r"epoch .*%", run.output)


SCHEDULED = ("--model=net-bn", "--accumulate=2", "--clip-norm=1", "--lr-rule=sqrt")
SCHEDULED += ("--base-batch-size=60", "--warmup-epochs=0.5", "--lr-decay=cosine")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ("--model=net",)), (2, ("--model=net",)), (2, ("--amp=fp16", *SCHEDULED))],
)
def test_resuming_inside_an_epoch_equals_not_having_stopped(ranks, flags, without=()):
    """To the bit, with dropout: weights, momenta, the loss of each step and of each epoch."""
    whole, resumed = stopped_and_resumed(ranks, *flags, "--epochs=2", **FP32, without=without)
    assert same_run(whole, resumed)
    assert printed(whole) == printed(resumed)


def test_survive_resumes_to_the_bit_inside_an_epoch(without=()):
    """Three ranks: their sums depend on the order of DDP's buckets."""
    test_resuming_inside_an_epoch_equals_not_having_stopped(3, ("--model=net",), without)


@pytest.mark.parametrize("source", [("01", 1), ("03", 2), ("05", 2)], ids=lambda way: way[0])
def test_survive_resumes_what_a_stage_has_saved_at_the_end_of_an_epoch(source):
    flags = ("--model=net-bn", "--batch-size=60")
    other = train_once(*source, *flags, "--epochs=1")
    path = other.folder / "checkpoint.pt"
    run = train("survive", 2, *flags, "--epochs=2", f"--resume={path}")
    assert [line["step"] for line in run.metrics] == list(range(26, 51))
    if source[0] != "03":  # its shards are another order; the others train as one process does
        whole = train_once("05", 2, *flags, "--epochs=2")
        assert (run.losses - whole.losses[25:]).abs().max() < 1e-10


def test_a_stage_resumes_what_survive_has_saved_at_the_end_of_an_epoch():
    flags = ("--model=net-bn", "--batch-size=60")
    other = train_once("survive", 2, *flags, "--epochs=1")
    run = train("01", 1, *flags, "--epochs=2", f"--resume={other.folder / 'checkpoint.pt'}")
    assert (run.losses - train_once("01", 1, *flags, "--epochs=2").losses[25:]).abs().max() < 1e-10


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return random_pictures(tmp_path_factory.mktemp("pictures"))


def test_random_crops_resume_to_the_bit_with_any_number_of_workers(pictures):
    """Ended with no loader process, resumed with two."""
    flags = ("--dataset=imagefolder", f"--data-dir={pictures}", "--batch-size=2", "--epochs=2")
    whole = train("survive", 2, *flags, **FP32)
    part = train("survive", 2, *flags, "--max-steps=4", **FP32)
    more = ("--resume=auto", "--workers=2")
    assert same_run(whole, train("survive", 2, *flags, *more, **FP32, folder=part.folder))


def test_the_crop_of_a_picture_depends_on_its_epoch_and_not_on_the_process(pictures):
    flags = ["--dataset=imagefolder", f"--data-dir={pictures}", "--batch-size=2"]
    args = make_parser("", "").parse_args(flags)
    crops = durable.Resumable(load_dataset(args)[0], args.seed)
    order = durable.Remaining(torch.utils.data.SequentialSampler(crops))

    def batches(epoch: int, skip: int, noise: int) -> list[torch.Tensor]:
        crops.epoch, order.skip = epoch, skip
        torch.manual_seed(noise)
        return [images for images, _ in make_loader(crops, 2, order)]

    first, again, later = batches(0, 0, noise=1), batches(0, 0, noise=2), batches(1, 0, noise=1)
    rest = batches(0, 8, noise=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[4:], rest, strict=True))
    assert not torch.equal(first[0], later[0]), "the control: another epoch, other crops"


def _seen(rank: int, flags: tuple[str, ...]) -> tuple[list[int], str]:
    """The samples that this rank trains on, in their order, and what it prints."""
    stage = load_stage("survive")
    seen: list[int] = []
    load = stage.load_dataset

    def load_and_watch(args):
        train_set, test_set = load(args)
        get = type(train_set).__getitems__

        class Watched(type(train_set)):
            def __getitems__(self, indices):
                seen.extend(indices)
                return get(self, indices)

        train_set.__class__ = Watched
        return train_set, test_set

    stage.load_dataset = load_and_watch
    return seen, run_main(stage, rank, *flags)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_ranks_sees_each_other_sample_once(before, after, tmp_path):
    """Of 1,500 samples, 12 batches of 120 make an epoch, on any number of ranks."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}", "--device=cpu", "--epochs=1")
    first = run_ranks(before, _seen, (*flags, "--max-steps=5"))
    rest = run_ranks(after, _seen, (*flags, "--resume=auto"))
    samples = [index for parts in (first, rest) for seen, _ in parts for index in seen]
    counts = torch.bincount(torch.tensor(samples), minlength=1500)
    assert counts.max() == 1
    assert counts.sum() == 1440
    assert f"saved by {before} ranks" in rest[0][1]


def test_another_number_of_ranks_computes_the_same():
    """With SyncBatchNorm and without dropout, in float64, only rounding depends on the ranks."""
    flags = ("--model=net-bn", "--epochs=1", "--batch-size=60")
    whole = train_once("survive", 2, *flags)
    part = train("survive", 2, *flags, "--max-steps=7")
    path = f"--resume={part.folder / 'checkpoint.pt'}"
    resumed = train("survive", 3, *flags, path)
    assert (whole.losses[7:] - resumed.losses).abs().max() < 1e-10
    other = train("survive", 3, *flags, path, "--no-sync-bn")
    assert (whole.losses[7:] - other.losses).abs().max() > 1e-3, "the control: local BatchNorm"


@pytest.mark.parametrize("flag", ["--batch-size=60", "--seed=5"])
def test_the_rest_of_an_epoch_needs_its_order(flag, tmp_path):
    base = (SCRIPT, f"--run-dir={tmp_path}", "--device=cpu")
    assert command(*base, "--max-steps=3")[0][0] == 0
    before = (tmp_path / "metrics.jsonl").read_text()
    [(status, output)] = command(*base, "--resume=auto", flag)
    assert status == 2
    refused(output, "inside an epoch", "--seed 1234 --batch-size 120: use the same")
    assert (tmp_path / "metrics.jsonl").read_text() == before, "nothing is lost"


def test_the_shards_of_03_cannot_be_continued_inside_an_epoch(tmp_path):
    part = train_once("03", 2, "--max-steps=3")
    with pytest.raises(AssertionError, match="inside an epoch of 03_ddp_manual_allreduce"):
        train("survive", 2, f"--resume={part.folder / 'checkpoint.pt'}")


def test_ranks_that_would_start_from_different_steps_are_refused(tmp_path):
    """--run-dir on a disk of each machine: only one of them has the checkpoint."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    flags = ("--device=cpu", "--max-steps=2", f"--run-dir={tmp_path / '0'}")
    assert command(SCRIPT, *flags)[0][0] == 0
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'survive')!r})\n"
        f"sys.argv.append('--run-dir={tmp_path}/' + os.environ['RANK'])\n"
        f"runpy.run_path({str(ROOT / SCRIPT)!r}, run_name='__main__')\n"
    )
    flags = ("--device=cpu", "--resume=auto")
    answers = command(str(script), *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [2, 2], answers
    said = "".join(output for _, output in answers)
    assert said.count("error: ") == 1
    assert "the step to resume from is 0 on rank 1, 2 on rank 0" in said


NAMES = ("checkpoint.pt", "checkpoint.before.pt")


def saved_step(path: Path) -> int:
    return torch.load(path, weights_only=True)["step"]


@pytest.fixture
def two(tmp_path):
    """A run-dir with two checkpoints: of step 4, and of step 2 before it."""
    flags = ("--max-steps=4", "--checkpoint-every-steps=2", f"--run-dir={tmp_path}")
    [(status, output)] = command(SCRIPT, "--device=cpu", *flags)
    assert status == 0, output
    assert [saved_step(tmp_path / name) for name in NAMES] == [4, 2]
    return tmp_path


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),  # more than the checksum
    "flipped": partial(flip, chance=random.Random(0)),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, two):
    DAMAGES[damage](two / "checkpoint.pt")
    flags = ("--device=cpu", "--max-steps=5", f"--run-dir={two}", "--resume=auto")
    [(status, output)] = command(SCRIPT, *flags)
    assert status == 0, output
    assert "checkpoint.before.pt: step 2" in output
    assert [saved_step(two / name) for name in NAMES] == [5, 2], (
        "the good one before is still there"
    )
    lines = (two / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_every_single_bit_counts(two):
    """200 flips at random places, and each of them is found; without a flip, the file is whole."""
    path, chance = two / "checkpoint.pt", random.Random(1)
    good = path.read_bytes()
    for _ in range(200):
        path.write_bytes(good)
        flip(path, chance)
        assert durable.newest_whole(path) == durable.previous(path)
    path.write_bytes(good)
    assert durable.newest_whole(path) == path


def test_two_damaged_checkpoints_are_refused(two):
    for name in NAMES:
        DAMAGES["cut"](two / name)
    [(status, output)] = command(SCRIPT, "--device=cpu", f"--run-dir={two}", "--resume=auto")
    assert status == 2
    refused(output, "checkpoint.pt is damaged")
    assert durable.newest_whole(two / "nowhere.pt") is None


def test_a_checkpoint_is_read_by_plain_torch_too(two):
    """The checksum stands behind its end, where torch does not look."""
    path = two / "checkpoint.pt"
    assert path.read_bytes()[-len(durable.MARK) - 64 :].startswith(durable.MARK)
    assert saved_step(path) == 4


@pytest.mark.parametrize("missing", [(), ("checkpoint.pt",)], ids=["both", "only the one before"])
def test_a_new_run_does_not_resume_the_checkpoint_of_an_old_one(missing, two):
    """If it ends before its first checkpoint, it leaves none; the old one has another name."""
    for name in missing:
        (two / name).unlink()
    flags = ("--device=cpu", f"--run-dir={two}", "--lr=1e30")  # nan in the second step
    [(status, output)] = command(SCRIPT, *flags)
    assert status == 2, output
    assert durable.newest_whole(two / "checkpoint.pt") is None
    assert saved_step(two / ("checkpoint.before.old.pt" if missing else "checkpoint.old.pt")) in (
        2,
        4,
    )


def test_a_path_in_another_spelling_is_the_same_checkpoint(two):
    flags = ("--device=cpu", "--max-steps=5", f"--run-dir={two}")
    other = f"--resume={two / '..' / two.name / 'checkpoint.pt'}"
    [(status, output)] = command(SCRIPT, *flags, other)
    assert status == 0, output
    assert not (two / "checkpoint.old.pt").exists()
    assert [saved_step(two / name) for name in NAMES] == [5, 4]


def test_checkpoints_inside_an_epoch_change_nothing_but_the_disk():
    flags = ("--epochs=2", "--model=net-bn")
    often = train("survive", 2, *flags, "--checkpoint-every-steps=5")
    never = train_once("survive", 2, *flags)
    assert torch.equal(often.losses, never.losses)
    assert often.summary["train_loss"] == pytest.approx(never.summary["train_loss"], abs=1e-12)
    assert (often.folder / "checkpoint.before.pt").exists()


def test_random_numbers_of_a_step_are_a_function_of_its_place():
    drawn = {}
    for key in ((1, 0, 3, 0), (1, 0, 3, 1), (1, 0, 4, 0), (2, 0, 3, 0), (1, 0, 3)):
        torch.rand(7)
        durable.reseed(*key)
        drawn[key] = torch.rand(3)
    durable.reseed(1, 0, 3, 0)
    assert torch.equal(torch.rand(3), drawn[1, 0, 3, 0])
    assert len({tuple(numbers.tolist()) for numbers in drawn.values()}) == 5
