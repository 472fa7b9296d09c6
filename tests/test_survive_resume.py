"""survive/: a run resumes from any step with the same bits, and checkpoints survive damage."""

import re
import sys

import pytest
import torch
from support import ROOT, Run, chapter, command, load_stage, run_main, run_ranks, train, train_once
from test_bad_input import refused
from test_stages import FP32, random_pictures, same_run

from common.data import load_dataset, make_loader
from common.options import make_parser

SCRIPT = "survive/train.py"
durable = chapter("survive", "durable")


def printed(run: Run) -> list[str]:
    """The line of each epoch, without the speed."""
    return re.findall(r"epoch .*%", run.output)


SCHEDULED = ("--model=net-bn", "--accumulate=2", "--clip-norm=0.5", "--lr-rule=sqrt")
SCHEDULED += ("--base-batch-size=60", "--warmup-epochs=0.5", "--lr-decay=cosine")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ("--model=net",)),
        (2, ("--model=net",)),
        (2, ("--amp=fp16", *SCHEDULED)),
        (2, ("--amp=bf16", "--model=net-bn", "--no-sync-bn", "--accumulate=1")),
    ],
)
def test_resuming_inside_an_epoch_equals_not_having_stopped(ranks, flags, without=()):
    """To the bit, with dropout: weights, momenta, the loss of each step and of each epoch.

    The checkpoints on the way change nothing. Without dropout, stage 05 trains the same, too.
    """
    flags, more = (*flags, "--epochs=2"), {**FP32, "without": without}
    whole = train("survive", ranks, *flags, **more)
    part = train("survive", ranks, *flags, "--max-steps=7", "--checkpoint-every-steps=1", **more)
    assert part.checkpoint["epoch_step"] == 7, "it ended inside the first epoch"
    again = ("--resume=auto", "--checkpoint-every-steps=5")
    resumed = train("survive", ranks, *flags, *again, folder=part.folder, **more)
    assert durable.previous(part.folder / "checkpoint.pt").exists()
    assert len(whole.summary["peak_memory_bytes"]) == ranks
    assert min(whole.summary["peak_memory_bytes"]) > 50e6
    same = [resumed, train("05", ranks, *flags, **FP32)] if "--model=net-bn" in flags else [resumed]
    for other in same:
        assert same_run(whole, other)
        assert printed(whole) == printed(other)


def test_survive_resumes_to_the_bit_inside_an_epoch(without=()):
    """Three ranks: their sums depend on the order of DDP's buckets."""
    test_resuming_inside_an_epoch_equals_not_having_stopped(3, ("--model=net",), without)


