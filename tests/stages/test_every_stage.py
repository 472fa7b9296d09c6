"""Every stage learns, logs, evaluates each sample once, and resumes to the bit.

It also takes the checkpoint of any other stage.
"""

import re
import statistics
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from common.data import load_dataset
from common.models import build_model
from helpers.on_ranks import run_on_ranks
from helpers.small_data import few_digits, random_pictures
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.run_files import Run, same_run
from local_ranks.scripts import run_script
from local_ranks.train_stage import (
    FP32,
    ON_CPU,
    ONE_EPOCH,
    default_dtype,
    load_stage,
    options,
    run_main,
    train,
    train_once,
)

RANKS = {"01": 1, "02": 1, "03": 2, "04": 2, "05": 2}  # ranks of each stage
each_stage = pytest.mark.parametrize(("key", "ranks"), RANKS.items(), ids=RANKS)


def five_epochs(key: str, ranks: int) -> Run:
    return train_once(key, ranks, "--epochs=5", "--lr=0.1", "--weight-decay=0.001", **FP32)


@each_stage
def test_every_stage_learns(key, ranks):
    # In 02, two threads draw dropout from one generator in any order, so no two runs are alike.
    least = 0.6 if key == "02" else 0.85
    assert five_epochs(key, ranks).summary["test_accuracy"] > least


def test_a_stage_that_skips_its_step_does_not_learn():
    """The control of the test above."""
    run = train_once("01", 1, "--epochs=1", **FP32, changes=(("train.py", "optimizer.step()"),))
    assert run.summary["test_accuracy"] < 0.3


