"""The forecast of stage 04 and the benchmark that checks it: formulas, buckets, sources, input."""

import json
import random
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torchvision
from support import ROOT, chapter, command, fresh_module, run_ranks
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(ROOT / "benchmarks"))
import predictions as made_of
import scaling
from tables import MACHINE, load
from timing import SAME

paper, ready = chapter("04", "alpha_beta"), chapter("04", "ready")
cluster, published = chapter("04", "cluster"), chapter("04", "published")
Bucket, Job, Link = paper.Bucket, paper.Job, paper.Link
FORECAST = "04_ddp_torchrun/forecast.py"
SLOW = Link(1e-3, 1e8)


# --- the ring


def simulated_ring(size: float, ranks: int, link) -> float:
    """Message by message: a rank sends on what it has just received, and its cable takes one."""
    clock = [0.0] * ranks  # when each has what it sends next
    for _ in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent = [at + link.alpha + size / ranks / link.beta for at in clock]
        clock = [max(sent[rank - 1], clock[rank]) for rank in range(ranks)]
    return max(clock)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_a_ring_takes_what_its_messages_take_one_after_the_other(ranks):
    for size in (4, 2**20, 25 * 2**20):
        assert paper.ring(size, ranks, SLOW) == pytest.approx(simulated_ring(size, ranks, SLOW))


def test_a_ring_that_forgot_the_all_gather_would_be_noticed():
    """The control."""
    old = "return 2 * (ranks - 1) * (link.alpha"
    broken = fresh_module(
        "04", "alpha_beta.py", (("alpha_beta.py", old, old.replace("2 * ", "", 1)),)
    )
    assert broken.ring(2**20, 4, SLOW) != pytest.approx(simulated_ring(2**20, 4, SLOW))


def test_one_rank_communicates_nothing():
    for alike in (paper.ring, paper.tree):
        assert alike(1e9, 1, SLOW) == 0 or alike is paper.tree
    assert paper.two_levels(1e9, 1, 8, SLOW, SLOW) == 0
    found = cluster.Forecast(Job(1.0, 2.0, 0.1, [Bucket(1e9, 1.0)]), 64, 8, SLOW, SLOW, spread=0.1)
    assert found.efficiency(1) == 1
    assert found.efficiency(2) < 1


# --- a step


def some_jobs(count: int = 200):
    draw = random.Random(0)
    for _ in range(count):
        shares = sorted(draw.random() for _ in range(draw.randint(0, 5)))
        buckets = [Bucket(draw.uniform(1e3, 1e8), share) for share in [*shares, 1.0]]
        yield Job(draw.random(), draw.random(), draw.random() / 10, buckets), draw.random()


def cost(size: float) -> float:
    return paper.ring(size, 4, SLOW)


def test_with_nothing_to_overlap_a_step_is_computing_plus_communication():
    late = Job(0.1, 0.2, 0.01, [Bucket(size, 1.0) for size in (1e6, 3e7, 2e7)])
    communication = sum(cost(bucket.size) for bucket in late.buckets)
    for steal in (0.0, 0.5, 1.0):
        assert paper.step(late, cost, steal=steal).seconds == pytest.approx(
            late.seconds + communication
        )
    early = replace(late, buckets=[Bucket(bucket.size, 0.1) for bucket in late.buckets])
    early.buckets[-1] = late.buckets[-1]
    assert paper.step(early, cost).seconds < late.seconds + communication, "the control"


def test_if_communication_stops_the_computing_nothing_is_gained_by_overlap():
    for job, _ in some_jobs():
        whole = job.seconds + sum(cost(bucket.size) for bucket in job.buckets)
        assert paper.step(job, cost, steal=1.0).seconds == pytest.approx(whole)
        assert paper.step(job, cost).seconds <= whole + 1e-9


def test_a_step_is_never_shorter_than_its_computing_nor_than_its_communication():
    for job, steal in some_jobs():
        found = paper.step(job, cost, steal=steal)
        communication = sum(cost(bucket.size) for bucket in job.buckets)
        assert found.seconds >= job.seconds - 1e-9
        assert found.seconds >= job.forward + communication + job.optimizer - 1e-9
        for (_, _, end), (known, begin, _) in zip(found.spans, found.spans[1:], strict=False):
            assert begin >= max(end, known), "one after the other, and none before it is ready"


