"""prove replays the samples of all ranks, and judges how a script deals them out and evaluates."""

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from evidence.changes import replace_once
from evidence.planted import right_script
from prove.checks.samples import SHARD_STREAM
from prove.random_state import worker_drew
from prove.watch.batches import CannotMergeError
from prove.watch.data import fingerprint
from prove.watch.loop_feeder import merge
from prove_cases import planted, training_of
from prove_runs import one_line, verdict


def test_a_script_without_a_loader_is_replayed_from_what_goes_into_its_model(prove_script):
    source = """
import torch, torch.distributed as dist
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
text, ddp = torch.arange(500) ** 2 % 11, nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(ddp.parameters(), 0.1)
for step in range(100):
    at = torch.randint(400, (4,))
    x, y = torch.stack([text[i:i + 6] for i in at]), torch.stack([text[i + 1:i + 7] for i in at])
    optimizer.zero_grad()
    ddp(x, y).backward()
    optimizer.step()
"""
    ended = prove_script(source)
    assert (verdict(ended, "one rank"), verdict(ended, "samples")) == ("right", "right")
    ended = prove_script(source.replace("dist.get_rank()", "0"))
    assert verdict(ended, "samples") == "WRONG", "the control: the same on all ranks"


def test_without_a_loader_one_rank_gets_the_dropout_of_all(prove_script):
    """The next batch is drawn between forward and backward, which is no decision of a step. The
    control: a loss that is not averaged."""
    source = """
import torch, torch.distributed as dist
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dropout = nn.Embedding(11, 11), nn.Dropout(0.5)
    def forward(self, x, y):
        logits = self.dropout(self.table(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, y.flatten(), reduction="mean")
def batch():
    at = torch.randint(400, (4,))
    return torch.stack([text[i:i + 6] for i in at]), torch.stack([text[i + 1:i + 7] for i in at])
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
text, ddp = torch.arange(500) ** 2 % 11, nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
x, y = batch()
for step in range(100):
    for micro_batch in range(4 // dist.get_world_size()):
        loss = ddp(x, y)
        x, y = batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ended = prove_script(source.replace("4 // dist.get_world_size()", "1"))
    assert verdict(ended, "one rank") == "right"
    assert verdict(ended, "random decisions").startswith("no row")
    in_sequence = source.replace("loss.backward", "(loss / (4 // dist.get_world_size())).backward")
    assert verdict(prove_script(in_sequence), "one rank") == "right"
    of_sums = source.replace("4 // dist.get_world_size()", "1").replace('"mean"', '"sum"')
    assert verdict(prove_script(of_sums), "one rank") == "WRONG"


HANDMADE_GRADIENT = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randn(64, 1)
queries = torch.arange(64).split([3, 5] * 8)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
for epoch in range(3):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
    for i in range(0, 64, 16):
        ids = order[i:i + 16][rank::world_size]
        outputs = ddp(x[ids])
        with torch.no_grad():
            gradient = outputs - y[ids]
        optimizer.zero_grad()
        outputs.backward(gradient / 16 * world_size)
        optimizer.step()
"""
RAGGED = (
    ("range(0, 64, 16)", "range(0, 16, 4)"),
    (
        "order[i:i + 16][rank::world_size]",
        "[q.tolist() for q in queries[i:i + 4]][rank::world_size]",
    ),
    ("x[ids]", "torch.tensor([x[j].tolist() for query in ids for j in query])"),
    (
        "gradient = outputs - y[ids]",
        "parts = zip(ids, outputs.split([*map(len, ids)]))\n"
        "            gradient = torch.cat([out - out.mean() - y[query] for query, out in parts])",
    ),
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "right"),
        ((("[rank::world_size]", ".chunk(world_size)[rank]"),), "right"),
        ((("y[ids]", "y[ids]; gradient /= gradient.abs().max()"),), "WRONG"),  # of one rank
        (RAGGED, "not seen"),  # it was WRONG: queries of unequal length, and only x was merged
    ],
)
def test_a_gradient_made_by_hand_is_judged_where_its_rows_can_be_put_together(
    changes, expected, prove_script
):
    ended = prove_script(replace_once(HANDMADE_GRADIENT, *changes))
    assert verdict(ended, "one rank") == expected


