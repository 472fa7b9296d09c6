"""prove judges a model: its gradients, its random numbers, its schedule, and what it decides."""

import math
import re
import sys
from collections.abc import Callable

from prove.checks import averaged_gradients
from prove.checks.base import CheckContext
from prove.judge.explain_difference import advice_against_rounding
from prove.judge.rank_steps import StepOfRanks
from prove.judge.reasons import Phrase, Reason
from prove.judge.replay import Precision
from prove.judge.replay_reasons import ReplayReason
from prove.judge.replay_schedule import Schedule, row_of_length
from prove.rank_record import (
    Flag,
    OptimizerRecord,
    OptimizerStep,
    RankRecord,
    RunOutcome,
    ScheduleRecord,
)
from prove.watch.schedule import length_of
from prove_cases import planted, training_of
from prove_runs import one_line, verdict

NO_BACKWARD = "has no backward"


def test_an_optimizer_that_is_made_anew_in_each_epoch_is_compared_in_the_first(prove_script):
    """The control: a loss that is not averaged."""
    epoch = "        sampler.set_epoch(epoch)\n"
    anew = (epoch, epoch + "        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)\n")
    ended = prove_script(planted(anew))
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0)
    loss = "F.cross_entropy(ddp(points), labels)"
    ended = prove_script(planted(anew, (loss, f"{loss} * len(labels)")))
    assert verdict(ended, "one rank") == "WRONG"
    assert NO_BACKWARD not in ended.stdout, "the control of the last test below"


SHARDED = """
class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.parts.values(), self):
            fully_shard(part, mesh=mesh)
    def forward(self, x):
        return self.parts["two"](self.parts["one"](x).relu())
"""


def test_a_script_with_fully_shard_is_compared_with_one_rank(prove_script):
    source = training_of("Sharded()", SHARDED)
    ended = prove_script(source)
    assert verdict(ended, "samples") == verdict(ended, "collectives") == "right"
    assert verdict(ended, "weights") == verdict(ended, "one rank") == "right"
    ended = prove_script(source.replace("mean()", "sum()"))  # the control
    assert verdict(ended, "one rank") == "WRONG"


CODES = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        z = self.encoder(x)
        hits = F.one_hot(torch.cdist(z, self.table).argmin(1), 5).to(z.dtype)
        found = hits @ self.table
        sums, counts = hits.t() @ z.detach(), hits.sum(0)
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(counts)
        means = (sums / counts.clamp(min=1)[:, None]).detach()
        self.table = nn.Parameter(self.table.detach() / 2 + means / 2)
        return self.decoder(z + (found - z).detach()), F.mse_loss(z, found.detach())

START
torch.manual_seed(0)
data, model = torch.randn(48, 6), Codes()
WRAP
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(3):
    for x in LOADER:
        optimizer.zero_grad()
        out, near = model(x)
        (F.mse_loss(out, x) + near).backward()
        optimizer.step()
"""
REPLACES = "self.table = nn.Parameter(self.table.detach() / 2 + means / 2)"
IN_PLACE = "self.table.data = self.table.data / 2 + means / 2"
WRAPPED = "model = DistributedDataParallel(model, find_unused_parameters=True)"
DEALT_OUT = "DataLoader(data, 4, sampler=DistributedSampler(data, seed=epoch))"


def of_one_process(source):
    return source.replace("START", "").replace("WRAP", "").replace("LOADER", "DataLoader(data, 8)")


def of_ranks(source):
    source = source.replace("START", 'dist.init_process_group("gloo")').replace("WRAP", WRAPPED)
    return source.replace("LOADER", DEALT_OUT)


def test_a_parameter_is_what_the_model_holds_in_its_place_now(prove_script, tmp_path):
    """A codebook without a gradient may be replaced in each forward, or changed in place."""
    (tmp_path / "single.py").write_text(of_one_process(CODES))
    original = f"--original={sys.executable} single.py"
    in_place = of_ranks(CODES.replace(REPLACES, IN_PLACE))
    ended = prove_script(in_place, original)
    assert (verdict(ended, "the original"), ended.returncode) == ("right", 0)
    slower = in_place.replace("/ 2 + means / 2", "* 0.6 + means * 0.4")
    ended = prove_script(slower, original)  # the control
    assert verdict(ended, "the original") == "WRONG"


def test_what_was_put_in_a_parameter_s_place_is_compared_between_the_ranks(prove_script):
    replaces = of_ranks(CODES)
    ended = prove_script(replaces)
    assert verdict(ended, "optimizer") == verdict(ended, "weights") == "right"
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0)
    ended = prove_script(replaces.replace("dist.all_reduce(sums)", "pass"))  # the control
    assert verdict(ended, "weights") == "WRONG"
    assert "table" in ended.stdout
    assert "frozen" not in ended.stdout


def test_a_parameter_that_the_optimizer_has_lost_is_named_although_the_model_trains(prove_script):
    lost = "optimizer = torch.optim.Adam(model.parameters(), 1e-2)\n"
    lost += "model.module.encoder.weight = nn.Parameter(torch.ones(4, 6))\n"
    lost += "model.module.encoder.bias = nn.Parameter(torch.ones(4))\n"
    source = of_ranks(CODES)
    line = lost.splitlines()[0] + "\n"
    ended = prove_script(source.replace(line, lost))
    assert verdict(ended, "optimizer") == "warning"
    assert "encoder.bias" in ended.stdout
    of_another = source.replace("Adam(model.parameters()", "Adam(Codes().parameters()")
    ended = prove_script(of_another)
    assert verdict(ended, "optimizer") == "WRONG"


AVERAGED = """
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
second, ddp = copy.deepcopy(net), DistributedDataParallel(net)
optimizer, sampler = torch.optim.SGD(net.parameters(), 0.1), DistributedSampler(data)
loader, valid = DataLoader(data, 4, sampler=sampler), DataLoader(data, 48)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sampler.set_epoch(epoch + 10)
    net.eval()
    for x, y in valid:  # with gradients, which nobody uses
        F.cross_entropy(net(x), y).item()
    net.train()
    for old, new in zip(second.parameters(), net.parameters()):
        old.data.lerp_(new.data, 1 / (epoch + 1))
    for x, y in loader:
        second(x)
