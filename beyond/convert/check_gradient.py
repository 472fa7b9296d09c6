"""Does my converted step have the gradient of the original's loss on the samples of all ranks?

    torchrun --standalone --nproc-per-node=2 beyond/convert/check_gradient.py

Copy this file beside your script, and let every rank call gradient_difference where the first batch
has arrived. Below it, three losses that look right, and the same three cured.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def gradient_difference(
    model: nn.Module, converted_loss: Callable, original_loss: Callable, *batch: Any
) -> float:
    """Return how far the ranks' gradient is from the original's, in lengths of the latter.

    model is the plain one, and batch what this rank has read: tensors whose first dimension counts
    samples, or lists. converted_loss(ddp, *batch) gets a wrapped copy and this batch;
    original_loss(model, *batch) gets a plain copy and the batches of all ranks. Both copies compute
    in float64. Neither loss may draw random numbers: switch dropout off, and pass noise in batch.
    """
    device = next(model.parameters()).device
    batches: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(batches, moved(batch, "cpu"))
    merged = [merge(parts) for parts in zip(*batches, strict=True)]
    ddp = DistributedDataParallel(deepcopy(model).double())
    original = deepcopy(ddp.module)
    converted_loss(ddp, *moved(batch, device)).backward()
    original_loss(original, *moved(merged, device)).backward()
    expected = flat_gradient(original)
    return float((flat_gradient(ddp) - expected).norm() / expected.norm())


def moved(value: Any, device: torch.device | str) -> Any:
    """The same with all its tensors on device, and those of floats in float64."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64 if value.is_floating_point() else value.dtype)
    return [moved(one, device) for one in value] if isinstance(value, list | tuple) else value


def merge(parts: tuple) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts))


def flat_gradient(model: nn.Module) -> Tensor:
    used = (x for x in model.parameters() if x.requires_grad)
    return torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in used])


def of_all_ranks(local: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = local.detach().clone()
    dist.all_reduce(total, op)
    return total


# A mean over elements: mse_loss divides by their number, not by that of the samples.


def mean_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def divided_by_samples(ddp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    samples = of_all_ranks(torch.tensor(len(x), device=x.device))
    return F.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / samples


def divided_by_elements(ddp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    elements = of_all_ranks(torch.tensor(y.numel(), device=y.device))
    return F.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / elements


# A statistic of the batch that has no gradient: what PPO does with its advantages.


def policy_loss(model: nn.Module, x: Tensor, reward: Tensor) -> Tensor:
    advantage = (reward - reward.mean()) / reward.std()
    return -(advantage * model(x).log_softmax(dim=1)[:, 0]).mean()


def normalized_on_all_ranks(ddp: nn.Module, x: Tensor, reward: Tensor) -> Tensor:
    count = of_all_ranks(torch.tensor(len(reward), device=reward.device))
    mean = of_all_ranks(reward.sum()) / count
    std = (of_all_ranks(((reward - mean) ** 2).sum()) / (count - 1)).sqrt()
    return -((reward - mean) / std * ddp(x).log_softmax(dim=1)[:, 0]).mean()


# The length of the longest sentence: the last state of an LSTM has read the padding, too.


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]  # (B, T, 4) -> (B, 8)


def padded_to_its_longest(model: nn.Module, sentences: list[Tensor]) -> Tensor:
    return model(nn.utils.rnn.pad_sequence(sentences, batch_first=True)).square().mean()


def padded_to_the_longest_of_all(ddp: nn.Module, sentences: list[Tensor]) -> Tensor:
    x = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    longest = int(of_all_ranks(torch.tensor(x.shape[1], device=x.device), dist.ReduceOp.MAX))
    return ddp(F.pad(x, (0, 0, 0, longest - x.shape[1]))).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    linear, last_state = nn.Linear(64, 60), LastState()
    torch.manual_seed(1 + dist.get_rank())
    x, y, reward = torch.randn(16, 64), torch.randn(16, 60), torch.randn(16)
    sentences = [torch.randn(length, 4) for length in torch.randint(3, 20, (16,)).tolist()]
    for model, original, batch, converted_losses in (
        (linear, mean_error, (x, y), (divided_by_samples, divided_by_elements)),
        (linear, policy_loss, (x, reward), (policy_loss, normalized_on_all_ranks)),
        (
            last_state,
            padded_to_its_longest,
            (sentences,),
            (padded_to_its_longest, padded_to_the_longest_of_all),
        ),
    ):
        for converted in converted_losses:
            off = gradient_difference(model, converted, original, *batch)
            if dist.get_rank() == 0:
                print(f"{original.__name__:<22} {converted.__name__:<29} off by {off:.0%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
