"""What a step of local SGD costs over a slow link, beside DDP's, and what a formula says of it."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor, nn

from common.options import UsageError
from ranks import run_ranks
from timing import Effort, Results, load_chapter, summarize, take_turns, timed
from training_step import build, ddp_without_buffers, train_copy
from two_nodes import ALLOWED, measure_across

local_sgd = load_chapter("beyond", "local_sgd/local_sgd")
sent_bytes = load_chapter("beyond", "local_sgd/async_mean").sent_bytes
step_model = load_chapter("04", "forecast/step_model")
gradient_order = load_chapter("04", "forecast/gradient_order")
GBIT = load_chapter("04", "forecast/forecast").GBIT
DDP, SHORT, LONG = "DDP", 8, 32  # steps between two messages
MESSAGES = {"fp32": "full", "bf16": "bf16", "int8": "int8"}


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
    variants = {
        "no messages": timed(train_copy(model, images), 4),
        DDP: timed(train_copy(model, images, ddp_without_buffers), 2),
    }
    late: dict[str, Any] = {"every": short, "message": "bf16", "late": True}
    ways: dict[str, Any] = {
        f"H = {short}, fp32": {"every": short},
        f"H = {short}, bf16, late": late,
    }
    for name, message in MESSAGES.items():
        ways[f"H = {long}, {name}"] = {"every": long, "message": message}
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


def step_seconds(message: str, every: int, seconds: float, numbers: int, link: Any) -> float:
    """Computed: a step on 2 ranks that send one mean in so many steps, and then wait for it."""
    return seconds + (2 * link.alpha + sent_bytes(message, numbers, 2) / link.beta) / every


def slowdowns(step_ms: float, gbit: float) -> dict[str, float]:
    """Computed by step_model.py for this link: a step of resnet18 on 2 ranks over its computing."""
    seconds, link = step_ms / 1000, step_model.Link(50e-6, gbit * GBIT)
    buckets = gradient_order.fill_buckets(gradient_order.gradients_of_classifier("resnet18", 64))
    job = step_model.Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    numbers = int(sum(bucket.size for bucket in buckets) / 4)
    step = {DDP: step_model.step(job, partial(step_model.ring, ranks=2, link=link)).seconds}
    for every, (name, message) in product((SHORT, LONG), MESSAGES.items()):
        step[f"H = {every}, {name}"] = step_seconds(message, every, seconds, numbers, link)
    return {name: each / seconds for name, each in step.items()}
