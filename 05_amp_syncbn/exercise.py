"""Exercise 05: cut the local batch into micro-batches, to save memory.

Their gradients should add up to the gradient of the mean loss over the whole batch, and DDP should
send one all-reduce per step. As it stands, the gradient is too large, and DDP sends one all-reduce
per micro-batch. Fix accumulate, then type: make exercise STAGE=05
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def accumulate(model: DistributedDataParallel, images: Tensor, labels: Tensor, parts: int) -> None:
    """Leave the gradient of the whole batch in .grad. The batch divides by the number of parts."""
    for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(model(x), y)  # the mean over the micro-batch
        loss.backward()  # adds to .grad
