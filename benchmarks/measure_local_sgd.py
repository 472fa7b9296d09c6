"""Local SGD beside DDP: what the model learns from MNIST, and what a step costs over a slow link.

To learn, every method sees the same samples in the same order, from the same first weights.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn

from common.data import load_dataset
from common.models import build_model
from common.options import UsageError
from stage_runs import ROOT
from timing import Effort, Results, load_chapter, summarize, take_turns, timed
from training_step import build, ddp_without_buffers, train_copy
from two_nodes import ALLOWED, measure_across

local_sgd = load_chapter("beyond", "local_sgd/local_sgd")
sent_bytes = load_chapter("beyond", "local_sgd/async_mean").sent_bytes
step_model = load_chapter("04", "forecast/step_model")
gradient_order = load_chapter("04", "forecast/gradient_order")
GBIT = load_chapter("04", "forecast/forecast").GBIT
DDP = "DDP"  # with it the other methods are compared
LOCAL_BATCH, STEPS = 30, {"net-bn": 480, "resnet18": 128}  # of each rank, to learn
SHORT, LONG = 8, 32  # steps between two messages
MESSAGES = {"fp32": "full", "bf16": "bf16", "int8": "int8"}

Accuracies = dict[str, list[float]]  # of each method, by seed


def train_on_ranks(dataset: str, model: str, steps: int, every: int, seeds: int) -> Accuracies:
    """What each method has learned on these ranks."""
    args = Namespace(dataset=dataset, data_dir=ROOT / "data", batch_size=LOCAL_BATCH)
    train_set, test_set = load_dataset(args)
    methods = local_sgd.methods(every)
    del methods["mean, H = 1"]  # it is DDP
    if model == "resnet18":  # four rounds are too few for DiLoCo's momentum
        methods = {name: method for name, method in methods.items() if "DiLoCo" not in name}
    accuracies: Accuracies = {name: [] for name in methods}
    for seed in range(seeds):
        torch.manual_seed(seed)
        first = build_model(model, train_set)
        for name, options in methods.items():
            batches = local_sgd.batches(train_set, LOCAL_BATCH, steps, seed)
            trained = local_sgd.train(name, options, first, batches)
            accuracies[name].append(round(local_sgd.accuracy(trained, test_set), 4))
    return accuracies


def compare_with_ddp(accuracies: Accuracies) -> Results:
    """The differences from DDP's with the same seed, in percentage points."""
    rows = {}
    for name, of_seeds in accuracies.items():
        points = [100 * (a - b) for a, b in zip(of_seeds, accuracies[DDP], strict=True)]
        rows[name] = {
            "test_accuracies": of_seeds,
            "points": round(mean(points), 3),
            "points_stdev": round(stdev(points), 3) if len(points) > 1 else 0.0,
        }
    return rows


def measure_local_sgd(effort: Effort) -> Results:
    """Which samples a rank sees depends on the seed only, so the differences are paired."""
    dataset, seeds, every = ("digits", 1, 2) if effort.quick else ("mnist", 5, LONG)
    steps_of = {"net-bn": 5} if effort.quick else STEPS
    trainings = []
    for (model, steps), ranks in product(steps_of.items(), (2,) if effort.quick else (2, 4)):
        first, *_ = run_ranks(ranks, train_on_ranks, dataset, model, steps, every, seeds)
        about = {"model": model, "ranks": ranks, "steps": steps}
        trainings.append({**about, "methods": compare_with_ddp(first)})
    return {"local_batch": LOCAL_BATCH, "every": every, "seeds": seeds, "trainings": trainings}


def measure_local_sgd_links(effort: Effort) -> Results:
    if effort.quick:
        links = {"no limit": run_ranks(2, time_rounds, 1, 2, 2, 2)[0]}
    elif ALLOWED:
        links = measure_across(("0.2 Gbit/s", "1 Gbit/s"), time_rounds)
    else:
        raise UsageError("slow links are network namespaces: run it as root, with tc and ip")
    return {"model": "resnet18", "local_batch": 2 if effort.quick else 16, "links": links}


def time_rounds(
    rounds: int = 7, local_batch: int = 16, short: int = SHORT, long: int = LONG
) -> Results:
    """Each variant takes a few steps in a round, with what they send."""
    model, images = build("resnet18", local_batch)
    ways: dict[str, dict[str, Any]] = {
        f"H = {short}, fp32": {"every": short},
        f"H = {short}, bf16, late": {"every": short, "message": "bf16", "late": True},
    }
    for name, message in MESSAGES.items():
        ways[f"H = {long}, {name}"] = {"every": long, "message": message}
    variants = {
        "no messages": timed(train_copy(model, images), 4),
        DDP: timed(train_copy(model, images, ddp_without_buffers), 2),
    }
    for name, options in ways.items():
        variants[name] = timed(local_step(model, images, options), options["every"])
    for run in variants.values():
        run()  # the first message of `late` is on its way, and DDP has laid out its buckets
    return {"rounds": rounds, "variants": summarize(take_turns(variants, rounds))}


def local_step(model: nn.Module, images: Tensor, options: dict[str, Any]) -> Callable[[], None]:
    trainer = train_copy(model, images)
    outer = local_sgd.LocalSGD(trainer.model, lr=1.0, momentum=0.0, **options)

    def step() -> None:
        trainer()
        outer.step()

    return step


def slowdowns(step_ms: float, gbit: float) -> dict[str, float]:
    """Computed by step_model.py for this link: a step of resnet18 on 2 ranks over its computing."""
    seconds, link = step_ms / 1000, step_model.Link(50e-6, gbit * GBIT)
    all_reduce = partial(step_model.ring, ranks=2, link=link)  # of so many bytes: its seconds
    buckets = gradient_order.fill_buckets(gradient_order.gradients_of_classifier("resnet18", 64))
    job = step_model.Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    slowdown = {DDP: step_model.step(job, all_reduce).seconds / seconds}
    numbers = int(sum(bucket.size for bucket in buckets) / 4)
    for every, (name, message) in product((SHORT, LONG), MESSAGES.items()):
        sending = all_reduce(sent_bytes(message, numbers, ranks=2))  # after `every` steps
        slowdown[f"H = {every}, {name}"] = 1 + sending / every / seconds
    return slowdown
