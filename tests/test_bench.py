"""`make bench`: one file for a machine, a section for each benchmark; none is lost."""

import json
import sys

import pytest
from support import ROOT, command

sys.path.append(str(ROOT / "benchmarks"))
import bench


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """bench.main with these flags, in a folder of its own, with sections that only say their name.

    The section "timeline" fails.
    """
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)

    def measure(section, device):
        if section == "timeline":
            raise RuntimeError("it failed")
        return {"found": f"{section} on {device}"}

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["bench.py", "--device", "cpu", *flags])
        bench.main()
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text())

    monkeypatch.setattr(bench, "measure", measure)
    return run


def test_a_machine_has_one_file_with_a_dash_in_its_name():
    """By the dash `committed` knows it; no other result has one."""
    assert bench.file_of("AMD EPYC 9B45 (x), 2 cores").name == "amd-epyc-9b45-x-2-cores.json"
    assert bench.file_of("1 x NVIDIA H200").name == "1-x-nvidia-h200.json"
    for path in (ROOT / "results").glob("*-*.json"):
        assert path == bench.file_of(json.loads(path.read_text())["provenance"]["hardware"])


def test_a_section_is_measured_again_and_the_others_stay(measured):
    first = measured("--only", "stages,reducers")
    assert first["stages"] == {"found": "stages on cpu"}
    assert first["provenance"]["commit"]
    second = measured("--only", "reducers,switches")
    assert {"stages", "reducers", "switches"} <= second.keys()
    assert "scaling" not in second


def test_a_section_that_fails_is_named_and_loses_nothing(measured, capsys):
    with pytest.raises(SystemExit) as end:
        measured("--only", "stages,timeline,reducers")
    assert end.value.code == 1
    assert "failed: timeline" in capsys.readouterr().out
    assert {"stages", "reducers"} <= measured("--only", "stages").keys()


def test_the_notebooks_read_every_machine_or_only_those_named(measured, monkeypatch, tmp_path):
    content = measured("--only", "stages")
    (path,) = tmp_path.glob("*.json")
    (tmp_path / "05_switches.json").write_text("{}")  # no machine's file
    (tmp_path / "of-a-reader.json").write_text('{"provenance": {"hardware": "a reader\'s"}}')
    assert bench.committed().keys() == {content["provenance"]["hardware"], "a reader's"}
    monkeypatch.setenv("ONLY_RESULTS", path.name)
    assert bench.committed() == {content["provenance"]["hardware"]: content}


@pytest.mark.parametrize("section", bench.SECTIONS)
def test_every_section_is_a_program_with_the_flags_that_bench_gives(section):
    [(status, output)] = command(f"benchmarks/{section}.py", "--help")
    assert status == 0
    assert all(flag in output for flag in ("--brief", "--out FILE", "--device {"))


def test_an_unknown_section_is_refused():
    [(status, output)] = command("benchmarks/bench.py", "--only", "speed")
    assert status == 2
    assert output.startswith("error: --only speed: expected one or more of stages,timeline,")
    assert len(output.splitlines()) == 1


def test_the_cost_of_surviving_is_measured_beside_stage_05(tmp_path):
    out = tmp_path / "survive.json"
    [(status, output)] = command("benchmarks/survive.py", "--quick", "--out", str(out))
    assert status == 0, output
    rows = json.loads(out.read_text())["variants"]
    assert list(rows) == ["05", "survive", "A/A"]
    assert all(row["step_ms"] > 0 < row["ratio"] for row in rows.values())