"""
BY_HAND = """
        F.cross_entropy(second(x), y).backward()
        for p in second.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        for p in second.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None
"""


def test_a_model_without_a_backward_is_not_trained_by_being_called_in_training(prove_script):
    ended = prove_script(AVERAGED)
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0)
    assert "no gradient in common" not in ended.stdout
    by_hand = AVERAGED.replace("\n        second(x)\n", BY_HAND)  # the control: it is trained
    ended = prove_script(by_hand)
    assert len(re.findall("^right     one rank", ended.stdout, re.M)) == 2
    assert (verdict(ended, "one rank"), ended.returncode) == ("right", 0)
    ended = prove_script(
        by_hand.replace("second(x), y)", "second(x), y, weight=torch.tensor([1.0, 3.0, 9.0]))")
    )
    assert verdict(ended, "one rank") == "WRONG"


DECIDES = """
import copy, logging, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 4)
data, valid = TensorDataset(x, x.sum(1, keepdim=True)), torch.randn(30, 4)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
valid_loader = DataLoader(valid, 5, sampler=range(rank, len(valid), world_size))
ddp = DistributedDataParallel(nn.Linear(4, 1))
average = copy.deepcopy(ddp.module)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
batches = len(loader)
by_batch = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * batches)
by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(6):
    loader.sampler.set_epoch(epoch)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(points), labels).backward()
        optimizer.step()
        by_batch.step()
        with torch.no_grad():
            for own, trained in zip(average.parameters(), ddp.module.parameters()):
                own.lerp_(trained, 0.5)
    with torch.no_grad():
        sums = torch.stack([torch.stack([average(p).sum(), torch.tensor(len(p))])
                            for p in valid_loader]).sum(0)
    dist.all_reduce(sums)
    metric = float(sums[0] / sums[1])
    by_metric.step(metric)
    if rank == 0:
        clocks = time.time() % 1, time.perf_counter() % 1  # one of them is never equal by chance
        logging.info("epoch %d: height %.4f, clocks %.6f and %.6f", epoch, metric, *clocks)
"""


def test_what_is_evaluated_logged_and_decided_by_is_compared(prove_script):
    """Beside a schedule that is counted in batches. The control: the script as it is."""
    changes = (
        ("    own.lerp_(", "    rank or own.lerp_("),
        ("    dist.all_reduce(sums)\n", ""),
        ("batches = len(loader)", "batches = len(data) // 4"),
    )
    source = DECIDES
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    checks = ("evaluated model", "learning rate by rank", "printed numbers", "schedule")
    ended, ended_right = prove_script(source), prove_script(DECIDES)
    assert [verdict(ended, check) for check in checks] == ["warning"] * 4
    assert [verdict(ended_right, check) for check in checks] == ["right"] * 4
    one_rank = verdict(ended, "one rank"), verdict(ended_right, "one rank")
    assert one_rank == ("right", "right")
    text = one_line(ended.stdout)
    assert "height" in text
    assert "144 batches on any number of ranks: 12 epochs of 12 batches on 2 ranks, 6 of" in text
    assert "clocks" not in text, "a time is no result"


def test_hooks_below_the_gradients_stay_where_the_script_has_put_them(prove_script):
    """Hooks sit on nodes that add to p.grad, which a new dtype makes anew. The control: no hook."""
    source = training_of("nn.Linear(8, 8)").replace("model(x)", "model(x.to(model.weight.dtype))")
    begins = "torch.manual_seed(dist.get_rank())\n"
    hooks = """
nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
for p, node in zip(model.parameters(), nodes):
    node.register_hook(lambda *_, p=p: average(p))
"""
    by_data = "for p in model.parameters():\n    p.data = p.data.to(torch.bfloat16)\n"
    for smaller in ("", "model.bfloat16()\n", by_data):
        ended = prove_script(source.replace(begins, smaller + hooks + begins))
        assert verdict(ended, "averaged gradients") == "right"
    assert verdict(prove_script(source), "averaged gradients") == "WRONG"


def test_equal_dropout_masks_are_not_called_different_in_another_row(prove_script):
    """The control: masks of each rank."""
    for seed, expected in (("1", ("warning", "no row")), ("rank + 1", ("right", "right"))):
        one_seed = ("    torch.manual_seed(rank + 1)", f"    torch.manual_seed({seed})")
        ended = prove_script(planted(one_seed))
        for check, said in zip(("dropout", "random numbers"), expected, strict=True):
            assert verdict(ended, check).startswith(said)


def test_gradients_that_are_no_numbers_are_not_called_zero(prove_script):
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    bad_sample = source.replace("model = ", "data[5] = float('nan')\nmodel = ", 1)
    ended = prove_script(bad_sample)
    assert verdict(ended, "finite gradients") == "warning"
    assert verdict(ended, "zero gradients").startswith("no row")
    ended = prove_script(source.replace("x).square()", "x * 0).square()"))  # the control
    assert verdict(ended, "finite loss").startswith("no row")
    assert verdict(ended, "finite gradients").startswith("no row")


def test_a_loss_that_is_no_number_is_seen_also_where_its_gradients_are_finite(prove_script):
    """The test above has its control."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "backward()" in text)
    ended = prove_script(source.replace("mean().backward", "mean().add(x[:0].mean()).backward"))
    assert verdict(ended, "finite loss") == "warning"
    assert f"the loss is nan at train.py:{line}, first before step 1" in ended.stdout
    assert verdict(ended, "finite gradients").startswith("no row")


def test_a_momentum_and_an_end_that_depend_on_the_ranks_are_named(prove_script):
    """One rank is given the momentum of the ranks, and has no more batches to compare after its
    end. The last one is the control: an end that depends on the samples of all ranks."""
    counts = ("    for epoch in", "    seen = 0\n    for epoch in")
    step = "            total += "
    count = "            seen += len(points) * world_size\n            if seen >= 72:\n"
    stops = f"{count}                raise SystemExit\n{step}"
    for said, changes in {
        "momentum 0.95 on 2 ranks and 0.9 on one": [
            ("momentum=0.9", "momentum=1 - 0.1 / world_size")
        ],
        "after 6 batches, 2 ranks still train, and one has ended after 3": [
            counts,
            (step, stops.replace(" * world_size", "").replace("72", "36")),
        ],
        "the learning rates of one rank": [counts, (step, stops)],
    }.items():
        ended = prove_script(planted(*changes))
        assert said in one_line(ended.stdout)
        assert "0 WRONG" in ended.stdout


def test_the_length_of_a_schedule_is_that_of_its_curve():
    def steps(factor: Callable[[int], float], n: int = 400) -> int | None:
        return length_of([factor(step) for step in range(n)], n == 61)

    def linear(step: int) -> float:
        return min(step / 10, max(0.0, (100 - step) / 90))

    assert steps(linear) == 100
    assert steps(lambda step: min(1.0, step / 10)) == 10, "a warm-up"
    assert steps(lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 60)) == 60, "and up again"
    assert steps(lambda step: 0.1 ** ((step >= 50) + (step >= 80))) == 80
    assert steps(linear, 61) == 60, "then it refuses, as OneCycleLR does"
    assert steps(linear, 62) is None, "it still falls"
    assert steps(lambda step: 0.5**step) is None, "it falls for ever"
    assert steps(lambda step: 1.0) is None
    assert steps(lambda step: -step) is None, "resumed past its end"


def test_a_rank_that_ddp_stops_is_named_with_what_it_left_out(prove_script):
    model = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.one(x) + (self.two(x) if CONDITION else 0)
