"""Measure the error of the gradient if each rank divides its loss by its own matched anchors.

    python loss_divisor.py

One process plays two ranks with half a batch each. BatchNorm is over the whole batch. The flags are
those of detector.py.
"""

from itertools import islice
from statistics import median

import torch
from torch import Tensor

import detector


class TwoRanks(detector.SSD):
    """SSD that returns two losses: what DDP makes of the ranks' losses, and the exact one."""

    def compute_loss(self, targets, outputs, anchors, matches) -> dict[str, Tensor]:
        self.counts, sums = [], []
        for rank in (0, 1):
            own_rows = slice(rank, None, 2)
            part = {key: output[own_rows].contiguous() for key, output in outputs.items()}
            losses = super().compute_loss(
                targets[own_rows], part, anchors[own_rows], matches[own_rows]
            )
            self.counts.append(max(1, sum(int((match >= 0).sum()) for match in matches[own_rows])))
            sums.append(sum(losses.values()) * self.counts[-1])
        mean = sum(total / count for total, count in zip(sums, self.counts, strict=True)) / 2
        return {"mean of the ranks": mean, "exact": sum(sums) / sum(self.counts)}


def gradient(loss: Tensor, model: detector.nn.Module) -> Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def main() -> None:
    args = detector.parse_args()
    torch.manual_seed(args.seed)
    train_set = detector.load_data(args, "train")
    detector.SSD = TwoRanks  # build_model takes it
    model = detector.build_model(args, max(train_set.coco.cats) + 1).to(args.device)
    errors = []
    for batch in islice(detector.make_loader(train_set, args, shuffle=True), 12):
        images = [image.to(args.device) for image, _ in batch]
        targets = [{key: x[key].to(args.device) for key in ("boxes", "labels")} for _, x in batch]
        mean, exact = (gradient(loss, model) for loss in model(images, targets).values())
        errors.append(float((mean - exact).norm() / exact.norm()))
        print(f"matched anchors {model.counts}  the gradient is off by {errors[-1]:.1%}")
    print(f"median {median(errors):.1%}, maximum {max(errors):.1%}")


if __name__ == "__main__":
    main()