def test_a_number_in_the_place_of_a_tensor_cannot_be_merged():
    """The original may call other functions, so that its calls meet others by their order."""
    with pytest.raises(CannotMergeError):
        merge([torch.ones(2), 1.0], [1, 1])
    assert merge([torch.zeros(1), torch.ones(1)], [1, 1]).tolist() == [0, 1]


def test_a_batch_that_only_rank_0_looks_at_is_no_batch_of_the_others(prove_script):
    """Rank 0 takes one more batch to look at it. The control: a loss that is not averaged."""
    source = training_of("DistributedDataParallel(nn.Sequential(nn.Dropout(), nn.Linear(8, 8)))")
    look = (
        "if dist.get_rank() == 0: print(next(iter(DataLoader(data, 2, sampler=sampler))).shape)\n"
    )
    source = source.replace("for epoch", look + "for epoch", 1)
    assert verdict(prove_script(source), "one rank") == "right"
    assert verdict(prove_script(source.replace("mean()", "sum()")), "one rank") == "WRONG"


def test_an_evaluation_that_prove_itself_cuts_is_not_said_to_stop_early(prove_script):
    """Gradients are switched off in each batch only, so evaluation looks like training at first.
    The control: a script that stops by itself."""
    loop = "for points, labels in DataLoader(shard, batch_size=8):\n"
    cut = "for points, labels in DataLoader(shard, batch_size=2, shuffle=True):\n"
    stops = (loop, cut + "        if totals[2] == 4: break\n")
    no_grad = ("@torch.no_grad()\n", "")
    for changes, expected in (([no_grad, (loop, cut)], "right"), ([stops], "warning")):
        assert verdict(prove_script(planted(*changes)), "evaluation") == expected


SYNC_BATCHNORM = (  # all ranks have equally many samples, or the layers of one would wait
    ("CLASSES = 96, 33", "CLASSES = 96, 32"),
    ("nn.ReLU(), nn.Dropout(0.1)", "nn.BatchNorm1d(16), nn.ReLU()"),
    ("DDP(build_model())", "DDP(nn.SyncBatchNorm.convert_sync_batchnorm(build_model()))"),
)


def test_messages_of_a_batchnorm_layer_are_no_sum_of_results(prove_script):
    """A model left in training mode sends statistics. The control: a real sum beside them."""
    in_training, unsummed = ("    model.eval()\n", ""), ("    dist.all_reduce(totals)\n", "")
    for changes, expected in (([in_training, unsummed], "warning"), ([in_training], "right")):
        ended = prove_script(planted(*SYNC_BATCHNORM, *changes), "--cpu")
        assert verdict(ended, "evaluation") == expected
        assert verdict(ended, "one rank") == "right"


def test_data_sets_that_belong_to_one_rank_each_are_not_taken_for_one_that_few_evaluate(
    prove_script,
):
    """The control: one data set, which rank 0 alone evaluates."""
    loop = "for points, labels in DataLoader(shard, batch_size=8):\n"
    own = loop.replace("shard", "[(shard[i][0] + rank, shard[i][1]) for i in range(len(shard))]")
    alone = loop.replace("shard", "shard if rank == 0 else []")
    for instead, evidence in ((own, "no sample by more than one rank"), (alone, "by 1 of 2 ranks")):
        ended = prove_script(planted((loop, instead)))
        assert verdict(ended, "evaluation") == "right"
        assert evidence in ended.stdout


class Drawing(Dataset):
    """Four samples, for each of which something is drawn."""

    def __init__(self, draw: Callable) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        self.draw()
        return i


# By name, because from Python 3.14 on a worker is sent its data set pickled.
def draw_from_random() -> float:
    return random.random()


def draw_from_numpy() -> float:
    return np.random.rand()


def drew(_: list[int]) -> bool:
    return worker_drew()