@each_stage
def test_every_step_is_logged(key, ranks):
    metrics = five_epochs(key, ranks).metrics
    logged = [[line[name] for name in ("epoch", "step", "samples", "lr")] for line in metrics]
    assert logged == [[step // 12, step + 1, 120, 0.1] for step in range(60)]


@each_stage
def test_the_summary_says_what_ran_and_how_fast(key, ranks):
    run = five_epochs(key, ranks)
    summary, local_batch = run.summary, 120 if key == "01" else 60
    expected = {"dataset": "digits", "model": "net", "device": "cpu", "world_size": ranks}
    expected |= {"global_batch": 120, "local_batch": local_batch, "epochs": 5, "seed": 1234}
    expected |= {"steps": 60, "torch": torch.__version__}
    assert expected.items() <= summary.items()
    assert summary["stage"].startswith(key)
    assert summary["train_loss"] == pytest.approx(run.losses[-12:].mean().item())
    median = statistics.median(line["seconds"] for line in run.metrics[5:])  # not the first ones
    assert summary["step_ms"] == pytest.approx(1000 * median, abs=3e-4)
    assert summary["samples_per_second"] == pytest.approx(120e3 / summary["step_ms"], rel=1e-3)


@each_stage
def test_a_run_prints_how_the_batch_is_divided_and_what_each_epoch_reached(key, ranks):
    run = five_epochs(key, ranks)
    parts = 1 if key == "01" else 2
    assert run.output.startswith(f"global batch 120 = {parts} × {120 // parts}\n")
    last_epoch = "epoch 5/5  loss {train_loss:.4f}  test loss {test_loss:.4f}".format(**run.summary)
    assert f"\n{last_epoch}  test accuracy {run.summary['test_accuracy']:.2%}  " in run.output


@each_stage
def test_the_checkpoint_has_the_optimizer_that_the_flags_ask_for(key, ranks):
    group = five_epochs(key, ranks).checkpoint["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0.001)


def seeds_of(rank: int, key: str, flags: tuple[str, ...]) -> list[int]:
    """The seeds that a run gives to torch, in order."""
    seeds, seed_all = [], torch.manual_seed
    with patch.object(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_all(seed)):
        run_main(load_stage(key), rank, *flags)
    return seeds


@cache
def four_steps(key: str, ranks: int) -> tuple[Run, list[list[int]]]:
    """A run that ends inside its second epoch, and the seeds of each rank."""
    folder = scratch_folder()
    flags = (*ON_CPU, *few_digits(), f"--run-dir={folder}", "--batch-size=100", "--max-steps=4")
    flags += ("--world-size=2",) if key == "03" else ()
    return Run(folder, [], ""), run_on_ranks(ranks, seeds_of, key, flags)


@each_stage
def test_random_numbers_depend_on_seed_epoch_and_rank(key, ranks):
    """So the ranks draw dropout masks of their own: test_c29 shows it."""
    for rank, seeds in enumerate(four_steps(key, ranks)[1]):
        assert seeds == [1234, 1234 + rank, 1234 + ranks + rank], "for the weights and two epochs"


@each_stage
def test_max_steps_ends_a_run_inside_an_epoch(key, ranks):
    run, _ = four_steps(key, ranks)
    assert [(line["epoch"], line["step"]) for line in run.metrics[2:]] == [(0, 3), (1, 4)]
    assert run.summary["steps"] == 4
    assert [run.checkpoint[name] for name in ("epoch", "epoch_step", "step")] == [1, 1, 4]


# Evaluation


def evaluated(state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Loss and accuracy of these weights on the test set, as one batch in float64."""
    with default_dtype(torch.float64), torch.no_grad():
        _, test_set = load_dataset(options())
        model = build_model("net-bn", test_set).eval()
        model.load_state_dict(state)
        images, labels = test_set.__getitems__(range(len(test_set)))
        logits = model(images)
        accuracy = (logits.argmax(dim=1) == labels).double().mean().item()
        return torch.nn.functional.cross_entropy(logits, labels).item(), accuracy


@pytest.mark.parametrize(("key", "ranks"), [("02", 1), ("05", 2)])
def test_evaluation_counts_every_sample_once(key, ranks, changes=()):
    """297 test samples: no rank has as many as another."""
    run = train_once(key, ranks, *ONE_EPOCH, "--max-steps=3", changes=changes)
    expected = evaluated(run.checkpoint["model"])
    printed = run.summary["test_loss"], run.summary["test_accuracy"]
    assert printed == pytest.approx(expected, abs=1e-10)


def test_01_evaluates_every_sample_once(changes=()):
    test_evaluation_counts_every_sample_once("01", 1, changes)


def test_03_evaluates_every_sample_once(changes=()):
    test_evaluation_counts_every_sample_once("03", 2, changes)


def test_04_evaluates_every_sample_once(changes=()):
    test_evaluation_counts_every_sample_once("04", 2, changes)


# Resuming


@pytest.mark.parametrize(("source", "taker"), list(pairwise([("05", 2), *RANKS.items()])))
def test_every_stage_resumes_the_checkpoint_of_another_and_01_evaluates_it(source, taker):
    source_run, first_epoch = (train_once(*each, *ONE_EPOCH, **FP32) for each in (source, taker))
    path = source_run.folder / "checkpoint.pt"
    loss, accuracy = evaluated(source_run.checkpoint["model"])
    call = (str(path), *ONE_EPOCH, "--device=cpu", f"--data-dir={ROOT / 'data'}")
    [(_, output)] = run_script("01_single_gpu/evaluate.py", *call)  # in float32
    printed = [float(number) for number in re.findall(r"[\d.]+", output)]
    assert printed == [pytest.approx(loss, abs=2e-4), pytest.approx(100 * accuracy, abs=6e-3)]
    flags = ("--epochs=2", "--max-steps=35", f"--resume={path}")
    run = train(*taker, *ONE_EPOCH, *flags, **FP32)
    assert [line["epoch"] for line in run.metrics] == [1] * 10
    assert run.losses.mean() < first_epoch.losses.mean() / 2, "it began where the other had stopped"


def assert_resumes(key: str, ranks: int, *flags: str, changes=()) -> None:
    """A run that stops after half of its steps and goes on ends with the bits of a whole run."""
    flags = (*few_digits(), "--batch-size=60", *flags, "--epochs=2")
    settings = {**FP32, "changes": changes}
    whole = train_once(key, ranks, *flags, **settings)
    half = train(key, ranks, *flags, f"--max-steps={len(whole.losses) // 2}", **settings)
    resumed = train(key, ranks, *flags, "--resume=auto", **settings, folder=half.folder)
    assert same_run(whole, resumed)


# With dropout, but in 02: there, the threads draw their dropout masks in no fixed order.
def test_01_resumes_to_the_bit(changes=()):
    assert_resumes("01", 1, changes=changes)


def test_03_resumes_to_the_bit(changes=()):
    assert_resumes("03", 2, changes=changes)


def test_05_resumes_the_loss_scale(changes=()):
    """And the random crops of the pictures. They are few, because a CPU computes fp16 slowly."""
    pictures = random_pictures(scratch_folder())
    assert_resumes("05", 2, "--model=net-bn", *pictures, "--amp=fp16", changes=changes)


@pytest.mark.parametrize(("key", "ranks", "flags"), [("02", 1, ["--model=net-bn"]), ("04", 2, [])])
def test_a_stage_resumes_to_the_bit(key, ranks, flags):
    assert_resumes(key, ranks, *flags)


def test_a_resumed_run_has_its_own_metrics_and_the_learning_rate_of_its_call(tmp_path):
    few = (*few_digits(), *ONE_EPOCH)  # an epoch has 5 steps
    train("01", 1, *few, "--max-steps=3", folder=tmp_path)  # another run, in the same folder
    path = train_once("01", 1, *few).folder / "checkpoint.pt"
    flags = ("--epochs=2", "--lr=0.5", "--momentum=0.8", "--weight-decay=0.1", f"--resume={path}")
    run = train("01", 1, *few, *flags, folder=tmp_path)
    assert [(line["step"], line["lr"]) for line in run.metrics] == [(n, 0.5) for n in range(6, 11)]
    group = run.checkpoint["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0.1)
