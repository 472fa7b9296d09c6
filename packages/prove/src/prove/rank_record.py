"""What does each rank write down? These records are all that the judges know about a run.

A tensor is written down as two numbers, its Projection: see model_tensors.project. `at` is always a
place in the user's code, such as train.py:73.
"""

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar


class StrEnum(str, Enum):
    """As Python's own, which 3.10 does not have yet: a member is printed as the text it is."""

    __str__ = str.__str__


class Mode(StrEnum):
    """All ranks are observed once, and one rank then replays their batches."""

    OBSERVE = "observe"
    REPLAY = "replay"  # sample 0 of each rank, sample 1 of each rank, ...: one large batch
    WHOLE = "whole"  # the same, but BatchNorm normalizes the whole batch, not the rows of a rank
    SEQUENCE = "sequence"  # the batches of the ranks one after another: accumulation was divided
    ORIGINAL = "original"  # as REPLAY, in the script for one GPU
    CONTROL = "control"  # all ranks, each fed its own records: do they reproduce themselves?
    BARE = "bare"  # all ranks, not observed: does the script fail by itself?


class ReplayVariant(StrEnum):
    """What a replay and its control do otherwise than usual."""

    USUAL = ""
    COIN = "-coin"  # what each rank decides for its whole batch, rank 0 decides for all
    ONE_DRAW = "-one-draw"  # all samples of a batch get one and the same draw
    NO_DROPOUT = "-no-dropout"
    LONGER = "-longer"  # the observed run, to where the shortest epoch of a rank ends
    BLOCKS = "-blocks"  # several rows of a sample lie in blocks: see samples.owners_of_rows


class Ended(StrEnum):
    """How the run of a rank ended."""

    NOT_YET = "not yet"  # or it was killed
    AT_ITS_END = "at the end of the script"
    WHEN_SEEN = "when enough was seen"  # by us
    WITH_ERROR = "with an error"

    @property
    def is_well(self) -> bool:
        return self in (Ended.AT_ITS_END, Ended.WHEN_SEEN)


class Finding(StrEnum):
    """What a replay found out about a draw, by place."""

    BY_SAMPLE = "one for each sample"
    SEVERAL = "several for each sample"  # one after another, or in blocks
    COMMON = "the same on all ranks"
    COIN = "each rank decides for its whole batch"
    SAME_NOISE = "all ranks draw the same numbers for their samples"
    NOT_MATCHED = "one rank draws otherwise"
    OTHER_SHARES = "the ranks draw for other shares of their samples, or some for none"
    ESCAPED = "drawn by something that cannot be watched"
    OPAQUE = "drawn inside a kernel"
    BETWEEN = "drawn between the batches by a generator of the script"
    TOO_MANY = "too many to keep"


class DataFinding(StrEnum):
    """Without a DataLoader: what one rank got where data meet gradients, by step and place."""

    GIVEN = "what all ranks had, from the script itself"
    LATE = "what all ranks had, but the script has computed with its own before"
    LATE_INPUT = "the same, for what goes into the model"
    OTHER = "one rank computes something else from the rows of all"
    NOT_GIVEN = "it cannot be merged"
    LOCAL_NUMBER = "a number as that of the samples of one rank"
    CHANGED = "another number than on all ranks"
    STATISTIC = "a mean or the like that differs between the ranks is in it"
    TOO_MANY = "too many to keep"


class Note(Enum):
    """A fact about a run that needs no more than the place where it was first seen."""

    CLIPS = auto()
    CLIPS_SCALED = auto()  # gradients that still carry the loss scale
    GATHERS_FOR_METRICS = auto()  # accelerate's, which drops the samples that padding repeats
    HAS_GROUPS = auto()  # of some ranks
    REDUCES_WITHOUT_BACKWARD = auto()  # the script sums what has a gradient, before the first step
    JOINS = auto()  # DDP's join, for unequal numbers of batches
    MODEL_IS_DIVIDED = auto()
    ENDS_WITH_OTHERS = auto()  # this rank, because another one had seen enough
    STOP_TOGETHER = auto()  # the ranks, where the first of them has no batch left


SECONDS_PER_BEAT = 0.2  # the record is written again, and read again
MOST_COLLECTIVES = 4000  # more are not written down
EVALUATION_FACTOR = 4  # an evaluation gets so many times the batches of a training epoch

Part = TypeVar("Part")
Projection = tuple[float, float]  # the product of a tensor with a fixed vector, and its norm


