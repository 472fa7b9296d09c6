"""beyond/shard/train.py repeats stage 04, which resumes its checkpoints, and learns a language."""

import pytest
import torch

from helpers.refusals import assert_one_line, refusal
from local_ranks.stage_files import LESSON_FOLDERS, different_functions, functions
from local_ranks.train_stage import train, train_once
from shard_cases import FSDP, ZERO_1, ZERO_2, largest_difference

ON_DIGITS = ("--dataset=digits", "--model=net-bn", "--optimizer=sgd", "--lr=0.02", "--epochs=2")
ON_DIGITS += ("--batch-size=300", "--seed=7", "--max-steps=7")  # 5 in the first epoch


def test_shard_train_repeats_stage_04_and_04_resumes_its_checkpoint():
    """Saved after one epoch of two, resumed by stage 04's unchanged script and at other levels."""
    flags = [flag for flag in ON_DIGITS if "optimizer" not in flag]
    uninterrupted = train_once("04", 2, *flags)
    first_epoch = train("shard", 2, *ON_DIGITS, f"--shard={ZERO_2}", "--epochs=1")
    resume = f"--resume={first_epoch.folder / 'checkpoint.pt'}"
    others = [("shard", ("--optimizer=sgd", f"--shard={level}")) for level in (ZERO_1, FSDP)]
    for key, more in [("04", ()), *others]:
        resumed = train(key, 2, *flags, *more, resume)
        losses = torch.cat([first_epoch.losses, resumed.losses])
        assert (losses - uninterrupted.losses).abs().max() < 1e-10
        reference_state = uninterrupted.checkpoint["model"]
        assert largest_difference(resumed.checkpoint["model"], reference_state) < 1e-10


@pytest.mark.parametrize("level", ["none", ZERO_2])
def test_shard_a_checkpoint_of_the_other_optimizer_is_refused_in_one_line(level):
    flags = (*ON_DIGITS, f"--shard={level}", "--max-steps=1")
    path = train_once("shard", 2, *flags, "--optimizer=adamw").folder / "checkpoint.pt"
    line = refusal("shard", *flags, f"--resume={path}", world_size=2)
    assert_one_line(line, "another optimizer, without dampening, momentum, nesterov")


def test_shard_the_language_model_learns_and_its_loss_does_not_depend_on_the_ranks():
    flags = ("--max-steps=8", "--width=8", "--layers=1", "--lr=0.01", "--batch-size=48")
    two, three = (train("shard", ranks, *flags) for ranks in (2, 3))
    assert (two.losses - three.losses).abs().max() < 1e-10
    assert two.losses[-1] < 0.95 * two.losses[0]
    state = two.checkpoint["model"]
    assert largest_difference(state, three.checkpoint["model"]) < 1e-10
    own_tokens = train("shard", 2, *flags, changes=(("train.py", "dist.all_reduce(tokens)"),))
    assert largest_difference(state, own_tokens.checkpoint["model"]) > 1e-3, "the control: C43"


def test_shard_what_the_script_does_not_teach_is_stage_04s():
    sharded, stage_04 = ((LESSON_FOLDERS[key] / "train.py").read_text() for key in ("shard", "04"))
    assert "join_process_group" in functions(sharded)
    assert different_functions(sharded, stage_04) == {"train_epoch", "evaluate", "main"}
