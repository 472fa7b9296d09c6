"""Local SGD beside DDP: what the model learns from the real MNIST.

Every method sees the same samples in the same order, from the same first weights.
"""

from argparse import Namespace
from statistics import mean, stdev

import torch

from common.data import load_dataset
from common.models import build_model
from ranks import run_ranks
from stage_runs import ROOT
from timing import Effort, Results, load_chapter

local_sgd = load_chapter("beyond", "local_sgd/local_sgd")
LOCAL_BATCH, EVERY = 30, 32
STEPS = {"net-bn": 480, "resnet18": 128}  # of each rank
DDP = "DDP"  # with it the other methods are compared

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
    dataset, seeds, every = ("digits", 1, 2) if effort.quick else ("mnist", 5, EVERY)
    trainings = []
    for model, steps in {"net-bn": 5}.items() if effort.quick else STEPS.items():
        for ranks in (2,) if effort.quick else (2, 4):
            first, *_ = run_ranks(ranks, train_on_ranks, dataset, model, steps, every, seeds)
            about = {"model": model, "ranks": ranks, "steps": steps}
            trainings.append({**about, "methods": compare_with_ddp(first)})
    return {"local_batch": LOCAL_BATCH, "every": every, "seeds": seeds, "trainings": trainings}
