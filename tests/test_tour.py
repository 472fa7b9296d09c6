"""The tour leaves its report, its picture and all files of the stages; it says what it measured."""

import json
from argparse import Namespace

import pytest
from support import command

import tour

CALL = Namespace(model="net-bn", ranks=2)


def row(key: str, *losses: float) -> tour.Row:
    return tour.Row(key, key, (), {}, [{"epoch": 0, "loss": loss} for loss in losses])


def test_the_tour_runs_the_stages_and_compares_them(tmp_path):
    """01 and 05 in both formats, a few steps each."""
    flags = ("--stages=01,05", "--epochs=1", "--device=cpu", "--batch-size=500")
    [(status, output)] = command("tour.py", *flags, f"--run-dir={tmp_path}", seconds=180)
    assert status == 0, output
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# The tour: net-bn on digits, 2 ranks\n")
    for label in ("01 one process", "05 DDP, SyncBN", "05 in bf16"):
        assert f"| {label} " in report
    assert "- **05 DDP, SyncBN** repeats 01" in report
    assert "- **05 in bf16** does not repeat 01" in report
    assert (tmp_path / "tour.png").read_bytes().startswith(b"\x89PNG")
    for key, ranks in (("01", 1), ("05", 2), ("05-bf16", 2)):
        summary = json.loads((tmp_path / key / "summary.json").read_text())
        assert (summary["world_size"], summary["steps"]) == (ranks, 3)
    assert output.rstrip().endswith("report.md and tour.png")
    assert json.loads((tmp_path / "tour.json").read_text())["rows"].keys() == {
        "01 one process",
        "05 DDP, SyncBN",
        "05 in bf16",
    }


@pytest.mark.parametrize(
    ("other", "call", "words"),
    [
        (row("05", 2.0, 1.0 + 1e-7), CALL, "repeats 01"),
        (row("05", 2.0, float("nan")), CALL, "cannot be compared"),
        (row("04", 2.0, 1.1), CALL, "BatchNorm"),
        (row("03", 2.0, 1.1), CALL, "fixed shards"),
        (row("04", 2.0, 1.1), Namespace(model="net", ranks=2), "dropout"),
        (row("04", 2.0, 1.1), Namespace(model="net", ranks=1), "rounded otherwise"),
        (row("05-bf16", 2.0, 1.1), CALL, "bf16"),
    ],
)
def test_the_reason_fits_what_was_measured(other, call, words):
    text = tour.explain(other, row("01", 2.0, 1.0), call)
    assert words in text
    assert text.startswith("repeats") == (words == "repeats 01")


def test_a_stage_that_fails_ends_the_tour(tmp_path):
    """Its line stands in the output, and its status becomes the tour's."""
    flags = ("--stages=01", "--data-dir=nowhere", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command("tour.py", *flags)
    assert status == 2
    assert "error: cannot read --dataset digits in --data-dir nowhere" in output
    assert "Traceback" not in output
