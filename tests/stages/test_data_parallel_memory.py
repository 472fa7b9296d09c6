"""The bytes that each replica holds, as memory.py counts them, are what torch allocates."""

from collections import Counter

import pytest
import torch
from torch import nn

from local_ranks.stage_files import LESSON_FOLDERS, fresh_module
from replicas import DEVICE_IDS

memory = fresh_module(LESSON_FOLDERS["02"] / "memory.py")  # not seen by other tests


def example(batch: int = 24, hidden: int = 7, classes: int = 50):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return model, torch.randn(batch, 5), torch.randint(classes, (batch,))


def test_the_count_equals_a_count_by_hand():
    (main, other), floats = memory.held_by_replica(example(), 2, inside=False), 4
    weights, outputs = (5 * 7 + 7 + 7 * 50 + 50) * floats, 24 * 50 * floats
    expected = {"parameters": weights, "batch": 12 * 5 * floats}
    expected["activations"] = 12 * 7 * floats  # what ReLU gives; it and the next layer save it
    assert other == dict.fromkeys(memory.KINDS, 0) | expected
    assert main == other | {
        "gradients": weights,
        "optimizer": weights,
        "batch": 24 * (5 * floats + 8),  # the targets are int64
        "outputs": outputs,
        "loss": outputs + 8,  # log-softmax, the sum of the class weights, the loss
    }
    # Inside, each replica keeps the log-softmax of its own half, and two losses are gathered.
    inside, elsewhere = memory.held_by_replica(example(), 2, inside=True)
    half = {"loss": outputs // 2 + floats}
    assert elsewhere == other | half | {"batch": 12 * (5 * floats + 8)}
    assert inside == main | {"outputs": 2 * floats, "loss": half["loss"] + floats}


def test_the_count_is_what_the_allocator_hands_out():
    """torch's profiler sees every allocation: those that are alive when the forward is done."""
    model, x, _ = memory.examples()["words"]
    counted = memory.CountingReplica(model)
    with torch.profiler.profile(profile_memory=True) as profiler:
        outputs = counted(x)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    kept = memory.size(counted.saved["activations"], [*model.parameters(), x])
    assert 0 < kept == allocated - memory.size([outputs])


@pytest.mark.parametrize("ids", DEVICE_IDS)
def test_the_count_is_what_torchs_data_parallel_allocates_on_each_gpu(ids):
    """Two replicas on one GPU: what both hold, but the other's part of the batch is a view."""
    model, x, targets = (each.to(f"cuda:{ids[0]}") for each in example(4096, 512, 1024))
    main, other = memory.held_by_replica((model, x, targets), 2, False)
    counted = Counter({ids[0]: main["activations"] + main["outputs"] + main["loss"]})
    counted[ids[1]] += other["activations"] + other["parameters"]
    counted[ids[1]] += other["batch"] if len(set(ids)) == 2 else 0
    real, requested = nn.DataParallel(model, ids), []
    memory.criterion(real(x), targets).backward()  # its gradients stay, before and after
    for forwards in (0, 1):
        outputs = [real(x) for _ in range(forwards)]
        losses = [memory.criterion(each, targets) for each in outputs]
        assert len(losses) == forwards  # they are kept while the memory is counted
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each thread
        statistics = {gpu: torch.cuda.memory_stats(gpu) for gpu in counted}
        requested.append({gpu: s["requested_bytes.all.current"] for gpu, s in statistics.items()})
    added = {gpu: requested[1][gpu] - requested[0][gpu] for gpu in counted}
    assert added == pytest.approx(counted, rel=0.01)  # a replica's parameters are 5 % of one GPU's
