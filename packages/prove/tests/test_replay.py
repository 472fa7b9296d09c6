"""A replay gives one rank the samples, the draws and the state of all ranks, and a WRONG has a
control: what prove says about scripts that are not like its own."""

import re

import pytest

from prove_runs import one_line, verdict

FRAME = """
import random
from collections import UserDict, namedtuple
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
{setup}
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler{collate})
torch.manual_seed(7 + rank)
random.seed(7 + rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
{step}
"""
OPTIMIZER = "ddp = DDP(net)\noptimizer = torch.optim.SGD(ddp.parameters(), 0.1)"
STEP = """
x, y = batch
loss = {loss}
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
MEAN = "F.cross_entropy(ddp(x), y)"


def script(step: str = "", loss: str = MEAN, setup: str = OPTIMIZER, collate: str = "") -> str:
    lines = (step or STEP.replace("{loss}", loss)).strip().splitlines()
    indented = "\n".join(" " * 8 + line for line in lines)
    return FRAME.replace("{setup}", setup).replace("{step}", indented).replace("{collate}", collate)


NOISE = "F.cross_entropy(ddp(x + 0.1 * torch.randn_like(x)), y{weight})"
DIFFUSION = """
x, y = batch
t = torch.randint(10, (len(x),))
noise = torch.randn(len(x), 6)
noisy = x * (1 - t[:, None] / 10) + noise + 0.1 * torch.randn_like(x)
loss = F.cross_entropy(ddp(F.dropout(noisy, 0.3)), y{weight})
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
MIXUP = """
x, y = batch
mix, partner = random.random(), torch.randperm(len(x))
out = ddp(mix * x + (1 - mix) * x[partner])
loss = mix * F.cross_entropy(out, y{weight}) + (1 - mix) * F.cross_entropy(out, y[partner]{weight})
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
CROPS = """
x, y = batch
crops = torch.cat([x, 2 * x])
out = ddp(crops + torch.randn(len(crops), 6))
loss = F.cross_entropy(out, torch.cat([y, y]){weight})
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
LOOKS_AHEAD = """def ahead(batches):
    batches = iter(batches)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current
"""
FROM_AHEAD = script(loss=NOISE, setup=LOOKS_AHEAD + OPTIMIZER).replace(
    "in loader", "in ahead(loader)"
)
WEIGHT = ", weight=torch.tensor([1.0, 3.0, 9.0])"


@pytest.mark.parametrize(
    "source",
    [script(DIFFUSION), script(MIXUP), script(CROPS), FROM_AHEAD],
    ids=["diffusion and dropout", "mixup", "two crops of each sample", "looks ahead"],
)
def test_one_rank_gets_the_random_numbers_that_all_ranks_drew(source, prove_script):
    ended = prove_script(source.replace("{weight}", ""))
    assert verdict(ended, "one rank") == "right"
    ended = prove_script(source.replace("{weight}", WEIGHT))  # the control
    assert verdict(ended, "one rank") == "WRONG"


def test_what_each_rank_decides_for_its_whole_batch_is_named_and_no_mistake_of_the_mean(
    prove_script,
):
    coin = "(0.5 if random.random() < 0.5 else 1.0) * F.cross_entropy(ddp(x), y)"
    ended = prove_script(script(loss=coin))
    assert verdict(ended, "random decisions") == "warning"
    assert verdict(ended, "one rank") == "right"
    ended = prove_script(script(loss=coin.replace("random.random() < 0.5", "epoch % 2 == 0")))
    assert verdict(ended, "random decisions") not in ("warning", "WRONG"), "the control"


OWN_DRAW = """
import os
x, y = batch
loss = F.cross_entropy(ddp(x * os.urandom(1)[0]), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def test_ranks_that_do_not_reproduce_themselves_are_no_reason_for_a_verdict(
    prove_script,
):
    ended = prove_script(script(OWN_DRAW))
    assert verdict(ended, "one rank") == "not seen"
    assert "does not reproduce its own" in one_line(ended.stdout)
    assert ended.returncode == 4, "nothing is proven"
    ended = prove_script(script(OWN_DRAW.replace("os.urandom(1)[0]", "1.0")))
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0), "the control"


BATCHES = """
@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
Pair = namedtuple("Pair", "x y")
def collate(samples):
    x, y = (torch.stack(part) for part in zip(*samples))
    return {made}
