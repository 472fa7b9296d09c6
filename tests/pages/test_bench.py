"""Benchmarks: each section runs, pictures are fresh, and what the pages say of them is so."""

import json
import random
import re
from argparse import Namespace
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torchvision
from PIL import Image

import bench
import measure_stages
import stage_runs
import tables
import timing
import tour
from local_ranks import command, on_ranks, scratch_folder
from refusals import ended, refused
from repository_pages import ALL_PAGES
from stage_files import chapter, fresh_module

paper, ready = chapter("04", "forecast/step_model"), chapter("04", "forecast/gradient_order")
peak = chapter("01", "peak")
BucketTime, Job, Link = paper.BucketTime, paper.Job, paper.Link
SLOW, FORECAST = Link(1e-3, 1e8), "04_ddp_torchrun/forecast/forecast.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


PROGRAMS = ("stages", "survive")  # these sections start the stages' own programs


@cache
def results_of(name: str) -> tuple[str, dict]:
    """What a section prints and stores."""
    out = scratch_folder() / "results.json"
    flags = ["--quick", f"--out={out}", "--device=cpu"]
    [(status, output)] = command("benchmarks/bench.py", name, *flags, env=ONE_THREAD, seconds=180)
    assert status == 0, output
    return output, json.loads(out.read_text())


def committed(name: str) -> dict:
    """The results of a section that the pages show."""
    file = bench.SECTIONS[name].file
    return timing.load(file) if file else timing.load(tables.MACHINE)[name]


@pytest.mark.parametrize("name", [name for name in bench.SECTIONS if name not in PROGRAMS])
def test_a_section_runs_and_finds_what_its_committed_results_hold(name):
    output, results = results_of(name)
    assert results["provenance"]["commit"]
    assert committed(name).keys() <= results.keys()
    table, *others = bench.tables_of(name, results)
    assert all(text in output for text in (table, *others))
    assert f"Measured on {results['provenance']['hardware']}" in others[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_section_that_runs_the_stages_finds_their_steps(name):
    """Instead of running, a stage takes 1 ms in the first epoch and 5 ms in the second."""
    steps = [{"epoch": epoch, "seconds": 0.001 + 0.004 * epoch} for epoch in (0, 1)]
    with patch.object(
        measure_stages, "run_quietly", return_value=stage_runs.StageRun({}, steps)
    ) as run:
        results = bench.measure(name, timing.Effort(rounds=3))
    assert committed(name).keys() <= results.keys()
    assert {row["step_ms"] for row in results["variants"].values()} == {5.0}
    assert {call.args[0] for call in run.call_args_list} <= stage_runs.COMMANDS.keys()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("bench speed", "'speed'"),
        ("bench stages --device tpu", "'tpu'"),
        ("bench --quick", "required: SECTION"),
        ("bench reducers --models resnet18", "--models is for precision only"),
        ("bench precision --quick --models resnet5000", "torchvision has no model resnet5000"),
        ("forecast --step-ms 23 --link carrier-pigeon", "carrier-pigeon"),
        ("forecast --step-ms 23 --gpus 12", "--gpus 8"),
        ("forecast --step-ms 23 --model resnet5000", "resnet5000"),
        ("forecast --step-ms 23 --model vit_b_16 --image-size 128", "--image-size 224"),
        ("forecast --step-ms 23 --model alexnet --image-size 9", "--image-size 224"),
        ("forecast --gpus 8", "--step-ms 45"),
    ],
)
def test_a_wrong_call_ends_in_one_line(call, words, tmp_path):
    name, *flags = call.split()
    script = "benchmarks/bench.py" if name == "bench" else FORECAST
    refused(ended(script, *flags, env=ONE_THREAD, where=tmp_path), words)


