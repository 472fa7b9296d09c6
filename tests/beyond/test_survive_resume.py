"""beyond/survive/train.py: a run resumes from any step with the same bits, whatever is damaged."""

import re
import shutil
import socket
from pathlib import Path

import pytest
import torch

from common.data import load_dataset
from common.options import make_parser
from helpers.machine import free_port
from helpers.on_ranks import run_on_ranks
from helpers.refusals import assert_one_line, refusal
from helpers.small_data import few_digits, random_pictures
from local_ranks.chapters import ROOT
from local_ranks.run_files import read_metrics, same_run
from local_ranks.scripts import launcher_variables, run_script
from local_ranks.train_stage import FP32, load_stage, run_main, train, train_once

SCRIPT = "beyond/survive/train.py"
durable = load_stage("survive").durable

SCHEDULED = ("--model=net-bn", "--accumulate=2", "--clip-norm=0.5", "--lr-rule=sqrt")
SCHEDULED += ("--base-batch-size=60", "--warmup-epochs=0.5", "--lr-decay=cosine")
RANKS_AND_FLAGS = [
    (2, ("--amp=fp16", *SCHEDULED)),
    (2, ("--amp=bf16", "--model=net-bn", "--no-sync-bn")),
]


@pytest.mark.parametrize(("ranks", "flags"), RANKS_AND_FLAGS)
def test_resuming_inside_an_epoch_equals_not_having_stopped(ranks, flags, changes=()):
    """Weights, momenta and losses, to the bit. Stage 05 trains the same, where it has the flags."""
    flags = (*few_digits(), "--batch-size=24", *flags, "--epochs=2", "--max-steps=14")
    more = {**FP32, "changes": changes}
    whole = train("survive", ranks, *flags, **more)
    part = train("survive", ranks, *flags, "--max-steps=7", "--checkpoint-every-steps=1", **more)
    assert part.checkpoint["epoch_step"] == 7, "it ended inside the first epoch, which has 12 steps"
    again = ("--resume=auto", "--checkpoint-every-steps=5")
    resumed = train("survive", ranks, *flags, *again, folder=part.folder, **more)
    assert durable.previous_path(part.folder / "checkpoint.pt").exists()
    same = [resumed, train("05", ranks, *flags, **FP32)] if "--no-sync-bn" in flags else [resumed]
    for other in same:
        assert same_run(whole, other)
        ours, theirs = (re.findall(r"epoch .*%", run.output) for run in (whole, other))
        assert ours == theirs, "the line of each epoch, without the speed"


def test_survive_resumes_to_the_bit_inside_an_epoch(changes=()):
    """Three ranks: their sums depend on the order of DDP's buckets."""
    test_resuming_inside_an_epoch_equals_not_having_stopped(3, ("--model=net",), changes)


@pytest.mark.parametrize(
    ("source", "taker"),
    [(("01", 1), ("survive", 2)), (("03", 2), ("survive", 2)), (("survive", 2), ("01", 1))],
)
def test_survive_and_the_stages_resume_what_the_other_has_saved_after_an_epoch(source, taker):
    flags = (*few_digits(), "--model=net-bn", "--batch-size=60")
    path = train_once(*source, *flags, "--epochs=1").folder / "checkpoint.pt"
    run = train(*taker, *flags, "--epochs=2", f"--resume={path}")
    assert [line["step"] for line in run.metrics] == list(range(6, 11))
    whole = train_once("01", 1, *flags, "--epochs=2")
    # BatchNorm in 03 sees only the local batch; the others train as one process does.
    assert ((run.losses - whole.losses[5:]).abs().max() < 1e-10) == (source[0] != "03")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> tuple[str, ...]:
    """The flags that use a folder of 12 pictures: an epoch has 6 steps."""
    flags = random_pictures(tmp_path_factory.mktemp("pictures"))
    return (*flags, "--batch-size=2", "--epochs=1")


def test_random_crops_resume_to_the_bit_with_any_number_of_workers(pictures):
    whole = train("survive", 2, *pictures, **FP32)
    part = train("survive", 2, *pictures, "--max-steps=4", **FP32)
    more = ("--resume=auto", "--workers=2")
    assert same_run(whole, train("survive", 2, *pictures, *more, **FP32, folder=part.folder))


def test_the_crop_of_a_picture_is_another_one_in_each_epoch(pictures):
    args = make_parser("", "").parse_args(pictures)
    crops, seen = durable.SeededPerSample(load_dataset(args)[0], args.seed), []
    for crops.epoch in (0, 0, 1):
        seen += [image for image, _ in crops.__getitems__([3])]
    assert [torch.equal(seen[0], other) for other in seen] == [True, True, False]
    assert list(durable.SkipFirst(range(3))) == [0, 1, 2], "a run that is new misses nothing"


def samples_seen(rank: int, flags: tuple[str, ...]) -> tuple[list[int], str]:
    """The samples that a rank trains on, and what it prints."""
    seen, get = [], durable.SeededPerSample.__getitems__
    durable.SeededPerSample.__getitems__ = lambda *args: seen.extend(args[1]) or get(*args)
    return seen, run_main(load_stage("survive"), rank, *flags)