def test_micro_batches_inside_no_sync_only_compute():
    for job, steal in some_jobs(20):
        once = paper.step(job, cost, steal=steal).seconds
        four = paper.step(job, cost, accumulate=4, steal=steal).seconds
        assert four == pytest.approx(once + 3 * (job.forward + job.backward))


def test_what_bounds_a_step_is_what_it_is_rid_of_by_a_better_link():
    job = Job(0.1, 0.2, 0.0, [Bucket(1e8, 1.0)])
    fast = Link(1e-9, 1e13)
    bounds = {"computing": fast, "latency": Link(0.1, 1e13), "bytes": Link(1e-9, 1e8)}
    for bound, link in bounds.items():
        assert cluster.Forecast(job, 64, 1, fast, link, trees=False).bound(4) == bound


# --- the buckets


def _sizes_that_ddp_sends(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torchvision.models.resnet18())
    sizes = []

    def note(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    ddp.register_comm_hook(None, note)
    images = torch.randn(2, 3, 64, 64)
    ddp(images).sum().backward()  # after it, DDP lays out its buckets again
    sizes.clear()
    ddp(images).sum().backward()
    dist.destroy_process_group()
    return sizes


def test_the_buckets_are_those_that_ddp_really_sends():
    gradients = ready.named("resnet18", 64)
    for sizes in run_ranks(2, _sizes_that_ddp_sends, 2):
        assert sizes == [bucket.size for bucket in ready.fill(gradients)]
        old = "FIRST, OTHERS = 2**20, 25 * 2**20"
        change = ("ready.py", old, "FIRST, OTHERS = 2**22, 10 * 2**20")
        other = fresh_module("04", "ready.py", (change,))
        assert sizes != [bucket.size for bucket in other.fill(gradients)], "the control"


@pytest.mark.parametrize("name", ["net", "resnet18", "vgg16", "inception_v3"])
def test_gradients_come_in_order_and_none_is_lost(name):
    gradients = ready.named(name, 28 if name == "net" else 299)
    shares = [share for _, share in gradients]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    buckets = ready.fill(gradients)
    assert sum(bucket.size for bucket in buckets) == sum(size for size, _ in gradients)
    known = {"net": 21840, "resnet18": 11689512, "vgg16": 138357544}  # what the models' papers say
    if name in known:
        assert sum(size for size, _ in gradients) == 4 * known[name]


# --- what others have published


def has_source(curve) -> bool:
    signs = ("arXiv ", "github.com/", "docs/", "none found")
    return bool(curve.note) and any(sign in curve.source for sign in signs)


def test_every_published_row_has_a_source_or_says_that_none_was_found():
    assert all(has_source(curve) for curve in published.CURVES)
    assert not has_source(replace(published.CURVES[1], source="everybody knows")), "the control"
    assert sum("none found" in curve.source for curve in published.CURVES) == 1


def test_on_paper_a_slow_link_shows_and_a_fast_one_does_not():
    found = {(c.name, c.model): published.predict(c) for c in published.CURVES}
    assert all(0 < efficiency <= 1 for efficiency in found.values())
    assert found["512 P100, RoCE", "vgg16"] < 0.8 < found["512 P100, RoCE", "resnet101"]
    for curve in published.CURVES:
        assert published.predict(curve, 0.03) < published.predict(curve)


# --- the program


def test_the_forecast_says_the_same_each_time_and_something_else_of_another_link():
    flags = ("--step-ms", "23", "--gpus", "64")
    (status, first), (_, again) = (command(FORECAST, *flags)[0] for _ in range(2))
    assert status == 0, first
    assert first == again
    [(_, other)] = command(FORECAST, *flags, "--link", "infiniband-8x400")
    assert first != other


def test_a_summary_of_stage_01_is_enough(tmp_path):
    summary = {"model": "net", "local_batch": 120, "step_ms": 17.2, "world_size": 1}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    flags = ("--summary", str(tmp_path / "summary.json"), "--image-size", "28", "--gpus", "4")
    [(status, output)] = command(FORECAST, *flags)
    assert status == 0, output
    assert "net: 0.1 MB of gradients in 1 buckets" in output
    assert "17.2" in output


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--step-ms 23 --gpus 0", "--gpus"),
        ("--step-ms 23 --link carrier-pigeon", "carrier-pigeon"),
        ("--step-ms 23 --gpus 12", "--gpus 8"),
        ("--step-ms 23 --model resnet5000", "resnet5000"),
        ("--step-ms -1", "--step-ms"),
        ("--gpus 8", "--step-ms 45"),
        ("--summary no/such/summary.json", "no/such/summary.json"),
    ],
)
def test_a_wrong_call_of_the_forecast_ends_in_one_line(flags, word):
    [(status, output)] = command(FORECAST, *flags.split())
    assert status == 2
    assert output.startswith("error: ")
    assert word in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "net"}', "two ranks"])
