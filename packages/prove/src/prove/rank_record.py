"""What does each rank write down? These records are all that the judges know about a run.

A tensor is written down as two numbers, its Projection: see model_tensors.project.
`source_line` is always a line of the user's code, such as train.py:73. `steps_before` is the number
of steps made by then.
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
    """An Enum whose members print as their text, as in Python's own StrEnum from 3.11 on."""

    __str__ = str.__str__


class Mode(StrEnum):
    """Who runs: all ranks are observed once, and one rank then replays their batches."""

    OBSERVE = "observe"
    REPLAY = "replay"  # sample 0 of each rank, sample 1 of each rank, ...: one large batch
    # The same, but BatchNorm normalizes the whole batch, not the rows of a rank.
    GLOBAL_BATCHNORM = "whole"
    SEQUENCE = "sequence"  # the batches of the ranks one after another: accumulation was divided
    ORIGINAL = "original"  # as REPLAY, in the script for one GPU
    CONTROL = "control"  # all ranks, each fed its own records: do they reproduce themselves?
    BARE = "bare"  # all ranks, not observed: does the script fail by itself?


class ReplayVariant(StrEnum):
    """How a replay and its control differ from the usual ones."""

    USUAL = ""
    RANK_0_DECIDES = (
        "-rank-0-decides"  # what each rank decides for its whole batch, rank 0 decides for all
    )
    ONE_DRAW = "-one-draw"  # all samples of a batch get one and the same draw
    NO_DROPOUT = "-no-dropout"
    LONGER = "-longer"  # the observed run, to where the shortest epoch of a rank ends
    ROWS_IN_BLOCKS = "-blocks"  # several rows of a sample lie in blocks: see batches.owners_of_rows


class Ended(StrEnum):
    """How the run of a rank ended."""

    NOT_YET = "not yet"  # or it was killed
    FINISHED = "at the end of the script"
    WHEN_SEEN = "when enough was seen"  # we have ended it
    WITH_ERROR = "with an error"

    @property
    def is_well(self) -> bool:
        return self in (Ended.FINISHED, Ended.WHEN_SEEN)


class Finding(StrEnum):
    """What a replay found out about the draws at one place."""

    BY_SAMPLE = "one for each sample"
    SEVERAL = "several for each sample"  # one after another, or in blocks
    COMMON = "the same on all ranks"
    DECISION = "each rank decides for its whole batch"
    SAME_NOISE = "all ranks draw the same numbers for their samples"
    NOT_MATCHED = "one rank draws otherwise"
    OTHER_SHARES = "the ranks draw for other shares of their samples, or some for none"
    ESCAPED = "drawn by something that cannot be watched"
    OPAQUE = "drawn inside a kernel"
    BETWEEN = "drawn between the batches by a generator of the script"
    TOO_MANY = "too many to keep"


class DataFinding(StrEnum):
    """What one rank got where data meet gradients, if the script has no DataLoader."""

    GIVEN = "what all ranks had, from the script itself"
    LATE = "what all ranks had, but the script has computed with its own before"
    LATE_INPUT = "the same, for what goes into the model"
    OTHER = "one rank computes something else from the rows of all"
    NOT_GIVEN = "it cannot be merged"
    LOCAL_NUMBER = "a number as that of the samples of one rank"
    CHANGED = "another number than on all ranks"
    STATISTIC = "a mean or the like that differs between the ranks is in it"
    TOO_MANY = "too many to keep"


class Flag(Enum):
    """A fact about a run that needs no more than the place where it was first seen."""

    CLIPS = auto()
    CLIPS_SCALED = auto()  # it clips gradients that still carry the loss scale
    GATHERS_FOR_METRICS = auto()  # with Accelerate, which drops samples that padding repeats
    HAS_GROUPS = auto()  # it makes process groups of some ranks
    REDUCES_WITHOUT_BACKWARD = auto()  # it sums what has a gradient, before the first step
    JOINS = auto()  # it uses DDP's join, for unequal numbers of batches
    MODEL_IS_DIVIDED = auto()
    ENDS_WITH_OTHERS = auto()  # this rank ends because another one had seen enough
    STOP_TOGETHER = auto()  # the ranks stop where the first of them has no batch left
    USES_AUTOCAST = auto()
    MODEL_RETURNS_LOSS = auto()
    ASKED_FOR_LENGTH = auto()  # of a loader, before its first batch
    BATCHNORM_ROWS_UNKNOWN = auto()  # nobody knows which row came from which rank
    BATCHNORM_ROWS_GUESSED = auto()  # a sample has several: one after another, or in blocks


