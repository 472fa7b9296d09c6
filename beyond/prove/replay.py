"""The second run: one rank gets the samples of all ranks, and must compute the same gradient.

The orders in which it can get them:
  replay    sample 0 of each rank, sample 1 of each rank, ...: one large batch; BatchNorm normalizes
            the samples of each rank by themselves, as in the observed run
  whole     the same, but BatchNorm normalizes the whole batch
  sequence  the batches of the ranks one after another, for scripts that divide the number of
            accumulated batches by the number of ranks
  again     as replay, but each batch with other random numbers: do they matter?
  original  as replay, in the script for one GPU
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from prove import record
from prove.record import Run, digests_of_generators, where
from prove.watch_data import as_double, copied, has_rows, tensors_in
from prove.watch_model import count_batchnorm

DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"]
DROPOUTS.append("feature_alpha_dropout")


def merge(parts: list, sizes: list[int]) -> Any:
    """One batch of all ranks' batches: sample i of each rank, then sample i + 1 of each rank."""
    first, equal = parts[0], len(set(sizes)) == 1
    if len(parts) == 1:
        return first
    if all(has_rows(x, size) for x, size in zip(parts, sizes, strict=True)):
        return torch.stack(parts, 1).flatten(0, 1) if equal else torch.cat(parts)
    if isinstance(first, dict):
        return {key: merge([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, list | tuple):
        per_sample = all(len(x) == size for x, size in zip(parts, sizes, strict=True))
        if per_sample and not all(has_rows(x, sizes[0]) for x in first):
            rows = zip(*parts, strict=True) if equal else parts
            return type(first)(x for row in rows for x in row)
        return type(first)([merge(list(column), sizes) for column in zip(*parts, strict=True)])
    return first


def rows_of_ranks(rows: int, sizes: list[int]) -> list[Tensor]:
    """Which rows of a merged activation came from which rank, as `merge` mixed them."""
    ranks, each = len(sizes), max(1, rows // sum(sizes))
    if len(set(sizes)) == 1:
        owner = torch.arange(rows) // each % ranks
    else:
        owner = torch.repeat_interleave(torch.arange(ranks), torch.tensor(sizes) * each)[:rows]
    return [torch.where(owner == rank)[0] for rank in range(ranks)]


def normalize_by_rank(layer: Any, forward: Callable, x: Tensor, sizes: list[int]) -> Tensor:
    """BatchNorm over the rows of each rank. Its running statistics become those of rank 0."""
    groups = [group for group in rows_of_ranks(len(x), sizes) if len(group)]
    parts, kept = [], {}
    for group in groups:
        parts.append(forward(layer, x[group]))
        if not kept:
            kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(kept[name])  # .data: autograd need not know
    return torch.cat(parts)[torch.argsort(torch.cat(groups))]


def draw_other_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def switch_off_dropout(run: Run) -> None:
    """In both runs, because no two runs draw the same masks. The states are compared by rank."""

    def note() -> None:
        if run.joined and (line := where()) not in run.facts["dropout"]:
            run.facts["dropout"][line] = digests_of_generators()[0]

    def no_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0:
            note()
        return x

    for name in DROPOUTS:
        setattr(functional, name, no_dropout)
    attention = functional.scaled_dot_product_attention

    def attention_without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any
    ) -> Any:
        if dropout_p > 0:
            note()
        return attention(query, key, value, attn_mask=attn_mask, dropout_p=0.0, **more)

    functional.scaled_dot_product_attention = attention_without_dropout  # type: ignore[assignment]


def install(run: Run) -> None:
    sizes = [1]  # samples of each rank in the batch that is computed now
    forward = _BatchNorm.forward
    switch_off_dropout(run)

    def batchnorm_forward(self: Any, x: Tensor) -> Tensor:
        if self.training and not run.replaying and torch.is_grad_enabled():
            count_batchnorm(self, x)
        by_rank = run.replaying and run.mode != "whole" and len(sizes) > 1
        if not (self.training and by_rank and run.per_rank_batchnorm):
            return forward(self, x)
        return normalize_by_rank(self, forward, x, sizes)

    _BatchNorm.forward = batchnorm_forward  # type: ignore[assignment,method-assign]
    run.feed_forward = lambda inputs, kwargs: (inputs, kwargs)
    run.step_ended = lambda: None
    if not run.replaying:
        end_without_loader(run)
        return

    observed = [run.folder / f"observe.{rank}.tensors.pt" for rank in range(run.ranks)]
    ranks = [torch.load(path, weights_only=False) for path in observed]
    facts = json.loads((run.folder / "observe.0.json").read_text())
    run.per_rank_batchnorm = bool(facts["batchnorm"])
    recorded, interleaved = ranks[0]["batches"], run.mode != "sequence"
    training = [p for p in facts["passes"] if "kept" in p]
    run.facts["own_batch_size"] = None

    def cast(x: Any) -> Any:
        return as_double(x) if run.double else x

    def length_of(loader: Any) -> int | None:
        for known in training:
            if known["loader"] == loader.prove_number and torch.is_grad_enabled():
                listed = known["batches"] or known["given"]
                return min(listed, run.limit) * (1 if interleaved else run.ranks)
        return None

    def feed(loader: Any, now: dict) -> Iterator | None:
        number = run.counts["fed"]
        run.counts["fed"] += 1
        if number >= len(recorded):
            if run.steps:
                epoch = [[float(g["lr"]) for g in o.param_groups] for o in run.optimizers()]
                run.facts["lr_in_epochs"].append(epoch)
                record.leave("replayed")
            return None
        if run.facts["own_batch_size"] is None:
            run.facts["own_batch_size"] = loader.batch_size
        return batches(number, now)

    def batches(number: int, now: dict) -> Iterator:
        feeding = ranks[:1] if run.shared_batches else ranks
        for parts in zip(*(rank["batches"][number] for rank in feeding), strict=False):
            if interleaved:
                feeds = [
                    ([n for n, _ in parts], merge([x for _, x in parts], [n for n, _ in parts]))
                ]
            else:
                feeds = [([n], x) for n, x in parts]
            for now_sizes, batch in feeds:
                sizes[:] = now_sizes
                now["given"] += 1
                now["sizes"].append(sum(now_sizes))
                if run.mode == "again":
                    draw_other_numbers(987654321 + now["given"])  # no seed that a script has
                run.current_pass, run.after_fetch = now, digests_of_generators()
                run.start()
                yield cast(batch)
        run.counts["fed all"] += 1

    def feed_forward(inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        calls = ranks[0].get("forwards")
        if not calls:
            return inputs, kwargs
        number = run.counts["forwards"]
        run.counts["forwards"] += 1
        if number >= len(calls) * (1 if interleaved else run.ranks):
            record.leave("replayed")
        run.after_fetch = digests_of_generators()
        if not interleaved:
            args, named = ranks[number % run.ranks]["forwards"][number // run.ranks]
            return cast(args), cast(named)
        parts = [rank["forwards"][number] for rank in ranks]
        sizes[:] = [len(tensors_in(list(part))[0]) for part in parts]
        merged = [merge([part[k] for part in parts], sizes) for k in (0, 1)]
        return cast(merged[0]), cast(merged[1])

    def set_start(optimizers: list, wrapped: list) -> None:
        with torch.no_grad():
            for ddp, state in zip(wrapped, ranks[0]["states"], strict=False):
                ddp.module.load_state_dict(state)
            for optimizer, theirs in zip(optimizers, ranks[0]["start"], strict=False):
                mine = [p for group in optimizer.param_groups for p in group["params"]]
                if [p.shape for p in mine] == [p.shape for p in theirs]:
                    for p, value in zip(mine, theirs, strict=True):
                        p.copy_(value)
                else:
                    run.note("other parameters")

    def use_recorded_rates(optimizer: Any, number: int) -> None:
        """The recorded learning rates, for this step only: the script's own ones are compared."""
        step = len(run.facts["optimizers"][number]["steps"]) - 1
        rates = ranks[0]["rates"][number] if number < len(ranks[0]["rates"]) else []
        if step < len(rates):
            for group, rate in zip(optimizer.param_groups, rates[step], strict=False):
                group["lr"] = rate

    run.feed, run.feed_forward, run.length_of = feed, feed_forward, length_of
    run.set_start, run.use_recorded_rates = set_start, use_recorded_rates


def end_without_loader(run: Run) -> None:
    """A script without a DataLoader: keep what goes into the model, and end after some steps."""
    forwards: list = []

    def has_no_loader() -> bool:
        return not any(p["training"] for p in run.facts["passes"])

    def keep_inputs(inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if has_no_loader() and run.joined and run.steps < run.limit:
            forwards.append((copied(list(inputs)), copied(kwargs)))
            run.tensors["forwards"] = forwards
        if has_no_loader():
            run.after_fetch = digests_of_generators()
        return inputs, kwargs

    def step_ended() -> None:
        if has_no_loader() and run.joined and run.steps >= 3 * run.limit:
            record.leave("epochs")

    run.feed_forward, run.step_ended = keep_inputs, step_ended