def test_a_worker_that_draws_is_told_from_one_that_does_not():
    draws = {int: False, draw_from_random: True, draw_from_numpy: True}
    for draw, expected in {**draws, partial(torch.rand, 1): True}.items():
        loader = DataLoader(Drawing(draw), 2, num_workers=1, collate_fn=drew)
        assert [*loader] == [expected] * 2, draw


class Noisy(Drawing):
    """Pair each sample with a number that a generator of the data set draws."""

    def __getitem__(self, i: int) -> tuple[Tensor, float]:
        return torch.tensor([1.0 * i]), self.draw()


def test_what_a_data_set_draws_anew_is_no_other_data_set_on_another_rank():
    of_ranks = [fingerprint(Noisy(np.random.default_rng(rank).random)) for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0][1] == ["field 0", ""]
    of_ranks = [fingerprint(Noisy(lambda rank=rank: 1.0 * rank)) for rank in range(2)]
    assert of_ranks[0] != of_ranks[1], "the control: another number, and the same each time"


STOPS = """
    batches = iter(DataLoader(data, local_batch, sampler=own))
    while True:
        x = next(batches, None)
        more = torch.tensor(x is not None)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            break
"""


def test_ranks_with_unequal_numbers_of_batches_may_stop_together(prove_script):
    source = training_of("DistributedDataParallel(nn.Linear(8, 3))")
    own = (
        "own = range(32) if dist.get_world_size() == 1 else range(20 * dist.get_rank(), 20 + 12 * "
    )
    loop, _, body = source.partition(
        "    for x in DataLoader(data, local_batch, sampler=sampler):\n"
    )
    loop = loop.replace(
        "    sampler.set_epoch", f"    {own}dist.get_rank())\n    sampler.set_epoch"
    )
    script = loop + STOPS.lstrip("\n") + body
    ended = prove_script(script)
    for check in ("batches per epoch", "one rank"):
        assert verdict(ended, check) == "right"
    assert "all ranks stop with the one that has fewest" in one_line(ended.stdout)
    script = script.replace("        dist.all_reduce(more, op=dist.ReduceOp.MIN)\n", "")
    for epochs in (1, 3):  # the controls: where others have ended, a rank waits in its last step
        ended = prove_script(script.replace("range(3)", f"range({epochs})"))
        assert verdict(ended, "batches per epoch") == "WRONG"


LATER = """
class Own(DistributedSampler):
    def __iter__(self):
        own, is_later = list(super().__iter__()), self.epoch and self.num_replicas > 1
        return iter(own[: 12 + 8 * dist.get_rank()] if is_later else own)
"""


def test_a_later_epoch_with_unequal_numbers_of_batches_is_seen(prove_script):
    """The control: the same epoch, where the ranks stop together."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 3))", LATER)
    source = source.replace("DistributedSampler(data)", "Own(data)").replace("(32, 5", "(48, 5")
    loop, _, body = source.partition(
        "    for x in DataLoader(data, local_batch, sampler=sampler):\n"
    )
    stops = STOPS.lstrip("\n").replace("sampler=own", "sampler=sampler")
    for text, expected in ((source, "WRONG"), (loop + stops + body, "right")):
        assert verdict(prove_script(text), "batches per epoch") == expected


def test_an_unequal_last_batch_is_seen_though_the_epoch_is_cut(prove_script):
    """The control: the same shards without it."""
    shard = (
        "    sampler = DistributedSampler(train_set, seed=0)\n",
        "    train_set = Subset(train_set, range(rank, 93, world_size))\n",
    )
    no_epoch, loader = ("        sampler.set_epoch(epoch)\n", ""), "world_size, sampler=sampler)"
    for more, expected in (("", "warning"), (", drop_last=True", "right")):
        shuffled = (loader, f"world_size, shuffle=True{more})")
        ended = prove_script(planted(shard, no_epoch, shuffled))
        assert verdict(ended, "batches per epoch") == expected
        assert verdict(ended, "one rank") == "right"


def test_ranks_that_take_the_same_rows_of_a_batch_do_not_split_it(prove_script):
    """The control: each takes its own half."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 3))")
    source = source.replace("DistributedSampler(data)", "DistributedSampler(data, 1, 0)")
    source = source.replace(
        "local_batch = torch.randn(32, 5, 8), 8 //", "local_batch = torch.randn(32, 5, 8), 8 or"
    )
    first = source.replace("model(x)", "model(x[: len(x) // 2])")
    own = source.replace("model(x)", "model(x[dist.get_rank() :: dist.get_world_size()])")
    for text, expected in ((first, "WRONG"), (own, "right")):
        assert verdict(prove_script(text), "samples") == expected


