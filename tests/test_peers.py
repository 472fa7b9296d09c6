"""The peers of stage 04: they train the same way, and what is timed is added up rightly."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from support import REAL_DATA, ROOT, command, run_ranks, scratch_folder

sys.path.append(str(ROOT / "benchmarks"))
import peers
import same_result
from peers import Log, read

STEPS = 4
needs_mnist = pytest.mark.skipif(
    not (REAL_DATA / "MNIST" / "raw").is_dir(), reason="needs MNIST in ../shared/data"
)
FLAGS = ("--dataset=mnist", f"--data-dir={REAL_DATA}", f"--max-steps={STEPS}", "--lr=0.1")
SCRIPTS = {
    "plain": [],
    "accelerate_": [
        pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
    ],
    "fabric_": [
        pytest.mark.skipif(
            not find_spec("lightning_fabric"), reason="lightning-fabric is not installed"
        )
    ],
}
each_peer = pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in SCRIPTS.items()])


# --- They compute what stage 04 computes


def _run(rank, script, flags):
    """A program as torchrun starts it, without dropout: each of them draws other masks."""
    import runpy

    import torch.distributed as dist
    from torch import nn

    nn.Dropout.forward = nn.Dropout2d.forward = lambda self, x: x
    sys.argv = [script, *flags]
    sys.path.insert(0, str((ROOT / script).parent))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()


def losses_of(script, *flags):
    folder = scratch_folder()
    run_ranks(2, _run, script, (*FLAGS, f"--run-dir={folder}", *flags))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([json.loads(line)["loss"] for line in lines])


@pytest.fixture(scope="module")
def of_stage_04():
    return losses_of("04_ddp_torchrun/train.py", "--device=cpu")


@needs_mnist
@each_peer
@pytest.mark.parametrize("flags", [(), ("--data=ours",)], ids=["pictures", "our-data"])
def test_a_peer_takes_the_steps_of_stage_04(name, flags, of_stage_04):
    """The same weights at the start, the same global batches, the same rate: the same losses."""
    losses = losses_of(f"benchmarks/peers/{name}.py", *flags)
    assert len(losses) == STEPS
    assert (losses - of_stage_04).abs().max() < 1e-5


@needs_mnist
@pytest.mark.parametrize("flag", ["--seed=8", "--lr=0.11"])
def test_another_optimization_would_be_noticed(flag, of_stage_04):
    """The control."""
    losses = losses_of("benchmarks/peers/plain.py", "--data=ours", flag)
    assert (losses - of_stage_04).abs().max() > 1e-4


# --- The benchmark


BATCHES = {"samples": 10.0}


def measured(monkeypatch, installed, *args, **more):
    """What `measure` makes of programs that are not started; and what it would have started."""
    asked = []

    def run(variant, data_dir, *flags, target=2.0):
        asked.append((variant, flags, target))
        return read(iter(LINES), target)

    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers, "us_a_sample", lambda *_: BATCHES)
    monkeypatch.setattr(peers, "find_spec", lambda name: installed)
    monkeypatch.setattr(peers, "version", lambda name: "1.0")
    results = peers.measure(REAL_DATA, *args, **more)
    assert json.loads(json.dumps(results)) == results
    return results, asked


def test_without_the_libraries_the_others_are_timed_and_the_line_that_installs_them_is_shown(
    monkeypatch,
):
    results, _ = measured(monkeypatch, None, 1)
    names = {name for name, variant in peers.VARIANTS.items() if not variant.package}
    assert {"04 DDP", "PyTorch's recipe"} < names
    assert set(results["variants"]) == names | {"A/A"}
    assert set(results["left_out"]) == set(peers.VARIANTS) - names
    assert "pip install -r requirements-peers.txt" in results["left_out"]["Accelerate"]
    assert not results["versions"]


def test_only_the_first_round_is_a_race_and_no_variant_is_timed_more_often(monkeypatch):
    results, asked = measured(monkeypatch, True, 3)
    assert set(results["variants"]) == set(peers.VARIANTS) | {"A/A"}
    assert results["versions"] == {"accelerate": "1.0", "lightning_fabric": "1.0"}
    a_round = len(peers.VARIANTS) + 1
    assert len(asked) == 3 * a_round
    races = [target == peers.TARGET for _, _, target in asked]
    assert sum(races[:a_round]) == sum(variant.races for variant in peers.VARIANTS.values())
    assert not any(races[a_round:])
    orders = {tuple(v.command for v, *_ in asked[k * a_round :][:a_round]) for k in range(3)}
    assert len(orders) == 3  # each round has its own


@needs_mnist
def test_a_program_is_timed_by_what_it_prints():
    log = peers.run(peers.VARIANTS["01 one process"], REAL_DATA, "--max-steps=2")
    assert 0 < log.start_up < log.epoch_ends[0]
    assert 0 < log.accuracies[0] < 1


@needs_mnist
def test_a_sample_costs_something_to_load_and_to_learn():
    found = peers.us_a_sample(REAL_DATA, 2)
    assert len(found) == 3
    assert min(found.values()) > 0


def test_without_mnist_it_ends_in_one_line():
    [(status, output)] = command("benchmarks/peers.py", "--data-dir=data")
    assert status == 2
    assert output.count("\n") == 1
    assert "no MNIST" in output
    assert "--data-dir" in output


@needs_mnist
def test_a_program_that_fails_is_an_error_that_shows_what_it_said():
    broken = peers.Variant(("01_single_gpu/train.py", "--lr=fast"))
    with pytest.raises(RuntimeError, match="'fast'"):
        peers.run(broken, REAL_DATA)


# --- What the lines of a program tell

LINES = [
    (3.0, "some library greets\n"),
    (5.0, "global batch 120 = 2 × 60 (world size × local batch)\n"),
    (15.0, "epoch 1/3  loss 0.6  test loss 0.1  test accuracy 96.99%  9,000 samples/s\n"),
    (25.0, "epoch 2/3  loss 0.3  test accuracy 98.00%\n"),
    (35.0, "epoch 3/3  loss 0.2  test accuracy 98.40%\n"),
]


def test_start_up_and_the_first_epoch_are_told_apart():
    log = read(iter(LINES))
    assert log == Log(5.0, [15.0, 25.0, 35.0], [0.9699, 0.98, 0.984])
    assert log.first_epoch_seconds() == 10.0


@pytest.mark.parametrize(
    ("target", "reached"), [(0.9, (15.0, 1)), (0.98, (25.0, 2)), (0.981, (35.0, 3)), (0.99, None)]
)
def test_the_race_ends_at_the_first_evaluation_that_reaches_the_target(target, reached):
    assert read(iter(LINES)).to(target) == reached
    ended = read(iter(LINES), target)  # as soon as that line is there
    assert ended.to(target) == reached
    assert len(ended.epoch_ends) == (reached[1] if reached else 3)


def test_the_summary_divides_by_stage_04_round_by_round():
    def logs(*seconds):
        return [Log(5.0, [5.0 + s], [0.97]) for s in seconds]

    race = Log(5.0, [15.0, 24.0], [0.97, 0.981])
    found = peers.summary(
        {"04 DDP": [race, *logs(20.0, 40.0)], "PyTorch's recipe": logs(20.0, 40.0, 100.0)}, 500
    )
    ours, plain = found.values()
    assert ours["samples_per_second"] == 3000  # 60,000 in the median, 20 s
    assert plain["samples_per_second"] == 1500
    assert plain["ratio"] == 2.0  # the median of 2, 2 and 2.5
    assert plain["ratio_interval"] == [2.0, 2.5]
    assert (ours["target_seconds"], ours["target_epochs"]) == (24.0, 2)
    assert (plain["target_seconds"], plain["target_epochs"]) == (None, None)


def test_results_of_the_race_have_a_row_each_and_a_picture(tmp_path):
    logs = {name: [Log(5.0, [15.0, 24.0], [0.97, 0.981])] for name in (*peers.VARIANTS, "A/A")}
    logs["Accelerate"] = [Log(5.0, [15.0], [0.97])]
    results = {"variants": peers.summary(logs, 500), "provenance": {"hardware": "none"}}
    rows = {row[0]: row[1:] for row in peers.rows(results)}
    assert rows["04 DDP"] == ("6,000", "1.00 (1.00 to 1.00)", "5.0", "24 (2)")
    assert rows["Accelerate"][-1] == ""
    peers.draw(results, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


# --- benchmarks/same_result.py


def test_each_stage_repeats_one_recipe_and_a_broken_one_none():
    runs = same_result.train_all(("04 DDP", "05 DDP, SyncBN"), dtype="float64")
    runs["broken"] = same_result.train("03", dtype="float64", without=(same_result.ALL_REDUCE,))
    found = same_result.matrix(runs)
    nearest = [same_result.nearest(row) for row in found.values()]
    assert nearest == ["strides", "whole_batches", "none"]
    assert same_result.ranks_apart(runs["04 DDP"]) == 0
    assert same_result.ranks_apart(runs["broken"]) > 1e-3


def test_without_dropout_net_on_two_ranks_repeats_one_process():
    pair = ("01 one process", "04 DDP")
    drawn, off = (
        same_result.losses_of(same_result.train_all(pair, model="net", without=without))
        for without in ((), (same_result.NO_DROPOUT,))
    )
    assert max(same_result.gaps(*drawn.values())) > 1e-3
    assert max(same_result.gaps(*off.values())) < 1e-5
