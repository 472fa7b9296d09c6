"""The tour leaves its report, its picture and all files of the stages; it says what it measured."""

import json
import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

import stage_runs
import tour
from local_ranks import ROOT, command, launch_ranks


def forked(call: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
    """In place of Popen: ranks from the forkserver of the tests, there in a moment."""
    if call[1] == "-m":
        assert call[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = ["packages/shm/src/shm/__main__.py", *call[8:]] if call[6] == "-m" else call[6:]
        answers = launch_ranks(*script, env=env)
    else:
        answers = command(*call[1:], env=env)
    lines = "".join(output for _, output in answers).splitlines(keepends=True)
    status = max(status for status, _ in answers)
    return SimpleNamespace(stdout=lines, returncode=status, wait=lambda: status)


@pytest.fixture
def run_tour(monkeypatch):
    def run(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks/tour.py", "--device=cpu", *flags])
        tour.main()

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(stage_runs, "subprocess", SimpleNamespace(Popen=forked, PIPE=0, STDOUT=0))
    counted = json.loads((ROOT / "benchmarks" / "results" / "tour.json").read_text())["memory"]
    monkeypatch.setattr(tour, "count_memory", lambda rows, args: counted)
    return run


def test_the_tour_runs_the_stages_and_compares_them(run_tour, tmp_path, capsys):
    """01 and 05 in both formats, a few steps each."""
    run_tour("--stages=01,05", "--epochs=1", "--batch-size=500", f"--run-dir={tmp_path}")
    labels = {r.key: r.label for r in tour.ROWS if r.key[:2] in ("01", "05") and r.shown(True)}
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# The tour: net-bn on digits, 2 ranks\n")
    assert all(f"| {label} " in report for label in labels.values())
    assert "- **05 DDP, SyncBN** repeats 01" in report
    assert "- **05 in bf16 over shm** does not repeat 01" in report
    assert (tmp_path / "tour.png").read_bytes().startswith(b"\x89PNG")
    for key in labels:
        summary = json.loads((tmp_path / key / "summary.json").read_text())
        assert (summary["world_size"], summary["steps"]) == (1 if key < "02" else 2, 3)
    assert capsys.readouterr().out.endswith("report.md and tour.png\n")
    results = json.loads((tmp_path / "tour.json").read_text())
    assert list(results["rows"]) == list(results["losses"]) == list(labels.values())


FIRST = "01 (largest difference in the first epoch: "
REASONS = [
    ("05", 1.0 + 1e-7, "net-bn", 2, f"repeats {FIRST}1e-07)"),
    ("05", float("nan"), "net-bn", 2, "cannot be compared"),
    ("04", 1.1, "net-bn", 2, f"does not repeat {FIRST}0.1)"),
    ("04", 1.1, "net-bn", 2, "BatchNorm"),
    ("03", 1.1, "net-bn", 2, "fixed shards"),
    ("04", 1.1, "net", 2, "dropout"),
    ("04", 1.1, "net", 1, "rounded otherwise"),
    ("05-bf16-shm", 1.1, "net-bn", 2, "bf16"),
]


@pytest.mark.parametrize(("key", "loss", "model", "ranks", "words"), REASONS)
def test_the_reason_fits_what_was_measured(key, loss, model, ranks, words):
    first, other = (
        tour.StageRow(
            name, name, run=stage_runs.StageRun({}, [{"epoch": 0, "loss": x} for x in (2.0, each)])
        )
        for name, each in (("01", 1.0), (key, loss))
    )
    assert words in tour.explain(other, first, Namespace(model=model, ranks=ranks))


def test_a_stage_that_fails_ends_the_tour(run_tour, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run_tour(
            "--stages=01,04",
            "--dataset=imagefolder",
            "--data-dir=nowhere",
            f"--run-dir={tmp_path / 'run'}",
        )
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out.count("error: cannot read --dataset imagefolder in --data-dir nowhere") == 1
    assert captured.err == "error: 01 one process ended with status 2\n"


def test_make_gpu_runs_every_test_that_needs_a_gpu_and_programs_that_exist(request):
    [(status, output)] = command("benchmarks/gpu.py", "--dry-run")
    assert status == 0, output
    assert "-m pytest -v --tb=short tests -k gpu\n" in output
    items = [(i.nodeid, m) for i in request.session.items for m in i.iter_markers("skipif")]
    needs = [name for name, m in items if "GPU" in m.kwargs["reason"]]
    assert [name for name in needs if "gpu" not in name] == []
    assert all((ROOT / name).exists() for name in re.findall(r"\S+\.py", output))
