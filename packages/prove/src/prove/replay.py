"""Does one rank compute the same? In a replay, it gets the samples of all ranks.

The orders in which it can get them are the modes in record.py. No run draws dropout masks.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from prove import generators
from prove.rank_run import RankRun, where, wrap
from prove.record import Mode, LoaderRun, read_records, tensors_file
from prove.watch_data import as_double, copied, has_rows, of_class, tensors_in
from prove.watch_model import parameters_of

DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
DROPOUTS += ["alpha_dropout", "feature_alpha_dropout"]
OTHER_SEED = 987654321  # no seed that a script has


def merge(parts: list, sizes: list[int]) -> Any:
    """One batch of all ranks' batches: sample i of each rank, then sample i + 1 of each rank."""
    first, equal = parts[0], len(set(sizes)) == 1
    if len(parts) == 1:
        return first
    if all(has_rows(part, size) for part, size in zip(parts, sizes, strict=True)):
        return torch.stack(parts, 1).flatten(0, 1) if equal else torch.cat(parts)
    if isinstance(first, Mapping):
        plain = {key: merge([part[key] for part in parts], sizes) for key in first}
        return of_class(type(first), plain)
    if isinstance(first, list | tuple):
        per_sample = all(len(part) == size for part, size in zip(parts, sizes, strict=True))
        if per_sample and not all(has_rows(column, sizes[0]) for column in first):
            rows = zip(*parts, strict=True) if equal else parts
            return type(first)(sample for row in rows for sample in row)
        return type(first)([merge(list(column), sizes) for column in zip(*parts, strict=True)])
    return first


