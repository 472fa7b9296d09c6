"""Benchmarks: each section runs, and what the pages say of its results is so."""

import json
import re
from functools import cache

import pytest

from common.chapters import load_chapter
from helpers.local_ranks import run_script
from helpers.machine import scratch_folder
from helpers.refusals import assert_one_line, refusal
from repository_pages import ALL_PAGES

bench = load_chapter("benchmarks", "bench")
result_files = load_chapter("benchmarks", "result_files")
measure_stages = load_chapter("benchmarks", "measure_stages")
stage_runs = load_chapter("benchmarks", "stage_runs")
tables = load_chapter("benchmarks", "tables")
timing = load_chapter("benchmarks", "timing")

peak = load_chapter("01", "peak")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


SECTIONS_OF_STAGES = ("stages", "survive")  # these sections start the stages' own programs
OTHER_SECTIONS = [name for name in bench.SECTIONS if name not in SECTIONS_OF_STAGES]


@cache
def results_of(name: str) -> tuple[str, dict]:
    """What a section prints and stores."""
    out = scratch_folder() / "results.json"
    call = ("benchmarks/bench.py", name, "--quick", f"--out={out}", "--device=cpu")
    [(status, output)] = run_script(*call, env=ONE_THREAD, seconds=180)
    assert status == 0, output
    return output, json.loads(out.read_text())


def committed(name: str) -> dict:
    """The results of a section that the pages show."""
    file = bench.SECTIONS[name].file
    return result_files.load(file) if file else result_files.load(result_files.MACHINE)[name]


@pytest.mark.parametrize("name", OTHER_SECTIONS)
def test_a_section_runs_and_finds_what_its_committed_results_hold(name):
    output, results = results_of(name)
    assert results["provenance"]["commit"]
    assert committed(name).keys() <= results.keys()
    shown = bench.tables_of(name, results)
    assert all(text in output for text in shown)
    assert not shown or f"Measured on {results['provenance']['hardware']}" in shown[-1]


RANKS = stage_runs.Layout.RANKS
STEPS = [{"epoch": epoch, "seconds": 0.001 + 0.004 * epoch} for epoch in (0, 1)]


@pytest.mark.parametrize("name", SECTIONS_OF_STAGES)
def test_a_section_that_runs_the_stages_finds_their_steps(name, monkeypatch):
    """Instead of running, a stage takes 1 ms in the first epoch and 5 ms in the second. Processes
    that never talk take 4 ms."""
    calls = []

    def run(key, ranks, *flags, threads):
        calls.append(key)
        return stage_runs.StageRun({}, STEPS)

    monkeypatch.setattr(measure_stages, "run_quietly", run)
    monkeypatch.setattr(measure_stages, "time_apart", lambda ranks, batch, *flags: [0.004])
    results = bench.measure(name, timing.Effort(rounds=3))
    assert committed(name).keys() <= results.keys()
    rows = results["variants"]
    assert {row["step_ms"] for key, row in rows.items() if key != "ceiling"} == {5.0}
    assert set(calls) <= stage_runs.VARIANTS.keys()
    if name == "stages":
        shares = {key: row["share"] for key, row in rows.items() if "share" in row}
        assert shares.pop("ceiling") == 1
        talk = [k for k in rows if k[0] != "A" and stage_runs.VARIANTS[k].layout is RANKS]
        assert {"03", "04", "05"} <= set(talk)
        assert shares == dict.fromkeys(talk, 0.8)
        assert rows["ceiling"]["label"] == "ceiling: 2 processes that never talk"
        assert rows["ceiling"]["samples_per_second"] == 120 / 0.004
        assert " 80% (80% to 80%)" in tables.stages(results)


class Trains:
    """In place of a process: at each look at it, it writes the next of these epochs."""

    def __init__(self, folder, *epochs):
        self.folder, self.epochs = folder, list(epochs)
        folder.mkdir()

    def poll(self):
        for number, seconds in self.epochs.pop(0):
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"epoch": number, "seconds": seconds}) + "\n")


def test_the_ceiling_counts_only_steps_during_which_all_processes_train(tmp_path, monkeypatch):
    """The second one starts late: what the first does meanwhile, alone, takes 1 s a step, and the
    epoch that is under way when the second has ended its first one does not count either."""
    monkeypatch.setattr(stage_runs.time, "sleep", lambda seconds: None)
    alone, apart = [(0, 1.0), (0, 1.0)], [(3, 2.0), (3, 2.0)]
    early = Trains(tmp_path / "0", alone, [(1, 1.0)], [(2, 1.0)], apart, [(4, 2.0), (4, 9.0)])
    late = Trains(tmp_path / "1", [], [(0, 1.0)], [(1, 1.0)], [(2, 3.0)], [(3, 3.0), (3, 3.0)])
    folders = [tmp_path / "0", tmp_path / "1"]
    assert stage_runs.steps_of_all([early, late], folders, 3) == [2.0] * 3 + [3.0] * 3


WRONG_CALLS = {
    "speed": "'speed'",
    "stages --device tpu": "'tpu'",
    "--quick": "required: SECTION",
    "reducers --rounds 0": "--rounds: got '0'",
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_ends_in_one_line(call, tmp_path):
    ending = refusal("benchmarks/bench.py", *call.split(), env=ONE_THREAD, where=tmp_path)
    assert_one_line(ending, WRONG_CALLS[call])


def test_every_result_is_shown_and_tells_where_it_comes_from():
    pages = "".join(path.read_text() for path in ALL_PAGES)
    assert all(f"<!-- table: {name} -->" in pages for name in tables.TABLES)
    parts = {name: (table.file, table.part) for name, table in tables.TABLES.items()}
    told = {part for name, part in parts.items() if f"<!-- table: origin of {name} -->" in pages}
    assert told == set(parts.values())
    sources = {table.file for table in tables.TABLES.values()} - {result_files.MACHINE}
    linked = set(re.findall(r"\bresults/(\w+)\.json", pages))
    assert sources | linked == {path.stem for path in result_files.RESULTS.glob("*.json")}
    for name in (*sources, *linked, result_files.MACHINE):
        about = result_files.load(name)["provenance"]
        assert {"hardware", "torch", "python", "commit", "date"} <= about.keys(), name


def ways() -> dict[str, dict]:
    return results_of("process_memory")[1]["ways"]


GRADIENT_BYTES = peak.parts_of(peak.Plan("net-bn", 28, "adam", "cpu"))["gradients"]


def test_a_rank_holds_its_gradients_once_with_views_of_the_buckets_and_twice_without():
    own_bytes = {"DDP with Adam": GRADIENT_BYTES, "views of the buckets": 0}
    for name, expected in own_bytes.items():
        for rank in ways()[name]["held"]:
            assert (rank["gradients"], rank["buckets"]) == (expected, GRADIENT_BYTES)
            assert rank["parameters"] == GRADIENT_BYTES, "as in one process"


def test_with_accumulation_views_save_at_the_peak_only_if_gradients_are_zeroed_in_place():
    """Inside no_sync(), autograd makes a new tensor where it finds no gradient."""
    names = "accumulate 4", "views, accumulate 4", "the same, zeroed in place"
    apart, to_none, in_place = (ways()[name]["peak_bytes"][0] for name in names)
    assert abs(to_none - apart) < GRADIENT_BYTES / 2  # nothing saved
    assert in_place < apart - GRADIENT_BYTES / 2
