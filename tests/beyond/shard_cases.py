"""Trainings whose levels, models and optimizers the tests of beyond/shard divide among ranks.

Each case trains four steps in float64 on 2, 3 or 4 ranks, and so does one plain process. All cases
of a number of ranks share its processes, because starting them costs more than training.
"""

import copy
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, NAdam

import text_model
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module

FILES = ("shards.py", "zero.py", "fsdp.py", "full_state.py", "library_state.py", "levels.py")
BY_HAND = ZERO_1, ZERO_2, FSDP = "optimizer", "gradients", "parameters"
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (NAdam, {"lr": 0.01}),  # it keeps two scalars of each parameter, not only a step
}
BATCH, STEPS = 24, 4  # a batch that divides by 2, 3 and 4 ranks, and then by 2 micro-batches


class TrainingCase(NamedTuple):
    """A training; by hand, since those by the library share no lines that could be changed."""

    level: str
    model: str = "transformer"
    optimizer: str = "sgd"
    micro_batches: int = 1
    clip: float | None = None
    changes: tuple = ()  # changes of lines, for a control


class Odd(nn.Module):
    """Odd shapes, a frozen parameter, one tied inside a layer, a scalar outside of all layers, and
    a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5)
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.last = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("factors", torch.tensor([1.0, 0.5, 2.0]))
        self.second.bias.requires_grad_(False)
        self.twice[2].weight = self.twice[0].weight

    def forward(self, inputs):  # (B, 7) -> (B, 3)
        hidden = self.second(self.first(inputs).tanh())
        return self.last(self.twice(self.twice(hidden))) * self.scale * self.factors


MODELS = {
    "odd": Odd,
    "transformer": lambda: text_model.Transformer(8, layers=2),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch for each step. Labels are missing here and there, not as many on each rank."""
    torch.manual_seed(1)
    if name != "transformer":
        return [(torch.randn(BATCH, 7).double(), torch.randint(3, (BATCH,))) for _ in range(STEPS)]
    steps = []
    for _ in range(STEPS):
        tokens, lengths = torch.randint(256, (BATCH, 7)), torch.randint(1, 7, (BATCH, 1))
        labels = tokens.roll(-1, dims=1).masked_fill(torch.arange(7) >= lengths, text_model.IGNORED)
        steps.append((tokens, labels))
    return steps


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, count: int):
    logits = model(inputs).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count


@cache
def one_process(name: str, optimizer: str, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The weights that all others must reach."""
    model = build(name)
    optimizer_class, options = OPTIMIZERS[optimizer]
    plain = optimizer_class(model.parameters(), **options)
    for inputs, labels in batches(name):
        plain.zero_grad()
        loss_of(model, inputs, labels, int((labels >= 0).sum())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        plain.step()
    return model.state_dict()


def changed_levels(changes: tuple = ()) -> ModuleType:
    """levels.py and what it imports, with changed lines."""
    folder = LESSON_FOLDERS["shard"]
    return [fresh_module(folder / file, changes, register=True) for file in FILES][-1]


def train_steps(training, steps, micro_batches: int = 1, clip: float | None = None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for inputs, labels in steps:
        count = int((labels >= 0).sum())  # labels of all ranks
        training.optimizer.zero_grad()
        pieces = (tensor[rank::world_size].chunk(micro_batches) for tensor in (inputs, labels))
        for number, micro_batch in enumerate(zip(*pieces, strict=True), start=1):
            waits = number < micro_batches and hasattr(training.model, "no_sync")
            with training.model.no_sync() if waits else nullcontext():
                (loss_of(training.model, *micro_batch, count) * world_size).backward()
            training.finish()
        if clip:
            training.clip(clip)
        training.optimizer.step()


def states_of(training) -> tuple:
    return training.model_state, training.optimizer_state


def collect(training) -> tuple[dict, dict]:
    """The full state_dicts of model and optimizer, on rank 0."""
    for part in states_of(training):
        part.collect()
    return copy.deepcopy(tuple(part.state_dict() for part in states_of(training)))


def largest_difference(state: dict, reference_state: dict) -> float:
    assert state.keys() == reference_state.keys()
    return max((state[name] - reference_state[name]).abs().max().item() for name in state)


def distance(case: TrainingCase) -> float:
    """How far rank 0's weights are from those of one process; on the other ranks, 0."""
    model = build(case.model)
    if dist.get_rank() > 0:  # rank 0's weights must win
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    optimizer_class, options = OPTIMIZERS[case.optimizer]
    by_hand = changed_levels(case.changes).by_hand
    training = by_hand(case.level, model, optimizer_class, **options)
    train_steps(training, batches(case.model), case.micro_batches, case.clip)
    state, _ = collect(training)
    if dist.get_rank() > 0:
        return 0.0
    return largest_difference(state, one_process(case.model, case.optimizer, case.clip))


def join(backend: str) -> None:
    if backend == "shm":
        import shm  # noqa: F401
    dist.init_process_group(backend)


def all_distances(rank: int, cases: list[TrainingCase], backend: str = "gloo") -> list[float]:
    join(backend)
    distances = [distance(case) for case in cases]
    dist.destroy_process_group()
    return distances
