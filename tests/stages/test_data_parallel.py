"""DataParallel by hand computes what one device does. On GPUs, 02 uses torch's: test_devices.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import scatter_gather

from local_ranks.stage_files import fresh_module
from replicas import CLOSE, CPU, FROM_SCRATCH, by_hand, parallel, samples, small, step


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("build", [small, Tied])
def test_replicas_give_the_outputs_loss_and_gradients_of_one_device(build, replicas):
    torch.manual_seed(0)
    module = build().double()
    models = module, parallel(module, replicas)
    for number in (30, 2):
        expected, actual = (step(model, module, *samples(number)) for model in models)
        torch.testing.assert_close(actual, expected, **CLOSE)
    first, *others = by_hand.replicate(module, [CPU] * replicas)
    assert first is module
    own = {parameter.data_ptr() for parameter in module.parameters()}
    for other in others:
        assert own.isdisjoint(parameter.data_ptr() for parameter in other.parameters())
        if build is Tied:
            assert other.again is other.first
            assert other.second.weight is other.first.weight


def test_only_the_first_replica_keeps_its_running_statistics():
    module, first, second = (nn.BatchNorm1d(3) for _ in range(3))
    batch = torch.randn(8, 3)
    output = parallel(module, 2)(batch)
    torch.testing.assert_close(output, torch.cat([first(batch[:4]), second(batch[4:])]))
    torch.testing.assert_close(module.state_dict(), first.state_dict())


def test_02_train_step_takes_the_steps_of_one_device(changes=()):
    train_step = fresh_module(FROM_SCRATCH, changes).train_step
    model, replicated = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, replicated)]
    for number in (30, 30, 7):
        batch, targets = samples(number)
        _, loss, _ = step(model, model, batch, targets)
        optimizers[0].step()
        devices = [CPU] * 3
        actual = train_step(replicated, optimizers[1], F.cross_entropy, (batch, targets), devices)
        torch.testing.assert_close(actual, loss, **CLOSE)
    torch.testing.assert_close(replicated.state_dict(), model.state_dict(), **CLOSE)


def test_02_an_error_in_a_replica_reaches_the_caller(changes=()):
    module = fresh_module(FROM_SCRATCH, changes).DataParallel(nn.Linear(3, 2), [CPU, CPU])
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the text is compared below)
        module(torch.randn(4, 5))
    assert "shapes cannot be multiplied" in str(caught.value)


def test_forward_takes_and_returns_tensors_wherever_they_are_and_none_as_torchs_own_does():
    class Several(nn.Module):
        def forward(self, x, scale, *, shift):
            shift, more = shift
            pair = x + shift, (x * x).mean() + more["deep"].sum()
            return {"sum": x.sum(1) * scale, "pair": pair, "loss": None}

    x, shift, deep = (torch.randn(6, n).double() for n in (2, 1, 1))
    output = parallel(Several(), 3)(x, 2, shift=(shift, {"deep": deep}))
    scalars = [(a * a).mean() + b.sum() for a, b in zip(x.chunk(3), deep.chunk(3), strict=True)]
    expected = {"sum": x.sum(1) * 2, "pair": (x + shift, torch.stack(scalars)), "loss": None}
    torch.testing.assert_close(output, expected)
    assert by_hand.scatter([CPU] * 3) == [((), {})], "a call without tensors: one replica works"
    assert scatter_gather.gather([{"loss": None}] * 3, CPU) == {"loss": None}


def test_threads_obey_no_grad_and_autocast_of_the_caller():
    model, batch = parallel(nn.Linear(3, 2), 2), torch.randn(4, 3)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype), torch.no_grad():
            assert (model(batch).dtype, model(batch).requires_grad) == (dtype, False)
    assert (model(batch).dtype, model(batch).requires_grad) == (torch.float32, True)
