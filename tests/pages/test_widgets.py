"""The site's widgets compute what the chapters compute. Needs node, which runs JavaScript."""

import json
import subprocess
from functools import cache, partial
from itertools import chain, product
from unittest.mock import patch

import pytest
import torch
import torchvision

import gradient_order
import levels
import memory as replicas
import peak
import ring
import step_model
from benchmarks import result_files
from benchmarks.measure import sharding
from helpers.on_ranks import run_on_ranks
from local_ranks.chapters import ROOT

parts_of = cache(peak.parts_of)  # what breaks a widget for the control changes nothing here
SOURCE = "".join(path.read_text() for path in sorted(ROOT.glob("docs/site/widgets/*.js"))[::-1])
GRID = {
    "model": ("resnet18", "resnet50", "vgg16"),
    "cap": (2**20, gradient_order.BUCKET_BYTES, 6e8),
    "gbit": (0.3, 25, 400),
}
GRID |= {"latency": (0, 5e-5), "ranks": (2, 3, 64), "computing": (0.01, 0.4)}


def node(function, calls, old, new):  # what it returns, with a piece of the source replaced
    run = f"JSON.stringify({json.dumps(calls)}.map((inputs) => widgets.{function}(...inputs)))"
    return json.loads(subprocess.check_output(["node", "-p", SOURCE.replace(old, new) + run]))


@cache
def gradients_of(model):
    if model != "resnet18":
        return gradient_order.gradients_of_classifier(model, 224)
    with torch.device("meta"):  # as in docs/pictures/buckets.svg
        small = torchvision.models.resnet18(num_classes=10)
        return gradient_order.gradients_of(small, torch.empty(2, 3, 64, 64))


def _trace_ring(rank, ranks):
    torch.distributed.init_process_group("gloo")
    return ring.trace(rank, ranks)


def allreduce(*change):
    for n in (2, 3, 5, 6, 7, 8, 4):
        steps, sent = (step_model.ring(8 * n, n, step_model.Link(*a)) for a in ((1, 1e99), (0, 1)))
        half = [steps / 2, n * steps / 2, sent / 2]
        ways = {"ring": [steps, n * steps, sent], "reduce-scatter": half, "all-gather": half}
        ways |= {"one-shot": [1, n * (n - 1), 8 * n * (n - 1)]}
        states_by_way = node("allreduce.simulate", [(n, way, 8 * n) for way in ways], *change)
        for states, theory in zip(states_by_way, ways.values(), strict=True):
            assert [len(states) - 1, states[-1]["messages"], *{*states[-1]["sent"]}] == theory
        held = [[state["held"] for state in states] for states in states_by_way]
        assert {*chain(*held[0][-1], *held[2][-1], *held[3][-1])} == {int("1" * n)}  # 1 + 10 + ...
        assert held[0][:n] == held[1], "a ring is a reduce-scatter and then an all-gather"
        complete = [[chunk == (rank + 1) % n for chunk in range(n)] for rank in range(n)]
        for last_states in (held[1][-1], held[2][0]):
            assert [[value == int("1" * n) for value in row] for row in last_states] == complete
    held = [[" ".join(map(str, row)) for row in state["held"]] for state in states_by_way[0]]
    assert [*zip(*held, strict=True)] == [
        tuple(seen) for _, seen in run_on_ranks(n, _trace_ring, n)
    ]


def buckets(*change):
    calls = [[dict(zip(GRID, row, strict=True))] for row in product(*GRID.values())]
    for (call,), plan in zip(calls, node("buckets.plan", calls, *change), strict=True):
        model, cap, gbit, latency, ranks, s = call.values()
        first = 2**20 if cap == gradient_order.BUCKET_BYTES else cap
        with patch.multiple(gradient_order, BUCKET_BYTES=cap, FIRST_BYTES=first):
            filled = gradient_order.fill_buckets(gradients_of(model))
        job = step_model.Job(s / 3, 2 * s / 3, 0.0, filled)
        link = step_model.Link(latency, gbit * 1e9 / 8)
        cost = partial(step_model.ring, world_size=ranks, link=link)
        step, seconds = step_model.step(job, cost), [plan["seconds"], *chain(*plan["spans"])]
        assert seconds == pytest.approx([step.seconds, *chain(*step.spans)], rel=1e-9, abs=0)


