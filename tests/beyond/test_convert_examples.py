"""convert/examples: what one process trains, two ranks train too, and not with a wrong line."""

import os
import runpy
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch

import sync_batchnorm
from convert_cases import EXAMPLES, load
from helpers.on_ranks import run_on_ranks
from local_ranks.machine import scratch_folder
from local_ranks.stage_files import replace_once

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


def versions_of(name: str) -> list[str]:
    """The script for one GPU, and the one that its diff makes of it."""
    return load("apply_steps.py").versions_of(EXAMPLES / f"{name}.py")


def _example(rank: int, source: str, *changes: tuple[str, str]) -> dict:
    """The weights after the script has run, and what it has printed."""
    os.chdir(scratch_folder())
    source = replace_once(source, *changes)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = sync_batchnorm.convert_sync_batchnorm
    torch.set_default_dtype(torch.float64)
    Path("script.py").write_text(source)
    with redirect_stdout(StringIO()) as printed:
        names = runpy.run_path("script.py", run_name="__main__")
    models = [names[key] for key in ("model", "generator", "critic") if key in names]
    weights = [p.detach() for model in models for p in model.parameters()]
    return {"weights": torch.cat([p.flatten() for p in weights]), "printed": printed.getvalue()}


@cache
def original_of(name: str) -> dict:
    """Run the original; if it shuffles, then in the order of a DistributedSampler."""
    epochs, sampler = (
        "for epoch in range(3):\n",
        "torch.utils.data.DistributedSampler(train_set, 1, 0)",
    )
    changes = (
        ("\nloader =", f"\nsampler = {sampler}\nloader ="),
        ("shuffle=True", "sampler=sampler"),
        (epochs, f"{epochs}    sampler.set_epoch(epoch)\n"),
    )
    source = versions_of(name)[0]
    return run_on_ranks(1, _example, source, *changes * ("shuffle=True" in source))[0]


@pytest.mark.parametrize("name", EXAMPLE)
def test_an_example_trains_on_two_ranks_what_one_process_trains(name):
    single = original_of(name)
    first, second = run_on_ranks(2, _example, versions_of(name)[1], *EXAMPLE[name])
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - single["weights"]).abs().max() < 1e-10
    assert (single["printed"] != "", second["printed"]) == (True, ""), "only rank 0 prints"
    if name in ("language", "segmentation"):  # these print an evaluation, which is exact
        assert first["printed"] == single["printed"]
    diff = (EXAMPLES / f"{name}.diff").read_text()
    assert [diff] == load("apply_steps.py").fresh_diffs(versions_of(name))
    assert 15 <= sum(line[0] in "+-" for line in diff.splitlines()[2:]) <= 40


@pytest.mark.parametrize(("name", "old", "new"), WRONG_LINES)
def test_with_one_line_that_looks_as_good_an_example_trains_something_else(name, old, new):
    changes = [*EXAMPLE[name], (old, new)]
    if "both" in new:
        changes.append(("critic_loss(ddp_critic(fake.detach()), 0.0).backward()", "pass"))
    weights = run_on_ranks(2, _example, versions_of(name)[1], *changes)[0]["weights"]
    assert (weights - original_of(name)["weights"]).abs().max() > 1e-5


def test_a_rate_that_only_rank_0_lowers_lets_the_ranks_train_apart():
    worse = ("test_loss < best", "epoch != 1")
    source = versions_of("language")[1]
    same = run_on_ranks(2, _example, source, worse)
    lowered = (
        'optimizer.param_groups[0]["lr"] /= 4',
        'optimizer.param_groups[0]["lr"] /= 4 - 3 * rank',
    )
    apart = run_on_ranks(2, _example, source, worse, lowered)
    assert torch.equal(same[0]["weights"], same[1]["weights"])
    assert (apart[0]["weights"] - apart[1]["weights"]).abs().max() > 1e-2