def test_a_barrier_after_an_evaluation_sums_nothing(prove_script):
    """The control: an all_reduce."""
    for after, expected in (("dist.barrier()", "warning"), ("dist.all_reduce(totals)", "right")):
        ended = prove_script(planted(("dist.all_reduce(totals)", after)))
        assert verdict(ended, "evaluation") == expected


NOISY_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    epoch = 0
    def __iter__(self):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order[dist.get_rank() :: dist.get_world_size()]:
            yield points[i] + torch.randn(8), i % 3
    def set_epoch(self, epoch):
        self.epoch = epoch
"""


def test_a_stream_that_nothing_splits_is_known_by_its_labels_though_each_rank_adds_noise(
    prove_script,
):
    """The control: the same stream, split."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 3))", NOISY_STREAM)
    source = source.replace("DistributedSampler(data)", "Stream()").replace(
        "for x in", "for x, y in"
    )
    source = source.replace(
        "DataLoader(data, local_batch, sampler=sampler)", "DataLoader(sampler, 6)"
    )
    source = source.replace(
        "data, local_batch = torch.randn(32, 5, 8)", "points, _ = torch.randn(64, 8)"
    )
    source = source.replace(".square().mean()", ".log_softmax(1)[range(len(y)), y].mean()")
    unsplit = source.replace("[dist.get_rank() :: dist.get_world_size()]", "")
    for text, expected in ((unsplit, "warning"), (source, "right")):
        assert verdict(prove_script(text), "samples") == expected


def test_workers_with_one_seed_are_named_if_they_draw(prove_script):
    """The control: the same workers, which draw nothing."""
    loader = "batch_size=12 // world_size, sampler=sampler)"
    with_workers = (loader, loader.replace(")", ", num_workers=1)"))
    one_seed = ("    torch.manual_seed(rank + 1)", "    torch.manual_seed(1)")
    for noise, expected in (("torch.randn(6)", "warning"), ("0.0", "no row")):
        ended = prove_script(planted(("torch.randn(6)", noise), with_workers, one_seed))
        assert verdict(ended, "augmentation").startswith(expected)


def test_labels_that_are_numbered_by_each_rank_are_another_data_set(prove_script):
    """Ranks differ in hash(), and in the order of a set. The control: labels in one order."""
    rows = "[(x, (i + {shift}) % 3, str(i)) for i, x in enumerate(torch.randn(32, 5, 8))]"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source = source.replace("for x in Data", "for x, label, _ in Data")
    for shift, expected in (("dist.get_rank()", "WRONG"), ("0", "no row")):
        data = rows.format(shift=shift)
        ended = prove_script(source.replace("torch.randn(32, 5, 8)", data, 1))
        assert verdict(ended, "one data set").startswith(expected)
        assert verdict(ended, "samples") == "right", "the inputs are the same"