"""
    source = training_of("DistributedDataParallel(Heads())", model)
    ended = prove_script(source.replace("CONDITION", "dist.get_rank() == 0"))
    assert verdict(ended, "unused parameters") == "WRONG"
    assert "on rank 1, some parameters got no gradient" in ended.stdout
    ended = prove_script(source.replace("CONDITION", "True"))  # the control
    assert verdict(ended, "unused parameters").startswith("no row")


def test_a_schedule_is_compared_with_the_batches_of_its_rank():
    def row(
        batches: int, batches_of_one: int, rate_of_one: float = 0.1
    ) -> tuple[str, Reason] | None:
        of_ranks, of_one = (
            Schedule(ScheduleRecord("", "?", highest_rate=rate), length, per_epoch)
            for rate, length, per_epoch in ((0.1, batches, 16), (rate_of_one, batches_of_one, 32))
        )
        row = row_of_length(of_ranks, of_one, 2)
        return row and (row.verdict, row.reason)

    assert row(160, 160) == ("warning", ReplayReason.SCHEDULE_IGNORES_LOADER)
    assert row(80, 160) == ("right", ReplayReason.SCHEDULE_FOLLOWS_LOADER)
    assert row(80, 160, 0.2) == ("warning", ReplayReason.HIGHEST_RATE_DIFFERS)
    assert row(10, 10) is None, "a warm-up says nothing"
    assert row(48, 48) is None, "three epochs on two ranks, and one and a half on one"


def test_what_has_become_of_the_mean_is_told_from_what_each_rank_computed():
    local = [[1.0, 2.0, -1.0, 3.0], [3.0, -2.0, 2.0, 1.0]]

    def reason(gradients: list[float], *flags: Flag) -> Reason:
        projections = [(gradient, 4.0) for gradient in gradients]
        steps = [
            OptimizerStep("?", 1, 0, 4, [], 1.0, "torch.float64", [], projections, [*own], False)
            for own in local
        ]
        record = RankRecord(flags=dict.fromkeys(flags, "train.py:8"))
        context = CheckContext(RunOutcome(0, "", False, False, [record], 1.0))
        context.steps = [StepOfRanks(OptimizerRecord("?", False), 1, steps, 0.0)]
        [row] = averaged_gradients.judge(context)
        assert "{" not in row.evidence
        return row.reason

    mean = [2.0, 0.0, 0.5, 2.0]
    assert reason(mean) == reason(mean, Flag.CLIPS) == averaged_gradients.Sentence.MEAN_OF_RANKS
    assert reason([2 * value for value in mean]) == averaged_gradients.Sentence.SUM_OF_RANKS
    assert reason([0.75 * a + 0.25 * b for a, b in zip(*local, strict=True)]) == (
        averaged_gradients.Sentence.WEIGHTED_SUM
    )
    assert reason([value / 4 for value in mean], Flag.CLIPS) == averaged_gradients.Sentence.CLIPPED
    assert reason([value / 4 for value in mean]) == averaged_gradients.Sentence.CHANGED_BEFORE_STEP
    by_value = [min(value, 0.6) for value in mean]
    assert reason(by_value, Flag.CLIPS) == averaged_gradients.Sentence.CLIPPED_APART
    assert reason(by_value) == averaged_gradients.Sentence.NO_MULTIPLE_OF_MEAN


def test_what_is_advised_against_rounding_is_not_what_was_already_done():
    def advice(run_in: Precision, in_float64: bool) -> str:
        return advice_against_rounding(run_in, in_float64)["words"]

    assert advice(Precision.FLOAT64, True) == Phrase.ALLOW_FLOAT32
    assert advice(Precision.FLOAT64, False) == Phrase.SEND_IN_FLOAT64
    assert advice(Precision.AS_ASKED, True) == Phrase.COMPUTE_IN_FLOAT64
    assert advice(Precision.AS_ASKED, False) == Phrase.LEAVE_OUT_FLOAT32
    assert advice(Precision.AS_FAILED, False) == Phrase.KEPT_IN_FLOAT32


def test_a_sum_over_the_ranks_that_has_no_backward_is_named_with_its_line(prove_script):
    """The control, a loss that nobody sums, is in the first test of this file."""
    loss = "F.cross_entropy(ddp(points), labels)"
    of_sum = planted((loss, "F.cross_entropy(ddp(points), labels, reduction='sum') / 12"))
    zero_grad = "            optimizer.zero_grad()\n"
    ended = prove_script(
        of_sum.replace(zero_grad, f"            dist.all_reduce(loss)\n{zero_grad}")
    )
    assert verdict(ended, "one rank") == "WRONG"
    assert f"sums the loss over the ranks, but {NO_BACKWARD}" in one_line(ended.stdout)
