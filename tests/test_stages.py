"""What every stage must do beside computing the right thing: learn, log, save, resume, evaluate."""

import shutil
import time
from pathlib import Path

import oracle
import pytest
import torch
import torch.nn.functional as F
import torchvision
from support import (
    REAL_DATA,
    ROOT,
    Run,
    default_dtype,
    load_stage,
    run_main,
    run_ranks,
    train,
    train_once,
)
from torchvision.datasets import MNIST

import common.data
from common.data import load_dataset, make_loader
from common.models import build_model
from common.options import make_parser

WAYS = [("01", 1), ("02", 1), ("03", 2), ("04", 2), ("05", 2)]
each_stage = pytest.mark.parametrize(("key", "ranks"), WAYS, ids=[key for key, _ in WAYS])
FP32 = {"dtype": torch.float32}


@each_stage
def test_every_stage_learns(key, ranks):
    run = train_once(key, ranks, **FP32)
    assert run.losses[:12].mean() > 2 * run.losses[-12:].mean()
    assert run.summary["test_accuracy"] > 0.9


def test_a_stage_that_skips_its_step_does_not_learn():
    """The control of the test above."""
    run = train_once("01", 1, **FP32, without=(("train.py", "optimizer.step()"),))
    assert run.summary["test_accuracy"] < 0.3


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_05_learns_in_mixed_precision(amp):
    run = train_once("05", 2, "--model=net-bn", f"--amp={amp}", **FP32)
    full = train_once("05", 2, "--model=net-bn", **FP32)
    assert run.summary["test_accuracy"] > 0.9
    assert not torch.equal(run.losses, full.losses), "autocast did nothing"
    assert run.checkpoint["model"]["fc1.weight"].dtype == torch.float32, "the weights stay fp32"


@each_stage
def test_metrics_have_a_line_per_step(key, ranks):
    metrics = train_once(key, ranks, **FP32).metrics
    assert [line["step"] for line in metrics] == list(range(1, 121))
    assert [line["epoch"] for line in metrics] == [epoch for epoch in range(10) for _ in range(12)]
    assert all(line["samples"] == 120 and line["lr"] == 0.02 for line in metrics)
    assert all(line["seconds"] > 0 for line in metrics)


@each_stage
def test_summary_tells_what_ran_and_what_came_of_it(key, ranks):
    run = train_once(key, ranks, **FP32)
    summary = run.summary
    expected = {"dataset": "digits", "model": "net", "device": "cpu", "world_size": ranks}
    expected |= {"global_batch": 120, "epochs": 10, "seed": 1234, "steps": 120}
    expected |= {"local_batch": 120 if key == "01" else 60, "torch": torch.__version__}
    assert {name: summary[name] for name in expected} == expected
    assert summary["stage"].startswith(key)
    assert len(summary["peak_memory_bytes"]) == ranks
    assert all(50e6 < peak < 5e9 for peak in summary["peak_memory_bytes"])
    assert summary["samples_per_second"] == pytest.approx(120e3 / summary["step_ms"], rel=1e-3)
    assert summary["train_loss"] == pytest.approx(run.losses[-12:].mean().item())


