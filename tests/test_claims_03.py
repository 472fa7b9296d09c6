"""Claims C25 to C31, of a tutorial on writing distributed applications: see CLAIMS.md."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import chapter, free_port, run_ranks
from torch import nn
from torch.autograd import Variable
from torch.utils.data import DataLoader

GPUS = torch.cuda.device_count()


def join(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


# --- C25: the published script runs


def test_c25_a_loader_refuses_a_batch_size_that_is_a_float():
    with pytest.raises(ValueError, match=r"positive integer value, but got batch_size=64\.0"):
        DataLoader(range(256), batch_size=128 / float(2))
    assert len(next(iter(DataLoader(range(256), batch_size=128 // 2)))) == 64


def test_c25_reduce_op_still_works_with_a_warning():
    with pytest.warns(FutureWarning, match="please use `torch.distributed.ReduceOp`"):
        assert dist.reduce_op.SUM == dist.ReduceOp.SUM


def _group_0(rank):
    join(rank, 1)
    try:
        dist.all_reduce(torch.ones(1), group=0)
    except AttributeError as error:
        return str(error)
    finally:
        dist.all_reduce(torch.ones(1), group=dist.group.WORLD)  # the control
    return "it was taken"


def test_c25_group_0_is_no_group():
    assert run_ranks(1, _group_0) == ["'int' object has no attribute 'allreduce'"]


def test_c25_a_loss_has_no_element_0():
    loss = nn.Linear(3, 1)(torch.ones(3)).sum()
    with pytest.raises(IndexError, match=r"Use `tensor\.item\(\)`"):
        loss.data[0]
    assert isinstance(loss.item(), float)


def test_c25_a_variable_is_a_tensor():
    tensor = torch.ones(2)
    assert type(Variable(tensor)) is torch.Tensor
    assert Variable(tensor).data_ptr() == tensor.data_ptr()


def test_c25_log_softmax_without_dim_warns_and_guesses():
    with pytest.warns(UserWarning, match="Implicit dimension choice for log_softmax"):
        matrix = F.log_softmax(torch.arange(6.0).view(2, 3))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        cube = F.log_softmax(torch.arange(12.0).view(2, 3, 2))
    torch.testing.assert_close(matrix.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(cube.exp().sum(0), torch.ones(3, 2))  # not the last, nor 1


# --- C26: partitions


def cut_as_published(length: int, parts: int) -> list[int]:
    """The lengths that the tutorial's rule gives: the fraction times the length, rounded down."""
    return [int(1.0 / parts * length) for _ in range(parts)]


@pytest.mark.parametrize(
    ("length", "parts"), [(60000, 2), (60000, 7), (1500, 4), (10, 3), (49, 49)]
)
def test_c26_partitions_are_disjoint_and_drop_less_than_one_sample_for_each_rank(length, parts):
    partitioner = chapter("03", "partition").DataPartitioner(range(length), [1 / parts] * parts, 5)
    used = [index for part in partitioner.parts for index in part]
    assert len(set(used)) == len(used)
    assert length - len(used) == length % parts < parts


def test_c26_rounded_down_as_published_it_can_drop_a_sample_for_each_rank():
    """In floating point, 1 / 49 times 49 is a little less than 1."""
    assert cut_as_published(49, 49) == [0] * 49
    assert cut_as_published(48, 48) == [1] * 48
    assert sum(cut_as_published(60000, 7)) == 60000 - 60000 % 7


# --- C27: dividing the summed gradients by the world size


def gradient(images, targets, reduction="mean"):
    weight = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    F.mse_loss(images @ weight, targets, reduction=reduction).backward()
    return weight.grad


def batch(samples):
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(samples, *rest, generator=generator).double() for rest in ((4,), ()))


def _average(rank, sizes, reduction, weighted):
    join(rank, len(sizes))
    images, targets = (tensor.split(sizes)[rank] for tensor in batch(sum(sizes)))
    mine = gradient(images, targets, reduction)
    samples = torch.tensor(len(images))
    if weighted:
        mine *= samples
        dist.all_reduce(samples)
    dist.all_reduce(mine)
    return mine / (samples if weighted else len(sizes))


