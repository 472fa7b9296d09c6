"""What prove says: its rows, its last line, its links, and why it can judge nothing."""

import json
import os
import re
import sys
import tty
from dataclasses import replace

import pytest

from prove.__main__ import main
from prove.checks import SENTENCES, order_of_an_epoch
from prove.cures import all_cures
from prove.judge import rank_exits, replay_checks, table, wording
from prove.judge.reasons import Phrase
from prove.judge.replay_reasons import ReplayReason
from prove.rank_record import Ended, RaisedError, RankRecord, RunOutcome, SourceLine
from prove_cases import planted, training_of
from prove_runs import (
    SECONDS,
    TORCHRUN,
    forked,
    one_line,
    patience,
    prove_in_files,
    run,
    verdict,
)

TWO_DATA_SETS = (
    ("    train_set, test_set = ", "    more = Points(20, 0.0)\n    train_set, test_set = "),
    (
        "        test_loss, accuracy = evaluate(",
        "        with torch.no_grad():\n"
        "            sum(ddp.module(x).sum() for x, _ in DataLoader(more, 8))\n"
        "        test_loss, accuracy = evaluate(",
    ),
)


def test_a_row_names_each_place_that_is_a_cause(prove_script):
    """Two lines that all ranks print, and two data sets that each rank evaluates to the end."""
    everything = ("DataLoader(shard, batch_size=8)", "DataLoader(dataset, batch_size=8)")
    all_print = ("        if rank == 0:\n", "        if rank >= 0:\n")
    source = planted(*TWO_DATA_SETS, everything, all_print)
    ended = prove_script(source)
    for check, words in (("evaluation", "DataLoader(more DataLoader(dataset"),
                         ("printing", "print(f\"epoch print(f\"accuracy")):  # fmt: skip
        [row] = re.findall(rf"^warning +{check}\s+(.*(?:\n +[^-\s].*)*)", ended.stdout, re.M)
        for word in words.split():
            number = next(n for n, text in enumerate(source.splitlines(), 1) if word in text)
            assert f"train.py:{number})" in row


def test_a_terminal_shows_which_run_lasts_how_long_and_keeps_nothing_of_it(tmp_path):
    (tmp_path / "train.py").write_text(training_of("DistributedDataParallel(nn.Linear(8, 8))"))
    piped = run(tmp_path, *TORCHRUN, "train.py").stderr
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # a line ends with \n alone
    (tmp_path / "error").symlink_to(os.ttyname(theirs))
    arguments = (tmp_path, tmp_path, {"PYTHONHASHSEED": "0"}, (*TORCHRUN, "train.py"))
    prove = forked.Process(target=prove_in_files, args=arguments)
    prove.start()
    prove.join(patience(SECONDS))
    os.write(theirs, b"END")
    text = ""
    while not text.endswith("END"):  # a read gives at most a page of it
        text += os.read(ours, 2**16).decode()
    assert [line.split(": ")[0] for line in piped.splitlines()] == ["observe", "replay"]
    assert re.sub(r"\r[^\r\n]*\r", "", text) == f"{piped}END", (
        "the control: a pipe gets nothing else"
    )
    assert re.search(r"\rrun 1 of 2 or more, \d s, \d+ steps?\s*\r", text)
    assert re.search(r"\r +\rreplay: ", text), "what stood there has been erased"


SHIFTED = """
class Shifted(nn.Module):
    def __init__(self, batch):
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(batch, 1, 8)), nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x + self.shift)
"""


