"""Exercise convert: divide a loss by the number of objects of all ranks.

DDP takes the mean of the ranks' gradients. The result should be the gradient of the loss of the
whole batch: the sum over the objects of all ranks, divided by their number.
As it stands, each rank divides by its own number. If the ranks have 31 objects and 12, an object of
the second rank counts 2.6 times as much as one of the first.
Fix global_loss, then type: make exercise STAGE=convert
"""

from torch import Tensor


def global_loss(loss_sum: Tensor, objects: Tensor) -> Tensor:
    """The loss that this rank calls backward on.

    loss_sum: the sum of the losses of its objects. objects: their number; it may be 0.
    """
    return loss_sum / objects.clamp(min=1)