def test_brief_results_of_one_machine_share_a_file(tmp_path, monkeypatch):
    """The notebooks read it: its name is the hardware, with dashes."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    results = {"provenance": {"hardware": "AMD EPYC, 2 cores"}, "variants": {}}
    for name in ("stages", "scaling"):
        bench.store(name, results, Namespace(out=None, brief=True))
    stored = json.loads((tmp_path / "amd-epyc-2-cores.json").read_text())
    assert stored == {"provenance": results["provenance"], "stages": results, "scaling": results}


def test_the_pictures_of_the_tour_are_not_older_than_their_results():
    results = timing.load("tour")
    for name in ("tour.png", "repeats_01.png"):
        with Image.open(timing.RESULTS / name) as picture:
            assert picture.text["made of"] == tour.digest(results), "run: make readme"
    changed = {**results, "losses": {}}
    assert tour.digest(changed) != tour.digest(results), "the control"


def test_every_result_is_shown_and_tells_where_it_comes_from():
    pages = "".join(path.read_text() for path in ALL_PAGES)
    pictures = set(re.findall(r"\bresults/(\w+\.png)", pages))
    assert pictures == {path.name for path in timing.RESULTS.glob("*.png")}
    assert all(f"<!-- table: {name} -->" in pages for name in tables.TABLES)
    sources = {table.file for table in tables.TABLES.values()} | {"tour"}
    assert sources == {path.stem for path in timing.RESULTS.glob("*.json")}
    for name in sources:
        results = timing.load(name)
        about = results.get("provenance") or results | next(iter(results["rows"].values()))
        assert {"hardware", "torch", "python", "commit", "date"} <= about.keys(), name


def simulated_ring(size: float, ranks: int, link) -> float:
    """Message by message: a rank sends on what it has just received, and its cable takes one."""
    clock = [0.0] * ranks  # when each has what it sends next
    for _ in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent = [at + link.alpha + size / ranks / link.beta for at in clock]
        clock = [max(sent[rank - 1], clock[rank]) for rank in range(ranks)]
    return max(clock)


def test_a_ring_takes_what_its_messages_take_one_after_the_other():
    old = "return 2 * (ranks - 1) * (link.alpha"
    without_all_gather = old.replace("2 * ", "", 1)
    change = ("forecast/step_model.py", old, without_all_gather)
    broken = fresh_module("04", "forecast/step_model.py", (change,))
    for size, ranks in ((s, n) for s in (4, 2**20, 25 * 2**20) for n in (2, 3, 8, 64)):
        expected = pytest.approx(simulated_ring(size, ranks, SLOW))
        assert paper.ring(size, ranks, SLOW) == expected != broken.ring(size, ranks, SLOW)
    assert paper.ring(1e9, 1, SLOW) == paper.two_levels(1e9, 1, 8, SLOW, SLOW) == 0


def test_a_step_is_its_computing_and_what_of_the_communication_nothing_hides():
    draw, cost = random.Random(0), partial(paper.ring, ranks=4, link=SLOW)
    for _ in range(200):
        shares = [*sorted(draw.random() for _ in range(draw.randint(0, 5))), 1.0]
        buckets = [BucketTime(draw.uniform(1e3, 1e8), share) for share in shares]
        job = Job(draw.random(), draw.random(), draw.random() / 10, buckets)
        late = replace(job, buckets=[BucketTime(bucket.size, 1.0) for bucket in buckets])
        communication = sum(cost(bucket.size) for bucket in buckets)
        whole, slowdown = pytest.approx(job.seconds + communication), draw.random()
        assert paper.step(late, cost, slowdown=slowdown).seconds == whole, "nothing to overlap"
        assert paper.step(job, cost, slowdown=1.0).seconds == whole, "nothing is computed meanwhile"
        step, free = paper.step(job, cost, slowdown=slowdown), paper.step(job, cost).seconds
        least = max(job.seconds, job.forward + communication + job.optimizer)
        assert least - 1e-9 <= free <= step.seconds + 1e-9 <= job.seconds + communication + 2e-9
        assert len(buckets) == 1 or free < job.seconds + communication, "the control"
        for (_, _, end), (known, begin, _) in zip(step.spans, step.spans[1:], strict=False):
            assert begin >= max(end, known), "one after the other, and none before it is ready"
        four = paper.step(job, cost, accumulate=4, slowdown=slowdown).seconds
        assert four == pytest.approx(step.seconds + 3 * (job.forward + job.backward)), "no_sync"


@on_ranks(2)
def test_the_buckets_are_those_that_ddp_really_sends(rank):
    ddp, sizes = torch.nn.parallel.DistributedDataParallel(torchvision.models.resnet18()), []

    def note(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    ddp.register_comm_hook(None, note)
    for _ in range(2):  # after the first backward, DDP lays out its buckets again
        sizes.clear()
        ddp(torch.randn(2, 3, 64, 64)).sum().backward()
    gradients = ready.gradients_of_classifier("resnet18", 64)
    assert sizes == [bucket.size for bucket in ready.fill_buckets(gradients)]
    old, new = "2**20, 25 * 2**20", "2**22, 10 * 2**20"
    change = (
        "forecast/gradient_order.py",
        *(f"FIRST_BYTES, BUCKET_BYTES = {x}" for x in (old, new)),
    )
    other = fresh_module("04", "forecast/gradient_order.py", (change,))
    assert sizes != [bucket.size for bucket in other.fill_buckets(gradients)], "the control"


def ways() -> dict[str, dict]:
    return results_of("process_memory")[1]["ways"]


SIZE = peak.parts_of(peak.Plan("net-bn", 28, "adam", "cpu"))["gradients"]


def test_a_rank_holds_its_gradients_once_with_views_of_the_buckets_and_twice_without():
    for name, expected in (("DDP with Adam", (SIZE, SIZE)), ("views of the buckets", (0, SIZE))):
        for rank in ways()[name]["held"]:
            assert (rank["gradients"], rank["buckets"]) == expected
            assert rank["parameters"] == SIZE, "as in one process"


def test_with_accumulation_views_save_at_the_peak_only_if_gradients_are_zeroed_in_place():
    """Inside no_sync(), autograd makes a new tensor where it finds no gradient."""
    names = "accumulate 4", "views, accumulate 4", "the same, zeroed in place"
    apart, to_none, in_place = (ways()[name]["peak_bytes"][0] for name in names)
    assert abs(to_none - apart) < SIZE / 2  # nothing saved
    assert in_place < apart - SIZE / 2