@cache
def saved_of_2_and_3_samples(plan, bf16):
    sizes = []
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model, _ = plan.build()
        for few in (2, 3):
            with replicas.saving_to(saved := []):
                plan.loss(model, few)
            sizes.append(replicas.size(saved, [*model.parameters(), *model.buffers()]))
    return sizes


def saved_bytes(plan, samples, bf16):
    """What autograd saves of a batch, from two tiny ones: no meta device knows autocast."""
    two, three = saved_of_2_and_3_samples(plan, bf16)
    return two + (samples - 2) * (three - two)


def memory(*change):
    for name, pixels, optimizer in (
        ("net", 28, "sgd"),
        ("net", 28, "adam"),
        ("resnet18", 64, "momentum"),
        ("resnet18", 224, "adamw"),
        ("resnet50", 224, "momentum"),
    ):
        plan = peak.Plan(name, pixels, optimizer, "cpu")
        *fixed, sample = parts_of(plan).values()
        full, few, one = (saved_bytes(plan, *a) for a in ((0, False), (0, True), (1, True)))
        fp32 = {"network": f"{name}, {pixels} × {pixels}", "optimizer": optimizer}
        fp32 |= {"batch": 30, "parallel": "ddp"}
        answer = node("memory.memory", [[fp32], [fp32 | {"precision": "bf16"}]], *change)
        # As many bytes in buckets as in gradients.
        assert [*answer[0].values()] == [*fixed, fixed[2], 0, 30 * sample]
        assert [*answer[1].values()] == [*fixed, fixed[2], few - full, 30 * (one - few)]
    answer = node("memory.largest", [[fp32 | {"parallel": "one"}, 2**33]], *change)
    assert f"largest batch at once: {answer[0]}\n" in (ROOT / "01_single_gpu/fit.md").read_text()


def shard(*change):
    counted = result_files.load("shard")["sent_multiples"]
    names = {
        way: name
        for name, (make_training, way) in sharding.VARIANTS.items()
        if make_training is levels.by_hand
    }
    for n in (2, 4, 7):
        moments = node("shard.moments", [(way, n) for way in levels.LEVELS], *change)
        for way, (_, forward, backward, update) in zip(levels.LEVELS, moments, strict=True):
            kept = [kind["kept"] for kind in backward["held"].values()]
            expected = [*levels.formula(way, n).values()]
            assert [kept[0], kept[1], 2 * kept[2]] == pytest.approx(expected)
            passing = [kind["passing"] for kind in forward["held"].values()]
            assert passing == [way == "parameters", False, False]
            sent = {"none": 2, "optimizer": 3, "gradients": 2, "parameters": 3}[way]
            assert update["sent"] == pytest.approx(sent * (n - 1) / n)
            assert n != 2 or update["sent"] == pytest.approx(counted[names[way]], rel=0.02)


WIDGETS = [  # what compares a widget with a chapter, and a change of its source for the control
    (allreduce, "from - s + lead", "from - s - lead"),
    (buckets, "2 * (ranks", "(ranks"),
    (memory, "tum: 1", "tum: 2"),
    (shard, "gradients: [0, 0, 1, 1]", "gradients: [0, 0, 2, 1]"),
]


@pytest.mark.skipif(subprocess.getoutput("node -p 1") != "1", reason="there is no node here")
@pytest.mark.parametrize(("compare", "old", "new"), WIDGETS)
def test_a_widget_computes_what_the_chapters_compute(compare, old, new):
    compare("", "")
    with pytest.raises(AssertionError):
        compare(old, new)
