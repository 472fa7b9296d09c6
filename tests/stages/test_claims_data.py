"""Claims about samplers, loaders and partitions: C06, C07, C15, C26, C33, C37."""

from itertools import chain

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from common.data import local_batch_size
from common.options import UsageError
from partition import DataPartitioner


def test_c06_32_on_each_of_2_times_8_ranks_is_a_global_batch_of_512():
    of_this_project = local_batch_size(32, 16)  # whose --batch-size is the global batch
    for batch_size, together in ((32, 512), (of_this_project, 32)):
        samplers = [DistributedSampler(range(4096), 2 * 8, rank) for rank in range(2 * 8)]
        loaders = [DataLoader(range(4096), batch_size, sampler=sampler) for sampler in samplers]
        assert len(set(chain(*(next(iter(loader)).tolist() for loader in loaders)))) == together
    with pytest.raises(UsageError, match="does not divide by 16: try 48"):
        local_batch_size(40, 16)


@pytest.mark.parametrize(("samples", "again"), [(10, 2), (12, 0), (297, 3)])
def test_c07_distributed_sampler_repeats_samples_unless_the_ranks_divide_their_number(
    samples, again
):
    samplers = [DistributedSampler(range(samples), 4, rank, shuffle=False) for rank in range(4)]
    seen = list(chain(*samplers))
    assert len(seen) - len(set(seen)) == again
    right = torch.zeros(samples).double()
    right[0] = 1  # of these samples, one is classified right: and it is among those
    padded = torch.stack([right[list(sampler)].mean() for sampler in samplers]).mean()
    shards = [right[rank::4] for rank in range(4)]  # nor is the mean of the means of unequal ones
    for mean in (padded, torch.stack([shard.mean() for shard in shards]).mean()):
        assert (mean == right.mean()) == (again == 0)
    assert sum(shard.sum() for shard in shards) / samples == right.mean()  # sums and counts


def test_c15_a_sampler_excludes_shuffle_and_a_batch_sampler_drop_last_too():
    data, sampler = range(10), RandomSampler(range(10))
    batches = BatchSampler(sampler, batch_size=4, drop_last=True)
    for loader, sizes in (
        (DataLoader(data, 4, sampler=sampler), [4, 4, 2]),
        (DataLoader(data, 4, sampler=sampler, drop_last=True), [4, 4]),
        (DataLoader(data, batch_sampler=batches), [4, 4]),
    ):
        assert [len(batch) for batch in loader] == sizes
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(data, 4, sampler=sampler, shuffle=True)
    for other in ({"batch_size": 4}, {"shuffle": True}, {"sampler": sampler}, {"drop_last": True}):
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            DataLoader(data, batch_sampler=batches, **other)


def test_c26_partitions_are_disjoint_and_drop_less_than_a_sample_for_each_rank():
    """Fractions must be rounded with care: int(1 / 49 * 49) is 0, so ours takes whole numbers."""
    for length, n in ((60000, 2), (60000, 7), (1500, 4), (10, 3), (49, 49)):
        parts = [list(DataPartitioner(range(length), n, 5).use(rank)) for rank in range(n)]
        assert {len(part) for part in parts} == {length // n}
        assert len(set(chain(*parts))) == length // n * n
        assert int(1.0 / n * length) == (0 if n == 49 else length // n)
    one, other = (DataPartitioner(range(100), 2, seed).use(seed) for seed in (0, 1))
    assert set(one) & set(other), "the control: of another seed, they overlap"


def test_c33_without_set_epoch_every_epoch_has_the_same_order():
    """Stage 04 calls it: test_04_gradients_equal_one_process_on_the_whole_batch fails without."""
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0)
    first, again = list(sampler), list(sampler)
    assert first == again
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_c37_weights_must_be_the_batches_own_sizes():
    for samples, equal in ((10, False), (12, True)):
        losses = torch.arange(samples).double() ** 2
        batches = list(DataLoader(losses, batch_size=4))
        means = torch.stack([batch.mean() for batch in batches])
        own = sum(mean * len(batch) for mean, batch in zip(means, batches, strict=True)) / samples
        torch.testing.assert_close(own, losses.mean(), rtol=0, atol=1e-12)
        for other in (means.sum() * 4 / samples, means.mean()):  # by nominal sizes, and unweighted
            assert torch.isclose(other, losses.mean()) == equal
