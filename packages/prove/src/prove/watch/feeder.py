"""Give one rank the samples and the draws of all ranks in a replay.

The orders in which it gets them are the modes of rank_record.py. A control run is a replay, too:
all ranks run again, and each is fed its own samples and draws.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from prove import random_state
from prove.rank_record import (
    Draw,
    DrawKey,
    Flag,
    Mode,
    RankFile,
    RankRecord,
    ReplayVariant,
    forced_file,
    read_records,
)
from prove.watch.batches import (
    RecordedBatch,
    are_same,
    as_double,
    copy_tensors,
    merge_batches,
    merge_by_collate,
    owners_of_rows,
    tensors_in,
)
from prove.watch.draws import without_places
from prove.watch.model_tensors import parameters_of, tensors_of
from prove.watch.rank_run import RankRun, source_line, wrap

NO_LOADER = -1  # stands for the number of a pass in a loop without a loader
DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
DROPOUTS += ["alpha_dropout", "feature_alpha_dropout"]


def normalize_by_rank(layer: Any, forward: Callable, rows: Tensor, owners: list[Tensor]) -> Tensor:
    """Apply BatchNorm to the rows of each rank; keep the running statistics that rank 0 gets."""
    normalized, rank_0_buffers = [], {}
    groups = [group for group in owners if len(group)]
    for group in groups:
        normalized.append(forward(layer, rows[group]))
        if not rank_0_buffers:
            rank_0_buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(rank_0_buffers[name])  # .data hides the write from autograd
    return torch.cat(normalized)[torch.argsort(torch.cat(groups))]


def passes_of_rank_0_alone(records: list[RankRecord]) -> list[int]:
    """List the kept passes that only rank 0 makes, for example to print the shape of a batch."""
    kept = [
        [own for own in record.loader_passes if own.replay_number is not None] for record in records
    ]
    looked_at = [
        own.replay_number
        for own in kept[0]
        if own.replay_number is not None and not own.step_count and not own.backwards
    ]
    in_step = len(kept[0]) - len(looked_at)
    return looked_at if all(len(own) == in_step for own in kept[1:]) else []


def with_a_pass_before(draws: dict[DrawKey, Draw], pass_index: int) -> dict[DrawKey, Draw]:
    """Renumber the draws of a rank, to make room for one more pass with this number."""
    return {
        key._replace(batch=(key.batch[0] + (key.batch[0] >= pass_index), key.batch[1])): draw
        for key, draw in draws.items()
    }


def size_of(call: tuple) -> int:
    """Count the samples in the arguments of one call of a model."""
    tensors = tensors_in(list(call))
    return len(tensors[0]) if tensors and tensors[0].ndim else 1


def batch_of_forward(forward_number: int) -> tuple[int, int]:
    """Name a forward as if it were a batch, for a loop without a loader."""
    return (NO_LOADER, forward_number)


def keep_inputs(run: RankRun, args: tuple, kwargs: dict) -> None:
    """Keep the inputs of DDP in the observed run, if there is no loader."""
    if not run.has_no_loader():
        return
    if not run.joined or run.record.step_count >= run.most_steps():
        run.draws.end_batch()
        return
    kept = run.tensors.setdefault("forwards", [])
    call = copy_tensors(list(args)), copy_tensors(kwargs)
    kept.append(call)
    run.draws.begin_forward(batch_of_forward(len(kept) - 1), [size_of(call)], [])
    if run.loop_watcher:
        run.loop_watcher.enter_ddp(args, kwargs)


class Feeder:
    """Gives a rank of a replay the data of all ranks, or in a control its own data again."""

    def __init__(self, run: RankRun) -> None:
        self.run, self.world_size = run, run.settings.world_size
        self.mode = run.settings.mode
        records = read_records(run.settings.folder, Mode.OBSERVE)
        rank_0_record = records[0]
        self.only_on_rank_0 = passes_of_rank_0_alone(records)
        self.normalizes_by_rank = bool(rank_0_record.batchnorm) and self.mode not in (
            Mode.GLOBAL_BATCHNORM,
            Mode.CONTROL,
        )
        self.recorded_loader_passes = [
            loader_pass
            for loader_pass in rank_0_record.loader_passes
            if loader_pass.replay_number is not None
            and loader_pass.replay_number not in self.only_on_rank_0
        ]
        self.in_sequence = self.mode == Mode.SEQUENCE
        self.sizes = [1]  # number of samples of each rank in the current batch
        self.forwards = 0  # number of calls of DDP that were fed so far
        forced = forced_file(run.settings.folder, run.settings.variant)
        if forced.exists():
            run.draws.forced = torch.load(forced, weights_only=False)

    @cached_property
    def tensors_of_ranks(self) -> list[dict[str, Any]]:
        """Read the tensors that each rank kept for a replay.

        A batch may be of a class of the script, so it is unpickled here, in a process that runs the
        script and knows this class by now, and never by the judges.
        """
        folder = self.run.settings.folder
        files = [RankFile.TENSORS.of(folder, Mode.OBSERVE, rank) for rank in range(self.world_size)]
        kept = [torch.load(file, weights_only=False) for file in files]
        if self.mode == Mode.ORIGINAL:
            for own in kept:
                own["draws"] = without_places(own["draws"])
        for pass_index in self.only_on_rank_0:
            for own in kept[1:]:
                own["batches"].insert(pass_index, [])
                own["draws"] = with_a_pass_before(own["draws"], pass_index)
        return kept

    @property
    def own_rank(self) -> int:
        """Return the rank whose weights this process begins with."""
        return self.run.record.rank if self.mode == Mode.CONTROL else 0

    def groups(self, pass_index: int = NO_LOADER) -> list[list[int]]:
        """Group the ranks whose samples become one batch, in the order of these batches."""
        if pass_index in self.only_on_rank_0:
            return [[0]]
        if self.mode == Mode.CONTROL:
            return [[self.own_rank]]
        ranks = [0] if self.run.settings.rows_are_split else list(range(self.world_size))
        return [[rank] for rank in ranks] if self.in_sequence else [ranks]

    def cast(self, nested: Any) -> Any:
        return as_double(nested) if self.run.settings.float64 else nested

    def batches_of(self, loader: Any) -> int | None:
        for recorded in self.recorded_loader_passes:
            if recorded.loader_number == loader.prove_number and torch.is_grad_enabled():
                batches = min(
                    recorded.batches_listed or recorded.batches_given, recorded.most_batches
                )
                return batches * (self.world_size if self.in_sequence else 1)
        return None

    @property
    def passes(self) -> int:
        """Count the passes over loaders that were kept, which are those with gradients."""
        return len(self.tensors_of_ranks[0]["batches"])

    def is_made_here(self, pass_index: int) -> bool:
        """Does this rank make that pass? Only rank 0 makes some."""
        return self.own_rank == 0 or pass_index not in self.only_on_rank_0

    def positions(self, pass_index: int) -> int:
        """Count the batches of a pass that every rank had."""
        ranks = [0] if pass_index in self.only_on_rank_0 else range(self.world_size)
        return min(len(self.tensors_of_ranks[rank]["batches"][pass_index]) for rank in ranks)

    def batch(
        self, pass_index: int, position: int, ranks: list[int], collate: Callable | None
    ) -> tuple[Any, list[dict]]:
        """Merge the batches of these ranks at one position; return it with their draws."""
        kept = [self.tensors_of_ranks[rank] for rank in ranks]
        batches: list[RecordedBatch] = [own["batches"][pass_index][position] for own in kept]
        batch = self.cast(merge_by_collate(collate, batches))
        self.sizes = [recorded.size for recorded in batches]
        return batch, [own["draws"] for own in kept]

    def restore_generators(self, pass_index: int) -> None:
        """Set the generators to their states after this pass in the observed run.

        The replaying rank has drawn other numbers meanwhile.
        """
        states = self.tensors_of_ranks[self.own_rank].get("states_after", {})
        if pass_index in states and self.mode != Mode.ORIGINAL:
            random_state.set_all_states(states[pass_index])

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replace the inputs of DDP by the merged inputs of all ranks, if there is no loader."""
        calls = self.tensors_of_ranks[0].get("forwards")
        if not calls:
            return args, kwargs
        groups = self.groups()
        forward_index = self.forwards
        self.forwards += 1
        if forward_index >= len(calls) * len(groups):
            self.run.end_early()
        ranks = groups[forward_index % len(groups)]
        calls_of_ranks = [
            self.tensors_of_ranks[rank]["forwards"][forward_index // len(groups)] for rank in ranks
        ]
        if all(are_same(call, calls_of_ranks[0]) for call in calls_of_ranks):
            calls_of_ranks = calls_of_ranks[:1]  # all ranks may give one input, such as a graph
        self.sizes = [*map(size_of, calls_of_ranks)]
        draws = [self.tensors_of_ranks[rank]["draws"] for rank in ranks]
        batch = batch_of_forward(forward_index // len(groups))
        self.run.draws.begin_forward(batch, self.sizes, draws)
        if self.run.loop_watcher and self.run.loop_watcher.enter_ddp(args, kwargs):
            return args, kwargs
        args, kwargs = merge_batches(calls_of_ranks, self.sizes)
        return self.cast(args), self.cast(kwargs)

    def set_start(self, optimizers: list, modules: dict[str, torch.nn.Module]) -> None:
        """Give all modules and optimizers the first weights of the observed run."""
        kept = self.tensors_of_ranks[self.own_rank]
        with torch.no_grad():
            for name, module in modules.items():
                state = kept["states"].get(name, {})
                for part, tensor in tensors_of(module):
                    if part in state and state[part].shape == tensor.shape:
                        copy_into(tensor, state[part])
            for optimizer_index, weights in enumerate(kept["start"][: len(optimizers)]):
                parameters = parameters_of(optimizers[optimizer_index])
                others = [
                    (parameter, [*observed.shape], [*p.shape])
                    for parameter, (observed, p) in enumerate(
                        zip(weights, parameters, strict=False)
                    )
                    if observed.shape != p.shape
                ]
                if others or len(parameters) != len(weights):
                    self.run.record.other_shapes[optimizer_index] = others
                    continue
                for p, observed in zip(parameters, weights, strict=True):
                    copy_into(p, observed)

    def use_recorded_schedule(self, optimizer: Any, optimizer_index: int, step: int) -> None:
        """Use the recorded learning rates in this step only: the script's own are compared."""
        recorded = self.tensors_of_ranks[self.own_rank]["schedule_settings"].get(
            optimizer_index, []
        )
        if step < len(recorded):
            for group, observed in zip(optimizer.param_groups, recorded[step], strict=False):
                group.update(observed)


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor in place; a tensor divided between ranks takes its part."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.data.copy_(value)


def watch_dropout(run: RankRun) -> None:
    """Record where dropout draws and from which state, to tell whether all ranks drop the same.

    The masks themselves are recorded as any other draw.
    """

    def note() -> None:
        if run.joined:
            run.record.dropout.setdefault(source_line(), random_state.state_digests()[0])

    for name in DROPOUTS:

        @wrap(functional, name)
        def dropout(
            original: Callable, input: Tensor, p: float = 0.5,
            training: bool = True, inplace: bool = False,
        ) -> Tensor:  # fmt: skip
            if training and p > 0:
                note()
            return original(input, p, training and run.settings.dropout, inplace)

    @wrap(functional, "scaled_dot_product_attention")
    def attention(
        original: Callable, query: Any, key: Any, value: Any,
        attn_mask: Any = None, dropout_p: float = 0.0,
        *rest: Any,  # nn.MultiheadAttention passes is_causal by position
        **more: Any,
    ) -> Tensor:  # fmt: skip
        if dropout_p > 0:
            note()
        if not run.settings.dropout:
            dropout_p = 0.0
        return original(query, key, value, attn_mask, dropout_p, *rest, **more)


def watch_batchnorm(run: RankRun) -> None:
    feeder = run.feeder

    @wrap(_BatchNorm, "forward")
    def forward(original: Callable, self: Any, rows: Tensor) -> Tensor:
        fewest = run.record.batchnorm
        if self.training and not run.replaying and torch.is_grad_enabled():
            layer, values = type(self).__name__, rows.numel() // rows.shape[1]  # per channel
            fewest[layer] = min(fewest.get(layer, values), values)
        if feeder is None or not (self.training and feeder.normalizes_by_rank):
            return original(self, rows)
        if len(feeder.sizes) == 1:
            return original(self, rows)
        in_blocks = run.settings.variant == ReplayVariant.ROWS_IN_BLOCKS
        owners = owners_of_rows(len(rows), feeder.sizes, in_blocks)
        if owners is None:
            run.flag(Flag.BATCHNORM_ROWS_UNKNOWN)
            return original(self, rows)
        if len(rows) != sum(feeder.sizes):
            run.flag(Flag.BATCHNORM_ROWS_GUESSED)
        return normalize_by_rank(self, original, rows, owners)


def install(run: RankRun) -> None:
    run.feeder = Feeder(run) if run.replaying else None
    watch_dropout(run)
    watch_batchnorm(run)
