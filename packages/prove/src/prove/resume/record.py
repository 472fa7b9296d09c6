"""What a rank writes down for `prove --resume`, beside what RankRecord holds."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prove.rank_record import Projection


@dataclass
class StepStart:
    """What an optimizer's step begins with."""

    number: int  # steps that were made before it, by all optimizers
    optimizer: int
    source_line: str
    batches: list[tuple[int, int]]  # of each batch that led to it: its pass, its number in that
    contents: list[list[int]]  # checksums of the samples of these batches
    epochs: list[str]  # what the sampler and the data set hold as their epoch
    groups: list[dict[str, float]]  # learning rate, momentum and the like of each group
    rates_ahead: dict[str, list[float]]  # of each scheduler: what its next steps would set
    metrics: dict[str, dict[str, float]]  # of each ReduceLROnPlateau: what it remembers
    loss_scale: dict[str, float]  # of GradScaler: scale, and steps since it last changed
    weights: list[Projection]
    state: list[dict[str, Projection]]  # the optimizer's and its inner ones', by parameter
    is_of_torch: bool  # so that its state is known to be where it belongs
    other_tensors: dict[str, Projection]  # untrained modules, and buffers before the forward
    at_batch: list[int]  # digests of the generators when its last batch was given
    at_step: list[int]
    own_generators: int  # digest of those of the script that drew inside a step so far


class FileChange(NamedTuple):
    """A file that is opened for writing, renamed or removed."""

    path: str
    mode: str | None  # of open(); None if the file is renamed or removed
    steps_before: int
    batches_before: int
    source_line: str


class FileRead(NamedTuple):
    path: str
    source_line: str


class Saved(NamedTuple):
    """What torch.save or torch.distributed.checkpoint was given."""

    path: str
    steps_before: int
    batches_before: int
    source_line: str
    content: dict[str, Any]  # projections of tensors, plain values, and else the name of a class


@dataclass
class ResumeRecord:
    """What one rank writes down about a run that is stopped, resumed, or neither."""

    starts: list[StepStart] = field(default_factory=list)
    changes: list[FileChange] = field(default_factory=list)
    reads: list[FileRead] = field(default_factory=list)  # before the first step
    saves: list[Saved] = field(default_factory=list)
    text_files: list[str] = field(default_factory=list)  # files that were written as text