@pytest.mark.parametrize(
    ("sizes", "reduction", "weighted", "equal"),
    [
        ([6, 6], "mean", False, True),
        ([4, 4, 4], "mean", False, True),
        ([9, 3], "mean", False, False),
        ([6, 6], "sum", False, False),
        ([9, 3], "mean", True, True),
    ],
    ids=["equal-shards", "three-ranks", "unequal-shards", "sum-loss", "weighted-by-samples"],
)
def test_c27_the_mean_of_gradients_is_that_of_the_batch(sizes, reduction, weighted, equal):
    whole = gradient(*batch(12), reduction)
    for mean in run_ranks(len(sizes), _average, sizes, reduction, weighted):
        assert torch.allclose(mean, whole, rtol=0, atol=1e-12) == equal
        if reduction == "sum":  # then the sum itself is right, not divided
            torch.testing.assert_close(mean * len(sizes), whole, rtol=0, atol=1e-12)


# --- C28: the published averaging


def _guarded(rank, guard):
    join(rank, 2)
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    for parameter in model.parameters():
        if guard(parameter):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    return model.weight.grad


def _exact_type(parameter):
    return type(parameter) is torch.Tensor


def _is_instance(parameter):
    return isinstance(parameter, torch.Tensor)


def test_c28_the_published_guard_is_false_for_every_parameter():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2), nn.LSTM(2, 2))
    parameters = list(model.parameters())
    assert len(parameters) == 10
    assert not any(_exact_type(parameter) for parameter in parameters)
    assert all(_is_instance(parameter) for parameter in parameters)


def test_c28_behind_that_guard_the_ranks_keep_gradients_of_their_own():
    mine, other = run_ranks(2, _guarded, _exact_type)
    assert mine.unique().tolist() == [1.0]
    assert other.unique().tolist() == [2.0]
    for gradient in run_ranks(2, _guarded, _is_instance):  # the control
        assert gradient.unique().tolist() == [1.5]


# --- C29: manual_seed on every rank


def _seeded(rank, apart):
    torch.manual_seed(1234)
    weight = nn.Linear(5, 5).weight.detach()
    if apart:
        torch.manual_seed(1234 + rank)
    return weight, F.dropout(torch.ones(1000))


def test_c29_one_seed_on_every_rank_gives_equal_weights_and_equal_dropout_masks():
    (weight, mask), (other_weight, other_mask) = run_ranks(2, _seeded, False)
    assert torch.equal(weight, other_weight)
    assert torch.equal(mask, other_mask)
    assert 300 < mask.count_nonzero() < 700


def test_c29_seeded_apart_after_the_weights_only_the_masks_differ():
    (weight, mask), (other_weight, other_mask) = run_ranks(2, _seeded, True)
    assert torch.equal(weight, other_weight)
    assert not torch.equal(mask, other_mask)


# --- C30: what the backends can do

BEYOND = ["reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"]


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_c30_gloo_on_a_gpu_does_more_than_all_reduce_and_broadcast():
    probes = {name: chapter("03", "matrix").probe("gloo", "cuda", name, 60) for name in BEYOND}
    assert "yes" in [cell for cell, _ in probes.values()], probes


@pytest.mark.parametrize("name", BEYOND)
def test_c30_gloo_on_the_cpu_does_it(name):
    assert chapter("03", "matrix").probe("gloo", "cpu", name, 60) == ("yes", "")


def _lists(rank):
    join(rank, 2)
    arrived = [torch.zeros(1), torch.zeros(1)]
    try:
        dist.all_to_all(arrived, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
    except RuntimeError as error:
        return str(error)
    return torch.cat(arrived).tolist()


def test_c30_all_to_all_of_lists_is_new_in_gloo():
    refused, right = ["Backend gloo does not support alltoall"] * 2, [[0, 10], [1, 11]]
    answers = run_ranks(2, _lists)
    seen = {"2.11": [refused], "2.15": [right]}.get(torch.__version__[:4], [refused, right])
    assert answers in seen


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch was built with MPI")
def test_c30_mpi_needs_a_build_from_source():
    """As in every wheel; what torch says about it stands in its own words in the error."""
    with pytest.raises(RuntimeError, match="only included if you build PyTorch from source"):
        _init_alone("mpi")


# --- C31: the tcp backend


def _init_alone(backend, **options):
    options = options or {"store": dist.HashStore()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend, rank=0, world_size=1, **options)
    dist.destroy_process_group()


def test_c31_there_is_no_tcp_backend():
    assert not dist.is_backend_available("tcp")
    with pytest.raises(AssertionError, match="Unknown backend type tcp"):
        _init_alone("tcp")
    _init_alone("gloo")  # the control


def test_c31_tcp_is_still_an_address_where_ranks_meet():
    _init_alone("gloo", init_method=f"tcp://127.0.0.1:{free_port()}")
