"""A step on paper: what the chapters forecast, and when backward really has each gradient."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel

import gradient_order
import step_model
from forecast import LINKS
from helpers.on_ranks import on_ranks
from helpers.outputs import output_of
from helpers.refusals import assert_one_line, refusal
from local_ranks.chapters import ROOT
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module
from published import PUBLISHED, published_job, speedups

SLOW = step_model.Link(1e-3, 1e8)

FORECAST = "forecast --parameters=7e7 --step-ms=23 --batch-size=32 --gbit=50 --latency-us=800"
FORECAST += " --gpus=16 --gpus-per-node=4 --inside=pcie-3"
PRINTED = {  # rows that a chapter prints with these flags, with one space between cells
    "step_model": "the step takes 316 ms | 8 100 100 123 | 30 140 140 225 | 25 200 225 295 | "
    "25 280 295 366 | 10 300 366 395 | the step takes 405 ms",
    "gradient_order": "resnet50 7.8 0% | resnet50 30.0 9% | resnet50 25.0 17% | "
    "resnet50 25.3 49% | resnet50 9.3 100% | vgg16 15.6 0% | vgg16 392.0 1% | vgg16 27.0 10% | "
    "vgg16 27.0 64%",
    FORECAST: "1 32 23.0 1,391 100% computing | 8 256 105.6 2,424 22% bytes | "
    "send bf16 (bf16_compress_hook) 512 105.7 4,844 22% bytes | fewer ranks: 1 32 23.0 1,391 "
    "100% computing | send bf16, and accumulate 4 2,048 174.7 11,723 53% bytes",
    "forecast --parameters=7e7 --step-ms=23 --gpus=1": "Advice: nothing to mend: one GPU waits for "
    "no other.",
    f"{FORECAST} --gpus-per-node=1 --gbit=5": "Advice: take a faster link, or fewer ranks: 1: 1 "
    "does 1,391 samples/s, 16 do 526.",
}


@pytest.mark.parametrize("call", PRINTED)
def test_a_chapter_prints_these_numbers(call):
    """The chapters are step_model.py, forecast.py and gradient_order.py."""
    name, *flags = call.split()
    output = output_of(name, *flags)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert [row for row in PRINTED[call].split(" | ") if row not in lines] == []


JOB = "--parameters=285e6 --batch-size=16 --step-ms=244.9 --half-step-ms=142.5 --hours=216"
ONE_MACHINE, ETHERNET = "--gpus=8 --inside=nvlink-a100", "--gpus=2 --gpus-per-node=1"
HOURS = re.compile(r"^ +(\d+) .* (\d+) +(\d+)$", re.M)  # GPUs, 16 samples on each, 16 in all


def forecast_hours(flags: str) -> dict[int, tuple[str, str]]:
    """The last two columns by number of GPUs: 16 samples on each, 16 in all."""
    output = output_of("forecast", *f"{JOB} {flags}".split())
    return {int(row[1]): (row[2], row[3]) for row in HOURS.finditer(output)}


def transformer(samples: int) -> dict:
    return published_job("Transformer-XL", "A100", batch=samples)


def published_hours(samples: int, gpus: int) -> str:
    """What 216 hours on one GPU with 16 samples become, as NVIDIA's rates say."""
    return f"{216 * transformer(16)['rates']['1'] / transformer(samples)['rates'][str(gpus)]:.0f}"


def test_the_example_of_a_whole_job_is_the_published_one():
    for samples, flag in ((16, "step-ms"), (8, "half-step-ms")):
        job = transformer(samples)
        milliseconds = 1000 * samples * job["units_per_sample"] / job["rates"]["1"]
        assert f"--{flag}={milliseconds:.1f} " in JOB
    assert f"--parameters={transformer(16)['parameters'] / 1e6:.0f}e6 " in JOB


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_first_page_shows_published_hours_and_forecasts_where_there_are_none(page):
    ahead = forecast_hours(ONE_MACHINE)
    each, shared = forecast_hours(f"{ETHERNET} --link=ethernet-10")[2]
    expected = [
        ("1", "216", "216"),
        ("2", published_hours(8, 2), published_hours(16, 2)),
        *((str(n), f"*{ahead[n][1]}*", published_hours(16, n)) for n in (4, 8)),
        ("2", f"*{shared}*", f"*{each}*"),
    ]
    row, text = (
        r"^\| (\d)\b[^|]* \| (\*?\d+\*?)[^|]* \| (\*?\d+\*?)[^|]* \|$",
        (ROOT / page).read_text(),
    )
    assert re.findall(row, text, re.M) == expected
    _, *both = expected[3]
    assert {hours.strip("*") for hours in both} <= {*re.findall(r"\d+", text.partition("![")[0])}