@dataclass
class Settings:
    """What a run is told by the process that starts it."""

    folder: str  # where the ranks write
    mode: Mode
    float64: bool
    cpu: bool  # GPU calls become CPU calls
    batches: int  # of each loader and epoch
    gpus: int  # that the script sees with `cpu`
    world_size: int  # of the observed run, once that is known
    rows_are_split: bool = False  # all ranks load the same batches, and each takes its rows
    variant: ReplayVariant = ReplayVariant.USUAL
    seed: int | None = None  # of the generators when the script begins; None: any
    dropout: bool = True  # False: switched off, because its masks cannot be recorded
    watches_operations: bool = True  # False: nothing is changed in the script's torch
    shares_out_cores: bool = False  # what one rank computes alone gets the threads of all

    def __post_init__(self) -> None:
        """From JSON, they come as texts."""
        self.mode, self.variant = Mode(self.mode), ReplayVariant(self.variant)

    @property
    def name(self) -> str:
        """Of this run, and of its files."""
        return self.mode + self.variant


# What DDP itself calls, by torch's names.
DDP_CALLS = {
    "_broadcast_coalesced": "DDP's broadcast",
    "_verify_params_across_processes": "DDP's comparison of parameters",
}


class Collective(NamedTuple):
    name: str
    at: str
    batchnorm: str = ""  # the class of the BatchNorm layer that calls it, if one does
    library: str = ""  # "torch" if a part of torch calls it, such as fully_shard

    @property
    def is_of_ddp(self) -> bool:
        return self.name in DDP_CALLS.values()


@dataclass
class RankProgress:
    """Is this rank alive, and what does it wait for?"""

    events: int = 0  # a run whose ranks have no new events may hang
    beats: int = 0  # how often the record was written
    collective: Collective | None = None  # that the rank is in
    waits_in: Collective | None = None  # another call that may wait for a rank: recv, a store
    in_backward: bool = False
    at: str = ""
    cpu_seconds: float = 0.0
    in_ddp: bool = False  # in DDP's own code: its forward may wait for the other ranks, too
    is_loading: bool = False  # it waits for data or for an import, and not for a rank


@dataclass
class LoaderPass:
    """One pass over a loader."""

    number: int
    loader: int
    at: str  # where the loader was made
    sampler: str  # its class
    shuffle: bool | None
    workers: int
    batch_size: int | None
    limit: int  # --batches
    dataset: int  # its number on this rank
    dataset_length: int | None  # below all Subsets
    fingerprint: list[list[int]]  # of three samples: of the first tensor, and of all fields
    is_stream: bool  # an IterableDataset
    with_gradients: bool  # gradients were enabled when it began
    batches_and_samples: tuple[int, int] | None  # of the whole pass, which we cut short
    steps_before: int
    collectives_before: int
    backwards_before: int
    generators: list[int]  # their digests when the pass began
    base_seed: int | None = None  # of the workers
    drew: list[bool] = field(default_factory=lambda: [False] * 3)  # these generators, while loading
    workers_drew: bool = False  # its workers have drawn random numbers, or may have
    batches_given: int = 0
    epoch: int = 0  # passes over this data set with steps, before this one
    ended: bool = False  # at the end of its data
    steps: int = 0
    backwards: int = 0
    accumulates: bool = False  # several of its batches make one step
    window: int = 0  # batches up to its first step; 0: not known
    contents: list[list[int]] = field(default_factory=list)  # checksums of samples, by batch
    inputs: list[list[int]] = field(default_factory=list)  # of their first tensors only
    labels: list[int] = field(default_factory=list)  # of what is beside these; 0: nothing
    sizes: list[int] = field(default_factory=list)  # of the batches
    batches: int | None = None  # that the sampler has listed
    samples_file: str = ""  # which samples they are
    # Its number among the passes whose batches are kept for a replay.
    replay_number: int | None = None
    indices: list[int] = field(default_factory=list)  # from samples_file, when the run is over
    may_draw: set[int] | None = None  # the indices of a Subset
    fields: list[str] = field(default_factory=list)  # of a sample: what fingerprint tells apart

    @property
    def checksums(self) -> list[int]:
        return [checksum for batch in self.contents for checksum in batch]

    @property
    def length(self) -> int:
        """Batches of the whole pass, which we cut short; 0: not known."""
        return self.batches or (self.batches_and_samples or (0, 0))[0]

    def ends_as_whole(self) -> bool:
        """Is the last window of the batches that were given as long as that of the whole pass?"""
        if not self.length or self.ended or self.batches_given >= self.length:
            return True
        return not self.window or (self.batches_given - self.length) % self.window == 0


