"""Benchmarks: each section runs, and what the pages say of its results is so."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import peak
from benchmarks import bench, result_files
from benchmarks.measure import stages, turns
from benchmarks.measure.timing import AA, Effort
from benchmarks.tables import measurements
from benchmarks.tables import pages as page_tables
from benchmarks.variants import VARIANTS, Layout
from helpers.machine import is_running
from helpers.refusals import assert_one_line, refusal
from local_ranks.machine import SECONDS, scratch_folder, timeout_under_load
from local_ranks.run_files import read_metrics
from local_ranks.scripts import run_script
from repository_pages import ALL_PAGES, ROOT

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


SECTIONS_OF_STAGES = ("stages", "survive")  # these sections start the stages' own programs
ELSEWHERE = (*SECTIONS_OF_STAGES, "timeline")  # notebook 01 records the stages
OTHER_SECTIONS = [name for name in bench.SECTIONS if name not in ELSEWHERE]


@cache
def results_of(name: str) -> tuple[str, dict]:
    """Run a section; return what it prints and stores."""
    out = scratch_folder() / "results.json"
    call = ("benchmarks/bench.py", name, "--quick", f"--out={out}", "--device=cpu")
    [(status, output)] = run_script(*call, env=ONE_THREAD, seconds=180)
    assert status == 0, output
    return output, json.loads(out.read_text())


def committed(name: str) -> dict:
    """Load the results of a section that the pages show, or none where no GPU has given them."""
    if bench.SECTIONS[name].seconds_on_gpu:
        return result_files.load(result_files.MACHINE).get(name, {})
    return result_files.load(name)


@pytest.mark.parametrize("name", OTHER_SECTIONS)
def test_a_section_runs_and_finds_what_its_committed_results_hold(name):
    if name == "shm" and torch.__version__ < "2.12":
        pytest.skip("gloo of torch 2.11 has no all_to_all to compare with")
    output, results = results_of(name)
    assert results["provenance"]["commit"]
    assert committed(name).keys() <= results.keys()
    shown = bench.tables_of(name, results)
    assert all(text in output for text in shown)
    assert not shown or f"Measured on {results['provenance']['hardware']}" in shown[-1]


@pytest.fixture
def no_stage_runs(monkeypatch):
    """Instead of training, a program takes 5 ms a step, and processes that never talk 4 ms."""

    def times(keys, model, ranks, effort, average=None):
        apart = {key: VARIANTS[key].layout is Layout.APART for key in keys}
        times = {key: [0.004 if apart[key] else 0.005] * 3 for key in keys} | {AA: [0.005] * 3}
        return times, {key: [20] for key in times}

    monkeypatch.setattr(stages, "time_in_turns", times)


@pytest.mark.usefixtures("no_stage_runs")
@pytest.mark.parametrize("name", SECTIONS_OF_STAGES)
def test_a_section_that_runs_the_stages_finds_their_steps(name):
    results = bench.measure(name, Effort(rounds=3))
    assert committed(name).keys() <= results.keys()
    rows = results["variants"]
    times = {row["step_ms"] for key, row in rows.items() if layout_of(key) is not Layout.APART}
    assert times == {5.0}


def layout_of(key: str) -> Layout | None:
    return VARIANTS[key].layout if key != AA else None


@pytest.mark.usefixtures("no_stage_runs")
def test_speeds_of_several_ranks_are_shares_of_what_processes_reach_that_never_talk():
    results = bench.measure("stages", Effort(rounds=3))
    rows = results["variants"]
    [ceiling] = [key for key in rows if layout_of(key) is Layout.APART]
    talking = [key for key in rows if layout_of(key) is Layout.RANKS]
    assert {VARIANTS[key].stage for key in talking} == {"03", "04", "05"}
    shares = {key: row["share"] for key, row in rows.items() if "share" in row}
    assert shares == {ceiling: 1} | dict.fromkeys(talking, 0.8)
    assert rows[ceiling]["label"] == "ceiling: 2 processes that never talk"
    assert rows[ceiling]["samples_per_second"] == 120 / 0.004
    assert " 80% (80% to 80%)" in measurements.stages(results)


def test_a_changed_program_makes_a_commit_dirty_and_stored_results_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    assert result_files.commit() == "unknown"
    program, results = tmp_path / "program.py", tmp_path / "benchmarks/results/results.json"
    for path in (program, results):
        result_files.write_json(path, {})
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (("init",), ("add", "."), (*settings, "commit", "-m", "first")):
        result_files.git(*words)
    clean = result_files.git("rev-parse", "--short", "HEAD")
    assert clean
    result_files.write_json(results, {"measured": 1})
    assert result_files.commit() == clean
    result_files.write_json(program, {"changed": 1})
    assert result_files.commit() == f"{clean}-dirty"


def test_a_program_trains_only_in_its_turns(tmp_path):
    """The control: without turns, it would have written the rest of its epochs meanwhile."""
    run = ("01", ("--model=net-bn", "--epochs=40", "--batch-size=500", "--device=cpu"))
    with turns.warmed_up({"01": run}, 2, 3, tmp_path) as programs:
        program = programs["01"]
        first = stopped(program)
        assert len(program.first_turn) >= 3
        time.sleep(0.5)
        assert stopped(program) == first, "nothing happens while it waits"
        steps = program.take_turn(6)
        assert len(steps) >= 6
        assert stopped(program) > first
        assert program.page_faults_of_a_step() >= 0
        [process] = program.processes
    assert process.exitcode == -signal.SIGKILL


def stopped(program: turns.Program) -> int:
    """Wait until the program has been stopped; return how many steps it has written."""
    [process] = program.processes
    end = time.monotonic() + timeout_under_load(SECONDS)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)
    return len(read_metrics(program.folders[0]))


WAITS = """
import sys, time
from pathlib import Path
from benchmarks.measure.turns import warmed_up

