"""BatchNorm over the global batch, by hand: for every device, torch's own is for GPUs only.

    python 05_amp_syncbn/sync_batchnorm.py

Each rank sums up its local batch in three numbers for each channel: count, mean, variance. One
all-reduce shows every rank the numbers of all, and they merge exactly, for local batches of any
size, by the rule of Chan, Golub and LeVeque (1979). A sum of squares would need no merging, but
would lose the variance where the mean is large. One more all-reduce on the way back, since every
input has moved the mean and the variance that all other ranks used.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd import Function

from common.options import Parser


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (C,) to (1, C, 1, ...), so that it meets an input (B, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def global_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance over the batches of all ranks: (), (C,), (C,)."""
    dims = [0, *range(2, x.dim())]  # all but the channel
    mean = x.mean(dims)
    variance = (x - per_channel(mean, x)).square().mean(dims)  # on CPU much faster than torch.var
    local = torch.cat([mean.new_tensor([x.numel() // x.shape[1]]), mean, variance])
    rows = local.new_zeros(dist.get_world_size(), len(local))
    rows[dist.get_rank()] = local
    dist.all_reduce(rows)  # each rank fills its own row; every rank must reach this line
    # (ranks, 1), (ranks, C), (ranks, C)
    counts, means, variances = rows.split([1, len(mean), len(mean)], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(dim=0) / count
    return count, mean, variance


class Normalize(Function):
    """y = (x − mean) / √(variance + eps), with the way back through mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, mean, variance = global_statistics(x)
        if count < 2:
            raise ValueError("one value for each channel has no variance: use a larger batch")
        scale = (variance + eps).rsqrt()
        normal = (x - per_channel(mean, x)) * per_channel(scale, x)
        ctx.save_for_backward(normal, scale, count)
        ctx.mark_non_differentiable(count, mean, variance)
        return normal, count, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        normal, scale, count = ctx.saved_tensors
        dims = [0, *range(2, grad.dim())]
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])  # (2, C)
        dist.all_reduce(sums)  # every rank must reach this line
        through_mean, through_variance = sums / count
        centred = (
            grad - per_channel(through_mean, grad) - normal * per_channel(through_variance, grad)
        )
        return centred * per_channel(scale, grad), None


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of 2-D to 5-D inputs (B, C, ...) over the batches of all ranks.

    Parameters, buffers and their names are those of nn.BatchNorm2d, so that checkpoints fit both.
    In eval mode it is nn.BatchNorm2d.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (B, C, ...), got {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x may be bf16
        normal, count, mean, variance = Normalize.apply(wide, self.eps)
        if self.training and self.running_mean is not None:
            self.update_running_statistics(count, mean, variance)
        if self.affine:
            normal = normal * per_channel(self.weight, x) + per_channel(self.bias, x)
        return normal.to(x.dtype)

    @torch.no_grad()
    def update_running_statistics(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked += 1
        new = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, new)
        unbiased = variance * count / (count - 1)  # as BatchNorm keeps it
        self.running_var.lerp_(unbiased, new)


def convert(model: nn.Module) -> nn.Module:
    """The same model with every BatchNorm layer replaced; parameters and buffers are kept."""
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        layer = SyncBatchNorm(model.num_features, model.eps, model.momentum, model.affine)
        layer._parameters, layer._buffers = model._parameters, model._buffers  # not copies: the
        layer.training = model.training  # optimizer may hold them already
        return layer
    for name, child in model.named_children():
        setattr(model, name, convert(child))
    return model


def compare(rank: int, port: int, batch: Tensor) -> None:
    """Each rank takes its rows of the batch; rank 0 prints what each kind of layer made of them."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    plain, sync = nn.BatchNorm1d(1, affine=False), SyncBatchNorm(1, affine=False)
    results = torch.zeros(2, *batch.shape)
    results[0, rank::2], results[1, rank::2] = plain(batch[rank::2]), sync(batch[rank::2])
    dist.all_reduce(results)  # each rank fills its own rows
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