SECONDS_PER_BEAT = 0.2  # the record is written again, and read again
MAX_COLLECTIVES = 4000  # more are not written down
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
    batches: int  # that each loader gives in an epoch
    gpus: int  # that the script sees with `cpu`
    world_size: int  # ranks of the observed run, once that is known
    rows_are_split: bool = False  # all ranks load the same batches, and each takes its rows
    variant: ReplayVariant = ReplayVariant.USUAL
    dropout: bool = True  # False: switched off, because its masks cannot be recorded
    watches_operations: bool = True  # False: nothing is changed in the script's torch
    shares_out_cores: bool = False  # what one rank computes alone gets the threads of all

    def __post_init__(self) -> None:
        """Turn the strings of JSON into enums."""
        self.mode, self.variant = Mode(self.mode), ReplayVariant(self.variant)

    @property
    def name(self) -> str:
        """The name of this run, with which its files begin."""
        return self.mode + self.variant


# Functions that DDP itself calls to reach the other ranks, and how we name them.
DDP_CALLS = {
    "_broadcast_coalesced": "DDP's broadcast",
    "_verify_params_across_processes": "DDP's comparison of parameters",
}


class Collective(NamedTuple):
    name: str
    source_line: str
    batchnorm: str = ""  # the class of the BatchNorm layer that calls it, if one does
    library: str = ""  # "torch" if a part of torch calls it, such as fully_shard

    @property
    def is_of_ddp(self) -> bool:
        return self.name in DDP_CALLS.values()


@dataclass
class RankProgress:
    """Shows whether a rank is alive, and what it waits for."""

    events: int = 0  # a run whose ranks have no new events may hang
    beats: int = 0  # how often the record was written
    collective: Collective | None = None  # the one that the rank is in now
    waits_in: Collective | None = None  # another call that may wait for a rank: recv, a store
    in_backward: bool = False
    source_line: str = ""
    cpu_seconds: float = 0.0
    in_ddp: bool = False  # in DDP's own code: its forward may wait for the other ranks, too
    is_loading: bool = False  # it waits for data or for an import, and not for a rank


@dataclass
class LoaderPass:
    """One pass of one rank over a loader."""

    pass_index: int
    loader_number: int
    source_line: str  # where the loader was made
    sampler: str  # the class of its sampler
    shuffle: bool | None
    workers: int
    batch_size: int | None
    most_batches: int  # --batches
    dataset_number: int  # on this rank
    dataset_length: int | None  # of the data set below all Subsets
    fingerprint: list[list[int]]  # of three samples, checksums of the first tensor and all fields
    is_stream: bool  # an IterableDataset
    with_gradients: bool  # gradients were enabled when it began
    batches_and_samples: tuple[int, int] | None  # in the whole pass, which we cut short
    steps_before: int
    collectives_before: int
    backwards_before: int
    generators: list[int]  # digests of their states when the pass began
    base_seed: int | None = None  # that the workers were given
    drew: list[bool] = field(default_factory=lambda: [False] * 3)  # each generator, while loading
    workers_drew: bool = False  # its workers have drawn random numbers, or may have
    batches_given: int = 0
    epoch: int = 0  # how many passes over this data set made steps before this one
    ended: bool = False  # it came to the end of its data
    step_count: int = 0
    backwards: int = 0
    accumulates: bool = False  # several of its batches make one step
    batches_per_step: int = 0  # batches up to its first step; 0: not known
    contents: list[list[int]] = field(default_factory=list)  # checksums of samples, by batch
    labels: list[int] = field(default_factory=list)  # checksums of all else in them; 0: nothing
    sizes: list[int] = field(default_factory=list)  # how many samples each batch has
    batches_listed: int | None = None  # how many the sampler has listed
    samples_file: str = ""  # a file with the indices that the sampler has listed
    replay_number: int | None = None  # among the passes whose batches are kept for a replay
    indices: list[int] = field(default_factory=list)  # read from samples_file after the run
    may_draw: set[int] | None = None  # the indices of a Subset, read with them
    fields: list[str] = field(default_factory=list)  # names of a sample's fields, for fingerprint

    @property
    def checksums(self) -> list[int]:
        return [checksum for batch in self.contents for checksum in batch]

    @property
    def length(self) -> int:
        """Batches of the whole pass, which we cut short; 0: not known."""
        return self.batches_listed or (self.batches_and_samples or (0, 0))[0]

    def ends_as_whole(self) -> bool:
        """Is the last window of the batches that were given as long as that of the whole pass?"""
        if not self.length or self.ended or self.batches_given >= self.length:
            return True
        return (
            not self.batches_per_step
            or (self.batches_given - self.length) % self.batches_per_step == 0
        )


