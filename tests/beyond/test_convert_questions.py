"""What convert/questions.md says of data, losses and state is so, and check_gradient.py sees it."""

import random
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import check_gradient
from check_gradient import gradient_difference
from helpers.on_ranks import on_ranks, run_on_ranks
from local_ranks.scripts import launch_script
from markers import fences
from repository_pages import ROOT

PAGE = ROOT / "beyond/convert/questions.md"


def _one_batch(rank: int) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    torch.manual_seed(1 + rank)
    return model, torch.randn(6 + 3 * rank, 8), torch.randn(6 + 3 * rank, 5)


@on_ranks(2)
def test_check_gradient_tells_a_loss_by_elements_from_one_by_samples(rank):
    model, x, y = _one_batch(rank)
    for converted, expected in (("divided_by_samples", 4), ("divided_by_elements", 0)):
        loss = getattr(check_gradient, converted)
        difference = gradient_difference(model, loss, check_gradient.mean_error, x, y)
        assert difference == pytest.approx(expected, abs=1e-12)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert model.weight.dtype == torch.float32


@on_ranks(2)
def test_check_gradient_sees_a_statistic_of_one_rank_and_padding_of_one_rank(rank):
    model, x, _ = _one_batch(rank)
    reward, policy_loss = torch.randn(len(x)).double(), check_gradient.policy_loss
    x, reward = x[:6], reward[:6]
    sentences = [torch.randn(3 + i + 4 * rank, 4) for i in range(6)]
    torch.manual_seed(0)
    last_state, padded = check_gradient.LastState(), check_gradient.padded_to_its_longest
    of_all = check_gradient.normalized_on_all_ranks, check_gradient.padded_to_the_longest_of_all
    assert gradient_difference(model, policy_loss, policy_loss, x, reward) > 0.01
    assert gradient_difference(model, of_all[0], policy_loss, x, reward) < 1e-12
    assert gradient_difference(last_state, padded, padded, sentences) > 0.01
    assert gradient_difference(last_state, of_all[1], padded, sentences) < 1e-12


OWN_SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
{code}
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""


def test_the_call_on_the_page_judges_a_script_that_has_the_file_beside_it(tmp_path):
    [code] = [x.text for x in fences("python", [PAGE]) if "gradient_difference" in x.text]
    *functions, call = code.strip().splitlines()
    (tmp_path / "check_gradient.py").write_text(Path(check_gradient.__file__).read_text())
    for ignored, right in ((0, True), (-100, False)):
        (tmp_path / "mine.py").write_text(
            OWN_SCRIPT.format(code="\n".join(functions))
            + "torch.manual_seed(0)\n"
            + "model, criterion = nn.Linear(8, 3), nn.CrossEntropyLoss(ignore_index=0)\n"
            + "summed_criterion = nn.CrossEntropyLoss(ignore_index=0, reduction='sum')\n"
            + "labels = torch.tensor([[0, 1, 2] * 2, [0] * 5 + [1]][rank])\n"
            + "images = torch.randn(6, 8)\n"
            + "def count_of_all(labels):\n"
            + f"    count = (labels != {ignored}).sum()\n"
            + "    dist.all_reduce(count)\n"
            + "    return count\n"
            + call
        )
        answers = launch_script(str(tmp_path / "mine.py"), world_size=2)
        for status, printed in answers:
            assert status == 0, printed
            assert (float(printed.split()[-1]) < 1e-12) == right


ELEMENTS = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss")
TARGETS = torch.tensor([0, 1, 1, 2, -100, 0])


def mean_and_sum(name: str, *batch: torch.Tensor, **options) -> float:
    """Return what the mean of this loss divides its sum by."""
    loss = getattr(nn, name)
    total = loss(reduction="sum", **options)(*batch)
    return float(total / loss(**options)(*batch))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_the_mean_of_each_loss_divides_by_what_the_page_says():
    torch.manual_seed(0)
    outputs, y = torch.rand(6, 4), torch.rand(6, 4)
    for name in (*ELEMENTS, "KLDivLoss"):
        assert mean_and_sum(name, outputs, y) == pytest.approx(y.numel())
    assert mean_and_sum("GaussianNLLLoss", outputs, y, y + 1) == pytest.approx(y.numel())
    log = outputs.log_softmax(dim=1)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for name, scores in (("CrossEntropyLoss", outputs), ("NLLLoss", log)):
        assert mean_and_sum(name, scores, TARGETS) == pytest.approx(5)
        weighted = mean_and_sum(name, scores, TARGETS, weight=weight)
        assert weighted == pytest.approx(float(weight[TARGETS[TARGETS >= 0]].sum()))
    sign = torch.ones(6)
    assert mean_and_sum("TripletMarginLoss", outputs, y, y.flip(0)) == pytest.approx(6)
    assert mean_and_sum("CosineEmbeddingLoss", outputs, y, sign) == pytest.approx(6)
    assert mean_and_sum("MarginRankingLoss", outputs[:, 0], y[:, 0], sign) == pytest.approx(6)
    lengths, targets = torch.tensor([3, 1]), torch.tensor([[1, 2, 3], [2, 0, 0]])
    scores = torch.randn(7, 2, 4).log_softmax(dim=2)  # (T, B, classes)
    batch = scores, targets, torch.tensor([7, 7]), lengths
    by_hand = (nn.CTCLoss(reduction="none")(*batch) / lengths).sum() / len(lengths)
    assert float(nn.CTCLoss()(*batch)) == pytest.approx(float(by_hand))


