"""Some generated scripts, all of which are right: prove calls none of them WRONG."""

import json
from pathlib import Path

import loaders
import one_process
import plant_mistakes
import pytest
from generate import generate

from local_ranks.machine import scratch_folder
from local_ranks.scripts import SECONDS, run_script

FOLDER = Path(__file__).parents[1] / "evidence" / "fuzz"

STYLES = (*loaders.STYLES, *loaders.INDEXED)

SEEDS = [0, 1, 3, 4, 6, 9, 31, 32, 41, 53, 55, 76, 89, 109, 111, 120, 125, 132, 163, 171, 232]
SEEDS += [245, 255, 256, 270, 275, 293, 296, 297, 299]
NOT_PROVEN = [41]  # a loop without a loader: how many samples a list of indices has
WITH_FAULT = [1, 31, 55]
PLANTED = {0: "parameter", 14: "parameter", 15: "part of a tensor", 18: "lost sample"}
PIECES = "task data workers collate averaging optimizer precision accumulation schedule clipping "
PIECES += "evaluation saving launcher"


def run_program(program: str, *arguments: object) -> dict:
    """One of the programs beside the generator; what it writes down."""
    file = scratch_folder() / "results.json"
    words = [str(each) for each in ("0", "300", "--json", file, *arguments)]
    [(status, output)] = run_script(str(FOLDER / program), *words, seconds=10 * SECONDS)
    assert file.exists(), f"{program} ended with {status}: {output[-2000:]}"
    return json.loads(file.read_text())


def test_right_scripts_are_not_called_wrong():
    judged = run_program("judge_scripts.py", "--only", *SEEDS)
    assert judged["WRONG"] == {}
    proven = [seed for seed in SEEDS if seed not in NOT_PROVEN]
    assert judged["proven seeds"] == proven, judged["not proven"]


def test_the_same_scripts_with_a_local_divisor_are_called_wrong():
    faulty = run_program("judge_scripts.py", "--fault", "--only", *WITH_FAULT)
    assert sorted(map(int, faulty["WRONG"])) == WITH_FAULT
    assert not {*WITH_FAULT} & {*NOT_PROVEN}


@pytest.mark.parametrize("with_fault", [False, True])
def test_the_scripts_are_right_and_no_longer_so_with_a_local_divisor(with_fault):
    """Their weights after all steps are those of one process, and prove has no part in this."""
    flags = [] if with_fault else ["--without-fault"]
    seeds = [seed for seed in SEEDS if (seed in WITH_FAULT) is with_fault]
    judged = run_program("one_process.py", *flags, "--only", *seeds)
    assert (judged["right"], judged["not right"]) == (len(seeds), [])
    assert judged["farthest"] < one_process.LIMIT
    assert judged["nearest with a fault"] > 1e-4


def test_a_planted_mistake_is_called_wrong_and_begins_with_the_weights():
    """Gradients that are gathered, complex weights, DDP, and a last window of fully_shard; and no
    change is no mistake."""
    searched = run_program("plant_mistakes.py", "--only", *PLANTED)["scripts"]
    assert {int(seed): each["kind"] for seed, each in searched.items()} == PLANTED
    assert {each["outcome"] for each in searched.values()} == {"WRONG"}
    no_change = plant_mistakes.changed_weights(0, lambda parts, plan, task: None)
    assert no_change < one_process.LIMIT < plant_mistakes.DIFFERS


def test_a_mistake_is_planted_only_where_it_has_a_place():
    complex_seed = next(seed for seed in PLANTED if generate(seed).pieces["task"] == "complex")
    assert plant_mistakes.plantable(complex_seed, "dtype")
    assert not plant_mistakes.plantable(0, "dtype")


def test_the_chosen_have_every_piece_that_a_script_can_have():
    pieces = {seed: generate(seed).pieces for seed in range(300)}
    of_all, of_chosen = (
        {(piece, pieces[seed].get(piece)) for seed in seeds for piece in PIECES.split()}
        for seeds in (pieces, SEEDS)
    )
    assert of_all == of_chosen
    assert generate(7).text == generate(7).text != generate(20).text


@pytest.mark.parametrize("style", STYLES)
def test_a_loader_deals_every_sample_to_one_rank_in_each_epoch(style):
    workers = "2, prefetch" if style == "stream" else "0"
    of_ranks = one_process.dealt_samples(style, workers)
    for epoch in range(2):
        assert sorted(of_ranks[0][epoch] + of_ranks[1][epoch]) == list(range(64))
    first, second = of_ranks[0]
    assert (first == second) == (style == "unshuffled")