@dataclass
class OptimizerStep:
    """The gradients that a step was given, and the weights before and after it."""

    source_line: str
    batch: int  # its number in the pass, from 1 on
    epoch: int  # its number, from 0 on
    batch_size: int | None
    learning_rates: list[float]  # one for each parameter group
    loss_scale: float
    dtype: str  # that the gradients have
    weights_before: list[Projection]
    gradients: list[Projection | None]
    local_gradients: list[float | None]  # projected, as backward gave them to this rank
    has_old_gradient: bool  # the step before left it there: zero_grad was forgotten
    weights_after: list[Projection] = field(default_factory=list)  # empty: step() did not end
    exchanges_inside: int = 0  # calls in step() itself that reached other ranks
    momenta: list[float] = field(default_factory=list)  # momentum or betas of the parameter groups
    # Parameters whose gradient had an imaginary part after backward, and has none any more.
    lost_imaginary: list[int] = field(default_factory=list)
    # What the optimizer keeps for each parameter: written down if step() communicates.
    moments: list[dict[str, Projection]] = field(default_factory=list)


@dataclass
class OptimizerRecord:
    """An optimizer of one rank, or the steps that the script makes by hand."""

    source_line: str
    is_adaptive: bool  # like Adam, it divides by small gradients
    is_by_hand: bool = False  # no optimizer of torch: the script changes its parameters itself
    compares_changes: bool = False  # there is no p.grad, so the changes of weights are compared
    steps: list[OptimizerStep] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # one for each parameter
    keys: list[str] = field(default_factory=list)  # into RankRecord.weights; "": in no module
    outside_ddp: list[int] = field(default_factory=list)  # the numbers of parameters outside DDP


@dataclass
class DDPRecord:
    """A model in DDP on one rank."""

    source_line: str
    forwards: int = 0  # calls of DDP in training
    forwards_around: dict[str, int] = field(default_factory=dict)  # calls of ddp.module, by place
    parameters: int = 0  # how many are trained
    in_no_optimizer: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # of its parameters, into RankRecord.weights
    unfrozen: list[str] = field(default_factory=list)  # keys of those that no DDP averages
    not_in_last_step: list[str] = field(default_factory=list)  # those that got no gradient in it
    without_gradient: list[str] = field(default_factory=list)


class PrintedText(NamedTuple):
    """A text that a rank has printed or logged."""

    text: str
    source_line: str
    steps_before: int
    in_first_epoch: bool
    on_terminal: bool = True  # else it goes to a file of the logging module only


class Backward(NamedTuple):
    """One call of backward."""

    source_line: str
    steps_before: int
    loss_source_line: str = ""  # where a loss function of torch was last called before it


class LayerOutput(NamedTuple):
    """What a layer gives in training before the first step."""

    layer: str
    class_name: str  # the class of the layer
    rows: list[float]  # the product of each row with a fixed vector


class ModelCall(NamedTuple):
    """A call of a module by the script itself, in training."""

    checksum: int  # of the first tensor that goes in
    rows: int
    batch: tuple[int, int]  # the pass and the number of the last batch
    batch_size: int | None


class RaisedError(NamedTuple):
    """The error with which a script has ended on one rank."""

    class_name: str
    message: str
    source_line: str
    seconds: float  # time.time() when it was raised