if __name__ == "__main__":
    flags = ("--model=net-bn", "--epochs=40", "--batch-size=500", "--device=cpu")
    with warmed_up({"01": ("01", flags)}, 2, 3, Path(sys.argv[1])) as programs:
        print(programs["01"].processes[0].pid, flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_programs_that_wait_end_with_the_process_that_lets_them_train(number, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, str(tmp_path / "waits.py"), str(tmp_path / "run")]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path, cwd=ROOT)
    assert process.stdout
    stopped = int(process.stdout.readline())
    assert is_running(stopped), "the control"
    process.send_signal(number)
    process.communicate()
    end = time.monotonic() + timeout_under_load(SECONDS)
    while is_running(stopped):
        assert time.monotonic() < end
        time.sleep(0.05)


class Waits:
    """Stands in for a process that lives."""

    exitcode, pid = None, None

    def is_alive(self):
        return True


def test_a_turn_of_the_ceiling_ends_when_all_of_its_processes_have_taken_their_steps(
    tmp_path, monkeypatch
):
    """The second one is slower, so the first one goes on for as long: both count."""
    written = [[1.0], []], [[1.0, 1.0], [3.0]], [[1.0], [3.0, 3.0]]
    program = turns.Program.__new__(turns.Program)
    program.folders, program.processes = [tmp_path / "0", tmp_path / "1"], [Waits(), Waits()]
    program.lines, program.marks, program.label = [0, 0], [], "ceiling"
    for folder in program.folders:
        folder.mkdir()
    coming, steps = iter(written), [0, 0]

    def write_next(_seconds):
        for number, each in enumerate(next(coming)):
            with (program.folders[number] / "metrics.jsonl").open("a") as file:
                for seconds in each:
                    steps[number] += 1
                    line = {"epoch": 0, "step": steps[number], "seconds": seconds}
                    file.write(json.dumps(line) + "\n")

    monkeypatch.setattr(turns.time, "sleep", write_next)
    assert program.take_turn(3) == [1.0] * 4 + [3.0] * 3
    assert program.lines == [4, 3]


