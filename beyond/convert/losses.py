"""Which losses stay right when each rank computes its own, and DDP takes the mean of the gradients?

    python beyond/convert/losses.py

One process plays two ranks with half of a batch each, in float64. All halves have 16 samples.
"""

from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels)


def sum_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum")


def mean_over_counted(outputs: Tensor, labels: Tensor) -> Tensor:
    """Divide by how many count: SSD by its matched anchors, a language model by its tokens."""
    return F.cross_entropy(outputs, labels.where(labels < 5, -100))  # -100 is ignored


def contrastive_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Each sample must find its pair, the one of the same label, among all samples of the batch."""
    outputs = F.normalize(outputs)  # (B, 10), each of length 1
    anchors, pairs = outputs[0::2], outputs[1::2]  # (B/2, 10)
    return F.cross_entropy(anchors @ pairs.T / 0.1, torch.arange(len(anchors)))


def dice_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """A ratio of two sums over the batch, as for segmentation: labels are the pixels' classes."""
    shares, hits = outputs.softmax(dim=1), F.one_hot(labels, 10)  # (B, 10)
    overlap, total = (shares * hits).sum(dim=0), (shares + hits).sum(dim=0)  # (10,)
    return 1 - ((2 * overlap + 1) / (total + 1)).mean()


def loss_after_attention(outputs: Tensor, labels: Tensor) -> Tensor:
    """A layer that takes the batch for the sequence, as attention without batch_first does."""
    mixed = F.scaled_dot_product_attention(outputs, outputs, outputs)  # (B, 10): each sees all
    return F.cross_entropy(mixed, labels)


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def gradient_error(loss_of: Callable, batch: Tensor, labels: Tensor, model: nn.Module) -> float:
    """How far the mean of two ranks' gradients is from that of the whole batch, relative to it."""
    exact = gradient(loss_of(model(batch), labels), model)
    halves = zip(batch.chunk(2), labels.chunk(2), strict=True)
    mean = sum(gradient(loss_of(model(x), y), model) for x, y in halves) / 2
    return float((mean - exact).norm() / exact.norm())


LOSSES = {
    "mean over samples": mean_loss,
    "sum over samples": sum_loss,
    "mean over those that count": mean_over_counted,
    "contrastive": contrastive_loss,
    "Dice over the batch": dice_loss,
    "attention over the batch": loss_after_attention,
}


def measure(batches: int = 12) -> dict[str, list[float]]:
    """The error of each loss in each batch: random images, of which each pair has one label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10)).double()
    errors: dict[str, list[float]] = {name: [] for name in LOSSES}
    for _ in range(batches):
        labels = torch.randint(10, (16,)).repeat_interleave(2)  # (32,)
        batch = torch.randn(10, 64, dtype=torch.float64)[labels]  # one picture for each class
        batch += 0.5 * torch.randn_like(batch)  # (32, 64)
        for name, loss_of in LOSSES.items():
            errors[name].append(gradient_error(loss_of, batch, labels, model))
    return errors


def main() -> None:
    for name, errors in measure().items():
        print(f"{name:<26} off by {median(errors):.0%} (median), {max(errors):.0%} (maximum)")


if __name__ == "__main__":
    main()
