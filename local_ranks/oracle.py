"""The replay oracle: one plain process that repeats, batch by batch, what a stage claims to do.

It has no process group, no sampler and no wrapper. It is told which samples each step sees and
how BatchNorm groups them, and trains in float64.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from common.data import load_dataset
from common.models import build_model
from local_ranks.train_stage import default_dtype, options

SampleGroups = list[list[int]]  # the groups of samples that a step normalizes together
# Called with samples, batch, seed and epoch; yields the groups of each step.
BatchSchedule = Callable[[int, int, int, int], Iterator[SampleGroups]]
Batch = tuple[torch.Tensor, torch.Tensor]  # images and labels


def permutation(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def whole_batches(samples: int, batch: int, seed: int, epoch: int) -> Iterator[SampleGroups]:
    """01 and SyncBN: the global batch is one group."""
    order = permutation(samples, seed + epoch)
    for start in range(0, samples - batch + 1, batch):
        yield [order[start : start + batch]]


def chunks(parts: int) -> BatchSchedule:
    """02: replica r normalizes the r-th piece of the batch."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[SampleGroups]:
        size = batch // parts
        for [whole] in whole_batches(samples, batch, seed, epoch):
            yield [whole[r * size : (r + 1) * size] for r in range(parts)]

    return steps


def strides(parts: int) -> BatchSchedule:
    """03 and 04: rank r normalizes every parts-th sample of the batch, as both deal them out."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[SampleGroups]:
        for [whole] in whole_batches(samples, batch, seed, epoch):
            yield [whole[r::parts] for r in range(parts)]

    return steps


def micro_batches(parts: int, k: int) -> BatchSchedule:
    """survive with --accumulate: the j-th of k pieces of each rank's samples, over all ranks."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[SampleGroups]:
        size = batch // (parts * k)
        for shares in strides(parts)(samples, batch, seed, epoch):
            yield [
                [i for share in shares for i in share[j * size : (j + 1) * size]] for j in range(k)
            ]

    return steps


@dataclass(frozen=True)
class Training:
    """The options of the run that the oracle repeats, besides its batches."""

    batch: int
    epochs: int
    seed: int
    lr: float | Callable[[int], float]  # a number, or a function of the step
    momentum: float
    model: str = "net-bn"
    clip: float = math.inf  # the largest norm of all gradients together
    max_steps: int = sys.maxsize
    data: tuple[str, ...] = ()  # flags of another data set than the digits

    def rate(self, step: int) -> float:
        return self.lr(step) if callable(self.lr) else self.lr


def replay(
    steps: BatchSchedule, training: Training
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of every step and the final weights, all in float64."""
    with default_dtype(torch.float64):
        train_set, _ = load_dataset(options(*training.data, f"--batch-size={training.batch}"))
        torch.manual_seed(training.seed)
        net = build_model(training.model, train_set)
    velocity = {p: torch.zeros_like(p) for p in net.parameters()}
    losses = []
    for epoch in range(training.epochs):
        batches = steps(len(train_set), training.batch, training.seed, epoch)
        for groups in islice(batches, training.max_steps - len(losses)):
            loss, gradients = gradients_of_step(net, [train_set.__getitems__(g) for g in groups])
            gradients = clipped(gradients, training.clip)
            with torch.no_grad():
                for (p, v), g in zip(velocity.items(), gradients, strict=True):
                    v.mul_(training.momentum).add_(g)
                    p.sub_(training.rate(len(losses)) * v)
            losses.append(loss)
    return torch.tensor(losses, dtype=torch.float64), net.state_dict()


def gradients_of_step(net: nn.Module, groups: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    """The mean loss of all groups, and its gradients. Of the running statistics, only those of the
    first group survive, as on rank 0."""
    outputs, targets = [], []
    first_buffers: list[torch.Tensor] = []
    for images, labels in groups:
        outputs.append(net(images))
        targets.append(labels)
        first_buffers = first_buffers or [buffer.clone() for buffer in net.buffers()]
    loss = nn.functional.cross_entropy(torch.cat(outputs), torch.cat(targets))
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    for buffer, first in zip(net.buffers(), first_buffers, strict=True):
        buffer.copy_(first)
    return loss.item(), list(gradients)


def clipped(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """Clip gradients as torch does, to a global norm of at most this limit."""
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    return [g * min(1.0, limit / (norm + 1e-6)) for g in gradients]