def test_another_number_of_ranks_sees_each_other_sample_once(tmp_path):
    """Of 1,500 samples, 12 batches of 120 make an epoch, on any number of ranks."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}", "--device=cpu", "--epochs=1")
    first = run_on_ranks(2, samples_seen, (*flags, "--max-steps=5"))
    rest = run_on_ranks(3, samples_seen, (*flags, "--resume=auto"))
    samples = [index for seen, _ in (*first, *rest) for index in seen]
    counts = torch.bincount(torch.tensor(samples), minlength=1500)
    assert (counts.max(), counts.sum()) == (1, 1440)
    _, output = rest[0]
    assert f"resuming from {tmp_path / 'checkpoint.pt'}: step 5, saved by 2 ranks\n" in output


def test_another_number_of_ranks_computes_the_same():
    """With SyncBatchNorm and without dropout, in float64, only rounding depends on the ranks."""
    flags = (*few_digits(), "--model=net-bn", "--epochs=1", "--batch-size=24")
    whole = train_once("survive", 2, *flags)
    part = train_once("survive", 2, *flags, "--max-steps=7")
    path = f"--resume={part.folder / 'checkpoint.pt'}"
    resumed = train("survive", 3, *flags, path)
    assert (whole.losses[7:] - resumed.losses).abs().max() < 1e-10
    other = train("survive", 3, *flags, path, "--no-sync-bn")
    assert (whole.losses[7:] - other.losses).abs().max() > 1e-3, "the control: local BatchNorm"


@pytest.mark.parametrize(("key", "flag"), [("survive", "--batch-size=60"), ("03", "--seed=5")])
def test_the_rest_of_an_epoch_needs_its_order(key, flag):
    part = train_once(key, 2, "--max-steps=3", **FP32)
    metrics, path = part.folder / "metrics.jsonl", part.folder / "checkpoint.pt"
    before = metrics.read_text()
    flags = (f"--run-dir={part.folder}", flag)
    line = refusal("survive", *flags, f"--resume={path}")
    words = "over 1500 samples (here: 1500) with --seed 1234 --batch-size 120: use the same"
    assert_one_line(line, f"inside an epoch of {key}", words)
    assert metrics.read_text() == before, "nothing is lost"


@pytest.mark.parametrize(
    ("key", "ranks", "more", "less"), [("01", 1, 1, 0), ("03", 2, 1, 0), ("survive", 2, 0, 4)]
)
def test_the_rest_of_an_epoch_needs_its_data(key, ranks, more, less, tmp_path):
    """Of 12 pictures, one is added or some are missing: no sample may come twice in an epoch."""
    flags = (*random_pictures(tmp_path), "--batch-size=2")
    part = train(key, ranks, *flags, "--max-steps=3", **FP32)
    pictures = sorted((tmp_path / "train").rglob("*.png"))
    for number in range(more):
        shutil.copy(pictures[0], pictures[0].with_name(f"more{number}.png"))
    for picture in pictures[:less]:
        picture.unlink()
    resume = (*flags, f"--resume={part.folder / 'checkpoint.pt'}")
    words = f"epoch of {part.summary['stage']} over 12 samples (here: {12 + more - less}) with"
    assert_one_line(refusal("survive", *resume), words, ": use the same")


@pytest.mark.parametrize("damage", ["cut", "missing", "none"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, tmp_path):
    base = (SCRIPT, "--device=cpu", f"--run-dir={tmp_path}")

    def saved() -> list[int]:
        both = (tmp_path / f"checkpoint{name}.pt" for name in ("", ".before"))
        return [torch.load(each, weights_only=True)["step"] for each in both]

    run_script(*base, "--max-steps=4", "--checkpoint-every-steps=2")
    assert saved() == [4, 2]
    path = tmp_path / "checkpoint.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])  # more than the checksum
    elif damage == "missing":
        path.unlink()
    [(status, output)] = run_script(*base, "--max-steps=5", "--resume=auto")
    assert status == 0, output
    assert ("checkpoint.before.pt: step 2" in output) == (damage != "none")
    assert saved() == [5, 4 if damage == "none" else 2]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    [(status, output)] = run_script(*base, "--max-steps=5", "--resume=auto")
    assert (status, "nothing to train: step 5 is done" in output) == (0, True), output
    [(status, output)] = run_script(*base, "--lr=1e30")  # nan in the second step
    assert status == 2, output
    assert durable.newest_whole(path) is None


def resume_from_own_folder(rank: int, folder: Path) -> str:
    """Resume as on two machines without a shared disk; return the error of this rank."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={folder / str(rank)}", "--resume=auto")
    with pytest.raises((ValueError, SystemExit)) as caught:
        run_main(load_stage("survive"), rank, "--device=cpu", *flags)
    return str(caught.value)


def test_a_checkpoint_that_only_one_rank_has_ends_both(tmp_path):
    run_script(SCRIPT, "--device=cpu", "--max-steps=2", f"--run-dir={tmp_path / '0'}")
    answers = ["2", "the step to resume from is 0 on rank 1, 2 on rank 0"]  # "2" is the exit status
    assert run_on_ranks(2, resume_from_own_folder, tmp_path) == answers


@pytest.mark.parametrize(("rank", "busy"), [("0", True), ("0", False), ("1", False)])
def test_a_rendezvous_without_an_answer_ends_in_time(rank, busy):
    """The port is in use; or rank 1 never comes; or nobody listens. 600 s are the default."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if busy else free_port()
        env = launcher_variables(port) | {"RANK": rank, "LOCAL_RANK": rank}
        [(status, output)] = run_script(SCRIPT, "--timeout-seconds=2", env=env, seconds=30)
    assert (status, "Traceback" in output) == (2, False), output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"2 ranks did not meet at 127.0.0.1:{port} (" in line
    assert all(word in line for word in ("rank 0's host", "port free and open", "all ranks start"))