def evaluated(state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Loss and accuracy of these float64 weights over the test set in one plain batch."""
    args = make_parser("", "").parse_args([f"--data-dir={ROOT / 'data'}"])
    with default_dtype(torch.float64), torch.no_grad():
        _, test_set = load_dataset(args)
        model = build_model("net-bn", test_set).eval()
        model.load_state_dict(state)
        images, labels = test_set.__getitems__(range(len(test_set)))
        logits = model(images)
        accuracy = (logits.argmax(dim=1) == labels).double().mean().item()
        return F.cross_entropy(logits, labels).item(), accuracy


SHORT = ("--model=net-bn", "--epochs=1", "--batch-size=60")
MANY = [("01", 1), ("02", 1), ("03", 2), ("03", 4), ("04", 2), ("04", 4), ("05", 2), ("05", 4)]


@pytest.mark.parametrize(("key", "ranks"), MANY)
def test_evaluation_counts_every_sample_once(key, ranks, without=()):
    """297 test samples on 2 and on 4 ranks: no shard is as long as another."""
    run = train_once(key, ranks, *SHORT, without=without)
    loss, accuracy = evaluated(run.checkpoint["model"])
    assert run.summary["test_loss"] == pytest.approx(loss, abs=1e-10)
    assert run.summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-10)


def test_01_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("01", 1, without)


def test_02_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("02", 1, without)


def test_03_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("03", 2, without)


def test_04_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("04", 2, without)


def test_a_padding_sampler_would_count_samples_twice():
    """The control: DistributedSampler over 297 samples on 4 ranks hands out 300."""
    sampler = [
        torch.utils.data.DistributedSampler(range(297), 4, rank, shuffle=False) for rank in range(4)
    ]
    dealt = [index for part in sampler for index in part]
    assert len(dealt) == 300
    assert len(set(dealt)) == 297


def test_all_checkpoints_have_the_same_form():
    """Names, shapes and dtypes of weights and momenta: any stage can take any other's."""
    forms = []
    for key, ranks in WAYS:
        content = train_once(key, ranks, *SHORT).checkpoint
        state = content["optimizer"]["state"]
        forms.append(
            (
                {name: (t.shape, t.dtype) for name, t in content["model"].items()},
                {
                    i: (s["momentum_buffer"].shape, s["momentum_buffer"].dtype)
                    for i, s in state.items()
                },
                {k: content[k] for k in ("epoch", "epoch_step", "step")},
            )
        )
    assert all(form == forms[0] for form in forms)


# Each stage once as the one that takes a checkpoint, and once as the one that has saved it.
PAIRS = [(way, WAYS[i - 1]) for i, way in enumerate(WAYS)]
each_pair = pytest.mark.parametrize(
    ("way", "source"), PAIRS, ids=[f"{way[0]} takes {source[0]}" for way, source in PAIRS]
)


@each_pair
def test_every_stage_evaluates_the_checkpoint_of_another(way, source):
    other = train_once(*source, *SHORT)
    loss, accuracy = evaluated(other.checkpoint["model"])
    run = train(*way, *SHORT, f"--evaluate={other.folder / 'checkpoint.pt'}")
    assert run.output == f"test loss {loss:.4f}  test accuracy {accuracy:.2%}\n"
    assert list(run.folder.iterdir()) == [], "evaluation leaves nothing behind"


@each_pair
def test_every_stage_resumes_the_checkpoint_of_another(way, source):
    other, first = train_once(*source, *SHORT), train_once(*way, *SHORT)
    flags = ("--model=net-bn", "--batch-size=60", "--epochs=2")
    run = train(*way, *flags, f"--resume={other.folder / 'checkpoint.pt'}")
    assert [line["epoch"] for line in run.metrics] == [1] * 25
    assert run.losses.mean() < first.losses.mean() / 2, "it began where the other had stopped"


@each_stage
def test_a_checkpoint_from_inside_an_epoch_is_for_survive(key, ranks):
    """The stages cannot skip the samples that the epoch has seen, and say so; they evaluate it."""
    flags = ("--model=net-bn", "--batch-size=60")
    path = train_once("01", 1, *flags, "--max-steps=7").folder / "checkpoint.pt"
    with pytest.raises(AssertionError, match=r"inside an epoch: resume it with survive/train\.py"):
        train(key, ranks, *flags, f"--resume={path}")
    run = train(key, ranks, *flags, f"--evaluate={path}")
    assert run.output.startswith("test loss ")
    at_its_end = train_once("01", 1, *flags, "--max-steps=25").folder / "checkpoint.pt"
    rest = train(key, ranks, *flags, "--epochs=2", f"--resume={at_its_end}")
    assert rest.summary["steps"] == 50, "the control: at the end of an epoch it resumes"


def same_run(a: Run, b: Run) -> bool:
    ours, theirs = a.checkpoint, b.checkpoint
    momenta = [
        [s["momentum_buffer"] for s in c["optimizer"]["state"].values()] for c in (ours, theirs)
    ]
    return (
        torch.equal(a.losses, b.losses)
        and ours.get("scaler") == theirs.get("scaler")
        and [x["step"] for x in a.metrics] == [x["step"] for x in b.metrics]
        and all(torch.equal(ours["model"][n], theirs["model"][n]) for n in ours["model"])
        and all(torch.equal(x, y) for x, y in zip(*momenta, strict=True))
    )


def resumes(key: str, ranks: int, *flags: str, without=()) -> None:
    """Two epochs in one run, and in two runs: the same bits."""
    more = {**FP32, "without": without}
    whole = train(key, ranks, *flags, "--epochs=2", **more)
    first = train(key, ranks, *flags, "--epochs=1", **more)
    resumed = train(key, ranks, *flags, "--epochs=2", "--resume=auto", **more, folder=first.folder)
    assert same_run(whole, resumed)


# With dropout, so that the random numbers count too. In 02, the threads of the replicas draw their
# dropout masks in no fixed order.


def test_01_resumes_to_the_bit(without=()):
    resumes("01", 1, "--model=net", without=without)


def test_02_resumes_to_the_bit(without=()):
    resumes("02", 1, "--model=net-bn", without=without)


def test_03_resumes_to_the_bit(without=()):
    resumes("03", 2, "--model=net", without=without)


def test_04_resumes_to_the_bit(without=()):
    resumes("04", 2, "--model=net", without=without)


def test_05_resumes_in_bf16_to_the_bit(without=()):
    resumes("05", 2, "--model=net", "--amp=bf16", without=without)


def test_05_resumes_the_loss_scale(without=()):
    resumes("05", 2, "--model=net-bn", "--amp=fp16", without=without)


def random_pictures(folder: Path) -> Path:
    """Twelve small random PNG files in two classes."""
    for part in ("train", "test"):
        for i in range(12):
            path = folder / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
            torchvision.io.write_png(image, str(path))
    return folder


@pytest.mark.parametrize(("key", "ranks", "workers"), [("01", 1, 1), ("04", 2, 0)])
def test_random_crops_resume_to_the_bit(key, ranks, workers, tmp_path):
    flags = ("--dataset=imagefolder", f"--data-dir={random_pictures(tmp_path)}", "--batch-size=2")
    resumes(key, ranks, *flags, f"--workers={workers}")


def test_05_resumes_on_another_number_of_ranks():
    """With SyncBatchNorm and without dropout, in float64, only rounding depends on the ranks."""
    flags = ("--model=net-bn", "--batch-size=60", "--epochs=2")
    whole = train_once("05", 2, *flags)
    path = f"--resume={train_once('05', 2, *SHORT).folder / 'checkpoint.pt'}"
    assert (whole.losses[25:] - train("05", 3, *flags, path).losses).abs().max() < 1e-10
    other = train("04", 3, *flags, path)
    assert (whole.losses[25:] - other.losses).abs().max() > 1e-3, "the control: local BatchNorm"


def test_metrics_of_another_run_are_not_taken_for_its_own(tmp_path):
    train("01", 1, "--model=net-bn", "--batch-size=60", "--max-steps=30", folder=tmp_path)
    path = train_once("01", 1, *SHORT).folder / "checkpoint.pt"
    flags = ("--model=net-bn", "--batch-size=60", "--epochs=2", f"--resume={path}")
    steps = [line["step"] for line in train("01", 1, *flags, folder=tmp_path).metrics]
    assert steps == list(range(26, 51))


def test_learning_rate_of_the_call_wins_over_that_of_the_checkpoint(tmp_path):
    first = train_once("01", 1, *SHORT)
    flags = ("--model=net-bn", "--batch-size=60", "--epochs=2", "--lr=0.5")
    run = train("01", 1, *flags, f"--resume={first.folder / 'checkpoint.pt'}")
    assert {line["lr"] for line in run.metrics} == {0.5}
    assert run.checkpoint["optimizer"]["param_groups"][0]["lr"] == 0.5


@each_stage
def test_max_steps_ends_the_run_inside_an_epoch(key, ranks):
    run = train_once(key, ranks, "--max-steps=3", "--batch-size=60")
    assert len(run.losses) == 3
    assert run.summary["steps"] == 3
    assert run.checkpoint["epoch"] == 0
    assert run.checkpoint["epoch_step"] == 3


def _masks(rank: int, key: str, flags: tuple[str, ...]) -> list[bool]:
    """Which of the 50 hidden units dropout kept for the first sample of the first step."""
    stage = load_stage(key)
    kept: list[torch.Tensor] = []
    build = stage.build_model

    def build_with_hook(*args):
        model = build(*args)
        model.dropout.register_forward_hook(
            lambda module, _, out: kept.append(out[0] != 0) if module.training else None
        )
        return model

    stage.build_model = build_with_hook
    run_main(stage, rank, *flags)
    return kept[0].tolist()


def masks(key: str, folder: Path) -> list[list[bool]]:
    flags = (f"--run-dir={folder}", f"--data-dir={ROOT / 'data'}", "--max-steps=1", "--device=cpu")
    flags += ("--world-size=2",) if key == "03" else ()
    return run_ranks(2, _masks, key, flags)


@pytest.mark.parametrize("key", ["03", "04", "05"])
def test_ranks_draw_their_own_dropout_masks(key, tmp_path):
    first, second = masks(key, tmp_path)
    assert first != second


class SlowSource(MNIST):
    """Files that take a second to arrive, and a list of the processes that have fetched them."""

    raw_folder = property(lambda self: f"{self.root}/files")

    def download(self):
        if self._check_exists():
            return
        with Path(self.root, "downloads").open("a") as file:
            file.write("one\n")
        time.sleep(1)  # the other rank must not look meanwhile
        shutil.copytree(ROOT / "data" / "digits", self.raw_folder, dirs_exist_ok=True)


def _download(rank: int, flags: tuple[str, ...], locked: bool) -> None:
    common.data.SOURCES["mnist"] = SlowSource
    if not locked:
        common.data.fcntl.flock = lambda *_: None
    run_main(load_stage("04"), rank, *flags)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "not-locked"])
