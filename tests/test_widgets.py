"""The site's widgets compute what the chapters compute. Needs node, which runs JavaScript."""

import json
import shutil
import subprocess
import sys
from functools import cache, partial
from itertools import chain, product
from unittest.mock import patch

import pytest
from support import ROOT, chapter

sys.path.append(str(ROOT / "benchmarks"))
from process_memory import saved_bytes

paper, ready = chapter("04", "alpha_beta"), chapter("04", "ready")
peak, ring = chapter("01", "peak"), chapter("03", "ring")
saved, named = cache(saved_bytes), cache(ready.named)
NAMES = "widgets", "allreduce", "buckets", "memory"
SOURCE = "".join((ROOT / f"website/widgets/{name}.js").read_text() for name in NAMES)
KEYS = "model", "cap", "gbit", "latency", "ranks", "computing"
SIZES, STATES = {"net": 28, "resnet18": 224, "resnet50": 224}, ("sgd", "momentum", "adam")
CAPS, LATE = (2**20, ready.OTHERS, 50 * 2**20, 600 * 2**20), (0, 5e-5)
GRID = [*product(("resnet50", "vgg16"), CAPS, (0.3, 25, 400), LATE, (2, 3, 64), (0.01, 0.4))]


def node(widget, key, calls, old, new):
    """What this function of a widget returns. old, new: a change of its source."""
    run = f"{json.dumps(calls)}.map((inputs) => widgets.{widget}.{key}(...inputs))"
    script = f"{SOURCE.replace(old, new)}; console.log(JSON.stringify({run}))"
    return json.loads(subprocess.check_output(["node"], input=script, text=True))


def allreduce(*change):
    for n in (2, 3, 5, 6, 7, 8, 4):
        calls = [(n, way, 8 * n) for way in ("ring", "one-shot")]
        around, at_once = node("allreduce", "simulate", calls, *change)
        steps, sent = (paper.ring(8 * n, n, paper.Link(*a)) for a in ((1, 1e99), (0, 1)))
        all_ = [[sum(10**rank for rank in range(n))] * n] * n
        for states, *theory in ((around, steps, sent), (at_once, 1, 8 * n * (n - 1))):
            assert [len(states) - 1, states[-1]["sent"][-1]] == theory
            assert states[-1]["messages"] == sum(len(state["sends"]) for state in states)
            assert states[-1]["held"] == all_
    held = [[" ".join(map(str, row)) for row in state["held"]] for state in around]
    told = [tuple(rows) for _, rows in ring.start(n, ring.follow, n)]  # what ring.py's ranks hold
    assert [*zip(*held, strict=True)] == told


def buckets(*change):
    calls = [[dict(zip(KEYS, row, strict=True))] for row in GRID]
    for row, plan in zip(GRID, node("buckets", "plan", calls, *change), strict=True):
        model, cap, gbit, latency, ranks, computing = row
        first = ready.FIRST if cap == ready.OTHERS else cap  # as with DDP's bucket_cap_mb
        with patch.multiple(ready, FIRST=first, OTHERS=cap):
            job = paper.Job(computing / 3, 2 * computing / 3, 0.0, ready.fill(named(model, 224)))
        link = paper.Link(latency, gbit * 1e9 / 8)
        step = paper.step(job, partial(paper.ring, ranks=ranks, link=link))
        found = [plan["seconds"], plan["backwardEnd"], *chain(*plan["spans"])]
        expected = [step.seconds, step.backward_end, *chain(*step.spans)]
        assert found == pytest.approx(expected, rel=1e-9, abs=0)


def memory(*change):
    plans = {(n, o): peak.Plan(n, s, o, "cpu") for n, s in SIZES.items() for o in STATES}
    for (name, optimizer), plan in plans.items():
        *fixed, sample = peak.parts_of(plan).values()
        inputs = {"network": name, "optimizer": optimizer, "batch": 30, "precision": "fp32"}
        ways = [inputs | {"parallel": "one"}, inputs | {"precision": "bf16", "parallel": "ddp"}]
        fp32, bf16 = node("memory", "memory", [[way] for way in ways], *change)
        assert list(fp32.values()) == [*fixed, 0, 0, 30 * sample]
        first = plans[name, STATES[0]]
        full, few, one = (saved(first, *a) for a in ((0, False), (0, True), (1, True)))
        assert list(bf16.values()) == [*fixed, fixed[2], few - full, 30 * (one - few)]
    (most,) = node("memory", "largest", [[ways[0] | {"optimizer": "momentum"}, 2**33]], *change)
    assert f"largest batch at once: {most}\n" in (ROOT / "01_single_gpu/fit.md").read_text()


WRONG = [(allreduce, "from - s + lead", "from - s - lead"), (buckets, "2 * (ranks", "(ranks")]
WRONG += [(memory, "momentum: 1", "momentum: 2")]


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node here")
@pytest.mark.parametrize(("compare", "old", "new"), WRONG)
def test_a_widget_computes_what_the_chapters_compute(compare, old, new):
    compare("", "")
    with pytest.raises(AssertionError):
        compare(old, new)
