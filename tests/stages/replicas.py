"""DataParallel by hand (02_data_parallel/from_scratch.py) on the CPU, and a small model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from local_ranks.stage_files import LESSON_FOLDERS, fresh_module

CPU = torch.device("cpu")
CLOSE = {"rtol": 0, "atol": 1e-12}
FROM_SCRATCH = LESSON_FOLDERS["02"] / "from_scratch.py"
by_hand = fresh_module(FROM_SCRATCH)  # not seen by other tests
# For torch's own class. It also takes one GPU twice: it then copies the weights and adds up the
# gradients without nccl, which wants every GPU once.
DEVICE_IDS = [
    pytest.param([0, 0], marks=pytest.mark.gpu, id="one GPU twice"),
    pytest.param([0, 1], marks=pytest.mark.gpu(2), id="two GPUs"),
    pytest.param([1, 0], marks=pytest.mark.gpu(2), id="two GPUs, the second first"),
]


def parallel(module: nn.Module, replicas: int) -> nn.Module:
    return by_hand.DataParallel(module, [CPU] * replicas)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(number, 6).double(), torch.randint(4, (number,))


def step(model, module, batch, targets):
    module.zero_grad()
    outputs = model(batch)
    loss = F.cross_entropy(outputs, targets)
    loss.backward()
    return outputs.detach(), loss.detach(), [p.grad.clone() for p in module.parameters()]
