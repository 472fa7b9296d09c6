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

from prove.record import Run, digests_of_generators, where, wrap
from prove.watch_data import as_double, copied, has_rows, tensors_in
from prove.watch_model import parameters_of

DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
DROPOUTS += ["alpha_dropout", "feature_alpha_dropout"]
OTHER_SEED = 987654321  # no seed that a script has


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
    parts, of_rank_0 = [], {}
    for group in groups:
        parts.append(forward(layer, x[group]))
        if not of_rank_0:
            of_rank_0 = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(of_rank_0[name])  # .data: autograd need not know
    return torch.cat(parts)[torch.argsort(torch.cat(groups))]


class Keeper:
    """In the observed run: keeps what goes into DDP, if there is no loader to keep batches of."""

    def __init__(self, run: Run) -> None:
        self.run, self.sizes = run, [1]

    def inputs(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        run = self.run
        if run.has_no_loader():
            run.after_fetch = digests_of_generators()
            if run.joined and run.steps < run.limit:
                calls = run.tensors.setdefault("forwards", [])
                calls.append((copied(list(inputs)), copied(kwargs)))
        return inputs, kwargs


class Feeder:
    """In a replay: gives one rank what all ranks of the observed run got."""

    def __init__(self, run: Run) -> None:
        files = [run.folder / f"observe.{rank}.tensors.pt" for rank in range(run.ranks)]
        self.run, self.ranks = run, [torch.load(file, weights_only=False) for file in files]
        facts = json.loads((run.folder / "observe.0.json").read_text())
        self.per_rank_batchnorm = bool(facts["batchnorm"]) and run.mode != "whole"
        self.training = [p for p in facts["passes"] if "kept" in p]
        self.in_sequence = run.mode == "sequence"
        self.sizes = [1]  # samples of each rank in the batch that is computed now
        self.passes = self.forwards = 0  # fed so far

    def cast(self, x: Any) -> Any:
        return as_double(x) if self.run.double else x

    def length_of(self, loader: Any) -> int | None:
        for known in self.training:
            if known["loader"] == loader.prove_number and torch.is_grad_enabled():
                batches = min(known["batches"] or known["given"], self.run.limit)
                return int(batches * (self.run.ranks if self.in_sequence else 1))
        return None

    def batches(self, loader: Any, now: dict) -> Iterator | None:
        """For the next pass over a loader; None: there was no such pass in the first epoch."""
        run, number = self.run, self.passes
        self.passes += 1
        if number < len(self.ranks[0]["batches"]):
            run.facts["own_batch_size"] = run.facts["own_batch_size"] or loader.batch_size
            return self.recorded(number, now)
        if run.steps:
            run.model.epoch_ended()
            run.leave("replayed")
        return None

    def recorded(self, number: int, now: dict) -> Iterator:
        run = self.run
        feeding = self.ranks[:1] if run.shared_batches else self.ranks
        for parts in zip(*(rank["batches"][number] for rank in feeding), strict=False):
            sizes = [size for size, _ in parts]
            feeds = [(sizes, merge([batch for _, batch in parts], sizes))]
            if self.in_sequence:
                feeds = [([size], batch) for size, batch in parts]
            for of_ranks, batch in feeds:
                self.sizes = of_ranks
                now["given"] += 1
                now["sizes"].append(sum(self.sizes))
                if run.mode == "again":
                    seed_generators(OTHER_SEED + now["given"])
                run.current_pass, run.after_fetch = now, digests_of_generators()
                run.model.start()
                yield self.cast(batch)
        run.counts["fed all"] += 1

    def inputs(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What goes into DDP, if the script has no loader."""
        calls = self.ranks[0].get("forwards")
        if not calls:
            return inputs, kwargs
        number, n = self.forwards, self.run.ranks
        self.forwards += 1
        if number >= len(calls) * (n if self.in_sequence else 1):
            self.run.leave("replayed")
        self.run.after_fetch = digests_of_generators()
        if self.in_sequence:
            recorded = self.ranks[number % n]["forwards"][number // n]
        else:
            parts = [rank["forwards"][number] for rank in self.ranks]
            self.sizes = [len(tensors_in(list(part))[0]) for part in parts]
            recorded = [merge([part[k] for part in parts], self.sizes) for k in (0, 1)]
        return self.cast(recorded[0]), self.cast(recorded[1])

    def set_start(self, optimizers: list, wrapped: list) -> None:
        with torch.no_grad():
            for ddp, state in zip(wrapped, self.ranks[0]["states"], strict=False):
                own = ddp.module.state_dict()
                if all(x.shape == own[name].shape for name, x in state.items() if name in own):
                    ddp.module.load_state_dict(state)
            for number, theirs in enumerate(self.ranks[0]["start"][: len(optimizers)]):
                mine = parameters_of(optimizers[number])
                shapes = [([*x.shape], [*p.shape]) for x, p in zip(theirs, mine, strict=False)]
                if len(mine) != len(theirs) or any(x != y for x, y in shapes):
                    other = [[k, x, y] for k, (x, y) in enumerate(shapes) if x != y]
                    self.run.facts["other_parameters"][number] = other
                    continue
                for p, value in zip(mine, theirs, strict=True):
                    p.copy_(value)

    def use_recorded_schedule(self, optimizer: Any, number: int, step: int) -> None:
        """The recorded learning rates, for this step only: the script's own ones are compared."""
        recorded = self.ranks[0]["scheduled"].get(number, [])
        if step < len(recorded):
            for group, theirs in zip(optimizer.param_groups, recorded[step], strict=False):
                group.update(theirs)


def seed_generators(seed: int) -> None:
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

    @wrap(functional, "scaled_dot_product_attention")
    def attention(
        original: Callable, query: Any, key: Any, value: Any,
        attn_mask: Any = None, dropout_p: float = 0.0,
        *rest: Any,  # nn.MultiheadAttention passes is_causal by its place
        **more: Any,
    ) -> Tensor:  # fmt: skip
        if dropout_p > 0:
            note()
        return original(query, key, value, attn_mask, 0.0, *rest, **more)


def watch_batchnorm(run: Run) -> None:
    @wrap(_BatchNorm, "forward")
    def forward(original: Callable, self: Any, x: Tensor) -> Tensor:
        sizes = run.feeder.sizes
        if self.training and not run.replaying and torch.is_grad_enabled():
            kind, values = type(self).__name__, x.numel() // x.shape[1]  # of each channel
            least = run.facts["batchnorm"].get(kind, values)
            run.facts["batchnorm"][kind] = min(least, values)
        if self.training and run.replaying and len(sizes) > 1 and run.feeder.per_rank_batchnorm:
            return normalize_by_rank(self, original, x, sizes)
        return original(self, x)


def install(run: Run) -> None:
    run.feeder = Feeder(run) if run.replaying else Keeper(run)
    switch_off_dropout(run)
    watch_batchnorm(run)
