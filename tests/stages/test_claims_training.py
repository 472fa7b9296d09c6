"""Claims about rates, gradients, seeds and batch sizes: C04, C27, C29, C40."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from helpers.on_ranks import gather_from_ranks, on_ranks


def descend(lr, steps, batches):
    """How far some steps of SGD lead, in float64: one batch a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    images, optimizer = torch.randn(64, 4).double(), SGD(model.parameters(), lr)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(steps):
        batch = images.chunk(batches)[step % batches]
        optimizer.zero_grad()
        F.mse_loss(model(batch)[:, 0], batch.sum(1)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def test_c04_for_small_steps_8_times_the_rate_on_8_batches_is_8_steps():
    """Goyal et al. 2017, section 2.1: the weights must hardly change meanwhile."""
    far = {}
    for lr in (1e-3, 1e-4):
        eight_steps, one_step = descend(lr, 8, 8), descend(8 * lr, 1, 1)
        far[lr] = ((one_step - eight_steps).norm() / eight_steps.norm()).item()
        unscaled = ((descend(lr, 1, 1) - eight_steps).norm() / eight_steps.norm()).item()
        assert unscaled > 0.8  # the control: an eighth of the way
    assert far[1e-4] < 0.02
    assert far[1e-3] / far[1e-4] == pytest.approx(10, rel=0.2)  # it goes with the rate
    assert descend(0.2, 50, 1).abs().max() < 10  # a rate that works
    assert descend(8 * 0.2, 50, 1).abs().max() > 1e6  # may be too much 8 times


def gradient(samples, reduction):
    weight = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    F.mse_loss(samples[:, 1:] @ weight, samples[:, 0], reduction=reduction).backward()
    return weight.grad


@on_ranks(2)
def test_c27_the_mean_of_gradients_is_that_of_the_batch(rank):
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)).double()
    for sizes, reduction, weights, right in (
        ([6, 6], "mean", [1 / 2, 1 / 2], True),
        ([9, 3], "mean", [1 / 2, 1 / 2], False),
        ([9, 3], "mean", [9 / 12, 3 / 12], True),
        ([6, 6], "sum", [1 / 2, 1 / 2], False),
        ([9, 3], "sum", [1, 1], True),
    ):
        mean = weights[rank] * gradient(batch.split(sizes)[rank], reduction)
        dist.all_reduce(mean)
        assert torch.allclose(mean, gradient(batch, reduction), rtol=0, atol=1e-12) == right


@on_ranks(2)
def test_c29_one_seed_gives_equal_weights_and_equal_dropout_masks(rank):
    for seed, same in ((1234, True), (1234 + rank, False)):
        torch.manual_seed(1234)
        weight = nn.Linear(5, 5).weight.tolist()
        torch.manual_seed(seed)
        mask = F.dropout(torch.ones(1000)).tolist()
        weights, masks = zip(*gather_from_ranks((weight, mask)), strict=True)
        assert weights[0] == weights[1]
        assert (masks[0] == masks[1]) == same
        assert 300 < mask.count(0.0) < 700


def train_16(rank, world_size, local_batch, batchnorm):
    torch.manual_seed(1)
    layers = [nn.BatchNorm1d(4)] if batchnorm else []
    model = nn.Sequential(*layers, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    forward = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randn(16, 4).double().split(world_size * local_batch):
        optimizer.zero_grad()
        local_batch = batch[rank::world_size]
        F.mse_loss(forward(local_batch)[:, 0], local_batch.sum(1)).backward()
        optimizer.step()
    return model[-1].weight.data


@on_ranks(2)
def test_c40_half_the_batch_on_each_of_two_ranks_is_the_same_training(rank):
    for local_batch, batchnorm in ((4, False), (8, False), (4, True)):  # halved, kept, halved
        one, ours = train_16(0, 1, 8, batchnorm), train_16(rank, 2, local_batch, batchnorm)
        same = torch.allclose(one, ours, rtol=0, atol=1e-12)
        assert same == (local_batch == 4 and not batchnorm)
