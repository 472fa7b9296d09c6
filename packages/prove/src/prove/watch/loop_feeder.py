"""Give one rank the merged data that all ranks read in a loop without a DataLoader.

loop_watcher.py records the sources and gradient inputs of a rank, and explains both words. In a
replay, the sources give the rows of all ranks, and each gradient input is checked: are its data the
merged ones?
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prove.rank_record import DataFinding, Mode, RankFile, Statistic, read_records
from prove.watch.batches import CannotMergeError, interleave
from prove.watch.draws import is_number, without_places
from prove.watch.feeder import Feeder, batch_of_forward
from prove.watch.rank_run import RankRun, source_line


class CallKey(NamedTuple):
    """Names one source, statistic or gradient input, so that the same call of a replay finds it."""

    source_line: str
    name: str  # name of the function
    call_index: int  # number of earlier calls of this function at this line


class Source(NamedTuple):
    """The tensor that a rank got from one call, and its number of samples."""

    value: Tensor
    size: int


class GradientInput(NamedTuple):
    """The data that came together with gradients in one call."""

    values: list[Any]  # tensors and numbers
    size: int  # number of samples of this rank
    statistics: list[str]  # tags of the statistics from which these data were made
    sources: list[CallKey]  # last sources from which these data were made
    trains: bool = False  # backward passed through this call, so it is not only inference


def number_in(value: Any) -> float | None:
    """Return the number in a value that holds just one, or None."""
    if is_number(value):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return None


def are_close(value: Any, other: Any) -> bool:
    """Are two values equal up to the rounding of another order of computation?"""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.shape != other.shape:
            return False
        if not (value.is_floating_point() or value.is_complex()):
            return bool(torch.equal(value, other.to(value.dtype)))
        limit = 1e-9 if value.dtype == torch.float64 else 1e-4
        return torch.allclose(value, other.to(value.dtype), limit, limit, equal_nan=True)
    own, others = number_in(value), number_in(other)
    return own is not None and others is not None and abs(own - others) <= 1e-9 * abs(own)


class LoopFeeder:
    """Gives a replay the data of the sources and gradient inputs of all ranks."""

    def __init__(self, run: RankRun, feeder: Feeder, watcher: Any) -> None:
        """Read the data of all ranks. watcher: the LoopWatcher of this rank."""
        self.run, self.feeder, self.watcher = run, feeder, watcher
        settings = run.settings
        ranks = range(settings.world_size)
        files = [RankFile.LOOP.of(settings.folder, Mode.OBSERVE, rank) for rank in ranks]
        self.sources_of_ranks: list[dict[CallKey, Source]] = []
        self.gradient_inputs_of_ranks: list[dict[CallKey, GradientInput]] = []
        for file in files if all(file.exists() for file in files) else ():
            sources, gradient_inputs = torch.load(file, weights_only=False)
            is_original = settings.mode == Mode.ORIGINAL
            self.sources_of_ranks.append({} if is_original else sources)
            self.gradient_inputs_of_ranks.append(
                without_places(gradient_inputs) if is_original else gradient_inputs
            )
        records = read_records(settings.folder, Mode.OBSERVE)
        self.steps = min(record.step_count for record in records)
        self.differing = differing_statistics([record.statistics for record in records])
        self.local_counts: set[float] = set()  # counts of samples, rows or elements of one rank
        self.steps_replaced: set[int] = set()  # in which this rank got rows that it had not read
        self.sizes: list[int] = []  # number of samples of each rank at the last gradient input
        if settings.mode == Mode.SEQUENCE and self.gradient_inputs_of_ranks:
            self.check_sequence()

    def check_sequence(self) -> None:
        """Note data that cannot be given in sequence: those not read once per forward."""
        keys = (*self.sources_of_ranks[0], *self.gradient_inputs_of_ranks[0])
        counts = Counter((key.source_line, key.name) for key in keys)
        forwards = max((n for (_, name), n in counts.items() if name.endswith("model")), default=0)
        for (at, _), count in counts.items():
            if count != forwards:
                self.watcher.note(DataFinding.NOT_GIVEN, at)

    def key_of_rank(self, key: CallKey) -> CallKey:
        return key._replace(call_index=key.call_index // len(self.feeder.groups()))

    def recorded(self, kept_by_ranks: list[dict[CallKey, Any]], key: CallKey) -> list | None:
        """Return what each rank kept under this key; None if one of them kept nothing."""
        groups = self.feeder.groups()
        ranks, own_key = groups[key.call_index % len(groups)], self.key_of_rank(key)
        found = [kept_by_ranks[rank].get(own_key) for rank in ranks]
        return None if any(each is None for each in found) else found

    def merged_source(self, key: CallKey, own: Tensor) -> Tensor:
        found = self.recorded(self.sources_of_ranks, key)
        if found is None:
            return own
        values = [each.value for each in found]
        if len(values) > 1 and all(are_close(value, values[0]) for value in values):
            return own
        try:
            merged = merge(values, [each.size for each in found])
        except CannotMergeError:
            return own  # the gradient input of these data will report it
        return own if are_close(own, merged) else self.like(own, merged)

    def like(self, own: Tensor, value: Tensor) -> Tensor:
        self.steps_replaced.add(self.run.record.step_count)
        return self.feeder.cast(value.to(own.device))

    def begin_draws(self, forward: int) -> None:
        """Give one rank the draws of all ranks in this forward, and the sizes of their batches."""
        if not self.sizes:
            return
        groups, self.feeder.sizes = self.feeder.groups(), self.sizes
        ranks = groups[(forward - 1) % len(groups)]
        forward_number = (forward - 1) // len(groups) + 1
        draws = [self.feeder.tensors_of_ranks[rank]["draws"] for rank in ranks]
        self.run.draws.begin_forward(batch_of_forward(forward_number), self.sizes, draws)

    def match_data(self, key: CallKey, values: list) -> dict[int, Any]:
        """Match the data of a gradient input with those of all ranks.

        Returns the replacements by the ids of the values.
        """
        at = source_line()
        gradient_input = self.gradient_inputs_of_ranks[0].get(self.key_of_rank(key))
        if gradient_input is not None and not gradient_input.trains:
            return {}
        found = self.recorded(self.gradient_inputs_of_ranks, key)
        if found is None or any(len(each.values) != len(values) for each in found):
            if self.run.record.step_count >= self.steps:
                self.run.end_early()
            self.watcher.note(DataFinding.NOT_GIVEN, at)
            return {}
        self.sizes = [each.size for each in found]
        self.watcher.size = sum(self.sizes)
        changed = {}
        for position, own in enumerate(values):
            column = [each.values[position] for each in found]
            if key.name.endswith("backward"):
                self.check_handmade_gradient(own, column, found)
                continue
            new = self.value_of(own, column, found, key.name.endswith("model"))
            if new is not own:
                changed[id(own)] = new
        return changed

    def value_of(self, own: Any, column: list, found: list[GradientInput], is_input: bool) -> Any:
        """Choose the value for one rank, and note what may explain a difference."""
        at, note, sizes = source_line(), self.watcher.note, [each.size for each in found]
        if len(column) == 1:  # in a control, each rank gets its own value
            return self.like(own, column[0]) if isinstance(own, Tensor) else own
        statistics = [tag for each in found for tag in each.statistics if tag in self.differing]
        if isinstance(own, str):
            if any(part != own for part in column):
                note(DataFinding.NOT_GIVEN, at)
            return own
        if not isinstance(own, Tensor) or all(part.ndim == 0 for part in (own, *column)):
            self.check_number(own, column, sizes, statistics)
            return own
        if all(are_close(part, column[0]) for part in column):
            if are_close(own, column[0]):
                note(DataFinding.GIVEN, at)
            elif own.shape == column[0].shape:
                note(DataFinding.CHANGED, at)
            return own
        try:
            merged = merge(column, sizes)
        except CannotMergeError:
            self.note_difference(statistics, at)
            return own
        self.local_counts |= {*map(float, sizes), float(len(column[0])), float(column[0].numel())}
        if are_close(own, merged):
            note(DataFinding.GIVEN, at)
            return own
        if statistics and own.shape == merged.shape:
            self.note_difference(statistics, at)
            return own
        if own.shape == merged.shape and self.run.settings.mode != Mode.ORIGINAL:
            note(DataFinding.OTHER, at)
        note(DataFinding.LATE_INPUT if is_input else DataFinding.LATE, at)
        return self.like(own, merged)

    def check_handmade_gradient(
        self, own: Tensor, column: list, found: list[GradientInput]
    ) -> None:
        """Check that a gradient which the script gives to backward was made from the merged data.

        Its length stays the script's: it may be multiplied by the number of ranks. If this rank has
        read the rows of all ranks by itself, it made the gradient from them, whatever it is.
        """
        is_common = all(are_close(part, column[0]) for part in column)
        if is_common or self.run.record.step_count not in self.steps_replaced:
            return
        try:
            merged = merge(column, [each.size for each in found]).to(own.dtype)
        except CannotMergeError:
            merged = own.new_empty(0)
        is_multiple = own.shape == merged.shape and bool(merged.any())
        if is_multiple:
            is_multiple = are_close(own, merged * ((own * merged).sum() / (merged**2).sum()))
        self.watcher.note(
            DataFinding.GIVEN if is_multiple else DataFinding.NOT_GIVEN, source_line()
        )

    def note_difference(self, statistics: list[str], at: str) -> None:
        if statistics:
            self.watcher.note(DataFinding.STATISTIC, statistics[0])
        else:
            self.watcher.note(DataFinding.NOT_GIVEN, at)

    def check_number(self, own: Any, column: list, sizes: list[int], statistics: list[str]) -> None:
        """Compare a number that scales the loss, which may be one rank's sample count."""
        numbers, value, at = [number_in(each) for each in column], number_in(own), source_line()
        first = numbers[0]
        if value is None or first is None or any(not are_close(n, first) for n in numbers):
            self.note_difference(statistics, at)
            return
        if are_close(value, first):
            self.local_counts |= {*map(float, sizes)}
            counts = {count for count in self.local_counts if count > 1}
            if counts & {value, round(1 / value, 9) if value else 0.0}:
                self.watcher.note(DataFinding.LOCAL_NUMBER, at)
        elif not are_close(value / (first or 1.0), sum(sizes) / sizes[0]):
            self.watcher.note(DataFinding.CHANGED, at)


def merge(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Interleave the rows of all ranks; raise CannotMergeError if these are not samples."""
    # Where the original calls other functions, a number may stand in a tensor's place.
    are_rows = all(isinstance(value, Tensor) and value.ndim for value in values)
    if not are_rows or len({value.shape[1:] for value in values}) > 1:
        raise CannotMergeError("other shapes on each rank")
    return interleave(values, sizes)


def differing_statistics(statistics_of_ranks: list[list[Statistic]]) -> set[str]:
    values: dict[str, list[float]] = {}
    for statistics in statistics_of_ranks:
        for each in statistics:
            values.setdefault(each.tag, []).append(each.value)
    return {tag for tag, own in values.items() if any(not are_close(v, own[0]) for v in own)}