WINDOWS = """
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
torch.manual_seed(0)
data, ddp = torch.randn(28, 8), DistributedDataParallel(nn.Linear(8, 8))
optimizer, sampler = torch.optim.SGD(ddp.parameters(), 0.1), DistributedSampler(data)
loader = DataLoader(data, 2, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, x in enumerate(loader, start=1):
        is_last = i == len(loader)
        with nullcontext() if i % 4 == 0 or is_last else ddp.no_sync():
            ddp(x).square().mean().backward()
        if i % 4 == 0 or is_last:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_last_window_of_an_epoch_is_as_ragged_as_the_script_makes_it(prove_script):
    """An epoch of 7 batches, 4 for a step. The control: the last 3 are not synchronized, where the
    script asks how long an epoch is, and where it does not. An epoch of 6 with windows of 3 has no
    such rest, so there it is no mistake."""
    ended = prove_script(WINDOWS)
    assert verdict(ended, "one rank") == "right"
    assert verdict(ended, "evaluation").startswith("no row"), "it evaluates nothing"
    unsynced = WINDOWS.replace("== 0 or is_last else", "== 0 else")
    assert verdict(prove_script(unsynced), "weights") == "WRONG"
    unasked = unsynced.replace("len(loader)", "7")
    assert verdict(prove_script(unasked), "weights") == "WRONG"
    whole = unsynced.replace("% 4", "% 3").replace("(28, 8)", "(24, 8)")
    assert verdict(prove_script(whole), "weights") == "right"


PROMPTS = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler
class Twice(Sampler):
    def __iter__(self):
        own = [*range(dist.get_rank(), 48, 2)] if SPLITS else [*range(24)]
        return iter(own + own[::-1])
    def __len__(self):
        return 48
dist.init_process_group("gloo")
torch.manual_seed(0)
data = [(x, i) for i, x in enumerate(torch.randn(48, 8))]
ddp, SPLITS = DistributedDataParallel(nn.Linear(8, 3)), False
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for epoch in range(3):
    for x, i in DataLoader(data, 4, sampler=Twice()):
        logits = ddp(x)
        action = torch.distributions.Categorical(logits=logits.detach()).sample()
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, action).backward()
        optimizer.step()
    SPLITS = SPLITS and epoch != 0
"""


def test_the_same_samples_are_a_mistake_if_the_ranks_compute_the_same_from_them(prove_script):
    """As GRPO does, each rank draws its own actions. The control: all act alike. A sampler that
    gives each sample twice splits them; a later epoch in which it does not is seen, too."""
    assert verdict(prove_script(PROMPTS), "samples") == "warning"
    alike = PROMPTS.replace("action = torch", "action = i % 3 #")
    assert verdict(prove_script(alike), "samples") == "WRONG"
    dropout = alike.replace("nn.Linear(8, 3))", "nn.Sequential(nn.Linear(8, 3), nn.Dropout()))")
    assert verdict(prove_script(dropout), "samples") == "WRONG"
    split = alike.replace("3)), False", "3)), True")
    ended = prove_script(split)
    assert verdict(ended, "samples") == "WRONG"
    assert "in pass 2" in ended.stdout
    always = split.replace("and epoch != 0", "")
    ended = prove_script(always)
    assert verdict(ended, "samples") == "right"
    assert "24 + 24 of 48" in ended.stdout


def test_each_of_two_loaders_that_make_one_step_has_its_samples_judged(prove_script):
    source = (
        WINDOWS[: WINDOWS.index("    for i, x")].replace("(28, 8)", "(32, 8)")
        + """
    for x, y in zip(loader, DataLoader(data[:24] + 1, 3, sampler=other)):
        optimizer.zero_grad()
        ddp(torch.cat([x, y])).square().mean().backward()
        optimizer.step()
"""
    )
    source = source.replace("loader =", "other = DistributedSampler(data[:24])\nloader =")
    assert prove_script(source).stdout.count("0 of them twice") == 2
    ended = prove_script(source.replace("3, sampler=other", "3"))
    assert verdict(ended, "samples") == "warning"
    assert ended.stdout.count("0 of them twice") == 1


def test_a_schedule_that_ends_within_an_epoch_is_announced(prove_script):
    """An epoch of 7 batches. The control: its steps are those of whole epochs."""
    source = (
        WINDOWS[: WINDOWS.index("    for i, x")]
        + """
    for x in loader:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        schedule.step()
"""
    )
    schedule = "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 3 * 6)\nloader ="
    source = source.replace("loader =", schedule)
    ended = prove_script(source)
    assert verdict(ended, "schedule") == "warning"
    assert "a run of 3 epochs ends" in ended.stdout
    assert "of 3 epochs ends" not in prove_script(source.replace("3 * 6", "3 * 7")).stdout


