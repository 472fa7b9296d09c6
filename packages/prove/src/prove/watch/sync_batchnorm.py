"""Compute BatchNorm over the global batch by hand, for --cpu: torch's own layer refuses a CPU.

The course builds it in its fifth stage; tests/packages/test_proven.py keeps the two copies equal.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm


def global_statistics(x: Tensor, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
    """Count, mean and biased variance over the batches of all ranks: a number, (C,), (C,)."""
    local_count = x.numel() // x.shape[1]  # values per channel; 0 if this rank's batch is empty
    mean = variance = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
    if local_count:
        dims = [0, *range(2, x.dim())]  # all but the channels
        center = x.mean(dims, keepdim=True, dtype=dtype)
        mean, variance = center.flatten(), (x - center).square_().mean(dims)
    rows = mean.new_zeros(dist.get_world_size(), 1 + 2 * len(mean))
    rows[dist.get_rank()] = torch.cat([mean.new_tensor([local_count]), mean, variance])
    dist.all_reduce(rows)  # each rank fills its own row; every rank must reach this line
    # (ranks, 1), (ranks, C), (ranks, C)
    counts, means, variances = rows.split([1, len(mean), len(mean)], dim=1)
    count = int(counts.sum())
    mean = (counts * means).sum(dim=0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(dim=0) / count
    return count, mean, variance


class Normalize(Function):
    """y = weight · normal + bias, where normal = (x - mean) / √(variance + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        count, mean, variance = global_statistics(x, weight.dtype)
        if count < 2:  # the same on all ranks
            raise ValueError(
                f"BatchNorm got {count} value for each of {len(mean)} channels from all ranks "
                "together, and one has no variance: try a larger --batch-size or larger images"
            )
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        ctx.mark_non_differentiable(mean, variance)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), count, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        grad_x = None
        sums = weight.new_zeros(2, len(weight))  # they stay 0 if this rank's batch is empty
        if x.numel():
            _, *local = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
            sums = torch.stack(local)  # (2, C): sums of grad · normal and of grad
        grad_weight, grad_bias = sums.clone()  # local, as in any layer: DDP averages over the ranks
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums)  # needs_input_grad is the same on all ranks
            scale = weight * (variance + ctx.eps).rsqrt()
            through_variance, through_mean = -scale * sums / ctx.count
            grad_x = F.batch_norm(x, mean, variance, through_variance, through_mean, eps=ctx.eps)
            grad_x.addcmul_(grad, scale.view(-1, *[1] * (x.dim() - 2)))
        return grad_x, grad_weight, grad_bias, None


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of 2-D to 5-D inputs (B, C, ...) over the batches of all ranks.

    It has the parameters, buffers and names of nn.BatchNorm2d, so that checkpoints fit both. In
    eval mode, and without a process group, it computes the same as nn.BatchNorm2d.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (B, C, ...), got {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        self._check_input_dim(x)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32  # x may be bf16
        weight, bias = self.weight, self.bias
        if weight is None:  # affine=False
            weight = torch.ones(self.num_features, device=x.device)
            bias = torch.zeros(self.num_features, device=x.device)
        y, count, mean, variance = Normalize.apply(x, weight.to(dtype), bias.to(dtype), self.eps)
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:  # the mean of all batches so far
                momentum = 1 / int(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1))
            self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
        return y