"""
OF_A_CLASS = """
out, y = ddp(batch{x}), batch{y}
loss = {loss}
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("made", "x", "y"),
    [
        ("Record(x, y)", ".x", ".y"),
        ("Pair(x, y)", ".x", ".y"),
        ("UserDict(x=x, y=y)", "['x']", "['y']"),
        ("[(a, b) for a, b in zip(x, y)]", "__x", "__y"),
    ],
    ids=["dataclass", "namedtuple", "UserDict", "list"],
)
def test_the_script_itself_makes_one_batch_of_the_samples_of_all_ranks(made, x, y, prove_script):
    step = OF_A_CLASS.replace("{x}", x).replace("{y}", y)
    step = step.replace("batch__x", "torch.stack([s[0] for s in batch])")
    step = step.replace("batch__y", "torch.stack([s[1] for s in batch])")
    for loss, expected in (
        ("F.cross_entropy(out, y)", "right"),
        (f"F.cross_entropy(out, y{WEIGHT})", "WRONG"),  # the control
    ):
        setup = OPTIMIZER + BATCHES.replace("{made}", made)
        source = script(step.replace("{loss}", loss), setup=setup, collate=", collate_fn=collate")
        assert verdict(prove_script(source), "one rank") == expected


LBFGS = """
x, y = batch
def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(x), y{weight})
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / world_size
optimizer.step(closure)
"""
BY_HAND = """
x, y = batch
loss = F.cross_entropy(net(x), y{weight})
gradients = torch.autograd.grad(loss, list(net.parameters()))
for p, gradient in zip(net.parameters(), gradients):
    dist.all_reduce(gradient)
    {update}
"""
PARAMETER_SERVER = """
x, y = batch
net.zero_grad()
F.cross_entropy(net(x), y{weight}).backward()
for p in net.parameters():
    dist.reduce(p.grad, 0)
    p.grad /= world_size
if rank == 0:
    optimizer.step()
for p in net.parameters():
    dist.broadcast(p.data, 0)
"""
IN_STEP = OPTIMIZER.replace(
    "ddp = DDP(net)",
    """
class Exchanging(torch.optim.SGD):
    def step(self, closure=None):
        for p in net.parameters():
            other = torch.empty_like(p.grad)
            sends = dist.P2POp(dist.isend, p.grad.clone(), 1 - rank)
            pair = [sends, dist.P2POp(dist.irecv, other, 1 - rank)]
            for message in dist.batch_isend_irecv(pair) if world_size > 1 else []:
                message.wait()
            p.grad.add_(other if world_size > 1 else 0).div_(world_size)
        super().step()""",
).replace("torch.optim.SGD(ddp", "Exchanging(net")
CHANGES = {
    "messages in step": script(STEP.replace("{loss}", "F.cross_entropy(net(x), y{weight})"),
                               setup=IN_STEP),
    "rank 0": script(PARAMETER_SERVER, setup="optimizer = torch.optim.SGD(net.parameters(), 0.1)"),
    "LBFGS": script(LBFGS, setup=OPTIMIZER.replace("SGD(ddp.parameters(), 0.1)",
                                                   "LBFGS(ddp.parameters(), 0.1, max_iter=3)")),
    "data": script(BY_HAND.replace("{update}", "p.data.sub_(0.1 * gradient / world_size)"),
                   setup=""),
    "exchanged": script(
        BY_HAND.replace("{update}", "p.data = p.data - 0.1 * gradient / world_size"), setup=""),
    "foreach": script(
        BY_HAND.replace("{update}", "torch._foreach_sub_([p.data], [0.1 * gradient / world_size])"),
        setup=""),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_is_a_change_of_parameters_whoever_makes_it(name, prove_script):
    ended = prove_script(CHANGES[name].replace("{weight}", ""))
    assert verdict(ended, "one rank") == "right"
    assert verdict(ended, "accumulation").startswith("no row"), "LBFGS clears what it has computed"
    ended = prove_script(CHANGES[name].replace("{weight}", WEIGHT))  # the control
    assert verdict(ended, "one rank") == "WRONG"


SENT_IN_16_BITS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
ddp.register_comm_hook(None, bf16_compress_hook)"""


def test_gradients_may_be_sent_in_16_bits(prove_script):
    """They then differ by 0.3 %, which is no mistake, and a mistake is larger."""
    for loss, expected in ((MEAN, "right"), (f"{MEAN} / world_size", "WRONG")):
        ended = prove_script(script(loss=loss, setup=OPTIMIZER + SENT_IN_16_BITS))
        assert verdict(ended, "one rank") == expected


def test_in_float32_too_a_mistake_that_begins_later_is_seen(prove_script):
    for loss, expected in ((MEAN, "right"), (f"{MEAN} / world_size**epoch", "WRONG")):
        source = script(loss=loss)
        ended = prove_script(source, "--float32")
        assert verdict(ended, "one rank") == expected
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "cross_entropy" in text)
    text = one_line(ended.stdout)
    assert re.search(rf"one rank the gradient of step \d+ .+ most in \S+ \(train.py:{line}\)", text)


SKIPS = """
x, y = batch
loss = F.cross_entropy(ddp(x), y)
optimizer.zero_grad()
loss.backward()
worst = loss.detach().clone()
dist.all_reduce(worst, op=dist.ReduceOp.{over})
if epoch == 0 or worst / {divisor} < 1.1:
    optimizer.step()
"""


def test_a_step_that_is_skipped_by_the_worst_rank_may_be_meant_so(prove_script):
    step = SKIPS.replace("{over}", "MAX").replace("{divisor}", "1")
    ended = prove_script(script(step))
    assert (verdict(ended, "one rank"), ended.returncode) == ("warning", 4)
    step = SKIPS.replace("{over}", "SUM").replace("{divisor}", "world_size")
    ended = prove_script(script(step))
    assert verdict(ended, "one rank") == "right", "the control: one rank knows the mean"


TEACHER = """
teacher = nn.Linear(6, 3)
for p in teacher.parameters():
    dist.broadcast(p.data, 0)
"""


SECOND_NET = """
net, net2 = nn.Linear(6, 3), nn.Linear(6, 3)
weight = torch.tensor([1.0, 3.0, 9.0])
class Averaging(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= world_size
        super().step()
"""
OPTIMIZERS = {
    "two optimizers": """
ddp, ddp2 = DDP(net), DDP(net2)
optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (ddp, ddp2)]
""",
    "one that averages in its step": """
ddp, ddp2 = net, net2
optimizers = [Averaging([*net.parameters(), *net2.parameters()], 0.1)]
""",
}
WARM_UP = """
x, y = batch
total = weight[y].sum()
dist.all_reduce(total)
second = F.cross_entropy(ddp2(x), y, weight=weight, reduction="sum") * world_size / total
loss = F.cross_entropy(ddp(x), y) + min(epoch, 1) * second
for each in optimizers:
    each.zero_grad()
loss.backward()
for each in optimizers:
    each.step()
"""


@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_has_no_gradient_at_first_is_compared_when_it_has(optimizers, prove_script):
    """A loss whose weight is 0 in the first epoch: as a warm-up, or a GAN."""
    source = script(WARM_UP, setup=SECOND_NET + optimizers)
    local = source.replace("dist.all_reduce(total)", "total *= world_size")
    for text, expected in ((source, "right"), (local, "WRONG")):
        assert verdict(prove_script(text), "one rank") == expected


def test_a_run_without_dropout_does_not_say_that_the_ranks_drop_alike(prove_script):
    """Rank 1 was left in eval mode. The controls, in which all ranks drop, are above."""
    ended = prove_script(script(loss="F.cross_entropy(ddp(F.dropout(x, 0.3, rank == 0)), y)"))
    assert verdict(ended, "one rank") == "not seen"


CRITIC = """
net = nn.Linear(6, 1, bias=False)
nn.init.zeros_(net.weight)
ddp = DDP(net)
optimizer = torch.optim.Adam(net.parameters(), 0.02)
"""
CLIPPED = STEP + "net.weight.data.clamp_(-{limit}, {limit})"


def test_weights_that_the_script_changes_between_steps_are_no_rounding(prove_script):
    """The gradients of a linear critic do not depend on its weights, and Adam may let rounding
    grow. The control: a limit that does not depend on the ranks."""
    for limit, expected in (("0.06 / world_size", "WRONG"), ("0.03", "right")):
        clipped = CLIPPED.replace("{limit}", limit)
        ended = prove_script(
            script(clipped.replace("{loss}", "((2 * y - 1.0) * ddp(x)[:, 0]).mean()"), setup=CRITIC)
        )
        assert verdict(ended, "one rank") == expected


def test_modules_that_no_optimizer_holds_begin_as_they_were(prove_script):
    loss = "(ddp(x) - teacher(x).detach()).square().mean()"
    setup = "torch.seed()" + TEACHER + OPTIMIZER
    ended = prove_script(script(loss=loss, setup=setup))
    assert verdict(ended, "one rank") == "right"
    ended = prove_script(script(loss=loss.replace("mean()", "sum() / (9 + rank)"), setup=setup))
    assert verdict(ended, "one rank") == "WRONG", "the control: another number than all samples"


def test_many_micro_batches_make_one_step_and_twelve_steps_are_seen(prove_script):
    step = """
x, y = batch
count = globals().get("count", 0) + 1
(F.cross_entropy(ddp(x), y) / 3).backward()
if count % 3 == 0:
    optimizer.step()
    optimizer.zero_grad()
"""
    data = "data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))"
    source = script(step).replace(data, data.replace("48", "96"))
    ended = prove_script(source)
    assert "after step 12" in one_line(ended.stdout)
    assert verdict(ended, "one rank") == "right"
    ended = prove_script(source.replace("/ 3)", "/ len(x.unique()))"))
    assert verdict(ended, "one rank") == "WRONG", "the control"


def test_an_error_that_the_script_has_only_under_observation_is_prove_s_own(
    prove_script,
):
    source = (
        script() + "if random.Random.__module__ != 'random': raise RuntimeError('my mistake')\n"
    )
    ended = prove_script(source.replace("range(3)", "range(1)"))
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "my mistake" in ended.stderr.splitlines()[-1]
    ended = prove_script("raise RuntimeError('my mistake')\n" + source)
    assert ended.returncode == 2, "the control: it fails by itself"