def test_a_summary_that_is_none_is_refused(text, tmp_path):
    if text == "two ranks":
        text = '{"model": "net", "local_batch": 60, "step_ms": 9, "world_size": 2}'
    (tmp_path / "summary.json").write_text(text)
    [(status, output)] = command(FORECAST, "--summary", str(tmp_path / "summary.json"))
    assert status == 2
    assert "stage 01" in output
    assert output.count("\n") == 1


# --- the benchmark


def a_machine(ranks: int, link, handling: float, steal: float) -> tuple[dict, list[dict]]:
    """Rounds of a machine that does exactly what the model says, and the notes of its ranks."""
    sizes, shares = [4 * 2**20, 4 * 2**20, 2**20], [0.3, 0.6, 1.0, 0.7, 0.2]
    alone = [0.050, 0.055, 0.040]
    jobs = [made_of.job_of(seconds, shares, sizes, handling) for seconds in alone]
    times = {
        made_of.ALONE: alone,
        SAME: alone,
        made_of.WORK: [0.005] * 3,
        made_of.LONG: [0.040] * 3,
        made_of.BESIDE: [0.040 + steal * paper.ring(made_of.MEANWHILE, ranks, link)] * 3,
        made_of.COPY: [handling * made_of.COPIED] * 3,
        "DDP": [
            paper.step(job, lambda size: paper.ring(size, ranks, link), steal=steal).seconds
            for job in jobs
        ],
    }
    for size in scaling.SIZES:
        times[f"{made_of.AFTER} {size}"] = [0.005 + paper.ring(size, ranks, link)] * 3
    note = {"model": "net", "shares": shares, "gradients": sizes, "local_batch": 64}
    return times, [note] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_of_a_machine_that_obeys_the_model_the_benchmark_predicts_every_step(ranks):
    times, notes = a_machine(ranks, Link(2e-4, 1e9), 1e-10, 0.4)
    found = made_of.predict(times, notes)
    assert found["alpha_us"] == pytest.approx(200)
    assert found["beta_bytes_per_second"] == pytest.approx(1e9)
    assert found["stolen"] == pytest.approx(0.4)
    [row] = found["rows"]
    assert row["error"] == pytest.approx(0, abs=1e-4)
    times["DDP"] = [1.2 * seconds for seconds in times["DDP"]]
    [row] = made_of.predict(times, notes)["rows"]
    assert row["error"] == pytest.approx(1 / 1.2 - 1, abs=1e-3), "the control"


def test_no_step_of_ddp_goes_into_its_prediction():
    times, notes = a_machine(2, Link(2e-4, 1e9), 1e-10, 0.4)
    before = made_of.predict(times, notes)["rows"][0]["predicted_ms"]
    others = times | {"DDP": [9.0] * 3}
    assert made_of.predict(others, notes)["rows"][0]["predicted_ms"] == before
    others = times | {made_of.ALONE: [0.1] * 3}
    assert made_of.predict(others, notes)["rows"][0]["predicted_ms"] != before, "the control"


def test_the_benchmark_runs_and_writes_each_prediction_beside_its_measurement(tmp_path):
    [(status, output)] = command(
        "benchmarks/scaling.py", "--quick", "--out", str(tmp_path / "found.json")
    )
    assert status == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    rows = made_of.rows_of(found)
    assert {(row["model"], row["ranks"]) for row in rows} == {("net", 2)}
    assert all(row["predicted_ms"] > 0 < row["measured_ms"] for row in rows)
    assert "median error" in output


def test_committed_predictions_are_within_ten_percent_in_the_median():
    """Of our machine; a reader's may have been busy."""
    for found in (load(MACHINE)["scaling"], load("04_scaling")):
        again = made_of.errors_of(found["machine"], found["links"])
        assert again == {key: found[key] for key in again}, "computed from the rows"
        assert found["median_error"] <= 0.10