def test_a_busy_machine_stores_nothing_unless_a_file_is_named(tmp_path, monkeypatch, capsys):
    """The control: the same results of a machine at rest are stored."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    rows = {"compute only": {"step_ms": 10.0, "step_ms_quartiles": [9.9, 10.1], "ratio": 1.0}}
    rows[AA] = {**rows["compute only"], "ratio": 1.02}
    quiet = {"load_before": 0.2, "other_cores": 0.05, "cores": 2, "commit": "c"}
    args = SimpleNamespace(out=None, quick=False, rounds=None)
    cases = {
        "other programs used 0.9 of 2 cores": (quiet | {"other_cores": 0.9}, rows),
        "1.30 times as long as itself": (quiet, rows | {AA: {**rows[AA], "ratio": 1.3}}),
    }
    for reason, (origin, variants) in cases.items():
        results = {"provenance": origin, "models": {"net": {"variants": variants}}}
        bench.store("drift", results, args)
        assert reason in capsys.readouterr().out
        assert not any(tmp_path.iterdir())
    named = SimpleNamespace(**{**vars(args), "out": tmp_path / "named.json"})
    bench.store("drift", results, named)
    assert (tmp_path / "named.json").exists()
    quiet_results = {"provenance": quiet, "models": {"net": {"variants": rows}}}
    bench.store("drift", quiet_results, args)
    assert (tmp_path / "drift.json").exists()


def test_what_bench_md_says_of_malloc_was_measured():
    rows = committed("stages")["variants"]
    faults = {key: rows[key]["page_faults_of_a_step"] for key in ("01", "01-malloc")}
    page = (ROOT / "benchmarks/bench.md").read_text()
    kept, as_it_comes = (f"{min(each):,} to {max(each):,}" for each in faults.values())
    assert f"had {as_it_comes} such page faults in each step" in page
    assert f"Then it had {kept}." in page
    assert 10 * max(faults["01"]) < min(faults["01-malloc"])


WRONG_CALLS = {
    "speed": "'speed'",
    "stages --device tpu": "'tpu'",
    "--quick": "required: SECTION",
    "reducers --rounds 0": "--rounds: got '0'",
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_ends_in_one_line(call, tmp_path):
    ending = refusal("benchmarks/bench.py", *call.split(), env=ONE_THREAD, cwd=tmp_path)
    assert_one_line(ending, WRONG_CALLS[call])


def test_every_result_is_shown_and_tells_where_it_comes_from():
    pages = "".join(path.read_text() for path in ALL_PAGES)
    assert all(f"<!-- table: {name} -->" in pages for name in page_tables.find_tables())
    parts = {name: (table.file, table.parts) for name, table in page_tables.find_tables().items()}
    told = {part for name, part in parts.items() if f"<!-- table: origin of {name} -->" in pages}
    assert told == set(parts.values())
    sources = {table.file for table in page_tables.find_tables().values()} - {result_files.MACHINE}
    linked = set(re.findall(r"\bresults/((?:once/|gpu/[\w-]+/)?\w+)\.json", pages))
    folders = (result_files.RESULTS.glob(f"{name}*.json") for name in ("", "once/", "gpu/*/"))
    paths = (path.relative_to(result_files.RESULTS) for folder in folders for path in folder)
    files = {str(path.with_suffix("")) for path in paths}
    assert sources | linked == files
    for name in (*sources, *linked, result_files.MACHINE):
        about = result_files.load(name)["provenance"]
        assert {"hardware", "torch", "python", "commit", "date"} <= about.keys(), name
        assert name.startswith("once/") == ("program" in about), "its program is only in history"


def ways() -> dict[str, dict]:
    return results_of("process_memory")[1]["ways"]


def test_without_averaging_two_models_drift_apart_while_the_loss_falls():
    for runs in (results_of("drift")[1]["runs"], committed("drift")["runs"]):
        assert not any(runs["right"]["distance"])
        assert 0 < runs["wrong"]["distance"][0] < runs["wrong"]["distance"][-1]
        assert all(run["loss"][-1] < run["loss"][0] for run in runs.values())


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
