"""The record that each rank writes: all that the judges know about a run.

A tensor is stored as two numbers, its Projection: see model_tensors.project. `source_line` is
always a line of the user's code, a SourceLine such as train.py:73, or "?" where none was found.
`steps_before` counts the optimizer steps before it.
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


class SourceLine(str):
    """FILE:LINE in the user's code. Among the facts of a row, its type tells it from other text."""

    @property
    def file(self) -> str:
        return self.rpartition(":")[0]

    @property
    def line(self) -> int:
        return int(self.rpartition(":")[2])


class Mode(StrEnum):
    """The purpose of a run: all ranks are observed once, then one rank replays their batches."""

    OBSERVE = "observe"
    REPLAY = "replay"  # sample 0 of each rank, sample 1 of each rank, ...: one large batch
    GLOBAL_BATCHNORM = "whole"  # as REPLAY, but BatchNorm normalizes the whole batch
    SEQUENCE = "sequence"  # one rank takes the batches one after another, for divided accumulation
    ORIGINAL = "original"  # as REPLAY, in the script for one GPU
    CONTROL = "control"  # all ranks, each fed its own records: do they reproduce themselves?
    BARE = "bare"  # all ranks, not observed: does the script fail by itself?


class ReplayVariant(StrEnum):
    """How a replay and its control differ from the usual ones."""

    USUAL = ""
    RANK_0_DECIDES = "-rank-0-decides"  # all ranks take rank 0's decisions for a whole batch
    ONE_DRAW = "-one-draw"  # all samples of a batch share one draw
    NO_DROPOUT = "-no-dropout"
    LONGER = "-longer"  # observes one batch more than the shortest epoch of a rank has
    ROWS_IN_BLOCKS = "-blocks"  # (view, sample), not (sample, view): see batches.owners_of_rows


class Ended(StrEnum):
    """How the run of a rank ended."""

    NOT_YET = "not yet"  # the rank still runs, or was killed
    FINISHED = "at the end of the script"
    WHEN_SEEN = "when enough was seen"  # prove ended the rank
    WITH_ERROR = "with an error"

    @property
    def is_well(self) -> bool:
        return self in (Ended.FINISHED, Ended.WHEN_SEEN)


class DrawFinding(StrEnum):
    """A replay's finding about the random draws of one line."""

    BY_SAMPLE = "one for each sample"
    SEVERAL = "several for each sample"  # adjacent per sample, or in blocks
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
    """How the replay could pass data to one rank, if the script has no DataLoader."""

    GIVEN = "what all ranks had, from the script itself"
    LATE = "the merged data arrived after the script had already used its own"
    LATE_INPUT = "merged model inputs arrived after the script had already used its own"
    OTHER = "one rank computes something else from the rows of all"
    NOT_GIVEN = "the ranks' data cannot be merged"
    LOCAL_NUMBER = "a number that looks like one rank's sample count"
    CHANGED = "another number than on all ranks"
    STATISTIC = "the data contain a statistic, such as a mean, that differs between the ranks"
    TOO_MANY = "too many to keep"


class Flag(Enum):
    """A fact about a run that needs no more than the place where it was first seen."""

    CLIPS = auto()
    CLIPS_SCALED = auto()  # the script clips gradients that still carry the loss scale
    GATHERS_FOR_METRICS = auto()  # by Accelerate, which drops the samples that padding repeats
    HAS_GROUPS = auto()  # the script makes process groups of some ranks
    REDUCES_WITHOUT_BACKWARD = auto()  # the script sums a tensor with a gradient before step 1
    JOINS = auto()  # the script uses DDP's join for unequal numbers of batches
    MODEL_IS_DIVIDED = auto()
    ENDS_WITH_OTHERS = auto()  # this rank ends because another one had seen enough
    STOP_TOGETHER = auto()  # the ranks stop where the first of them has no batch left
    USES_AUTOCAST = auto()
    MODEL_RETURNS_LOSS = auto()
    ASKED_FOR_LENGTH = auto()  # the script called len(loader) before the first batch
    BATCHNORM_ROWS_UNKNOWN = auto()  # nobody knows which row came from which rank
    BATCHNORM_ROWS_GUESSED = auto()  # samples have several rows, in an order that is only assumed


STARTED_IN = "PROVE_STARTED_IN"  # variable of each rank: the folder where prove was started
SECONDS_PER_BEAT = 0.2  # interval at which ranks write and prove reads the records
MAX_COLLECTIVES = 4000  # further calls are not recorded
EVALUATION_FACTOR = 4  # an evaluation gets this many times the --batches of training