def rows_of_ranks(rows: int, sizes: list[int]) -> list[Tensor]:
    """Which rows of a merged activation came from which rank, as `merge` mixed them."""
    ranks, rows_per_sample = len(sizes), max(1, rows // sum(sizes))
    if len(set(sizes)) == 1:
        owner = torch.arange(rows) // rows_per_sample % ranks
    else:
        rows_of_rank = torch.tensor(sizes) * rows_per_sample
        owner = torch.repeat_interleave(torch.arange(ranks), rows_of_rank)[:rows]
    return [torch.where(owner == rank)[0] for rank in range(ranks)]


def normalize_by_rank(layer: Any, forward: Callable, rows: Tensor, sizes: list[int]) -> Tensor:
    """BatchNorm over the rows of each rank. Its running statistics become those of rank 0."""
    groups = [group for group in rows_of_ranks(len(rows), sizes) if len(group)]
    normalized, of_rank_0 = [], {}
    for group in groups:
        normalized.append(forward(layer, rows[group]))
        if not of_rank_0:
            of_rank_0 = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(of_rank_0[name])  # .data: autograd need not know
    return torch.cat(normalized)[torch.argsort(torch.cat(groups))]


class Keeper:
    """In the observed run: keeps what goes into DDP, if there is no loader to keep batches of."""

    def __init__(self, run: RankRun) -> None:
        self.run = run

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        run = self.run
        if run.has_no_loader():
            run.generators_after_fetch = generators.digests()
            if run.joined and run.record.steps < run.settings.batches:
                kept = run.tensors.setdefault("forwards", [])
                kept.append((copied(list(args)), copied(kwargs)))
        return args, kwargs


class Feeder:
    """In a replay: gives one rank what all ranks of the observed run got."""

    def __init__(self, run: RankRun) -> None:
        self.run, self.ranks = run, run.settings.world_size
        observed = read_records(run.settings.folder, Mode.OBSERVE)[0]
        self.normalizes_by_rank = bool(observed.batchnorm) and run.settings.mode != Mode.WHOLE
        self.kept_loader_runs = [
            loader_run for loader_run in observed.loader_runs if loader_run.kept is not None
        ]
        self.in_sequence = run.settings.mode == Mode.SEQUENCE
        self.sizes = [1]  # samples of each rank in the batch that is computed now
        self.loader_runs = self.forwards = 0  # fed so far

    @cached_property
    def kept(self) -> list[dict[str, Any]]:
        """What each rank kept. A batch may be of a class of the script, which must be known by now:
        it is unpickled here, in a process that runs the script, and never by the judges."""
        folder = self.run.settings.folder
        files = [tensors_file(folder, Mode.OBSERVE, rank) for rank in range(self.ranks)]
        return [torch.load(file, weights_only=False) for file in files]

    def cast(self, nested: Any) -> Any:
        return as_double(nested) if self.run.settings.float64 else nested

    def batches_of(self, loader: Any) -> int | None:
        for kept_run in self.kept_loader_runs:
            if kept_run.loader == loader.prove_number and torch.is_grad_enabled():
                batches = min(kept_run.batches or kept_run.given, self.run.settings.batches)
                return batches * (self.ranks if self.in_sequence else 1)
        return None

    def feed(self, loader: Any, loader_run: LoaderRun) -> Iterator | None:
        """The next pass over a loader; None: there was no such pass in the first epoch."""
        record, number = self.run.record, self.loader_runs
        self.loader_runs += 1
        if number < len(self.kept[0]["batches"]):
            record.own_batch_size = record.own_batch_size or loader.batch_size
            return self.recorded_batches(number, loader_run)
        if record.steps:
            self.run.model.end_epoch()
            self.run.leave()
        return None

    def recorded_batches(self, number: int, loader_run: LoaderRun) -> Iterator:
        run = self.run
        ranks = self.kept[:1] if run.settings.rows_are_split else self.kept
        for of_ranks in zip(*(kept["batches"][number] for kept in ranks), strict=False):
            sizes = [size for size, _ in of_ranks]
            merged = [(sizes, merge([batch for _, batch in of_ranks], sizes))]
            one_by_one = [([size], batch) for size, batch in of_ranks]
            for feed_sizes, batch in one_by_one if self.in_sequence else merged:
                self.sizes = feed_sizes
                loader_run.given += 1
                loader_run.sizes.append(sum(self.sizes))
                if run.settings.mode == Mode.AGAIN:
                    generators.seed(OTHER_SEED + loader_run.given)
                run.current_loader_run, run.generators_after_fetch = (
                    loader_run,
                    generators.digests(),
                )
                run.model.keep_start()
                yield self.cast(batch)
        if number > 0:  # an evaluation with gradients: its last batches are of unequal sizes
            run.in_second_epoch = True  # so the numbers that follow are not compared

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What goes into DDP, if the script has no loader."""
        calls = self.kept[0].get("forwards")
        if not calls:
            return args, kwargs
        number = self.forwards
        self.forwards += 1
        if number >= len(calls) * (self.ranks if self.in_sequence else 1):
            self.run.leave()
        self.run.generators_after_fetch = generators.digests()
        if self.in_sequence:
            args, kwargs = self.kept[number % self.ranks]["forwards"][number // self.ranks]
        else:
            calls_of_ranks = [kept["forwards"][number] for kept in self.kept]
            self.sizes = [len(tensors_in(list(call))[0]) for call in calls_of_ranks]
            parts = zip(*calls_of_ranks, strict=True)
            args, kwargs = (merge(list(part), self.sizes) for part in parts)
        return self.cast(args), self.cast(kwargs)

    def set_start(self, optimizers: list, wrapped: list) -> None:
        """Give the models and optimizers the first weights of the observed run."""
        with torch.no_grad():
            for ddp, state in zip(wrapped, self.kept[0]["states"], strict=False):
                own = ddp.module.state_dict()
                if all(own[name].shape == state[name].shape for name in state if name in own):
                    ddp.module.load_state_dict(state)
            recorded = self.kept[0]["start"][: len(optimizers)]
            for number, weights in enumerate(recorded):
                parameters = parameters_of(optimizers[number])
                others = [
                    (parameter, [*observed.shape], [*p.shape])
                    for parameter, (observed, p) in enumerate(
                        zip(weights, parameters, strict=False)
                    )
                    if observed.shape != p.shape
                ]
                if others or len(parameters) != len(weights):
                    self.run.record.other_shapes[number] = others
                    continue
                for p, observed in zip(parameters, weights, strict=True):
                    p.copy_(observed)

    def use_recorded_schedule(self, optimizer: Any, number: int, step: int) -> None:
        """The recorded learning rates, for this step only: the script's own ones are compared."""
        recorded = self.kept[0]["schedule_settings"].get(number, [])
        if step < len(recorded):
            for group, observed in zip(optimizer.param_groups, recorded[step], strict=False):
                group.update(observed)


def switch_off_dropout(run: RankRun) -> None:
    """In both runs, because no two runs draw the same masks. The states are compared by rank."""

    def note() -> None:
        if run.joined:
            run.record.dropout.setdefault(where(), generators.digests()[0])

    def no_dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if training and p > 0:
            note()
        return input

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


def watch_batchnorm(run: RankRun) -> None:
    @wrap(_BatchNorm, "forward")
    def forward(original: Callable, self: Any, rows: Tensor) -> Tensor:
        feeder, fewest = run.feeder, run.record.batchnorm
        if self.training and not run.replaying and torch.is_grad_enabled():
            layer, values = type(self).__name__, rows.numel() // rows.shape[1]  # of each channel
            fewest[layer] = min(fewest.get(layer, values), values)
        if self.training and run.replaying and feeder.normalizes_by_rank and len(feeder.sizes) > 1:
            return normalize_by_rank(self, original, rows, feeder.sizes)
        return original(self, rows)


def install(run: RankRun) -> None:
    run.feeder = Feeder(run) if run.replaying else Keeper(run)
    switch_off_dropout(run)
    watch_batchnorm(run)