def test_if_one_rank_cannot_be_compared_the_last_line_says_that_nothing_is_proven(
    prove_script, tmp_path
):
    of_each_sample, of_all_samples = (
        training_of(f"DistributedDataParallel(Shifted({batch}))", SHIFTED)
        for batch in ("local_batch", 1)
    )
    unknown = "nothing is proven about"
    (tmp_path / "once.py").write_text(of_all_samples)
    ended = prove_script(of_each_sample, "--original", "torchrun --nproc-per-node=1 once.py")
    assert (verdict(ended, "one rank"), verdict(ended, "the original")) == ("not seen", "not seen")
    assert "shape [4, 1, 8], and [8, 1, 8]" in one_line(ended.stdout)
    last_line = ended.stdout.splitlines()[-1]
    assert f"{unknown} what is averaged and the conversion: see one rank and" in last_line
    ended = prove_script(of_each_sample)
    assert ended.stdout.endswith(f"; {unknown} what is averaged: see one rank\n")
    ended = prove_script(of_all_samples)  # the control: a parameter for all samples
    assert (verdict(ended, "one rank"), unknown in ended.stdout) == ("right", False)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no such script"),
        ("raise ValueError('my own mistake')", "my own mistake"),
        ("print('hello')", "no process group: each process trains for itself"),
        # Without the barrier, one rank may have left before the other has joined: gloo's error.
        ("import torch.distributed as d\nd.init_process_group()\nd.barrier()", "no optimizer"),
    ],
)
def test_if_nothing_can_be_judged_one_line_says_why(source, message, prove_script, tmp_path):
    ended = prove_script(source) if source else run(tmp_path, *TORCHRUN, "train.py")
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert last.startswith("error: ")
    assert message in last


def test_every_cure_that_says_more_has_a_heading_that_exists():
    links = {reason.link for reason in SENTENCES.values()} - {""}
    assert len(links) >= 8
    assert links - all_cures().keys() == set()


def test_a_row_that_was_written_as_json_says_the_same_again():
    differing = [
        wording.phrase(
            Phrase.PRINTED, name="loss", of_ranks="0.25", of_one="0.5", world_size=n, at="?"
        )
        for n in range(2, 7)
    ]
    row = table.warning("printed numbers", ReplayReason.NUMBERS_DIFFER, numbers=differing)
    here, there = SourceLine("train.py:7"), SourceLine("src/loops.py:12")
    also = {"numbers": [{**differing[0], "at": here}]}, {"numbers": [{**differing[0], "at": there}]}
    row = replace(row, also=({"numbers": differing[:1]}, *also))
    again = table.ReportRow.from_json(json.loads(json.dumps(row.as_json())), SENTENCES)
    assert (again.evidence, again.cure, again.link) == (row.evidence, row.cure, row.link)
    assert [(at.file, at.line) for at in again.lines] == [("train.py", 7), ("src/loops.py", 12)]
    assert "on 4 ranks and 0.5 on one (?) and 2 more; after the same steps, loss" in row.evidence


def test_a_reason_writes_its_facts_as_numbers_with_nouns_lists_and_shares():
    def written(template: str, **facts: object) -> str:
        return wording.in_words(template, facts)

    assert written("{n:n step}, {m:n step}", n=1, m=2) == "1 step, 2 steps"
    assert written("{a:percent} {b:percent} {a:.1f}", a=0.25, b=0.00015) == "25% 1.5e-04 0.2"
    assert written("{names} | {names: + }", names=[*"abcd"]) == "a, b, c and 1 more | " + (
        "a + b + c and 1 more"
    )
    assert written("{rates:each .2g}", rates=[0.123, 4.0]) == "0.12, 4"
    assert written("{text}", text="{not} a {field}") == "{not} a {field}", "a script's own words"
    with pytest.raises(KeyError):  # the control
        written("{steps} steps", step=1)