EVALUATES = """
    totals = torch.zeros(2)
    with torch.no_grad():
        for x in DataLoader(Stream(), 3):
            totals += torch.tensor([ddp.module(x).sum(), len(x)])
    dist.all_reduce(totals)
"""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        yield from data[dist.get_rank()::2]
loader ="""


def test_an_evaluation_of_a_stream_is_judged_by_content(prove_script):
    """The controls: each rank evaluates all of it, or its part, but nobody adds the parts up."""
    source = WINDOWS.replace("import DataLoader,", "import IterableDataset, DataLoader,")
    source = source.replace("loader =", STREAM) + EVALUATES
    assert verdict(prove_script(source), "evaluation") == "right"
    for changed in (
        source.replace("[dist.get_rank()::2]", ""),
        source.replace("dist.all_reduce(totals)", "pass"),
    ):
        assert verdict(prove_script(changed), "evaluation") == "warning"


def test_padding_does_not_hide_that_nobody_adds_up_the_parts(prove_script):
    padded = (
        "DataLoader(shard, batch_size=8)",
        "DataLoader(dataset, 8, sampler=DistributedSampler(dataset, shuffle=False))",
    )
    unsummed = ("    dist.all_reduce(totals)\n", "")
    stdout = prove_script(planted(padded, unsummed)).stdout
    assert -1 < stdout.find("and no collective follows") < stdout.find("counted twice"), stdout


def test_a_share_that_each_rank_mixes_with_is_no_coin(prove_script):
    """The control: a number that may decide about anything; and one that all ranks draw alike at
    first, until one of them has drawn once more."""
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))", "import numpy, random")
    source = source.replace(
        "model(x)", "share = numpy.random.beta(0.4, 0.4)\n        model(share * x)"
    )
    source = source.replace("for epoch in", "numpy.random.seed(dist.get_rank())\nfor epoch in")
    assert verdict(prove_script(source), "random decisions") == "right"
    coin = source.replace("numpy.random.beta(0.4, 0.4)", "numpy.random.rand()")
    assert verdict(prove_script(coin), "random decisions") == "warning"
    leaves = coin.replace("seed(dist.get_rank())", "seed(0)")
    leaves += "        if dist.get_rank(): numpy.random.rand()\n"
    stdout = prove_script(leaves).stdout
    assert "the same for their whole batches at first" in stdout, stdout


SPLIT = """ranks, workers, rank, source = self.world_size, parts, self.rank, points
        worker = worker.id if worker else 0
        return """


def test_the_printed_split_of_a_stream_gives_each_sample_to_one_worker_of_one_rank(prove_script):
    """Two workers on two ranks. The control splits by rank alone, so each sample comes twice."""
    [printed] = re.findall(r"islice\(.*\)", SHARD_STREAM)
    script = right_script("iterable")
    [old] = re.findall(r"part = self.rank .*\n.*", script)
    for call, times, expected in (
        (printed, 1, ("no row", "right")),
        ("islice(source, rank, None, ranks)", 2, ("WRONG", "right")),
    ):
        names = {"islice": islice, "source": range(96), "ranks": 2, "workers": 2}
        read: Counter[int] = Counter()
        for rank, worker in product(range(2), repeat=2):
            place = {"rank": rank, "worker": worker}
            read.update(eval(call, names | place))  # noqa: S307  a text of ours
        assert read == dict.fromkeys(range(96), times)
        changes = (old, SPLIT + call), ("WORKERS = 96, 0", "WORKERS = 96, 2")
        ended = prove_script(replace_once(script, *changes))
        found = verdict(ended, "workers").split(":")[0], verdict(ended, "one rank")
        assert found == expected
        assert (printed in one_line(ended.stdout)) == (times == 2), "the cure names the right one"
