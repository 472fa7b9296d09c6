"""Local SGD beside DDP: what the model learns, and what a step costs over a slow link.

It learns on one machine, from the real MNIST: every method sees the same samples in the same order,
from the same first weights. The steps are timed between two network namespaces, as in scaling.py.
"""

import copy
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data import load_dataset
from common.models import build_model
from common.options import UsageError
from links import ALLOWED, RATES, on_two_nodes, set_rate
from run_stage import ROOT
from step import build, ddp, make_step, sgd, start, train_step
from timing import Effort, Results, chapter, summarize, take_turns

local, sent_bytes = chapter("04", "local_sgd"), chapter("04", "async_mean").sent_bytes
paper, order = chapter("04", "alpha_beta"), chapter("04", "gradient_order")
GBIT = chapter("04", "forecast").GBIT
LOCAL_BATCH, EVERY = 30, 32
STEPS = {"net-bn": 480, "resnet18": 128}  # of each rank
COMPUTE, DDP = "no messages", "DDP"  # what a step is compared with


def accuracies(name: str, steps: int, every: int, seeds: int, data_dir: str) -> dict[str, Any]:
    """What each method has learned on these ranks, by seed."""
    dataset = "mnist" if data_dir else "digits"
    where = Path(data_dir or ROOT / "data")
    args = Namespace(dataset=dataset, data_dir=where, batch_size=LOCAL_BATCH)
    train_set, test_set = load_dataset(args)
    methods = local.methods(every)
    del methods["mean, H = 1"]  # it is DDP
    if name == "resnet18":  # four rounds are too few for DiLoCo's momentum
        methods = {method: methods[method] for method in methods if "DiLoCo" not in method}
    learned: dict[str, list[float]] = {method: [] for method in methods}
    for seed in range(seeds):
        torch.manual_seed(seed)
        first = build_model(name, train_set)
        for method, options in methods.items():
            batches = local.batches(train_set, LOCAL_BATCH, steps, seed)
            model = local.train(method, options, first, batches)
            learned[method].append(round(local.accuracy(model, test_set), 4))
    return learned


def beside_ddp(learned: dict[str, list[float]]) -> Results:
    """Each method's accuracies, and their differences from DDP's with the same seed, in points."""
    rows = {}
    for method, by_seed in learned.items():
        points = [100 * (a - b) for a, b in zip(by_seed, learned[DDP], strict=True)]
        spread = stdev(points) if len(points) > 1 else 0.0
        rows[method] = {"test_accuracies": by_seed, "points": round(mean(points), 3)}
        rows[method] |= {"points_stdev": round(spread, 3)}
    return rows


def measure_local_sgd(effort: Effort) -> Results:
    """Which samples a rank sees depends on the seed only, so the differences are paired."""
    quick, data_dir = effort.quick, effort.data_dir
    if not quick and not data_dir:
        raise UsageError("what it learns is shown on MNIST: add --data-dir FOLDER, where that lies")
    seeds, every = (1, 2) if quick else (5, EVERY)
    models = {"net-bn": 5} if quick else STEPS
    rows = []
    for name, steps in models.items():
        for ranks in (2,) if quick else (2, 4):
            what = name, steps, every, seeds, data_dir
            methods = beside_ddp(start(ranks, accuracies, *what)[0])
            rows.append({"model": name, "ranks": ranks, "steps": steps, "methods": methods})
    return {"local_batch": LOCAL_BATCH, "every": every, "seeds": seeds, "trainings": rows}


def rounds_of(every: tuple[int, int], size: int) -> dict[str, Callable[[], float]]:
    """Of each variant: run a few steps, with what they send, and return the seconds of one."""
    model, images = build("resnet18", size)
    short, long = every
    average = {"lr": 1.0, "momentum": 0.0}
    exchanges: dict[str, dict[str, Any]] = {
        f"H = {short}, fp32": {"every": short},
        f"H = {short}, bf16, late": {"every": short, "message": "bf16", "late": True},
        f"H = {long}, fp32": {"every": long},
        f"H = {long}, bf16": {"every": long, "message": "bf16"},
        f"H = {long}, int8": {"every": long, "message": "int8"},
    }
    rounds = {
        COMPUTE: timed(make_step(model, images), 4),
        DDP: timed(make_step(model, images, ddp), 2),
    }
    for name, options in exchanges.items():
        step = local_step(model, images, {**average, **options})
        rounds[name] = timed(step, options["every"])
    return rounds


def local_step(model: nn.Module, images: Tensor, options: dict[str, Any]) -> Callable[[], None]:
    model, labels = copy.deepcopy(model), torch.arange(len(images)) % 10
    optimizer, outer = sgd(model), local.LocalSGD(model, **options)

    def step() -> None:
        train_step(model, optimizer, images, labels)
        outer.step()

    return step


def timed(step: Callable[[], None], steps: int) -> Callable[[], float]:
    def seconds_per_step() -> float:
        dist.barrier()  # ranks start together
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin) / steps

    return seconds_per_step


def time_rounds(rounds: int, every: tuple[int, int], size: int) -> Results:
    variants = rounds_of(every, size)
    for run in variants.values():
        run()  # the first message of `late` is on its way, and DDP has laid out its buckets
    return {"rounds": rounds, "variants": summarize(take_turns(variants, rounds))}


def measure_local_sgd_links(effort: Effort) -> Results:
    if effort.quick:
        links = {"no limit": start(2, time_rounds, 1, (1, 2), 2)[0]}
    elif ALLOWED:
        links = on_two_nodes("local_sgd_links")
    else:
        raise UsageError("slow links are network namespaces: run it as root, with tc and ip")
    return {"model": "resnet18", "local_batch": 2 if effort.quick else 16, "links": links}


def local_sgd_links_on_node() -> Results:
    """The rounds across each link, on each of two nodes."""
    links = {}
    for name in ("0.2 Gbit/s", "1 Gbit/s"):
        set_rate(RATES[name])
        links[name] = time_rounds(7, (8, EVERY), 16)
    return links


def step_seconds(message: str, every: int, seconds: float, numbers: int, link: Any) -> float:
    """Computed: a step on 2 ranks that send one mean in so many steps, and then wait for it."""
    return seconds + (2 * link.alpha + sent_bytes(message, numbers, 2) / link.beta) / every


def slowdowns(step_ms: float, gbit: float) -> dict[str, float]:
    """Computed by alpha_beta.py for this link: a step of resnet18 on 2 ranks over its computing."""
    seconds, link = step_ms / 1000, paper.Link(50e-6, gbit * GBIT)
    buckets = order.fill_buckets(order.gradients_of_classifier("resnet18", 64))
    job = paper.Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    numbers = int(sum(bucket.size for bucket in buckets) / 4)
    step = {DDP: paper.step(job, partial(paper.ring, ranks=2, link=link)).seconds}
    messages = {"fp32": "full", "bf16": "bf16", "int8": "int8"}
    for every, (name, message) in product((8, EVERY), messages.items()):
        step[f"H = {every}, {name}"] = step_seconds(message, every, seconds, numbers, link)
    return {name: each / seconds for name, each in step.items()}