def test_the_page_compares_the_forecast_with_what_is_published():
    page, ahead = (
        (LESSON_FOLDERS["forecast"] / "README.md").read_text(),
        forecast_hours(ONE_MACHINE),
    )
    for n, (each, shared) in ahead.items():
        if n > 1:
            seen = published_hours(8, 2) if n == 2 else ""
            row = f"| {n} | {each} | {published_hours(16, n)} | {shared} | {seen} |"
            assert row.replace("  ", " ") in page


def test_the_page_links_to_where_each_rate_was_published():
    page = (LESSON_FOLDERS["forecast"] / "README.md").read_text()
    assert {job["source"] for job in PUBLISHED["jobs"]} == PUBLISHED["sources"].keys()
    assert all(f"]({source['address']})" in page for source in PUBLISHED["sources"].values())


FORMATS = "FP32", "AMP"


def test_a_page_on_formats_quotes_the_a100_that_is_published():
    page = (LESSON_FOLDERS["05"] / "loss_scaling.md").read_text()
    tf32, mixed = (published_job("ResNet-50", "A100", format=each) for each in ("TF32", "AMP"))
    assert f"was {mixed['rates']['1'] / tf32['rates']['1']:.1f} times as fast" in page


def test_what_the_page_concludes_follows_from_the_published_rates():
    page = (LESSON_FOLDERS["forecast"] / "README.md").read_text()
    bert = published_job("BERT-Large", "RTX 4090")
    longer = 2 * bert["batch"] / bert["rates"]["2"] - bert["batch"] / bert["rates"]["1"]
    assert f"takes {1000 * longer:.0f} ms longer with two of them" in page
    assert f"no more than {4 * bert['parameters'] / longer / 1e9:.0f} GB/s" in page
    v100, mixed = (published_job("ResNet-50", "V100", format=each)["rates"] for each in FORMATS)
    work, mixed_work = v100["8"] / v100["1"], mixed["8"] / mixed["1"]
    assert f"{work:.1f} in FP32 and of {mixed_work:.1f} in AMP, and were still" in page
    assert f"were still {mixed['8'] / v100['8']:.1f} times as fast" in page
    assert step_model.ring(102.2e6, 8, LINKS["nvlink-v100"]) < 2e-3


EIGHT = re.compile(r"(\d\.\d)\D{1,12}(\d\.\d)")
PAGES_ON_EIGHT = ["README.md", "README.zh.md", "04_ddp_torchrun/README.md"]
PAGES_ON_EIGHT += ["docs/zh/04_ddp_torchrun.md"]


@pytest.mark.parametrize("page", PAGES_ON_EIGHT)
def test_pages_that_speak_of_eight_gpus_give_the_range_that_is_published(page):
    known = [speedups(job)[8] for job in PUBLISHED["jobs"] if "8" in job["rates"]]
    [sentence] = [
        line for line in (ROOT / page).read_text().splitlines() if "#what-others-have" in line
    ]
    assert (f"{min(known):.1f}", f"{max(known):.1f}") in EIGHT.findall(sentence)