Part = TypeVar("Part")
Projection = tuple[float, float]  # inner product of a tensor with a fixed vector, and the norm


@dataclass
class Settings:
    """Settings that the starting process passes to each rank of a run."""

    folder: str  # where the ranks write
    mode: Mode
    float64: bool
    cpu: bool  # GPU calls become CPU calls
    batches: int  # limit per loader and epoch
    gpus: int  # number of GPUs that the script sees with `cpu`
    world_size: int  # ranks of the observed run, known after it
    rows_are_split: bool = False  # all ranks load the same batches, and each uses its own rows
    variant: ReplayVariant = ReplayVariant.USUAL
    watches_operations: bool = True  # False leaves the operations of the script's torch unchanged
    shares_out_cores: bool = False  # a run of one rank gets the threads of all ranks
    seed: int | None = None  # with which rank 0 begins; None: any
    epochs: int = 3  # the run ends where one more would begin
    steps: int | None = None  # the run ends where another batch would follow so many steps
    batches_given: int = 0  # and so many batches, of all passes together
    ends_at_step: bool = False  # not at that batch, with which the script may make no step
    keeps_batches: bool = True  # for a replay
    for_resume: bool = False  # prove --resume: record the state before each step

    def __post_init__(self) -> None:
        """Turn the strings of JSON into enums."""
        self.mode, self.variant = Mode(self.mode), ReplayVariant(self.variant)

    @property
    def dropout(self) -> bool:
        """Does dropout stay on? It is switched off if its masks cannot be recorded."""
        return self.variant != ReplayVariant.NO_DROPOUT

    @property
    def name(self) -> str:
        """Name this run; its files begin with this name."""
        return self.mode + self.variant


# Functions by which DDP itself reaches the other ranks, with the names that the report prints.
DDP_CALLS = {
    "_broadcast_coalesced": "DDP's broadcast",
    "_verify_params_across_processes": "DDP's comparison of parameters",
}


class Collective(NamedTuple):
    name: str
    source_line: str
    batchnorm: str = ""  # class of the BatchNorm layer that made the call, if any
    library: str = ""  # "torch" if a part of torch made the call, such as fully_shard

    @property
    def is_of_ddp(self) -> bool:
        return self.name in DDP_CALLS.values()


@dataclass
class RankProgress:
    """Shows whether a rank is alive, and what it waits for."""

    events: int = 0  # counts events: if no rank has new ones, the run may hang
    beats: int = 0  # how often the record was written
    collective: Collective | None = None  # the collective that the rank is in now
    waits_in: Collective | None = None  # another call that may wait for a rank: recv, a store
    in_backward: bool = False
    source_line: str = ""
    cpu_seconds: float = 0.0
    in_ddp: bool = False  # the rank is in DDP's own code, where forward may wait for others
    is_loading: bool = False  # the rank waits for data or an import, not for another rank


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
    most_batches: int  # limit by --batches
    dataset_number: int  # counts the data sets of this rank
    dataset_length: int | None  # number of samples below all Subsets
    fingerprint: list[list[int]]  # for three samples: checksums of first tensor and fields
    is_stream: bool  # the data set is an IterableDataset
    with_gradients: bool  # gradients were enabled when the pass began
    batches_and_samples: tuple[int, int] | None  # numbers of the uncut pass
    steps_before: int
    collectives_before: int
    backwards_before: int
    generators: list[int]  # digests of the generators' states when the pass began
    base_seed: int | None = None  # base seed that the workers were given
    # For torch, random and numpy: did loading draw from this generator?
    drew: list[bool] = field(default_factory=lambda: [False] * 3)
    workers_drew: bool = False  # loader workers drew random numbers, or may have
    batches_given: int = 0
    epoch: int = 0  # number of earlier passes over this data set that made steps
    ended: bool = False  # the pass reached the end of its data
    step_count: int = 0
    backwards: int = 0
    accumulates: bool = False  # several batches make one step
    batches_per_step: int = 0  # batches before the first step; 0 if unknown
    contents: list[list[int]] = field(default_factory=list)  # checksums of samples, by batch
    labels: list[int] = field(default_factory=list)  # checksums of the rest, 0 if there is none
    sizes: list[int] = field(default_factory=list)  # number of samples per batch
    batches_listed: int | None = None  # number of batches that the sampler has listed
    samples_file: str = ""  # path of a file with the sampler's indices
    replay_number: int | None = None  # index among the passes that are kept for a replay
    indices: list[int] = field(default_factory=list)  # read from samples_file after the run
    may_draw: set[int] | None = None  # indices of a Subset, also read from samples_file
    fields: list[str] = field(default_factory=list)  # names of the fields in fingerprint

    @property
    def checksums(self) -> list[int]:
        return [checksum for batch in self.contents for checksum in batch]

    @property
    def length(self) -> int:
        """Count the batches of the whole pass, had prove not cut it short; 0 if unknown."""
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
    """One optimizer step: its gradients, and the weights before and after it."""

    source_line: str
    batch: int  # number in the pass, from 1 on
    epoch: int  # number from 0 on
    batch_size: int | None
    learning_rates: list[float]  # one for each parameter group; none for a step by hand
    loss_scale: float
    dtype: str  # dtype of the gradients
    weights_before: list[Projection]
    gradients: list[Projection | None]
    local_gradients: list[float | None]  # projected, before any averaging
    has_old_gradient: bool  # the last step's gradient was still there: no zero_grad
    weights_after: list[Projection] = field(default_factory=list)  # empty if step() did not end
    exchanges_inside: int = 0  # calls in step() itself that reached other ranks
    momenta: list[float] = field(default_factory=list)  # momentum or betas of the parameter groups
    # Indices of parameters whose gradient lost its imaginary part between backward and step().
    lost_imaginary: list[int] = field(default_factory=list)
    # The optimizer's state of each parameter, recorded only if step() communicates.
    moments: list[dict[str, Projection]] = field(default_factory=list)