def test_a_run_without_flags_saves_at_the_end_of_each_epoch_and_waits_ten_minutes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    args = vars(load_stage("survive").parse_args())
    defaults = {"amp": "off", "sync_bn": True, "accumulate": 1, "clip_norm": None}
    defaults |= {"checkpoint_every_steps": 10**9, "timeout_seconds": 600, "lr_rule": "none"}
    assert {name: args[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("source", "taker"),
    [(("01", 1), ("survive", 2)), (("03", 2), ("survive", 2)), (("survive", 2), ("01", 1))],
)
def test_survive_and_the_stages_resume_what_the_other_has_saved_after_an_epoch(source, taker):
    """The shards of 03 are another order; the others train as one process does."""
    flags = ("--model=net-bn", "--batch-size=60")
    path = train_once(*source, *flags, "--epochs=1").folder / "checkpoint.pt"
    run = train(*taker, *flags, "--epochs=2", f"--resume={path}")
    assert [line["step"] for line in run.metrics] == list(range(26, 51))
    whole = train_once("01", 1, *flags, "--epochs=2")
    assert ((run.losses - whole.losses[25:]).abs().max() < 1e-10) == (source[0] != "03")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> tuple[str, ...]:
    folder = random_pictures(tmp_path_factory.mktemp("pictures"))
    return ("--dataset=imagefolder", f"--data-dir={folder}", "--batch-size=2", "--epochs=2")


def test_random_crops_resume_to_the_bit_with_any_number_of_workers(pictures):
    """Ended with no loader process, resumed with two."""
    whole = train("survive", 2, *pictures, **FP32)
    part = train("survive", 2, *pictures, "--max-steps=4", **FP32)
    more = ("--resume=auto", "--workers=2")
    assert same_run(whole, train("survive", 2, *pictures, *more, **FP32, folder=part.folder))


def test_the_crop_of_a_picture_depends_on_its_epoch_and_not_on_the_process(pictures):
    args = make_parser("", "").parse_args(pictures)
    crops = durable.Resumable(load_dataset(args)[0], args.seed)
    order = durable.Remaining(torch.utils.data.SequentialSampler(crops))

    def batches(epoch: int, skip: int, noise: int) -> list[torch.Tensor]:
        crops.epoch, order.skip = epoch, skip
        torch.manual_seed(noise)
        return [images for images, _ in make_loader(crops, 2, order)]

    first, again, later = batches(0, 0, noise=1), batches(0, 0, noise=2), batches(1, 0, noise=1)
    rest = batches(0, 8, noise=3)
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert torch.equal(torch.cat(first[4:]), torch.cat(rest))
    assert not torch.equal(first[0], later[0]), "the control: another epoch, other crops"


def _seen(rank: int, flags: tuple[str, ...]) -> tuple[list[int], str]:
    """The samples that this rank trains on, in their order, and what it prints."""
    seen, get = [], durable.Resumable.__getitems__
    durable.Resumable.__getitems__ = lambda *args: seen.extend(args[1]) or get(*args)
    return seen, run_main(load_stage("survive"), rank, *flags)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_ranks_sees_each_other_sample_once(before, after, tmp_path):
    """Of 1,500 samples, 12 batches of 120 make an epoch, on any number of ranks."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}", "--device=cpu", "--epochs=1")
    first = run_ranks(before, _seen, (*flags, "--max-steps=5"))
    rest = run_ranks(after, _seen, (*flags, "--resume=auto"))
    samples = [index for seen, _ in (*first, *rest) for index in seen]
    counts = torch.bincount(torch.tensor(samples), minlength=1500)
    assert (counts.max(), counts.sum()) == (1, 1440)
    path = tmp_path / "checkpoint.pt"
    assert f"resuming from {path}: step 5, saved by {before} ranks\n" in rest[0][1]
    assert [said for _, said in rest[1:]] == [""] * (after - 1), "only rank 0 prints"


def test_another_number_of_ranks_computes_the_same():
    """With SyncBatchNorm and without dropout, in float64, only rounding depends on the ranks."""
    flags = ("--model=net-bn", "--epochs=1", "--batch-size=60")
    whole = train_once("survive", 2, *flags)
    part = train_once("survive", 2, *flags, "--max-steps=7")
    path = f"--resume={part.folder / 'checkpoint.pt'}"
    resumed = train("survive", 3, *flags, path)
    assert (whole.losses[7:] - resumed.losses).abs().max() < 1e-10
    other = train("survive", 3, *flags, path, "--no-sync-bn")
    assert (whole.losses[7:] - other.losses).abs().max() > 1e-3, "the control: local BatchNorm"


@pytest.mark.parametrize(
    ("key", "flag"), [("survive", "--batch-size=60"), ("survive", "--seed=5"), ("03", "--lr=0.1")]
)
def test_the_rest_of_an_epoch_needs_its_order(key, flag):
    """The shards of 03 are not survive's. The weights can be evaluated at any time."""
    part = train_once(key, 2, "--max-steps=3", **FP32)
    before, path = (part.folder / "metrics.jsonl").read_text(), part.folder / "checkpoint.pt"
    flags = ("--device=cpu", f"--run-dir={part.folder}", flag)
    [(status, output)] = command(SCRIPT, *flags, f"--resume={path}")
    assert status == 2
    refused(output, f"inside an epoch of {key}", "--seed 1234 --batch-size 120: use the same")
    assert (part.folder / "metrics.jsonl").read_text() == before, "nothing is lost"
    [(status, output)] = command(SCRIPT, *flags, f"--evaluate={path}")
    assert (status, "\ntest loss " in output) == (0, True), output


NAMES = ("checkpoint.pt", "checkpoint.before.pt")


@pytest.mark.parametrize("damage", ["cut", "missing", "none"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, tmp_path):
    """The good one before it is still there after the next save. A new run resumes neither."""
    base = (SCRIPT, "--device=cpu", f"--run-dir={tmp_path}")

    def saved() -> list[int]:
        return [torch.load(tmp_path / name, weights_only=True)["step"] for name in NAMES]

    command(*base, "--max-steps=4", "--checkpoint-every-steps=2")
    assert saved() == [4, 2]
    path = tmp_path / "checkpoint.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])  # more than the checksum
    elif damage == "missing":
        path.unlink()
    [(status, output)] = command(*base, "--max-steps=5", "--resume=auto")
    assert status == 0, output
    assert ("checkpoint.before.pt: step 2" in output) == (damage != "none")
    assert saved() == [5, 4 if damage == "none" else 2]
    assert [line["step"] for line in Run(tmp_path, [], "").metrics] == [1, 2, 3, 4, 5]
    [(status, output)] = command(*base, "--max-steps=5", "--resume=auto")
    assert (status, "nothing to train: step 5 is done" in output) == (0, True), output
    [(status, output)] = command(*base, "--lr=1e30")  # nan in the second step
    assert status == 2, output
    assert durable.newest_whole(path) is None