def test_one_rank_downloads_and_the_others_wait(locked, tmp_path):
    flags = (f"--run-dir={tmp_path / 'run'}", f"--data-dir={tmp_path}", "--dataset=mnist")
    small = ("--max-steps=1", "--device=cpu", "--image-size=16")
    with pytest.raises(AssertionError, match="16 or more, got 8"):  # after the download
        run_ranks(2, _download, (*flags, *small), locked)
    downloads = (tmp_path / "downloads").read_text().split()
    assert downloads == (["one"] if locked else ["one", "one"]), "without the lock: the control"


def test_order_of_the_samples_is_that_of_distributed_sampler():
    """The k-th batches of all ranks are together the k-th global batch of stage 01."""
    whole = list(oracle.whole_batches(1500, 60, seed=7, epoch=3))
    ranks = []
    for rank in range(3):
        sampler = torch.utils.data.DistributedSampler(range(1500), 3, rank, seed=7, drop_last=True)
        sampler.set_epoch(3)
        ranks.append(list(sampler))
    for k, [batch] in enumerate(whole):
        assert sorted(batch) == sorted(i for r in ranks for i in r[k * 20 : (k + 1) * 20])


@pytest.mark.skipif(not oracle.real_data(REAL_DATA), reason="no MNIST in ../shared/data")
@pytest.mark.parametrize(("key", "ranks"), [("01", 1), ("05", 2)])
def test_mnist_is_learned_in_a_third_of_an_epoch(key, ranks):
    flags = ("--dataset=mnist", f"--data-dir={REAL_DATA}", "--model=net-bn", "--max-steps=150")
    assert train(key, ranks, *flags, **FP32).summary["test_accuracy"] > 0.94


@pytest.mark.skipif(not oracle.real_data(REAL_DATA), reason="no MNIST in ../shared/data")
def test_a_pass_over_mnist_sees_every_image_once():
    args = make_parser("", "").parse_args(["--dataset=mnist", f"--data-dir={REAL_DATA}"])
    train_set, _ = load_dataset(args)
    batches = list(make_loader(train_set, 120))
    assert sum(len(labels) for _, labels in batches) == 60000
    assert torch.cat([images for images, _ in batches]).mean().abs() < 1e-3, "normalized"
