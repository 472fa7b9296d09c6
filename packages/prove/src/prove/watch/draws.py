"""Random numbers are data: what a step draws on each rank is recorded, and one rank gets it again.

A draw has a key: the batch, the line of the script, the name of the function, and how often it was
called there before. In a replay, the same call of one rank gets the values that the ranks have
drawn: merged by sample if the draw has a row for each, and unchanged if all ranks drew the same.
operations.py sees torch's draws, and random_numbers.py those of numpy and random.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prove import random_state
from prove.rank_record import Draw, DrawFinding, DrawKey, Mode, OneDraw, ReplayVariant
from prove.watch.batches import CannotMergeError, are_equal, interleave, order_of_rows
from prove.watch.rank_run import RankRun, source_line

MAX_DRAWN_BYTES = 2_000_000_000  # limit of one rank's recorded draws
DRAWS_WITHOUT_TAG = {"random_", "random", "binomial", "_sample_dirichlet", "feature_dropout"}
# Kernels whose draws are used inside, so that no call returns them.
KERNELS_THAT_DRAW = ("_scaled_dot_product", "_cudnn_rnn", "rrelu", "fused_moving", "_fused_dropout")
# Functions that may draw positions in the batch, which change when batches are merged.
DRAWS_OF_PLACES = (
    "randperm", "randint", "random", "numpy.permutation", "numpy.randint", "numpy.integers",
    "numpy.choice",
)  # fmt: skip


def is_draw(function: Any) -> bool:
    """Does this operation of torch draw random numbers?"""
    tagged = torch.Tag.nondeterministic_seeded in function.tags
    return tagged or function.overloadpacket.__name__ in DRAWS_WITHOUT_TAG


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def without_places(kept: dict) -> dict:
    """Remove the lines from the keys, for the original script, whose lines differ."""
    calls: Counter = Counter()
    renamed = {}
    for key, value in kept.items():
        unplaced = key._replace(source_line="", call_index=0)
        renamed[unplaced._replace(call_index=calls[unplaced])] = value
        calls[unplaced] += 1
    return renamed


class Draws:
    """Records or replays what this rank draws between getting a batch and asking for the next."""

    def __init__(self, run: RankRun) -> None:
        self.run, self.active = run, False  # active: draws belong to a batch now
        self.is_loading = self.is_in_model = False
        self.batch = (0, 0)
        self.of_model = False  # without a loader, only draws of the model belong to a batch
        self.sizes = [1]  # number of samples of each rank in this batch
        # In a replay: the recorded draws of each rank whose samples are in this batch.
        self.draws_of_ranks: list[dict[DrawKey, Draw]] = []
        self.recorded: dict[DrawKey, Draw] = {}
        # The first row of draws with a row per sample.
        self.per_sample_draws: dict[DrawKey, OneDraw] = {}
        self.batch_decisions: dict[DrawKey, Draw] = {}  # rank 0's decision, if the ranks' differ
        self.forced: dict[DrawKey, Draw | OneDraw] = {}  # forced draws go before any other answer
        self.bytes_recorded = 0
        self.calls: Counter = Counter()  # number of calls in this batch, by function and line
        self.calls_by_sample: set[tuple[str, str]] = set()  # functions called once per sample
        self.states: list[int] = []  # digests of the generators after the last seen draw

    def record_finding(self, finding: DrawFinding, at: str) -> None:
        places = self.run.record.draws.setdefault(finding, [])
        if at not in places:
            places.append(at)

    def begin_batch(
        self, batch: tuple[int, int], sizes: list[int], draws_of_ranks: list[dict]
    ) -> None:
        self.batch, self.sizes, self.draws_of_ranks = batch, sizes, draws_of_ranks
        self.calls.clear()
        self.note_states()
        self.active = not self.run.written and os.getpid() == self.run.record.pid

    def end_batch(self) -> None:
        if self.active:
            self.check_states()
        self.active = self.of_model = False
        for name, at in self.calls_by_sample:
            if self.calls[name, at] != sum(self.sizes):
                self.record_finding(DrawFinding.NOT_MATCHED, at)
        self.calls_by_sample.clear()

    def begin_forward(
        self, batch: tuple[int, int], sizes: list[int], draws_of_ranks: list[dict]
    ) -> None:
        """Begin a batch in a loop without a loader.

        Draws outside of the model may make the next batch, so only those of forward and backward
        belong to this one.
        """
        self.end_batch()
        self.begin_batch(batch, sizes, draws_of_ranks)
        self.of_model, self.active = self.active, False

    @contextmanager
    def in_model(self) -> Iterator[None]:
        entered = self.enter_model()
        try:
            yield
        finally:
            if entered:
                self.leave_model()

    def enter_model(self) -> bool:
        """Count draws from here on, in a model's forward or backward, to its batch."""
        if not self.of_model or self.active or self.run.written:
            return False
        self.note_states()
        self.active = self.is_in_model = True
        return True

    def leave_model(self) -> None:
        if self.is_in_model:
            self.check_states()
            self.active = self.is_in_model = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the draws that prove itself makes meanwhile."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Ignore the draws of a loader meanwhile: a replay gets the batches themselves."""
        before, self.is_loading = self.is_loading, True
        try:
            yield
        finally:
            self.is_loading = before

    def note_between(self) -> None:
        """Note that a generator of the script's own has drawn between two batches.

        The numbers may be for the next epoch, and the state of that generator cannot be restored.
        """
        if self.run.record.step_count and not self.is_loading and not self.run.written:
            self.record_finding(DrawFinding.BETWEEN, source_line())

    def note_states(self) -> None:
        self.states = random_state.state_digests()

    def check_states(self) -> list[int]:
        """Note whether an unseen draw was made since the last one; return the state digests."""
        states = random_state.state_digests()
        if self.active and self.states and states != self.states:
            self.record_finding(DrawFinding.ESCAPED, f"before {source_line()}")
        return states

    def next_key(self, name: str) -> DrawKey:
        """Return the key of the next draw by this function at this line of the script."""
        # The original script has other lines, so its calls are matched by order alone.
        line = "" if self.run.settings.mode == Mode.ORIGINAL else source_line()
        self.calls[name, line] += 1
        return DrawKey(self.batch, line, name, self.calls[name, line] - 1)

    def record_or_replay_operation(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Call an operation of torch that may draw; a replay overwrites what it has drawn."""
        before = self.check_states()
        result = function(*args, **kwargs)
        self.note_states()
        if before == self.states and kwargs.get("generator") is None:
            return result  # attention is tagged as a draw, but draws nothing without dropout
        name = function.overloadpacket.__name__.rstrip("_")
        if any(part in name for part in KERNELS_THAT_DRAW):
            self.record_finding(DrawFinding.OPAQUE, f"{name} at {source_line()}")
            return result
        is_fused = name == "native_dropout"  # the first result is dropout applied to the input
        drawn = result[1] if is_fused else result
        if not isinstance(drawn, Tensor):
            self.record_finding(DrawFinding.OPAQUE, f"{name} at {source_line()}")
            return result
        arguments = [argument for argument in (*args, *kwargs.values()) if is_number(argument)]
        answer = self.record_or_answer(self.next_key(name), drawn.detach().clone(), arguments)
        if answer is not None:
            drawn.copy_(answer)
            if is_fused:
                result[0].copy_(args[0] * drawn / (1 - args[1]))
        return result

    def record_or_replay_value(self, name: str, args: tuple, value: Any) -> Any:
        """Return what numpy or random has drawn; in a replay, the recorded number or array."""
        arguments = [argument for argument in args if is_number(argument)]
        try:
            drawn = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            drawn = value
        answer = self.record_or_answer(self.next_key(name), drawn, arguments)
        if answer is None:
            return value
        if not isinstance(answer, Tensor):
            return answer
        if hasattr(value, "astype") and hasattr(value, "shape"):
            return answer.numpy().astype(value.dtype).reshape(answer.shape)[()]
        return type(value)(answer.item())

    def save_draw(self, key: DrawKey, draw: Draw) -> None:
        value = draw.value
        if isinstance(value, Tensor):
            is_mask = value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
            value = value.bool() if is_mask else value.cpu()
            self.bytes_recorded += value.nbytes
        if self.bytes_recorded > MAX_DRAWN_BYTES:
            self.recorded.clear()
            self.record_finding(DrawFinding.TOO_MANY, key.source_line)
        else:
            self.recorded[key] = Draw(value, draw.arguments)

    def record_or_answer(self, key: DrawKey, drawn: Any, arguments: list) -> Any:
        """While observing, record the draw; in a replay, return the recorded one, if there is one.

        Returns None to keep the draw, because the run observes or no recorded draw fits this call.
        """
        forced = self.forced.get(key)
        if isinstance(forced, OneDraw) and isinstance(drawn, Tensor):
            if forced.row.shape == drawn.select(forced.dim, 0).shape:
                return forced.row.unsqueeze(forced.dim).expand_as(drawn).to(drawn.dtype)
            self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
            return None
        if isinstance(forced, Draw):
            return forced.value
        if not self.run.replaying:
            self.save_draw(key, Draw(drawn, arguments))
            return None
        if per_sample := self.draw_of_sample(key, drawn):
            return per_sample[0]
        draws = [draw for own in self.draws_of_ranks if (draw := own.get(key)) is not None]
        if not draws or len(draws) < len(self.draws_of_ranks):
            self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
            if draws and not all(
                any(other[:3] == key[:3] for other in own) for own in self.draws_of_ranks
            ):
                self.record_finding(DrawFinding.OTHER_SHARES, key.source_line)
            return None
        return self.answer_from_ranks(key, drawn, arguments, draws)

    def answer_from_ranks(
        self, key: DrawKey, drawn: Any, arguments: list, draws: list[Draw]
    ) -> Any:
        shapes = [getattr(draw.value, "shape", None) for draw in draws]
        if not isinstance(drawn, Tensor) or all(shape == drawn.shape for shape in shapes):
            return self.draw_of_batch(key, arguments, draws)
        dim = self.dim_of_samples(drawn, [draw.value for draw in draws])
        if dim is None:
            self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
            return None
        return self.interleaved_draws(key, dim, drawn, draws, arguments)

    def draw_of_batch(self, key: DrawKey, arguments: list, draws: list[Draw]) -> Any:
        """Return rank 0's draw if each rank has drawn once for its whole batch."""
        if any(draw.arguments != arguments for draw in draws):
            # The draw may be a position in the batch.
            self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
            return None
        values = [draw.value for draw in draws]
        are_tensors = all(isinstance(value, Tensor) for value in values)
        alike = all_equal(values) if are_tensors else len({*map(repr, values)}) == 1
        self.record_finding(DrawFinding.COMMON if alike else DrawFinding.DECISION, key.source_line)
        if not alike:
            self.batch_decisions[key] = draws[0]
        return values[0]

    def dim_of_samples(self, drawn: Tensor, values: list[Tensor]) -> int | None:
        """Find the dimension in which one rank's draw is as long as those of all ranks together."""
        if any(value.ndim != drawn.ndim for value in values):
            return None
        for dim in range(drawn.ndim):
            length = sum(value.shape[dim] for value in values)
            if drawn.shape[dim] == length > 0 and length % sum(self.sizes) == 0:
                return dim
        return None

    def interleaved_draws(
        self, key: DrawKey, dim: int, drawn: Tensor, draws: list[Draw], arguments: list
    ) -> Tensor | None:
        """Interleave the ranks' draws in the order in which their samples are interleaved."""
        values, of_places = [draw.value for draw in draws], False
        for draw, size in zip(draws, self.sizes, strict=True):
            if draw.arguments != arguments:  # the arguments may contain the size of the batch
                names = with_size_named(draw.arguments, size)
                if names != with_size_named(arguments, sum(self.sizes)):
                    self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
                    ranks_arguments = [own.arguments for own in draws]
                    if any(own != ranks_arguments[0] for own in ranks_arguments):
                        self.record_finding(DrawFinding.OTHER_SHARES, key.source_line)
                    return None
                of_places = key.name in DRAWS_OF_PLACES
        if of_places:
            values = self.places_in_merged_batch(values)
        elif dim_alike([value.shape for value in values], dim):
            self.per_sample_draws[key] = OneDraw(dim, values[0].select(dim, 0))
            if len(values) > 1 and values[0].numel() > 1 and all_equal(values):
                self.record_finding(DrawFinding.SAME_NOISE, key.source_line)
        rows = values[0].shape[dim] // self.sizes[0]
        if rows > 1:
            self.record_finding(DrawFinding.SEVERAL, key.source_line)
        in_blocks = rows > 1 and self.run.settings.variant == ReplayVariant.ROWS_IN_BLOCKS
        try:
            parts = pad_like(values, drawn, dim)
            answer = interleave(parts, self.sizes, dim, rows if in_blocks else 1)
        except CannotMergeError:
            self.record_finding(DrawFinding.NOT_MATCHED, key.source_line)
            return None
        self.record_finding(DrawFinding.BY_SAMPLE, key.source_line)
        return answer

    def finish(self) -> None:
        self.run.tensors |= {
            "draws": self.recorded, "batch_decisions": self.batch_decisions,
            "per_sample_draws": self.per_sample_draws,
        }  # fmt: skip

    def places_in_merged_batch(self, values: list[Tensor]) -> list[Tensor]:
        """Turn drawn positions in each rank's batch into positions in the merged batch."""
        place = {pair: row for row, pair in enumerate(order_of_rows(self.sizes))}
        return [
            torch.tensor([place[rank, int(i)] for i in value.flatten()]).view_as(value)
            for rank, value in enumerate(values)
        ]

    def draw_of_sample(self, key: DrawKey, drawn: Any) -> tuple | None:
        """Return the draw for the next sample, in a tuple, if each rank drew once per sample."""
        calls = [
            [draw.value for other, draw in own.items() if other[:3] == key[:3]]
            for own in self.draws_of_ranks
        ]
        sizes = self.sizes
        if len(calls) < 2 or [*map(len, calls)] != sizes or max(sizes) < 2:
            return None
        if key.call_index >= sum(sizes) or all(repr(values) == repr(calls[0]) for values in calls):
            return None  # all ranks drew the same: the number of draws is a coincidence
        shapes = {getattr(value, "shape", None) for values in calls for value in values}
        if shapes != {getattr(drawn, "shape", None)}:  # one line may call several layers
            return None
        self.calls_by_sample.add((key.name, key.source_line))
        rank, sample = order_of_rows(sizes)[key.call_index]
        return (calls[rank][sample],)


def all_equal(values: list[Tensor]) -> bool:
    return all(are_equal(value, values[0]) for value in values)


def dim_alike(shapes: list, dim: int) -> bool:
    """Do these shapes differ at most in this dimension?"""
    others = {tuple(n for number, n in enumerate(shape) if number != dim) for shape in shapes}
    return len(others) == 1


def with_size_named(arguments: list, size: int) -> list:
    return ["the size" if argument == size else argument for argument in arguments]


def pad_like(values: list[Tensor], drawn: Tensor, dim: int) -> list[Tensor]:
    """Fill up the draws of ranks that each pad to their own longest sample.

    The rest keeps the values that the replaying rank has drawn. Raises CannotMergeError if it needs
    more than any of the ranks has drawn.
    """
    for other in range(drawn.ndim):
        if other != dim and drawn.shape[other] != max(value.shape[other] for value in values):
            raise CannotMergeError
    parts = []
    for value in values:
        part = drawn.narrow(dim, 0, value.shape[dim]).clone()
        part[tuple(slice(0, n) for n in value.shape)] = value.to(drawn.dtype)
        parts.append(part)
    return parts