@dataclass
class OptimizerRecord:
    """An optimizer of one rank, or the steps that the script makes by hand."""

    source_line: str
    is_adaptive: bool  # divides by small gradients, as Adam does
    is_by_hand: bool = False  # without a torch optimizer: the script updates its parameters
    compares_changes: bool = False  # without p.grad, weight changes are compared
    steps: list[OptimizerStep] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # one for each parameter
    keys: list[str] = field(default_factory=list)  # keys of RankRecord.weights; "" if in no module
    outside_ddp: list[int] = field(default_factory=list)  # indices of parameters outside DDP


@dataclass
class DDPRecord:
    """A model in DDP on one rank."""

    source_line: str
    forwards: int = 0  # calls of DDP in training
    forwards_around: dict[str, int] = field(default_factory=dict)  # calls of ddp.module, by place
    parameters: int = 0  # number of trained parameters
    in_no_optimizer: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # keys of its parameters in RankRecord.weights
    unfrozen: list[str] = field(default_factory=list)  # keys of parameters that no DDP averages
    not_in_last_step: list[str] = field(default_factory=list)  # names without a gradient in it
    without_gradient: list[str] = field(default_factory=list)


class PrintedText(NamedTuple):
    """A text that a rank has printed or logged."""

    text: str
    source_line: str
    steps_before: int
    in_first_epoch: bool
    on_terminal: bool = True  # False if it goes only to a log file


class Backward(NamedTuple):
    """One call of backward."""

    source_line: str
    steps_before: int
    loss_source_line: str = ""  # where a loss function of torch was last called before it


class LayerOutput(NamedTuple):
    """The output of a layer in training, before the first step."""

    layer: str
    class_name: str  # the class of the layer
    rows: list[float]  # inner product of each row with a fixed vector


class ModelCall(NamedTuple):
    """A call of a module by the script itself, in training."""

    checksum: int  # checksum of the first input tensor
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
    batches: int = 0  # number of batches until its last step
    by_batch: bool = False  # the script steps it more than once per epoch
    length: int | None = None  # steps until its rate stays constant; None if unknown or never
    highest_rate: float = 0.0
    total_steps: int = 0  # OneCycleLR raises beyond this step; 0 for other classes


class DrawKey(NamedTuple):
    """Names one draw, so that the same call in a replay finds it."""

    batch: tuple[int, int]  # the pass over a loader and the number of the batch
    source_line: str
    name: str  # name of the function that drew
    call_index: int  # number of earlier calls of this function at this line in this batch


class Draw(NamedTuple):
    """The value that one call has drawn on one rank."""

    value: Any
    arguments: list  # numbers among the arguments of the call


class OneDraw(NamedTuple):
    """One draw that all samples of a batch get, so that their order cannot matter."""

    dim: int  # dimension of the samples
    row: Any  # the tensor that each sample gets


