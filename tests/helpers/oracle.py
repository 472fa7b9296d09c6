"""The replay oracle: one plain process that repeats, batch by batch, what a stage claims to do.

It has no process group, no sampler and no wrapper. It is told which samples each step sees and
how BatchNorm groups them, and trains in float64.
"""

import math
from collections.abc import Iterator
from itertools import islice

import torch

from common.data import load_dataset
from common.models import build_model
from helpers.train_stage import default_dtype, options

Step = list[list[int]]  # the groups of samples that a step normalizes together


def permutation(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def whole_batches(samples: int, batch: int, seed: int, epoch: int) -> Iterator[Step]:
    """01 and SyncBN: the global batch is one group."""
    order = permutation(samples, seed + epoch)
    for start in range(0, samples - batch + 1, batch):
        yield [order[start : start + batch]]


def chunks(parts: int):
    """02: replica r normalizes the r-th piece of the batch."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[Step]:
        size = batch // parts
        for [whole] in whole_batches(samples, batch, seed, epoch):
            yield [whole[r * size : (r + 1) * size] for r in range(parts)]

    return steps


def strides(parts: int):
    """03 and 04: rank r normalizes every parts-th sample of the batch, as both deal them out."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[Step]:
        for [whole] in whole_batches(samples, batch, seed, epoch):
            yield [whole[r::parts] for r in range(parts)]

    return steps


def micro_batches(parts: int, k: int):
    """05 with --accumulate: the j-th of the k pieces of each rank's samples, over all ranks."""

    def steps(samples: int, batch: int, seed: int, epoch: int) -> Iterator[Step]:
        size = batch // (parts * k)
        for shares in strides(parts)(samples, batch, seed, epoch):
            yield [
                [i for share in shares for i in share[j * size : (j + 1) * size]] for j in range(k)
            ]

    return steps


def replay(
    steps,
    *,
    batch,
    epochs,
    seed,
    lr,
    momentum,
    model="net-bn",
    clip=math.inf,
    max_steps=10**9,
    data=(),
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of every step and the final weights, all float64. lr: may be a function of the step.
    clip: the largest global norm. data: flags of another data set than the digits."""
    args = options(*data, f"--batch-size={batch}")
    with default_dtype(torch.float64):
        train_set, _ = load_dataset(args)
        torch.manual_seed(seed)
        net = build_model(model, train_set)
    velocity = {p: torch.zeros_like(p) for p in net.parameters()}
    losses = []
    for epoch in range(epochs):
        batches = steps(len(train_set), batch, seed, epoch)
        for groups in islice(batches, max_steps - len(losses)):
            outputs, targets, kept = [], [], []
            for group in groups:
                images, labels = train_set.__getitems__(group)
                outputs.append(net(images))
                targets.append(labels)
                kept = kept or [buffer.clone() for buffer in net.buffers()]
            loss = torch.nn.functional.cross_entropy(torch.cat(outputs), torch.cat(targets))
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for buffer, first in zip(net.buffers(), kept, strict=True):
                buffer.copy_(first)  # of the running statistics only the first group's survive
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
            gradients = [g * min(1.0, clip / (norm + 1e-6)) for g in gradients]  # as torch does
            rate = lr(len(losses)) if callable(lr) else lr
            with torch.no_grad():
                for (p, v), g in zip(velocity.items(), gradients, strict=True):
                    v.mul_(momentum).add_(g)
                    p.sub_(rate * v)
            losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), net.state_dict()