class Words(IterableDataset):
    def __init__(self, rank: int, ranks: int, by_worker: bool) -> None:
        self.rank, self.ranks, self.by_worker = rank, ranks, by_worker

    def __iter__(self):
        info, source, rank, ranks = get_worker_info(), range(7), self.rank, self.ranks
        workers, worker = info.num_workers, info.id
        if self.by_worker:
            return islice(source, worker * ranks + rank, None, ranks * workers)
        return islice(source, rank, None, ranks)


def _words_read(rank: int, by_worker: bool) -> list[int]:
    loader = DataLoader(Words(rank, 2, by_worker), batch_size=2, num_workers=2)
    return [word for batch in loader for word in batch.tolist()]


@pytest.mark.parametrize("by_worker", [True, False])
def test_an_evaluation_reads_each_sample_once_only_if_the_workers_share_it(by_worker):
    assert "islice(source, worker * ranks + rank, None, ranks * workers)" in PAGE.read_text()
    assert sorted(chain(*run_on_ranks(2, _words_read, by_worker))) == sorted(
        [*range(7)] if by_worker else [*range(7)] * 2
    )


class Noise(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def _noises_of_workers(rank: int, seed_of_all: bool) -> list[float]:
    generator = torch.Generator().manual_seed(0 if seed_of_all else rank)
    loader = DataLoader(Noise(), num_workers=1, generator=generator)
    return [float(x) for x in loader]


@pytest.mark.parametrize("seed_of_all", [True, False])
def test_workers_of_all_ranks_draw_alike_if_the_loaders_generators_have_one_seed(seed_of_all):
    first, second = run_on_ranks(2, _noises_of_workers, seed_of_all)
    assert (first == second) == seed_of_all


def _coins(lengths: tuple[int, ...], anew: bool) -> list[float]:
    """The first coin of each step, of a rank whose batches have these lengths."""
    coin, firsts = random.Random(0), []
    for step, length in enumerate(lengths):
        coin = random.Random(f"0 {step}") if anew else coin
        firsts.append(coin.random())
        for _ in range(length - 1):  # one for each of the other time steps
            coin.random()
    return firsts


@pytest.mark.parametrize("anew", [True, False])
def test_ranks_with_batches_of_other_lengths_toss_one_coin_if_each_step_seeds_it(anew):
    assert (_coins((3, 5, 4), anew) == _coins((4, 4, 4), anew)) == anew


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


@on_ranks(2)
def test_a_parameter_that_no_rank_has_used_keeps_none_if_ddp_looks_for_it(rank):
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for both, expected in ((False, None), (rank == 0, [[0.5, 0.5]])):
        ddp(torch.ones(1, 2), both).sum().backward()
        gradient = model.sometimes.weight.grad
        assert (gradient if expected is None else gradient.tolist()) == expected


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(10, 4, sparse=sparse)
        self.score = nn.Linear(4, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.score(self.items(items))


def train_recommender(model: nn.Module, trained: Recommender, items: torch.Tensor) -> None:
    sparse = torch.optim.SparseAdam(trained.items.parameters(), 0.1)
    dense = torch.optim.Adam(trained.score.parameters(), 0.1)
    for _ in range(3):
        sparse.zero_grad()
        dense.zero_grad()
        (model(items) - 1).square().mean().backward()
        sparse.step()
        dense.step()


@on_ranks(2)
def test_sparse_embeddings_with_two_optimizers_train_as_in_one_process(rank):
    items = torch.tensor([[0, 1, 2], [2, 3, 2]])
    torch.manual_seed(0)
    ours = Recommender(sparse=True).double()
    torch.manual_seed(0)
    alone = Recommender(sparse=True).double()
    before = alone.items.weight.detach().clone()
    train_recommender(DistributedDataParallel(ours), ours, items[rank])
    train_recommender(alone, alone, items.flatten())
    for weight, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        assert (weight - expected).abs().max() < 1e-12
    moved = (alone.items.weight != before).any(dim=1)
    assert moved.tolist() == [True] * 4 + [False] * 6


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.task_weights = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@on_ranks(2)
def test_a_parameter_that_only_the_loss_uses_is_averaged_unless_ddp_takes_it_for_unused(rank):
    for find_unused in (False, True):
        model = TwoTasks()
        ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
        loss = ddp(torch.ones(1, 2)).sum() + (model.task_weights * rank).sum()
        if find_unused:
            with pytest.raises(RuntimeError, match="mark a variable ready only once"):
                loss.backward()
        else:
            loss.backward()
            assert model.task_weights.grad.tolist() == [0.5, 0.5], "the mean of 0 and 1"


@pytest.mark.parametrize("sparse", [True, False])
def test_plain_sgd_trains_sparse_and_dense_embeddings_alike(sparse):
    torch.manual_seed(0)
    model = Recommender(sparse).double()
    torch.manual_seed(0)
    dense = Recommender(False).double()
    for trained in (model, dense):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        trained(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
    assert torch.equal(model.items.weight, dense.items.weight)
