"""What every stage must do beside computing the right thing: learn, log, save, resume, evaluate.

And the parts that they share: the data, the networks."""

import statistics
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from PIL import Image

import common.data
import support
from common.data import load_dataset, loader_options
from common.models import build_model
from common.options import make_parser
from support import ROOT, Run, chapter, default_dtype, load_stage, run_ranks, train, train_once
from test_bad_input import SHORT

WAYS = [("01", 1), ("02", 1), ("03", 2), ("04", 2), ("05", 2)]
each_stage = pytest.mark.parametrize(("key", "ranks"), WAYS, ids=[key for key, _ in WAYS])
FP32 = {"dtype": torch.float32}
PICTURES = ("--dataset=imagefolder", "--batch-size=4", "--image-size=32")
LOCAL = ("--device=cpu", f"--data-dir={ROOT / 'data'}")


def options(*flags):
    return make_parser("", "").parse_args([*LOCAL, *flags])


@each_stage
def test_every_stage_learns_and_tells_what_ran_and_what_came_of_it(key, ranks):
    run = train_once(key, ranks, "--epochs=5", "--lr=0.1", "--weight-decay=0.001", **FP32)
    metrics, summary, local = run.metrics, run.summary, 120 if key == "01" else 60
    told = [[line[name] for name in ("epoch", "step", "samples", "lr")] for line in metrics]
    assert told == [[step // 12, step + 1, 120, 0.1] for step in range(60)]
    expected = {"dataset": "digits", "model": "net", "device": "cpu", "world_size": ranks}
    expected |= {"global_batch": 120, "local_batch": local, "epochs": 5, "seed": 1234, "steps": 60}
    assert (expected | {"torch": torch.__version__}).items() <= summary.items()
    assert summary["test_accuracy"] > 0.85
    assert summary["stage"].startswith(key)
    assert summary["train_loss"] == pytest.approx(run.losses[-12:].mean().item())
    assert len(summary["peak_memory_bytes"]) == ranks
    assert all(50e6 < peak < 5e9 for peak in summary["peak_memory_bytes"])
    seconds = [line["seconds"] for line in metrics]
    low, middle, high = (1000 * sorted(seconds[5:])[55 * k // 4] for k in (1, 2, 3))
    assert summary["step_ms"] == pytest.approx(middle, abs=3e-4)
    assert summary["step_ms_quartiles"] == pytest.approx([low, high], abs=3e-4)
    assert summary["samples_per_second"] == pytest.approx(120e3 / summary["step_ms"], rel=1e-3)
    assert run.output.startswith(f"global batch 120 = {120 // local} × {local}\n")
    losses = "epoch 5/5  loss {train_loss:.4f}  test loss {test_loss:.4f}".format(**summary)
    shown = f"{losses}  test accuracy {summary['test_accuracy']:.2%}  "
    speed = run.output.splitlines()[-2].removeprefix(shown).removesuffix(" samples/s")
    samples = 120 / statistics.median(seconds[-12:])
    assert float(speed.replace(",", "")) == pytest.approx(samples, rel=1e-3, abs=0.5)  # a whole one
    group = run.checkpoint["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0.001)


def test_a_stage_that_skips_its_step_does_not_learn():
    """The control of the test above."""
    run = train_once("01", 1, "--epochs=5", **FP32, without=(("train.py", "optimizer.step()"),))
    assert run.summary["test_accuracy"] < 0.3


def _seeds(rank: int, key: str, flags: tuple[str, ...]) -> list[int]:
    seeds, seed_all = [], torch.manual_seed
    with patch.object(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_all(seed)):
        support.run_main(load_stage(key), rank, *flags)
    return seeds


@each_stage
def test_random_numbers_hang_on_seed_epoch_and_rank_and_max_steps_ends_a_run(key, ranks, tmp_path):
    """So the ranks draw dropout masks of their own: test_c29 shows it."""
    flags = (*LOCAL, f"--run-dir={tmp_path}", "--epochs=3", "--batch-size=500", "--max-steps=4")
    flags += ("--world-size=2",) if key == "03" else ()
    for rank, seeds in enumerate(run_ranks(ranks, _seeds, key, flags)):
        assert seeds == [1234, 1234 + rank, 1234 + ranks + rank], "for the weights and two epochs"
    run = Run(tmp_path, [], "")
    assert [(line["epoch"], line["step"]) for line in run.metrics[2:]] == [(0, 3), (1, 4)]
    assert run.summary["steps"] == 4
    assert [run.checkpoint[name] for name in ("epoch", "epoch_step", "step")] == [1, 1, 4]


def evaluated(state: dict[str, torch.Tensor]) -> tuple[float, float]:
    with default_dtype(torch.float64), torch.no_grad():
        _, test_set = load_dataset(options())
        model = build_model("net-bn", test_set).eval()
        model.load_state_dict(state)
        images, labels = test_set.__getitems__(range(len(test_set)))
        logits = model(images)
        accuracy = (logits.argmax(dim=1) == labels).double().mean().item()
        return torch.nn.functional.cross_entropy(logits, labels).item(), accuracy


@pytest.mark.parametrize(("key", "ranks"), [("02", 1), ("03", 4), ("04", 4), ("05", 2)])
def test_evaluation_counts_every_sample_once(key, ranks, without=()):
    """297 test samples on 2 and on 4 ranks: no shard is as long as another."""
    run = train_once(key, ranks, *SHORT, without=without)
    expected = evaluated(run.checkpoint["model"])
    found = run.summary["test_loss"], run.summary["test_accuracy"]
    assert found == pytest.approx(expected, abs=1e-10)


def test_01_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("01", 1, without)


def test_03_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("03", 2, without)


def test_04_evaluates_every_sample_once(without=()):
    test_evaluation_counts_every_sample_once("04", 2, without)


@pytest.mark.parametrize(("way", "source"), [*zip(WAYS, WAYS[-1:] + WAYS[:-1], strict=True)])
def test_every_stage_evaluates_and_resumes_the_checkpoint_of_another(way, source):
    other, first = train_once(*source, *SHORT), train_once(*way, *SHORT)
    path = other.folder / "checkpoint.pt"
    loss, accuracy = evaluated(other.checkpoint["model"])
    run = train(*way, *SHORT, f"--evaluate={path}")
    assert run.output == f"test loss {loss:.4f}  test accuracy {accuracy:.2%}\n"
    assert list(run.folder.iterdir()) == [], "evaluation leaves nothing behind"
    run = train(*way, *SHORT, "--epochs=2", f"--resume={path}")
    assert [line["epoch"] for line in run.metrics] == [1] * 25
    assert run.losses.mean() < first.losses.mean() / 2, "it began where the other had stopped"


def same_run(a: Run, b: Run) -> bool:
    def kept(run: Run) -> list:
        saved, steps = run.checkpoint, [(line["step"], line["lr"]) for line in run.metrics]
        momenta = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
        tensors = [run.losses, *saved["model"].values(), *momenta]
        return [steps, saved.get("scaler"), *(tensor.tolist() for tensor in tensors)]

    return kept(a) == kept(b)


def resumes(key: str, ranks: int, *flags: str, without=()) -> None:
    flags, more = (*flags, "--epochs=2"), {**FP32, "without": without}
    whole = train_once(key, ranks, *flags, **more)
    first = train(key, ranks, *flags, f"--max-steps={len(whole.losses) // 2}", **more)
    assert same_run(whole, train(key, ranks, *flags, "--resume=auto", **more, folder=first.folder))


# With dropout, but in 02: there, the threads draw their dropout masks in no fixed order.
def test_01_resumes_to_the_bit(without=()):
    resumes("01", 1, without=without)


def test_03_resumes_to_the_bit(without=()):
    resumes("03", 2, without=without)


def test_05_resumes_the_loss_scale(without=()):
    """With few pictures: a CPU computes fp16 slowly."""
    flags = (*PICTURES, f"--data-dir={random_pictures(support.scratch_folder())}", "--amp=fp16")
    resumes("05", 2, "--model=net-bn", *flags, without=without)


@pytest.mark.parametrize(
    ("key", "ranks", "flags"),
    [("02", 1, ["--model=net-bn"]), ("04", 2, []), ("05", 2, ["--amp=bf16"])],
)
def test_a_stage_resumes_to_the_bit(key, ranks, flags):
    resumes(key, ranks, *flags)


@pytest.mark.parametrize(("key", "limit"), [("03", 0.0), ("04", 1e-5)])
def test_on_three_ranks_a_resumed_run_of_ddp_may_round_differently(key, limit):
    """DDP orders its bucket by the first backward, so a resumed run begins with another order, and
    gloo adds three ranks' numbers in an order that depends on their place in the bucket."""
    flags = ("--epochs=2", "--model=net-bn")
    whole = train_once(key, 3, *flags, **FP32)
    first = train(key, 3, *flags, "--epochs=1", **FP32)
    resumed = train(key, 3, *flags, "--resume=auto", **FP32, folder=first.folder)
    old, new = whole.checkpoint["model"], resumed.checkpoint["model"]
    distance = max(float((old[name] - new[name]).abs().max()) for name in old)
    assert distance <= limit


def random_pictures(folder: Path) -> Path:
    for part, i in product(("train", "test"), range(12)):
        path = folder / part / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()).save(path)
    return folder


def test_random_crops_resume_to_the_bit(tmp_path):
    resumes("01", 1, *PICTURES, f"--data-dir={random_pictures(tmp_path)}")


def _loaders(rank: int, key: str, *flags: str) -> list[tuple[int, str]]:
    torch.multiprocessing.set_start_method("fork", force=True)  # in a moment
    stage, made = load_stage(key), []
    make = stage.DataLoader
    stage.DataLoader = lambda *args, **more: made.append(make(*args, **more)) or made[-1]
    support.run_main(stage, rank, *flags, *LOCAL[:1], f"--run-dir={support.scratch_folder()}")
    return [(each.num_workers, getattr(each.worker_init_fn, "__name__", "")) for each in made]


@pytest.mark.parametrize(("key", "start"), [("01", ""), ("04", ""), ("survive", "end_with_rank")])
def test_processes_load_pictures_for_training_and_for_evaluation(key, start, tmp_path):
    flags = (f"--data-dir={random_pictures(tmp_path)}", "--workers=2", "--max-steps=1")
    assert run_ranks(1, _loaders, key, *PICTURES, *flags) == [[(2, start)] * 2]


def test_cifar10_crops_and_flips_whole_batches_in_training_and_only_there():
    augment, images = chapter("survive", "cifar10").augment, torch.rand(200, 3, 8, 8)
    padded = torch.nn.functional.pad(images, (4,) * 4)
    cuts = padded.unfold(2, 8, 1).unfold(3, 8, 1).permute(2, 3, 0, 1, 4, 5).flatten(0, 1)
    cuts = torch.cat([cuts, cuts.flip(-1)])  # (162, B, C, H, W): each place, then mirrored
    [found] = augment(torch.nn.Identity(), (images,))
    assert found.stride() == images.stride(), "or DDP's gradients get other strides"
    same = (cuts == found).flatten(2).all(2)
    assert same.any(0).all()
    places = same.int().argmax(0).unique()
    assert len(places) > 80
    assert 0.3 < (same[81:].any(0)).double().mean() < 0.7
    assert augment(torch.nn.Identity().eval(), (images,))[0] is images
    flags = ("--dataset=digits", "--model=net-bn", "--max-steps=2", "--epochs=1", *LOCAL)
    [(status, output)] = support.command(
        "beyond/survive/cifar10.py", *flags, f"--run-dir={support.scratch_folder()}"
    )
    assert (status, "epoch 1/1" in output) == (0, True), output


def test_a_resumed_run_has_its_own_metrics_and_the_learning_rate_of_its_call(tmp_path):
    train("01", 1, *SHORT, "--max-steps=3", folder=tmp_path)  # of another run
    path = train_once("01", 1, *SHORT).folder / "checkpoint.pt"
    flags = ("--epochs=2", "--lr=0.5", "--momentum=0.8", "--weight-decay=0.1", f"--resume={path}")
    inside = f"--evaluate={tmp_path / 'checkpoint.pt'}"
    assert train("01", 1, *SHORT, inside).output.startswith("test loss ")
    run = train("01", 1, *SHORT, *flags, folder=tmp_path)
    assert [(line["step"], line["lr"]) for line in run.metrics] == [(n, 0.5) for n in range(26, 51)]
    group = run.checkpoint["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0.1)


def _download(rank: int, folder: Path, locked: bool) -> None:
    class Slow:
        data, targets = torch.zeros(1, 8, 8, dtype=torch.uint8), torch.zeros(1)

        def __init__(self, root: Path, train: bool, download: bool = False) -> None:
            if (root / "files").exists():
                return
            if not download:
                raise RuntimeError("the data set is not there")
            (root / f"fetched by {rank}").touch()
            time.sleep(1)  # the other rank must not look meanwhile
            (root / "files").touch()

    common.data.SOURCES["mnist"] = Slow
    if not locked:
        common.data.fcntl.flock = lambda *_: None
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    load_dataset(options("--dataset=mnist", f"--data-dir={folder}", "--batch-size=1"))


@pytest.mark.parametrize(("locked", "fetched"), [(True, 1), (False, 2)])
def test_one_rank_downloads_and_the_others_wait(locked, fetched, tmp_path):
    """Without the lock: the control."""
    run_ranks(2, _download, tmp_path, locked)
    assert len(list(tmp_path.glob("fetched by *"))) == fetched


def test_the_digits_are_whole_normalized_and_come_in_batches():
    train_set, test_set = load_dataset(options())
    labels = torch.cat([train_set.labels, test_set.labels])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images, labels = train_set.__getitems__(range(1500))
    assert (len(train_set), len(test_set), *images.shape) == (1500, 297, 1500, 1, 28, 28)
    assert (images.mean().item(), images.std().item()) == pytest.approx((0, 1), abs=5e-3)
    torch.testing.assert_close(train_set[5], (images[5], labels[5]), rtol=0, atol=0)
    loader = torch.utils.data.DataLoader(train_set, 400, **loader_options(options()))
    assert [len(batch) for _, batch in loader] == [400] * 3 + [300]


def test_synthetic_has_any_size_and_number_of_classes_and_faint_pictures_to_learn():
    flags = ("--dataset=synthetic", "--image-size=17", "--classes=3")
    with default_dtype(torch.float64):
        train_set, test_set = load_dataset(options(*flags))
        assert train_set[0][0].dtype == torch.float64
    assert (len(train_set), len(test_set), *train_set[0][0].shape) == (2048, 512, 3, 17, 17)
    other, _ = load_dataset(options(*flags, "--seed=5"))
    ours, theirs, others = (
        torch.stack([part.images[part.labels == label].double().mean(0) for label in range(3)])
        for part in (train_set, test_set, other)
    )
    assert (ours - theirs).abs().mean() < 5, "the same pictures"
    for another in (ours.roll(1, 0), others):
        assert (ours - another).abs().mean() > 10, "for each class and seed another one"
    assert not torch.equal(train_set.images[:512], test_set.images), "in other noise"


def test_color_pictures_are_contiguous_in_memory(monkeypatch):
    """As (N, H, W, C) behind a permuted view, gradients of DDP would have other strides."""
    pictures = torch.randint(256, (130, 8, 8, 3), dtype=torch.uint8)
    source = SimpleNamespace(data=pictures.numpy(), targets=[0] * 130)
    monkeypatch.setitem(common.data.SOURCES, "cifar10", lambda root, train: source)
    images = load_dataset(options("--dataset=cifar10"))[0].images
    assert torch.equal(images, pictures.permute(0, 3, 1, 2))
    assert images.is_contiguous()


def test_imagefolder_reads_ones_own_pictures(tmp_path):
    for part, (number, name) in product(("train", "test"), enumerate(("cat", "dog", "owl"))):
        (tmp_path / part / name).mkdir(parents=True)
        for file in range(4):
            picture = Image.new("RGB", (40, 30), (80 * number, 0, 255))
            picture.save(tmp_path / part / name / f"{file}.png")
    flags = ("--dataset=imagefolder", f"--data-dir={tmp_path}", "--batch-size=4", "--image-size=32")
    train_set, test_set = load_dataset(options(*flags))
    assert train_set.classes == ["cat", "dog", "owl"]
    assert train_set[0][0].shape == test_set[0][0].shape == (3, 32, 32)
    assert test_set.transform.transforms[0].size == 36, "a margin, which is cut off"
    assert test_set[4][0][:, 0, 0].tolist() == pytest.approx([-0.748, -2.036, 2.640], abs=1e-3)
    assert build_model("net-bn", train_set)(train_set[0][0][None]).shape == (1, 3)


@pytest.mark.parametrize(("dataset", "channels"), [("digits", 1), ("synthetic", 3)])
def test_the_networks_are_those_of_the_documents_for_gray_and_color(dataset, channels):
    train_set, _ = load_dataset(options(f"--dataset={dataset}"))
    images, _ = train_set.__getitems__([0, 1])
    net, resnet = (build_model(name, train_set).eval() for name in ("net", "resnet18"))
    weights = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert weights == [(10, channels, 5, 5), (20, 10, 5, 5), (50, 320), (10, 50)]
    assert net(images).shape == resnet(images).shape == (2, 10)
    conv = resnet.conv1
    assert conv.weight.shape == (64, channels, 7, 7)
    assert (conv.stride, conv.padding, conv.bias) == ((2, 2), (3, 3), None)
