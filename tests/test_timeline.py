"""What is timed is each stage's own loop; every moment of a step belongs to one part of it."""

import inspect
import sys
from datetime import timedelta
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from support import ROOT, command, run_ranks

from common.options import UsageError

sys.path.append(str(ROOT / "benchmarks"))
import spans
import stages
import timeline
from spans import Event

FEW = (f"--data-dir={ROOT / 'data'}", "--device=cpu", "--batch-size=120")


def join(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))


# --- stages.py: what is timed


def test_stages_times_every_stage_and_every_reducer():
    found = stages.variants(cores=4)
    assert {variant.stage for variant in found.values()} == {"01", "02", "03", "04", "05"}
    reducers = {variant.reducer for variant in found.values() if variant.stage == "03"}
    assert reducers == {"", *stages.REDUCERS}
    assert {variant.threads for variant in found.values() if variant.stage == "01"} == {1, 4}
    assert {variant.threads for variant in found.values() if variant.stage != "01"} == {1}


def test_stages_says_what_it_leaves_out_and_why():
    chosen, skipped = stages.choose("cuda", cores=4)
    assert set(skipped) == {"01, all cores", "03, shared-memory"}
    assert chosen.keys() | skipped.keys() == stages.variants(4).keys()
    assert stages.choose("cpu", cores=4)[1] == {}
    assert set(stages.choose("cpu", cores=1)[1]) == {"01, all cores"}


@pytest.mark.parametrize("stage", ["01", "02", "03", "04", "05"])
def test_stages_times_the_code_that_the_reader_reads(stage):
    [path] = ROOT.glob(f"{stage}_*/train.py")
    loop = stages.program(stage).train_epoch
    assert inspect.getsourcefile(loop) == str(path)
    assert inspect.getsource(loop) in path.read_text()


def _weights(rank, names):
    """Of each variant after four steps: their number, the local batch, the weights."""
    join(rank)
    found = {}
    for name in names:
        training = stages.Training(stages.variants(2)[name], "--model=net-bn", *FEW)
        training(4)
        weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
        found[name] = (training.recorder.step, training.loader.batch_size, weights)
    return found


def test_stages_trains_all_variants_with_one_global_batch_and_equal_ranks():
    """Variants of one stage that differ only in how gradients travel train the same network."""
    names = [name for name in stages.variants(2) if name != "05, bf16"]
    zero, one = run_ranks(2, _weights, names)
    for name in names:
        alone = stages.variants(2)[name].alone
        assert zero[name][:2] == (4, 120 if alone else 60), name
        assert one[name][0] == (0 if alone else 4), name
        if not alone:
            assert torch.equal(zero[name][2], one[name][2]), name

    def far(name, other):
        return (zero[name][2] - zero[other][2]).abs().max()

    for reducer in stages.REDUCERS:
        assert far(f"03, {reducer}", "03 as in train.py") < 1e-5, reducer
    assert far("01, 1 thread", "05 DDP, SyncBN") < 1e-5
    assert far("04 DDP", "05, no SyncBN") < 1e-5
    # The controls: other batches, other statistics.
    assert far("03 as in train.py", "04 DDP") > 1e-4
    assert far("01, 1 thread", "05, no SyncBN") > 1e-4


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        ("stages", ("--ranks", "7"), ("--batch-size 120", "by 7")),
        ("stages", ("--rounds", "0"), ("'0'", "at least 1")),
        ("timeline", ("--stages", "03,06"), ("03,06", "expected some of 01,02")),
        ("timeline", ("--device", "tpu"), ("'tpu'", "cuda")),
    ],
)
def test_wrong_calls_end_in_one_line(program, flags, words):
    [(status, output)] = command(f"benchmarks/{program}.py", *flags)
    assert status == 2
    assert output.count("\n") == 1
    assert all(word in output for word in words), output


@pytest.mark.parametrize("steps", [0, 21])
def test_a_profile_stays_within_an_epoch(steps):
    with pytest.raises(UsageError, match="expected 1 to 20"):
        timeline.measure(["01"], steps=steps)


# --- timeline.py: from events to parts

MAIN, GLOO = 1, 2


def a_step(collective: tuple[float, float] = (60, 90), wait: float = 80) -> list[Event]:
    """0 to 100 ms: data, forward, loss, zero_grad, backward, collective, optimiser.

    The main thread works in backward until `wait`.
    """
    operators = [(5, 30), (31, 33), (36, wait), (91, 95)]
    return [
        Event("step", 0, 100, MAIN),
        Event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 4, MAIN),
        Event(spans.FORWARD, 5, 30, MAIN),
        Event("aten::cross_entropy_loss", 31, 33, MAIN),
        Event("Optimizer.zero_grad#SGD.zero_grad", 34, 35, MAIN),
        Event(spans.BACKWARD, 36, 90.5, MAIN),
        Event("gloo:all_reduce", *collective, GLOO),
        Event("Optimizer.step#SGD.step", 91, 96, MAIN),
        *(Event("aten::mm", *span, MAIN) for span in operators),
    ]


def test_the_parts_of_a_step_are_what_its_events_say():
    parts = spans.parts_of(a_step())
    assert {name: spans.length(part) for name, part in parts.items()} == {
        "data": 4,
        "forward": 28,  # up to the end of the loss
        "backward": 44,
        "waiting for others": 11,  # from the last operator to the next, at 91
        "optimiser": 6,
        "other": 7,
    }
    assert spans.waits(a_step(collective=(40, 70))) == []  # the control: done in time


def test_the_hidden_share_is_communication_while_the_rank_works():
    assert spans.hidden_share(a_step((60, 90), wait=80)) == pytest.approx(2 / 3)
    assert spans.hidden_share(a_step((60, 90), wait=60)) == 0
    assert spans.hidden_share(a_step((40, 70), wait=80)) == 1
    silent = [event for event in a_step() if not spans.is_collective(event)]
    assert spans.hidden_share(silent) is None