@dataclass
class ScheduleRecord:
    """A learning-rate scheduler that the script steps."""

    class_name: str  # the class of the scheduler
    source_line: str  # where it was first stepped
    step_count: int = 0
    batches: int = 0  # after how many of them it stepped
    by_batch: bool = False  # it steps more than once per epoch
    length: int | None = None  # steps after which its rate stays; None: not known, or never
    highest_rate: float = 0.0
    total_steps: int = 0  # OneCycleLR refuses to make more; 0 for other classes


class DrawKey(NamedTuple):
    """Names one draw, so that the same call in a replay finds it."""

    batch: tuple[int, int]  # the pass over a loader and the number of the batch
    source_line: str
    name: str  # of the function that drew
    call_index: int  # how many such calls came before it, at this place and in this batch


class Draw(NamedTuple):
    """What one call has drawn on one rank."""

    value: Any
    arguments: list  # the numbers with which it was called


class OneDraw(NamedTuple):
    """One draw that all samples of a batch get, so that their order cannot matter."""

    dim: int  # along which the samples lie
    row: Any  # a tensor, for each of them


CENTERED = "mean that was subtracted"


class Statistic(NamedTuple):
    """A mean or the like over the samples of one rank that its loss depends on."""

    name: str
    source_line: str
    call_index: int  # how many such calls came before it, at this place
    value: float

    @property
    def tag(self) -> str:
        return f"{self.name} {self.source_line} {self.call_index}"


@dataclass
class RankRecord:
    """What one rank writes down about itself."""

    rank: int = 0
    world_size: int = 1
    pid: int = 0
    ended: Ended = Ended.NOT_YET
    error: RaisedError | None = None
    progress: RankProgress = field(default_factory=RankProgress)
    step_count: int = 0  # by all optimizers together
    loader_passes: list[LoaderPass] = field(default_factory=list)
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
    flags: dict[Flag, str] = field(default_factory=dict)  # where each was first seen
    loss_scale: float = 1.0
    exchange_precision: float = 0.0  # the spacing of numbers near 1 in what backward and step send
    seed: int = 0  # with which its generators began
    why_not_kept: str = ""  # why a batch could not be kept for a replay
    draws: dict[Finding, list[str]] = field(default_factory=dict)  # the places of each
    own_batch_size: int | None = None  # that the replaying rank's script set; it gets larger ones
    # By optimizer of the replaying rank: parameters of another shape than those observed.
    other_shapes: dict[int, list[tuple]] = field(default_factory=dict)
    schedules: list[ScheduleRecord] = field(default_factory=list)  # in the order of first steps
    # By number of steps made: all parameters of the modules that are trained, by their keys, as
    # they were when the script first called one of these modules then, and at the end of the run.
    weights: dict[int, dict[str, Projection]] = field(default_factory=dict)
    not_comparable: list[str] = field(default_factory=list)  # kinds of parameters or gradients
    data: dict[DataFinding, list[tuple[int, str]]] = field(default_factory=dict)  # step and place
    statistics: list[Statistic] = field(default_factory=list)
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
    """The file of what a loop without a DataLoader has read: see loop_watcher.py."""
    return Path(folder, f"{mode}.{rank}.loop.pt")


def forced_file(folder: str, variant: ReplayVariant) -> Path:
    """The file of draws that all runs of a variant get: Draw or OneDraw by key."""
    return Path(folder, f"forced{variant}.pt")


def calls_file(folder: str, mode: str, rank: int) -> Path:
    """The file of a rank's collectives, each written before it begins: the rank may die in it."""
    return Path(folder, f"{mode}.{rank}.calls")


def with_last_calls(record: RankRecord, file: Path) -> RankRecord:
    """Complete the record of a rank that did not come to its end: it is older than its calls."""
    if record.ended != Ended.NOT_YET or not file.exists():
        return record
    calls = [Collective(*line.split("\t")) for line in file.read_text().splitlines()]
    return replace(record, collectives=calls)


def read_records(folder: str, mode: str) -> list[RankRecord]:
    """Read the records of all ranks, rank 0 first.

    Pickle is safe here, because only the script of the user, who may run anything, can write to
    this folder.
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
        with suppress(Exception):  # the script may have put a file there, and have closed it
            stream.flush()
    os._exit(status)