@dataclass
class OptimizerStep:
    """The gradients that a step was given, and the weights before and after it."""

    at: str
    batch: int  # of its pass, from 1 on
    epoch: int  # from 0 on
    batch_size: int | None
    learning_rates: list[float]  # of the parameter groups
    loss_scale: float
    dtype: str  # of the gradients
    weights_before: list[Projection]
    gradients: list[Projection | None]
    local_gradients: list[float | None]  # projected, as backward gave them to this rank
    has_old_gradient: bool  # of the step before, because of a forgotten zero_grad
    weights_after: list[Projection] = field(default_factory=list)  # empty: step() did not end
    exchanges_inside: int = 0  # between ranks, in step() itself
    momenta: list[float] = field(default_factory=list)  # of the parameter groups, or their betas
    # Parameters whose gradient had an imaginary part after backward, and has none any more.
    lost_imaginary: list[int] = field(default_factory=list)
    # Of each parameter, what the optimizer keeps for it: written down if step() communicates.
    moments: list[dict[str, Projection]] = field(default_factory=list)


@dataclass
class OptimizerRecord:
    at: str
    is_adaptive: bool  # as Adam, it divides by small gradients
    is_by_hand: bool = False  # no optimizer of torch: the script changes its parameters itself
    compares_changes: bool = False  # there is no p.grad, so the changes of weights are compared
    steps: list[OptimizerStep] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of its parameters
    keys: list[str] = field(default_factory=list)  # in RankRecord.weights; "": in no module
    outside_ddp: list[int] = field(default_factory=list)  # the numbers of these parameters


@dataclass
class DDPRecord:
    at: str
    forwards: int = 0  # in training
    forwards_around: dict[str, int] = field(default_factory=dict)  # by place: ddp.module(x)
    parameters: int = 0  # that are trained
    in_no_optimizer: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # of its parameters, in RankRecord.weights
    unfrozen: list[str] = field(default_factory=list)  # of these, those that no DDP averages
    not_in_last_step: list[str] = field(default_factory=list)  # they got no gradient in it
    without_gradient: list[str] = field(default_factory=list)
    buffers_at_evaluation: dict[str, Projection] = field(default_factory=dict)
    buffers_at_end: dict[str, Projection] = field(default_factory=dict)


class PrintedText(NamedTuple):
    text: str
    at: str
    steps_before: int
    in_first_epoch: bool
    on_terminal: bool = True  # else it goes to a file of the logging module only


class Backward(NamedTuple):
    at: str
    steps_before: int
    is_scaled: bool  # the loss is divided or multiplied in one of its last operations
    loss_at: str = ""  # the last call of a loss function of torch before it
    adds_up: bool = False  # to the gradients of another one


class LayerOutput(NamedTuple):
    """What a layer gives in training before the first step."""

    layer: str
    kind: str  # its class
    rows: list[float]  # the product of each row with a fixed vector


class ModelCall(NamedTuple):
    """The script calls a module in training."""

    checksum: int  # of its first input
    rows: int
    batch: tuple[int, int]  # the pass and the number of the last batch
    batch_size: int | None


class ScriptError(NamedTuple):
    kind: str
    message: str
    at: str
    seconds: float  # time.time() when it was raised


@dataclass
class ScheduleRecord:
    """A learning-rate scheduler that the script steps."""

    kind: str  # its class
    at: str  # of its step
    steps: int = 0
    batches: int = 0  # after which it stepped
    by_batch: bool = False  # not once per epoch
    length: int | None = None  # steps after which its rate stays; None: not known, or never
    highest_rate: float = 0.0
    total_steps: int = 0  # of OneCycleLR, which refuses to make more


class DrawKey(NamedTuple):
    """Which of the calls that draw random numbers this is."""

    batch: tuple[int, int]  # the pass over a loader and the number of the batch
    at: str
    name: str
    number: int  # of this call, at this place and in this batch


class Draw(NamedTuple):
    """What one such call has drawn."""

    value: Any
    arguments: list  # the numbers with which it was called


class OneDraw(NamedTuple):
    """All samples of a batch get one and the same draw, so that their order cannot matter."""

    dim: int  # of the samples
    row: Any  # a tensor


CENTERED = "mean that was subtracted"


class Statistic(NamedTuple):
    """A mean or the like over the samples of one rank that its loss depends on."""

    name: str
    at: str
    number: int  # of this call, at this place
    value: float

    @property
    def tag(self) -> str:
        return f"{self.name} {self.at} {self.number}"


class EvaluatedModule(NamedTuple):
    """What a module held that the script called in eval mode or without gradients, after a step."""

    name: str  # Sequential called at train.py:47
    steps_before: int
    is_trained: bool  # an optimizer holds its parameters: only its buffers are written down
    tensors: dict[str, Projection]
    buffers: list[str]  # the names of those that are buffers