CENTERED = "mean that was subtracted"


class Statistic(NamedTuple):
    """A mean or the like over the samples of one rank that its loss depends on."""

    name: str
    source_line: str
    call_index: int  # number of earlier calls of this function at this line
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
    flags: dict[Flag, str] = field(default_factory=dict)  # with the line where each was first seen
    loss_scale: float = 1.0
    exchange_precision: float = 0.0  # the spacing of numbers near 1 in what backward and step send
    seed: int = 0  # initial seed of its generators
    why_not_kept: str = ""  # why a batch could not be kept for a replay
    draws: dict[DrawFinding, list[str]] = field(
        default_factory=dict
    )  # source lines of each finding
    own_batch_size: int | None = None  # set by the replaying rank's script
    # Parameters whose shape differs from the observed one, by optimizer of the replaying rank.
    other_shapes: dict[int, list[tuple]] = field(default_factory=dict)
    schedules: list[ScheduleRecord] = field(default_factory=list)  # in the order of first steps
    # For each number of steps made: the parameters of all trained modules, by key. They are read
    # when the script first calls one of these modules after that step, and at the end of the run.
    weights: dict[int, dict[str, Projection]] = field(default_factory=dict)
    not_comparable: list[str] = field(default_factory=list)  # kinds of such tensors
    data: dict[DataFinding, list[tuple[int, str]]] = field(default_factory=dict)  # step and line
    statistics: list[Statistic] = field(default_factory=list)
    parts: dict[type, Any] = field(default_factory=dict)  # data that only one check records

    @property
    def trained_passes(self) -> list[LoaderPass]:
        """List the passes over a loader in which this rank made steps."""
        return [each for each in self.loader_passes if each.step_count]

    def notes(self, kind: type[Part]) -> list[Part]:
        """Return the list of such notes, to which one check adds; empty on the first call."""
        notes: list[Part] = self.parts.setdefault(kind, [])
        return notes

    def part(self, kind: type[Part]) -> Part:
        """Return the part of this class, a new and empty one on the first call."""
        part: Part = self.parts.setdefault(kind, kind())
        return part

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(self))
        part.replace(path)  # renamed, so that nobody reads half a file


@dataclass
class RunOutcome:
    """The result of one run: the records of all ranks, exit status, log and duration."""

    status: int
    log: str
    hang: bool
    silent: bool  # no progress was made, but a hang could not be proven
    records: list[RankRecord]
    seconds: float


class RankFile(StrEnum):
    """A file that each rank of a run writes into the folder of the run."""

    RECORD = "record"
    GRADIENTS = "gradients.pt"  # at the first step
    TENSORS = "tensors.pt"  # what a replay needs
    LOOP = "loop.pt"  # what a loop without a DataLoader has read: see loop_watcher.py
    CALLS = "calls"  # collectives, each logged before it begins, because the rank may die in it

    def of(self, folder: str, mode: str, rank: int) -> Path:
        return Path(folder, f"{mode}.{rank}.{self}")


def forced_file(folder: str, variant: ReplayVariant) -> Path:
    """Name the file of draws that all runs of a variant get: Draw or OneDraw by key."""
    return Path(folder, f"forced{variant}.pt")


def with_last_calls(record: RankRecord, file: Path) -> RankRecord:
    """Complete the collectives of a killed rank, whose record is older than its last calls."""
    if record.ended != Ended.NOT_YET or not file.exists():
        return record
    calls = [Collective(*line.split("\t")) for line in file.read_text().splitlines()]
    calls = [
        call._replace(source_line=SourceLine(call.source_line)) if ":" in call.source_line else call
        for call in calls
    ]
    return replace(record, collectives=calls)


def read_records(folder: str, mode: str) -> list[RankRecord]:
    """Read the records of all ranks, rank 0 first.

    Pickle is safe here, because only the script of the user, who may run anything, can write to
    this folder.
    """
    files = Path(folder).glob(f"{mode}.*.record")
    records = [pickle.loads(file.read_bytes()) for file in files]
    return [
        with_last_calls(record, RankFile.CALLS.of(folder, mode, record.rank))
        for record in sorted(records, key=lambda own: own.rank)
    ]


def end_process(status: int) -> None:
    """End a rank whose record is written, whatever the script has made of its stdout."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put a file there, and have closed it
            stream.flush()
    os._exit(status)