def test_spans_follow_the_algebra_of_sets():
    """On whole numbers, against Python's own sets."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ends = torch.randint(0, 30, (2, 4, 2), generator=generator).sort(dim=-1).values.tolist()
        one, other = ([tuple(span) for span in some] for some in ends)
        a, b = ({n for low, high in some for n in range(low, high)} for some in (one, other))
        assert spans.length(spans.union(one)) == len(a)
        assert spans.length(spans.both(one, other)) == len(a & b)
        assert spans.length(spans.without(one, other)) == len(a - b)
        assert all(x[1] <= y[0] for x, y in pairwise(spans.without(one, other)))


# --- timeline.py: real steps


def _profiled(rank, stage, model, steps):
    join(rank)
    variant = stages.Variant(stage)
    if variant.alone and rank > 0:
        return []
    training = stages.Training(variant, f"--model={model}", *FEW, "--batch-size=24")
    training(2)
    return spans.steps_of(timeline.record(training, steps + 2))[1:]


def profiled(stage: str, model: str = "resnet18", steps: int = 2) -> list[list[Event]]:
    """Some steps of rank 0."""
    return run_ranks(2, _profiled, stage, model, steps)[0]


@pytest.mark.parametrize("stage", ["01", "02", "03", "04", "05"])
def test_the_parts_of_a_step_add_up_to_it(stage):
    steps = profiled(stage, "net-bn", steps=4)
    assert len(steps) == 4
    for step in steps:
        parts = spans.parts_of(step)
        low, high = step[0].span
        assert sum(map(spans.length, parts.values())) == pytest.approx(high - low)
        everything = [span for part in parts.values() for span in part]
        assert spans.length(everything) == pytest.approx(high - low)  # no moment twice
        for name in ("data", "forward", "backward", "optimiser"):
            assert parts[name], f"{name} was not found"
    assert any(spans.waits(step) for step in steps) == (stage >= "03")
    found = spans.summarize_steps(steps)
    assert sum(found["parts_ms"].values()) == pytest.approx(found["step_ms"], abs=0.01)
    assert sum(found["parts_share"].values()) == pytest.approx(1, abs=0.001)
    # The control: without the mark around backward, most of the step has no name.
    unmarked = [event for event in steps[0] if event.name != spans.BACKWARD]
    assert not spans.parts_of(unmarked)["backward"]


def sent_before_the_last_gradient(step: list[Event]) -> int:
    """How many collectives of gradients start before backward computes its last layer's."""
    last = max(e.start for e in step if "ConvolutionBackward0" in e.name)
    return sum(event.start < last for event in spans.averaging(step))


def test_03_waits_after_backward_and_04_during_it():
    """By the order of events. 62 parameters, three buckets."""
    for step in profiled("03"):
        end = max(e.end for e in step if e.name == spans.BACKWARD)
        assert len(spans.averaging(step)) == 62
        assert all(event.start > end for event in spans.averaging(step))
        assert sent_before_the_last_gradient(step) == 0
        assert spans.hidden_share(step) == 0
    for step in profiled("04"):
        assert len(spans.averaging(step)) == 3
        assert sent_before_the_last_gradient(step) == 2
        assert spans.hidden_share(step) > 0
    for step in profiled("04", "net-bn"):  # the control: one bucket, which the last one fills
        assert len(spans.averaging(step)) == 1
        assert sent_before_the_last_gradient(step) == 0


def test_05_waits_in_forward_and_backward_for_its_statistics():
    """net-bn has two such layers: one all-reduce each in forward and in backward; one bucket."""
    for step in profiled("05", "net-bn"):
        [forward] = [e for e in step if e.name == spans.FORWARD]
        inside = [e for e in step if spans.is_collective(e)]
        reduces = [e for e in inside if "all_reduce" in e.name]
        assert sum(forward.start < e.start < forward.end for e in reduces) == 2
        assert len(spans.averaging(step)) == 2 + 1


def test_02_runs_replicas_in_threads_and_backward_in_one():
    for step in profiled("02"):
        rows = spans.rows_of(step)
        assert list(rows) == ["main thread", "replica thread 1", "replica thread 2"]
        backward = {e.thread for e in step if "ConvolutionBackward0" in e.name}
        assert backward == {step[0].thread}  # on a CPU


def test_a_profile_leaves_the_stage_as_it_was():
    before = torch.Tensor.backward
    model = torch.nn.Linear(2, 2)
    with timeline.marks(model):
        assert torch.Tensor.backward is not before
        model(torch.ones(2)).sum().backward()
    assert torch.Tensor.backward is before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# --- Both: measured and drawn


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_stages_measures_and_draws_what_it_was_asked_for(axes):
    names = ["02 DataParallel", "03, shared-memory", "04 DDP"]
    results = stages.measure(rounds=1, names=names)
    assert list(results["variants"]) == [stages.BASE, *names, "A/A"]
    for row in results["variants"].values():
        assert row["samples_per_second"] == pytest.approx(120e3 / row["step_ms"], rel=1e-3)
    assert results["waiting_cpu_share"] < 0.5
    assert all(name in stages.report(results) for name in names)
    stages.draw(results, axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == [stages.BASE, *names]


def test_timeline_measures_and_draws_what_it_was_asked_for(axes):
    results = timeline.measure(["04"], steps=1)
    assert set(results["stages"]) == {"04"}
    timeline.draw_timeline(results, "04", axes)
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[0] == "main thread"
    assert rows[1].startswith("gloo thread")
    timeline.draw_parts(results, axes)
