"""BatchNorm over the global batch, by hand, for every device: torch's layer is for GPUs only.

    python 05_amp_syncbn/sync_batchnorm.py

torch's kernels do the work of one rank. This file adds what crosses the ranks. In forward, one
all-reduce gives every rank the count of each rank, and the mean and variance of its channels. They
merge exactly, for local batches of any size (Chan, Golub and LeVeque, 1983). Sums and sums of
squares would be simpler, but where the mean is large, their difference loses the variance. Backward
needs one more all-reduce: every input has moved the mean and the variance that all ranks used.

Only the activations are large, so what counts is how often they are read and written.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from common.options import Parser, UsageError

CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
            raise UsageError(
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


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Make every BatchNorm layer of the model a SyncBatchNorm, in place; returns the model.

    Each layer stays the same object, with all that it holds: only its class changes. UsageError if
    a layer is of another class of BatchNorm, which may do more, or has a group of fewer ranks.
    """
    all_ranks = (None, dist.group.WORLD)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group not in all_ranks:
            raise UsageError(f"layer {name} has a process_group of its own: expected all ranks")
        if type(layer) in CONVERTIBLE:
            layer.__class__ = SyncBatchNorm  # torch's lazy layers change class in the same way
        elif isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            kind = type(layer).__name__  # torch's convert drops the extra part: issue 187298
            raise UsageError(f"layer {name} is a {kind}: expected BatchNorm1d, 2d or 3d of torch")
    return model


def compare(rank: int, port: int, batch: Tensor) -> None:
    """Each rank takes its rows of the batch; rank 0 prints what each kind of layer returns."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = torch.zeros(2, *batch.shape)
    results[0, rank::2] = nn.BatchNorm1d(1, affine=False)(batch[rank::2])
    results[1, rank::2] = SyncBatchNorm(1, affine=False)(batch[rank::2])
    dist.all_reduce(results)  # each rank has filled its own rows
    if rank == 0:
        names = ("one process, whole batch", "two ranks, BatchNorm", "two ranks, SyncBatchNorm")
        whole = nn.BatchNorm1d(1, affine=False)(batch)
        for name, output in zip(names, (whole, *results), strict=True):
            print(f"{name:26}{[round(value, 3) for value in output.flatten().tolist()]}")
    dist.destroy_process_group()


def main() -> None:
    # Rank 0 gets the small numbers, rank 1 the large ones.
    batch = torch.tensor([[1.0], [10.0], [2.0], [20.0], [3.0], [30.0]])
    print(f"{'the batch':26}{batch.flatten().tolist()}")
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    mp.spawn(compare, args=(store.port, batch), nprocs=2)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