@dataclass
class RankRecord:
    """What one rank writes down about itself."""

    rank: int = 0
    world_size: int = 1
    pid: int = 0
    ended: Ended = Ended.NOT_YET
    error: ScriptError | None = None
    progress: RankProgress = field(default_factory=RankProgress)
    steps: int = 0  # of all optimizers together
    loader_passes: list[LoaderPass] = field(default_factory=list)
    unused_loaders: dict[int, str] = field(default_factory=dict)  # where each was made
    optimizers: list[OptimizerRecord] = field(default_factory=list)
    ddps: list[DDPRecord] = field(default_factory=list)
    model_calls: list[ModelCall] = field(default_factory=list)
    outputs: list[LayerOutput] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    printed: list[PrintedText] = field(default_factory=list)
    rates_after_epochs: list[list[float]] = field(default_factory=list)
    dropout: dict[str, int] = field(default_factory=dict)  # by place: a digest of torch's generator
    batchnorm: dict[str, int] = field(default_factory=dict)  # by class: fewest values of a channel
    notes: dict[Note, str] = field(default_factory=dict)  # where each was first seen
    loss_scale: float = 1.0
    uses_autocast: bool = False
    exchange_precision: float = 0.0  # the spacing of numbers near 1 in what backward and step send
    model_returns_loss: bool = False
    seed: int = 0  # of its generators, when the script began
    asked_for_length: bool = False  # of a loader, before its first batch
    why_not_kept: str = ""  # why a batch could not be kept for a replay
    draws: dict[Finding, list[str]] = field(default_factory=dict)  # the places of each
    batchnorm_rows_unknown: bool = False  # which of them came from which rank
    batchnorm_rows_guessed: bool = False  # a sample has several: one after another, or in blocks
    own_batch_size: int | None = None  # of the replaying rank, which gets larger ones
    other_shapes: dict[int, list[tuple]] = field(default_factory=dict)  # of its optimizers
    schedules: list[ScheduleRecord] = field(default_factory=list)  # in the order of first steps
    evaluated: list[EvaluatedModule] = field(default_factory=list)
    # Of all parameters of the modules that are trained, by their keys: when the script first calls
    # one of them after so many steps, and at the end of the run.
    weights: dict[int, dict[str, Projection]] = field(default_factory=dict)
    not_comparable: list[str] = field(default_factory=list)  # kinds of parameters or gradients
    data: dict[DataFinding, list[tuple[int, str]]] = field(default_factory=dict)
    statistics: list[Statistic] = field(default_factory=list)
    buffers_outside_ddp: dict[str, dict[str, Projection]] = field(default_factory=dict)
    parts: dict[type, Any] = field(default_factory=dict)  # what one check alone writes down

    def part(self, kind: type[Part]) -> Part:
        """The part of this class; it is empty if this rank has written nothing into it yet."""
        part: Part = self.parts.setdefault(kind, kind())
        return part

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(self))
        part.replace(path)  # renamed, so that nobody reads half a file


@dataclass
class RunOutcome:
    """The records of all ranks, and what these do not say themselves."""

    status: int
    log: str
    hang: bool
    silent: bool  # no progress, and nobody can say why
    records: list[RankRecord]
    seconds: float


def record_file(folder: str, mode: str, rank: int) -> Path:
    return Path(folder, f"{mode}.{rank}.record")


def gradients_file(folder: str, mode: str, rank: int) -> Path:
    return Path(folder, f"{mode}.{rank}.gradients.pt")


def tensors_file(folder: str, mode: str, rank: int) -> Path:
    return Path(folder, f"{mode}.{rank}.tensors.pt")


def loop_file(folder: str, mode: str, rank: int) -> Path:
    """What the loop of a script without a DataLoader has read: see sources.py."""
    return Path(folder, f"{mode}.{rank}.loop.pt")


def forced_file(folder: str, variant: ReplayVariant) -> Path:
    """Draws that all runs of a variant are given: Draw or OneDraw by key."""
    return Path(folder, f"forced{variant}.pt")


def calls_file(folder: str, mode: str, rank: int) -> Path:
    """The collectives of a rank, written at once: its process may be killed in the next one."""
    return Path(folder, f"{mode}.{rank}.calls")


def with_last_calls(record: RankRecord, file: Path) -> RankRecord:
    """The record of a rank that did not come to its end is older than its last calls."""
    if record.ended != Ended.NOT_YET or not file.exists():
        return record
    calls = [Collective(*line.split("\t")) for line in file.read_text().splitlines()]
    return replace(record, collectives=calls)


def read_records(folder: str, mode: str) -> list[RankRecord]:
    """The records of all ranks, rank 0 first.

    Unpickled, because only the script of the user, who may run anything, can write to this folder.
    """
    files = Path(folder).glob(f"{mode}.*.record")
    records = [pickle.loads(file.read_bytes()) for file in files]
    return [
        with_last_calls(record, calls_file(folder, mode, record.rank))
        for record in sorted(records, key=lambda own: own.rank)
    ]


def end_process(status: int) -> None:
    """End a rank whose record is written, whatever the script has made of its stdout."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a script that has put a file in its place has closed it, too
            stream.flush()
    os._exit(status)