def test_the_command_below_a_cure_prints_all_of_it(tmp_path, capsys, monkeypatch):
    """From any folder: the page lies in the package. The control asks for another name."""
    facts = {"at": "train.py:1", "sampler": "RandomSampler"}
    rows = [table.wrong("order of an epoch", order_of_an_epoch.Sentence.EPOCH_NOT_SET, **facts)]
    [words] = re.findall(r"\(python -m prove (.*)\)", table.format_table(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prove", *words.split()])
    assert main() == 0
    assert capsys.readouterr().out.startswith("## Every epoch has the same order\n")
    monkeypatch.setattr(sys, "argv", ["prove", "--explain", "another"])
    with pytest.raises(SystemExit):
        main()
    assert "'every-epoch-has-the-same-order'" in capsys.readouterr().err


def test_the_error_of_a_rank_is_told_and_not_that_of_its_launcher():
    log = "ModuleNotFoundError: No module named 'tokens'\n"
    log += "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    outcome = RunOutcome(1, log, False, False, [], 1.0)
    assert rank_exits.error_of(outcome) == log.splitlines()[0]


def test_a_rank_that_loses_one_which_we_have_ended_has_no_error_of_its_own():
    lost = RaisedError("RuntimeError", "Connection closed by peer", "train.py:9", 0.0)
    for ended, is_ours in ((Ended.WHEN_SEEN, True), (Ended.FINISHED, False)):
        records = [RankRecord(0, ended=ended), RankRecord(1, ended=Ended.WITH_ERROR, error=lost)]
        outcome = rank_exits.excuse_connections_we_closed(
            RunOutcome(1, "", False, False, records, 1.0)
        )
        assert [outcome.status == 0, outcome.records[1].error is None] == [is_ours, is_ours]


def test_a_replay_that_fails_is_told_what_fits_its_error():
    def reason(kind: str, message: str, in_float64: bool = True) -> ReplayReason:
        return replay_checks.reason_of_failure(RaisedError(kind, message, "?", 0.0), in_float64)

    for kind, message in (
        ("RuntimeError", "The size of tensor a (64) must match the size of tensor b (32)"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (1x4 and 2x16)"),
        ("ValueError", "Expected input batch_size (8) to match target batch_size (4)."),
    ):
        assert reason(kind, message) == ReplayReason.REPLAY_FAILS_BY_SHAPE, message
    for message in (
        "expected scalar type Float but found Double",
        "mat1 and mat2 must have the same dtype, but got Double and Float",
        "Input type (double) and bias type (float) should be the same",
    ):
        assert reason("RuntimeError", message) == ReplayReason.REPLAY_FAILS_BY_DTYPE, message
        assert reason("RuntimeError", message, in_float64=False) == ReplayReason.REPLAY_FAILS
    for kind, message in (
        ("KeyError", "'size'"),
        ("AssertionError", ""),
        ("ValueError", "Expected world size 2, got 1"),
        ("RuntimeError", "Invalid rank 1 for a process group of size 1"),
    ):
        assert reason(kind, message) == ReplayReason.REPLAY_FAILS, message


TRANSFORMED = """
class Transformed(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows, self.transform = rows, nn.Hardtanh()
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.transform(self.rows[index])
"""


def test_a_transform_of_the_data_is_no_layer_of_the_model(prove_script):
    """One rank never calls it. The control: the layers of the model are still compared."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))", TRANSFORMED)
    source = source.replace("torch.randn(32, 5, 8)", "Transformed(torch.randn(32, 5, 8))")
    ended = prove_script(source.replace(".mean()", ".sum().div((x > 0).sum())"))
    assert verdict(ended, "one rank") == "WRONG"
    assert "its layers give the same on one rank" in one_line(ended.stdout)


LEAVES = """
import os
os.makedirs("runs", exist_ok=True)
os.chdir("runs")
from layers import Layer
"""
LAYER = """
import torch
class Layer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) - torch.rand(())
"""


def test_a_line_is_named_from_the_folder_of_the_user_though_the_script_has_left_it(
    prove_script, tmp_path
):
    (tmp_path / "layers.py").write_text(LAYER)
    ended = prove_script(training_of("DistributedDataParallel(Layer(8, 8))", LEAVES))
    assert "layers.py:5" in ended.stdout
    assert "../layers.py" not in ended.stdout
    assert "train.py:" in ended.stdout
    assert "../train.py" not in ended.stdout
