"""The time of a DDP step: predicted before it is measured, and across slower and slower links.

Scaling: the model is 04_ddp_torchrun/alpha_beta.py. What it needs is measured apart from DDP, in
the same rounds. Steps without DDP give the computing, and when each gradient is ready. Some
convolutions, with and without an all-reduce behind or beside them, give alpha, beta, and what
communication takes from the computing beside it. No number is fitted to a step of DDP.

Links: launch/two_nodes_here.sh makes two network namespaces joined by a virtual cable, and each
holds one rank. At each rate of the cable all variants take turns.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common.options import UsageError

from plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, ends
from step import build, ddp, make_step, sgd, start
from tables import predictions
from timing import ROOT, SAME, Effort, Results, Times, chapter, interleave, summarize

paper, fill = chapter("04", "alpha_beta"), chapter("04", "ready").fill

Steps = dict[str, Callable[[], None]]

COMPUTE, EACH, DDP, NO_SYNC = "compute only", "per parameter", "DDP", "DDP, 4 with no_sync"
BF16, POWER_SGD = "DDP, bf16 hook", "DDP, PowerSGD hook"
LOOKS = {COMPUTE: BLACK, EACH: RED, DDP: BLUE, NO_SYNC: SKY, BF16: GREEN, POWER_SGD: PINK}
HOW = {DDP: (1, 1.0), NO_SYNC: (4, 1.0), BF16: (1, 0.5)}  # micro-batches; of fp32's bytes
ALONE, WORK, AFTER, LONG, BESIDE, COPY = "alone", "work", "work, then", "long", "beside", "copy"
TIMES, MEANWHILE, COPIED = 8, 2**23, 2**24  # long work is so much; bytes beside it; bytes copied
SIZES = [2**14, 2**20, 2**22, MEANWHILE, 2**24, 25 * 2**20]  # bytes
SMALL = [2**10, 2**17, 2**20, MEANWHILE]  # for net, whose bucket has 87,360
ALLOWED = os.geteuid() == 0 and all(map(shutil.which, ("tc", "ip")))  # network namespaces
MEASURED = ("step_ms", "step_ms_quartiles")
RATES = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "0.2 Gbit/s": "200mbit"}


def step_of(how: str, model: nn.Module, images: Tensor) -> Callable[[], None]:
    """What one step of this variant does; of NO_SYNC: four of them."""
    if how in (COMPUTE, EACH):
        reducer = chapter("03", "reducers").REDUCERS["per-parameter"]
        return make_step(model, images, reducer=reducer if how == EACH else None)

    def wrap(model: nn.Module) -> nn.Module:
        # PowerSGD sends twice for each bucket, the second time from a thread of gloo as soon as the
        # first is done. With several buckets the order can then differ between ranks, which abort:
        # "Received data size doesn't match expected size". So it gets a single one.
        wrapped = ddp(model, **({"bucket_cap_mb": 100} if how == POWER_SGD else {}))
        if how == BF16:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        if how == POWER_SGD:  # from the third step on; DDP rebuilds its buckets after the first
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped

    return make_step(model, images, wrap, micro_batches=4 if how == NO_SYNC else 1)


def tick() -> Any:
    """Now; on a GPU an event, for which nobody waits."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def alone(model: nn.Module, images: Tensor) -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """A step without DDP; and, once some are done, its shares.

    Of the step: forward, backward. Then of backward: until each gradient is there.
    """
    model, labels = copy.deepcopy(model), torch.arange(len(images)) % 10
    optimizer, ready = sgd(model), dict[Tensor, Any]()
    notes: list[list] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.update({p: tick()}))

    def step() -> None:
        ticks = [tick()]
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        ticks.append(tick())
        loss.backward()
        ticks.append(tick())
        optimizer.step()
        notes.append([*ticks, tick(), *(ready[each] for each in model.parameters())])

    def between(first: Any, second: Any) -> float:
        return second - first if isinstance(first, float) else first.elapsed_time(second)

    def shares() -> list[float]:
        rows = []
        for begin, forward, backward, end, *gradients in notes:
            whole, back = between(begin, end), between(forward, backward)
            each = [between(forward, gradient) / back for gradient in gradients]
            rows.append([between(begin, forward) / whole, back / whole, *each])
        return np.median(rows, axis=0).tolist()

    return step, shares


def work_steps(sizes: list[int]) -> Steps:
    """Work; work, then an all-reduce of each size; long work, one all-reduce beside it; a copy."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
    images, tensors = torch.randn(4, 64, 32, 32), {size: torch.zeros(size // 4) for size in sizes}
    here, there = torch.zeros(2, COPIED // 4)

    def work(times: int = 1) -> None:
        for _ in range(times):
            layer(images)

    def then_reduce(size: int) -> None:
        work()
        dist.all_reduce(tensors[size])  # every rank must reach this line

    def reduce_meanwhile() -> None:
        under_way = dist.all_reduce(tensors[MEANWHILE], async_op=True)
        work(TIMES)
        under_way.wait()

    def there_and_back() -> None:  # into a bucket, divided, and out of it
        torch.mul(here, 0.5, out=there)
        here.copy_(there)

    found: Steps = {WORK: work, COPY: there_and_back, LONG: partial(work, TIMES)}
    found |= {f"{AFTER} {size}": partial(then_reduce, size) for size in sizes}
    return found | {BESIDE: reduce_meanwhile}


def rounds_of(name: str, hows: list[str], rounds: int, sizes: list[int]) -> tuple[Times, Results]:
    """What each rank does: seconds of all variants in each round, and notes of the model."""
    model, images = build(name, 16 if name == "resnet18" else 0)
    step, shares = alone(model, images)
    steps = {ALONE: step, **{how: step_of(how, model, images) for how in hows}}
    times = interleave(steps | work_steps(sizes), rounds)
    gradients = [parameter.nbytes for parameter in model.parameters()]
    notes = {"model": name, "gradients": gradients, "local_batch": len(images)}
    return times, {**notes, "shares": shares()}


def measure_scaling(effort: Effort) -> Results:
    """`links` is empty unless all is measured on a CPU where namespaces are allowed."""
    rounds, worlds, machine = {"net": 51, "mlp": 25, "resnet18": 15}, (1, 2, 3, 4), []
    for ranks in (effort.ranks,) if effort.ranks else (2,) if effort.quick else worlds:
        for model in effort.models or (list(rounds)[:1] if effort.quick else rounds):
            most = rounds[model] // 3 if effort.brief else min(rounds[model], effort.rounds)
            what = model, [DDP], most, SMALL if model == "net" else SIZES
            answers = start(ranks, rounds_of, *what, device=effort.device)
            machine.append(predict(answers[0][0], [note for _, note in answers]))
    whole = effort.rounds > 99 and effort.device == "cpu" and ALLOWED
    found: Results = {"provenance": {"threads_a_rank": 1, "backend": "gloo"}, "machine": machine}
    found["links"] = on_two_nodes("scaling", effort) if whole else {}
    errors = [abs(row["error"]) for row in predictions(found)]
    found |= {"median_error": round(median(errors), 4), "largest_error": max(errors)}
    return {**found, "predictions": len(errors)}


def reduces(times: Times) -> dict[int, float]:
    """Seconds of an all-reduce, by its bytes: work and then the all-reduce, less the work.

    Ranks come to it from computing, as they do in a step: not all at once, and with busy cores.
    """
    found = {}
    for name, seconds in times.items():
        if name.startswith(AFTER):
            more = [both - work for both, work in zip(seconds, times[WORK], strict=True)]
            found[int(name.removeprefix(AFTER))] = max(median(more), 1e-6)
    return found


def fit(ranks: int, times: Times) -> Any:
    """The link whose ring takes what the all-reduces took, with the least relative error."""
    if ranks == 1:
        return paper.Link(0.0, 1e15)
    found = reduces(times)
    sizes, seconds = np.array(list(found), float), np.array(list(found.values()))
    columns = [np.full(len(sizes), 2.0 * (ranks - 1)), 2 * (ranks - 1) / ranks * sizes]
    # What is smaller than the scatter of the work before it must not count as if it were exact.
    weights = 1 / np.maximum(seconds, 0.1 * median(times[WORK]))
    matrix = np.column_stack(columns) * weights[:, None]
    alpha, per_byte = np.linalg.lstsq(matrix, seconds * weights, rcond=None)[0]
    return paper.Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def job_of(seconds: float, shares: list[float], gradients: list[int], handling: float) -> Any:
    """The computing of one rank, from its shares."""
    forward, backward, *ready = shares
    order = sorted(zip(gradients, ready, strict=True), key=lambda gradient: gradient[1])
    each = handling * sum(gradients) / 2  # backward fills the buckets; in the end they are emptied
    rest = (1 - forward - backward) * seconds + each
    return paper.Job(forward * seconds, backward * seconds + each, rest, fill(order))


def predict(times: Times, notes: list[Results]) -> Results:
    """Every step of DDP in these rounds, predicted from what is not DDP, beside its measurement.

    notes: of each rank. A row's times are medians over the rounds; so is its error, which compares
    a round's step with the prediction from that round's computing: a slow minute slows both.
    """
    ranks, seconds, link = len(notes), times[ALONE], fit(len(notes), times)
    longer = [beside - work for beside, work in zip(times[BESIDE], times[LONG], strict=True)]
    # what a second of communication takes from the computing beside it
    stolen = min(1.0, max(0.0, median(longer) / reduces(times)[MEANWHILE]))
    handling = median(times[COPY]) / COPIED  # seconds a byte, in and out of a bucket
    shares = np.mean([note["shares"] for note in notes], axis=0).tolist()
    *jobs, job = [
        job_of(each, shares, notes[0]["gradients"], handling)
        for each in (*seconds, median(seconds))
    ]
    timed, rows = summarize(times), []
    for how in (name for name in HOW if name in times):
        micro_batches, wire = HOW[how]

        def cost(size: float, wire: float = wire) -> float:
            return paper.ring(size * wire, ranks, link)

        found = [paper.step(each, cost, micro_batches, stolen).seconds for each in jobs]
        errors = [p / m - 1 for p, m in zip(found, times[how], strict=True)]
        row = {"model": notes[0]["model"], "ranks": ranks, "how": how, "rounds": len(jobs)}
        row |= {"local_batch": notes[0]["local_batch"], "alone_ms": timed[ALONE]["step_ms"]}
        row |= {key.replace("step", "measured"): timed[how][key] for key in MEASURED}
        row |= {"predicted_ms": round(1000 * median(found), 4), "error": round(median(errors), 4)}
        rows.append(row)
    parts = [round(1000 * part, 4) for part in (job.forward, job.backward, job.optimizer)]
    return {
        **{"ranks": ranks, "alpha_us": round(1e6 * link.alpha, 1), "stolen": round(stolen, 3)},
        **{"beta_bytes_per_second": round(link.beta), "parts_ms": parts},
        "copied_bytes_per_second": round(1 / handling),
        "all_reduce_ms": {str(size): round(1000 * s, 4) for size, s in reduces(times).items()},
        "buckets": [[bucket.size, round(bucket.ready, 4)] for bucket in job.buckets],
        "alone_again": timed[SAME]["ratio"],
        "rows": rows,
    }


def on_two_nodes(section: str, effort: Effort) -> Results:
    """What the two nodes find, each of which runs `on_node`."""
    with tempfile.TemporaryDirectory() as folder:
        out, script = Path(folder, "found"), "04_ddp_torchrun/launch/two_nodes_here.sh"
        flags = [section, "--device=cpu", f"--node={out}", *["--quick"] * effort.quick]
        command = ["bash", script, sys.executable, "benchmarks/bench.py", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": ""}
        if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
            raise UsageError("the nodes could not be started, or one has failed: see above")
        return json.loads(out.read_text())


def on_node(section: str, effort: Effort, out: Path) -> None:
    """What each of two nodes does; node 0 writes what both have found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    found = scale_across_links() if section == "scaling" else time_across_links(effort)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def set_rate(rate: str) -> None:
    """Shape what leaves this node; the other one does the same. See two_nodes_here.sh."""
    link = ["dev", os.environ["GLOO_SOCKET_IFNAME"], "root"]
    subprocess.run(["tc", "qdisc", "del", *link], stderr=subprocess.DEVNULL)  # there may be none
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
        subprocess.run(["tc", "qdisc", "add", *link, *bucket], check=True)


def scale_across_links() -> Results:
    """Predictions and measurements for each rate of the cable."""
    found = {}
    for name, rate in RATES.items():
        set_rate(rate)
        times, note = rounds_of("resnet18", list(HOW), 9, SIZES[:-1] if "0." in name else SIZES)
        notes = [note, note]
        dist.all_gather_object(notes, note)  # every rank must reach this line
        found[name] = predict(times, notes)
    return found


def sent_bytes(step: Callable[[], None], steps: int = 3) -> int:
    """What this node sends in a step, by the counter of its network interface.

    Read between barriers: what a step has sent has then arrived. The barriers' own few hundred
    bytes are counted too, and of each of the kernel's packets of up to 64 KB one header.
    """
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics", "tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    for _ in range(steps):
        step()
    dist.barrier()
    return (int(counter.read_text()) - before) // steps


def time_across_links(effort: Effort) -> Results:
    """The step of each variant at each rate of the cable, and what it sends."""
    model, images = build("net-bn" if effort.quick else "resnet18")
    steps = {name: step_of(name, model, images) for name in LOOKS}
    rates, bucket = dict[str, Results](), torch.zeros(2**20 if effort.quick else 2**25)
    for name in list(RATES)[::2] if effort.quick else RATES:
        set_rate(RATES[name])
        rounds = min(9 if "0." in name else 15, effort.rounds)
        times = interleave(steps, rounds, warm_up=1 if rates else 3)  # PowerSGD begins after two
        times[NO_SYNC] = [seconds / 4 for seconds in times[NO_SYNC]]  # of one micro-batch
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(bucket, 0)  # one way
        dist.barrier()  # it has arrived
        speed = round(8 * bucket.nbytes / (time.perf_counter() - begin))
        rates[name] = {"rounds": rounds, "measured_bits_per_second": speed}
        rates[name]["variants"] = summarize(times)
    sent = {name: sent_bytes(step) // (4 if name == NO_SYNC else 1) for name, step in steps.items()}
    parameters = sum(p.numel() for p in model.parameters())
    about = {"parameters": parameters, "local_batch": len(images), "sent_bytes_a_step": sent}
    return {**about, "rates": rates}


def measure_links(effort: Effort) -> Results:
    if not ALLOWED:
        raise UsageError("network namespaces need root and tc: apt-get install iproute2, then sudo")
    return {"provenance": {"world_size": 2, "threads_a_rank": 1}, **on_two_nodes("links", effort)}


def draw_links(results: Results, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for variant, colour in LOOKS.items():
        rows = [found["variants"][variant] for found in results["rates"].values()]
        label = f"{variant}: {results['sent_bytes_a_step'][variant] / 1e6:.1f} MB a step"
        style: Any = {"color": colour, "marker": "o", "label": label}
        axis.errorbar(list(results["rates"]), [row["ratio"] for row in rows], ends(rows), **style)
    axis.set(yscale="log", ylabel="time of a step / time of computing only", xlabel="link")
    ticks = [1, 1.5, 2, 3, 5, 10]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(title="and what each node sends")
    axis.set_title(
        f"resnet18, {results['local_batch']} pictures of 64 × 64 a rank, 2 ranks of one thread on "
        f"two nodes\n{results['provenance']['hardware']}; bars: 95 % intervals"
    )
    figure.savefig(path, dpi=110)


def draw_scaling(results: Results, path: Path | None = None) -> None:
    """Left, steps by the number of ranks; right, the error of every prediction."""
    figure, (by_ranks, errors) = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    rows, texts, where = predictions(results), [], results["provenance"]
    looks = {"net": (BLUE, "o"), "mlp": (ORANGE, "s"), "resnet18": (GREEN, "^")}
    for name, (colour, mark) in looks.items():
        style: Any = {"color": colour, "marker": mark}
        places = [place for place, row in enumerate(rows) if row["model"] == name]
        errors.plot(places, [100 * rows[i]["error"] for i in places], ls="", label=name, **style)
        own = [row for row in rows if row["model"] == name and row["link"] == "one machine"]
        ranks, measured = [row["ranks"] for row in own], [row["measured_ms"] for row in own]
        for row in own:
            by_ranks.vlines(row["ranks"], *row["measured_ms_quartiles"], color=colour)
        by_ranks.plot(ranks, measured, ls="", label=f"{name}, measured", **style)
        style |= {"ls": "--", "mfc": "white", "label": "predicted"}
        by_ranks.plot(ranks, [row["predicted_ms"] for row in own], **style)
    by_ranks.set(title="A step of DDP", xlabel="ranks", ylabel="ms", yscale="log")
    by_ranks.set_xticks([1, 2, 3, 4])
    below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    by_ranks.legend(fontsize="small", **below)
    errors.axhspan(-10, 10, color=GREY, alpha=0.2, label="within 10 %")
    errors.axhline(0, color="black", linewidth=0.8)
    for row in rows:
        link = f"{row['link']}, {row['how'].removeprefix('DDP, ')}"
        here = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        texts.append(here if row["link"] == "one machine" else link)
    errors.set_xticks(range(len(rows)), texts, rotation=90, fontsize="small")
    errors.set(title="Error of each prediction", ylabel="predicted / measured − 1, %")
    errors.legend(fontsize="small")
    figure.suptitle(f"{where['hardware']}, torch {where['torch']}; one thread a rank, gloo")
    if path:
        figure.savefig(path, dpi=110)
