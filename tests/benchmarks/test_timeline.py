"""The timeline records what happens in a step: who computes, who waits, and who sends."""

import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import from_scratch
from benchmarks.measure import timeline_recorder
from benchmarks.measure.recordings import choose_step, read_recordings, recorder_variables
from benchmarks.measure.timeline_recorder import MESSAGES, Kind, RecordedStep, Recording, Span
from docs.pictures import timeline
from helpers.on_ranks import run_on_ranks
from helpers.refusals import assert_one_line, refusal
from local_ranks.scripts import run_script

PROGRAM = "benchmarks/timeline.py"


def step(*ranks: list[Span]) -> RecordedStep:
    return {"ms": 10.0, "ranks": [{"rank": r, "spans": spans} for r, spans in enumerate(ranks)]}


def span(kind: Kind, begin: float, end: float) -> Span:
    return Span(kind, "main", begin, end)


def test_a_rank_waits_until_the_last_rank_has_come_and_then_all_send():
    early, late = span(Kind.MESSAGE, 1.0, 6.0), span(Kind.MESSAGE, 4.0, 6.0)
    lanes = timeline.lanes(step([early], [late]))
    parts = {lane.name: [*lane.parts] for lane in lanes if lane.parts}
    assert [*lanes[1].parts] == [("waiting", 1.0, 4.0), ("sending", 4.0, 6.0)]
    assert [*lanes[3].parts] == [("waiting", 4.0, 4.0), ("sending", 4.0, 6.0)]
    assert parts.keys() == {"messages"}
    alone = timeline.lanes(step([early], []))  # the control: they send unlike numbers
    assert [*alone[1].parts] == [("waiting", 1.0, 1.0), ("sending", 1.0, 6.0)]


def test_a_rank_that_a_message_keeps_from_computing_is_not_drawn_as_computing():
    spans = [
        span(Kind.FORWARD, 0.0, 4.0),
        span(Kind.MESSAGE, 1.0, 2.0),
        span(Kind.STARTED, 2.5, 3.0),
        span(Kind.BACKWARD, 4.0, 9.0),
        span(Kind.BUCKET, 5.0, 6.0),
        span(Kind.BUCKET, 7.0, 9.0),
    ]
    assert [*timeline.lanes(step(spans, spans))[0].parts] == [
        ("forward", 0.0, 1.0),
        ("forward", 2.0, 4.0),
        ("backward", 4.0, 7.0),  # after the last bucket, it waits for the mean
    ]


def test_the_step_shown_is_the_median_one_cut_at_its_ends():
    steps, now = [], 0.0
    for seconds in [9, 9, 9, 9, 9, 1, 5, 2]:
        forward = span(Kind.FORWARD, now, now + seconds / 2)
        now += seconds
        steps.append([forward, span(Kind.OPTIMIZER, now - 0.1, now)])
    recording: Recording = {"rank": 0, "gpu": "", "torch": "", "steps": steps}
    shown = choose_step([recording])
    assert (shown["steps"], shown["shown"]["ms"]) == (3, 2000)
    [rank] = shown["shown"]["ranks"]
    assert [(each.begin, each.end) for each in rank["spans"]] == [(0, 1000), (1900, 2000)]


def _train(rank: int, folder: Path, how: str) -> None:
    if how != "threads":
        dist.init_process_group("gloo")
    os.environ |= recorder_variables(folder)
    recorder = timeline_recorder.install()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    wrapped = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    elif how == "threads":
        wrapped = from_scratch.DataParallel(model, [torch.device("cpu")] * 2)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(7):
        loss = wrapped(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if how == "by hand" else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        with torch.no_grad():
            wrapped.eval()(torch.randn(4, 8))  # an evaluation is no forward of a step
            wrapped.train()
    recorder.save()


@pytest.mark.parametrize(
    ("how", "messages"),
    [("ddp", 2), ("by hand", 6)],  # DDP: the buffers, and one bucket; by hand: each parameter
)
def test_the_messages_of_a_step_are_seen_and_its_parts_follow_each_other(how, messages, tmp_path):
    run_on_ranks(2, _train, tmp_path, how)
    recordings = read_recordings(tmp_path)
    assert [each["rank"] for each in recordings] == [0, 1]
    for rank in choose_step(recordings)["shown"]["ranks"]:
        sent = [span for span in rank["spans"] if span.kind in MESSAGES]
        assert len(sent) == messages
        [forward], [backward], [optimizer] = (
            [span for span in rank["spans"] if span.kind == kind]
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
        )
        assert forward.end <= backward.begin <= backward.end <= optimizer.begin


def test_the_replicas_of_data_parallel_are_threads_and_around_them_the_process_copies(tmp_path):
    run_on_ranks(1, _train, tmp_path, "threads")
    shown = choose_step(read_recordings(tmp_path))
    process, *replicas = timeline.lanes(shown["shown"])
    assert [lane.name for lane in replicas] == ["replica 0", "replica 1"]
    assert all([kind for kind, *_ in lane.parts] == ["forward"] for lane in replicas)
    assert [kind for kind, *_ in process.parts] == ["backward", "optimizer", "sending", "sending"]


SCRIPT = """
import sys, time
import torch
assert not {"benchmarks", "common"} & sys.modules.keys(), "a script may have its own"

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index):
        time.sleep(LOADING)
        return torch.randn(8)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.utils.data.DataLoader(Slow(), 2):
    time.sleep(BETWEEN)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        ("loading", {"LOADING": "0.05", "BETWEEN": "0"}),
        ("nothing", {"LOADING": "0", "BETWEEN": "0.1"}),
    ],
)
def test_in_a_script_of_ones_own_a_slow_dataset_is_loading_and_another_wait_is_nothing(
    where, seconds, tmp_path
):
    """A sleep lasts at least as long as it says, on any machine."""
    source = SCRIPT
    for name, number in seconds.items():
        source = source.replace(name, number)
    (tmp_path / "mine.py").write_text(source)
    [(status, output)] = run_script(PROGRAM, sys.executable, "mine.py", cwd=tmp_path)
    assert status == 0, output
    heads, (name, *row), end = (re.split(r"  +", line.strip()) for line in output.splitlines())
    assert float(dict(zip(heads, row, strict=True))[where]) >= 100
    assert (name, end) == ("process", ["wrote timeline.svg: open it in a browser"])
    picture = ElementTree.parse(tmp_path / "timeline.svg")
    assert "mine.py: " in picture.findtext("{*}desc")
    assert "loading" in [element.text for element in picture.iter()]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("nowhere train.py", "cannot start nowhere"),
        ("python -c pass", "no process took an optimizer step"),
    ],
)
def test_a_wrong_call_ends_in_one_line(call, words, tmp_path):
    call = call.replace("python", sys.executable)
    assert_one_line(refusal(PROGRAM, *call.split(), cwd=tmp_path), words)