CLASSIFIERS = ["vit_b_16", "swin_t", "convnext_tiny", "googlenet", "maxvit_t", "regnet_y_400mf"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_forecast_counts_every_parameter_of_a_classifier(name):
    """Attention multiplies by weights of layers that it does not call, and has some of its own.

    googlenet has classifiers of its own in the middle, which are trained too.
    """
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        options = {"init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, **options)
    gradients = gradient_order.gradients_of_classifier(name, 224)
    assert sum(size for size, _ in gradients) == 4 * sum(p.numel() for p in model.parameters())
    ready = [share for _, share in gradients]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0


def simulated_ring(size: float, ranks: int, link) -> float:
    """Message by message: a rank sends on what it has just received, and its cable takes one."""
    clock = [0.0] * ranks  # when each has what it sends next
    for _ in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent = [at + link.alpha + size / ranks / link.beta for at in clock]
        clock = [max(sent[rank - 1], clock[rank]) for rank in range(ranks)]
    return max(clock)


def test_a_ring_takes_what_its_messages_take_one_after_the_other():
    old = "return 2 * (world_size - 1) * (link.alpha"
    without_all_gather = old.replace("2 * ", "", 1)
    change = ("step_model.py", old, without_all_gather)
    broken = fresh_module(LESSON_FOLDERS["forecast"] / "step_model.py", (change,))
    for size, ranks in ((s, n) for s in (4, 2**20, 25 * 2**20) for n in (2, 3, 8, 64)):
        expected = pytest.approx(simulated_ring(size, ranks, SLOW))
        assert step_model.ring(size, ranks, SLOW) == expected != broken.ring(size, ranks, SLOW)
    assert step_model.ring(1e9, 1, SLOW) == step_model.two_levels(1e9, 1, 8, SLOW, SLOW) == 0


def test_a_step_is_its_computing_and_what_of_the_communication_nothing_hides():
    draw, cost = random.Random(0), partial(step_model.ring, world_size=4, link=SLOW)
    for _ in range(200):
        shares = [*sorted(draw.random() for _ in range(draw.randint(0, 5))), 1.0]
        buckets = [step_model.BucketTime(draw.uniform(1e3, 1e8), share) for share in shares]
        job = step_model.Job(draw.random(), draw.random(), draw.random() / 10, buckets)
        late = replace(job, buckets=[step_model.BucketTime(bucket.size, 1.0) for bucket in buckets])
        communication = sum(cost(bucket.size) for bucket in buckets)
        whole, slowdown = pytest.approx(job.seconds + communication), draw.random()
        assert step_model.step(late, cost, slowdown=slowdown).seconds == whole, "nothing to overlap"
        in_turn = step_model.step(job, cost, slowdown=1.0)
        assert in_turn.seconds == whole, "nothing is computed meanwhile"
        step = step_model.step(job, cost, slowdown=slowdown)
        free = step_model.step(job, cost).seconds
        least = max(job.seconds, job.forward + communication + job.optimizer)
        assert least - 1e-9 <= free <= step.seconds + 1e-9 <= job.seconds + communication + 2e-9
        assert len(buckets) == 1 or free < job.seconds + communication, "the control"
        for (_, _, end), (known, begin, _) in zip(step.spans, step.spans[1:], strict=False):
            assert begin >= max(end, known), "one after the other, and none before it is ready"
        four = step_model.step(job, cost, accumulate=4, slowdown=slowdown).seconds
        assert four == pytest.approx(step.seconds + 3 * (job.forward + job.backward)), "no_sync"


@on_ranks(2)
def test_the_buckets_are_those_that_ddp_really_sends(rank):
    ddp, sizes = DistributedDataParallel(torchvision.models.resnet18()), []

    def note(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    ddp.register_comm_hook(None, note)
    for _ in range(2):  # after the first backward, DDP lays out its buckets again
        sizes.clear()
        ddp(torch.randn(2, 3, 64, 64)).sum().backward()
    gradients = gradient_order.gradients_of_classifier("resnet18", 64)
    assert sizes == [bucket.size for bucket in gradient_order.fill_buckets(gradients)]
    old, new = "2**20, 25 * 2**20", "2**22, 10 * 2**20"
    change = (
        "gradient_order.py",
        *(f"FIRST_BYTES, BUCKET_BYTES = {x}" for x in (old, new)),
    )
    other = fresh_module(LESSON_FOLDERS["forecast"] / "gradient_order.py", (change,))
    assert sizes != [bucket.size for bucket in other.fill_buckets(gradients)], "the control"


WRONG_CALLS = {  # the flags: what the line names
    "--step-ms 23 --link carrier-pigeon": "carrier-pigeon",
    "--step-ms 23 --gpus 12": "--gpus 8",
    "--step-ms 23 --model resnet5000": "resnet5000",
    "--step-ms 23 --model vit_b_16 --image-size 128": "--image-size 224",
    "--step-ms 23 --model alexnet --image-size 9": "--image-size 224",
    "--gpus 8": "--step-ms 45",
    "--step-ms 50 --half-step-ms 20 --hours 9": "from 25 to 50",
    "--step-ms 50 --half-step-ms 30": "--hours 216",
}


@pytest.mark.parametrize("flags", WRONG_CALLS)
def test_a_wrong_call_ends_in_one_line(flags):
    assert_one_line(refusal("beyond/forecast/forecast.py", *flags.split()), WRONG_CALLS[flags])
