"""Stage 04's chapters print what they should, and each failure happens and is cured as they say.

The READMEs show what rank_variables.py and uneven.py print, and test_readmes.py runs them.
The model of a step on paper: see test_bench.py.
"""

import re
import subprocess
import sys
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from local_ranks import ROOT, in_time, on_ranks
from repository_pages import fences
from support import chapter, default_dtype, output_of

FORECAST = "forecast --parameters=7e7 --step-ms=23 --batch-size=32 --gbit=50 --latency-us=800"
FORECAST += " --gpus=16 --gpus-per-node=4 --inside=pcie-3"
PRINTED = {  # by a chapter with these flags: rows, with one space between their cells
    "alpha_beta": "the step takes 316 ms | 8 100 100 123 | 30 140 140 225 | 25 200 225 295 | "
    "25 280 295 366 | 10 300 366 395 | the step takes 405 ms",
    "gradient_order": "resnet50 7.8 0% | resnet50 30.0 9% | resnet50 25.0 17% | "
    "resnet50 25.3 49% | resnet50 9.3 100% | vgg16 15.6 0% | vgg16 392.0 1% | vgg16 27.0 10% | "
    "vgg16 27.0 64%",
    FORECAST: "1 32 23.0 1,391 100% computing | 8 256 105.6 2,424 22% bytes | "
    "send bf16 (bf16_compress_hook) 512 105.7 4,844 22% bytes | fewer ranks: 1 32 23.0 1,391 "
    "100% computing | send bf16, and accumulate 4 2,048 174.7 11,723 53% bytes",
    "forecast --parameters=7e7 --step-ms=23 --gpus=1": "Advice: nothing to mend: one GPU waits for "
    "no other.",
    f"{FORECAST} --gpus-per-node=1 --gbit=5": "Advice: take a faster link, or fewer ranks: 1: 1 "
    "does 1,391 samples/s, 16 do 526.",
}


@pytest.mark.parametrize("call", PRINTED)
def test_what_a_chapter_prints(call):
    """Of alpha_beta.py, forecast.py and gradient_order.py."""
    name, *flags = call.split()
    lines = [" ".join(line.split()) for line in output_of("04", name, *flags).splitlines()]
    assert [row for row in PRINTED[call].split(" | ") if row not in lines] == []


CLASSIFIERS = ["vit_b_16", "swin_t", "convnext_tiny", "googlenet", "maxvit_t", "regnet_y_400mf"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_forecast_counts_every_parameter_of_a_classifier(name):
    """Attention multiplies by weights of layers that it does not call, and has some of its own.

    googlenet has classifiers of its own in the middle, which are trained too.
    """
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        options = {"init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, **options)
    gradients = chapter("04", "gradient_order").gradients_of_classifier(name, 224)
    assert sum(size for size, _ in gradients) == 4 * sum(p.numel() for p in model.parameters())
    ready = [share for _, share in gradients]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0


def really_ready(name: str) -> list[tuple[float, float]]:
    """(bytes, ready) of each gradient in a real backward, where torch counts multiplications."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
        loss = model(torch.empty(2, 3, 224, 224)).sum()
    with FlopCounterMode(display=False) as counter:
        gradients = []

        def note(parameter: nn.Parameter) -> None:
            gradients.append((parameter.numel() * 4, counter.get_total_flops()))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        loss.backward()
    return [(size, flops / counter.get_total_flops()) for size, flops in gradients]


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t"])
def test_a_gradient_of_attention_is_forecast_when_backward_really_has_it(name):
    """Bytes that are ready at each tenth of backward. Queries times keys, 4 %, is left out."""

    def ready_at(share, gradients):
        return sum(size for size, ready in gradients if ready <= share)

    forecast = chapter("04", "gradient_order").gradients_of_classifier(name, 224)
    real = really_ready(name)
    for tenth in range(1, 10):
        expected = ready_at(tenth / 10, real)
        assert ready_at(tenth / 10, forecast) == pytest.approx(expected, rel=0.1)


def test_c01_c03_words_shows_what_torchrun_gives_to_nodes_of_unequal_size():
    """Of two real torchruns. On the second node, rank % GPUs is another GPU."""
    table, *_ = output_of("04", "rank_variables", "--nodes", "3", "2").split("\n\n")
    node_0, node_1 = table.split("node 1")
    for output, numbers in (
        (node_0, ("RANK 0 1 2", "LOCAL_RANK 0 1 2", "rank % 3 0 1 2 the local rank")),
        (node_1, ("RANK 3 4", "LOCAL_RANK 0 1", "rank % 2 1 0 another GPU than LOCAL_RANK names")),
    ):
        lines = [" ".join(line.split()) for line in output.splitlines()[1:]]
        assert lines == [*numbers, f"WORLD_SIZE 5, LOCAL_WORLD_SIZE {len(numbers[0].split()) - 1}"]


BUSY = "Application timeout caused pair closure"  # so gloo says it on a busy machine


@on_ranks(3)
def test_join_ends_and_divides_by_the_initial_or_by_the_active_ranks(rank):
    """The gradient of rank r is r + 1. Three steps of all, and one of the last rank alone."""
    with default_dtype(torch.float64):
        for divide, last in ((True, 3 / 3), (False, 3 / 1)):
            gradients, weights = chapter("04", "uneven").join(divide)
            assert gradients == pytest.approx([2, 2, 2] + [last] * (rank == 2), abs=1e-12)
            assert weights.tolist() == [pytest.approx([1 - 0.1 * (6 + last)] * 2, abs=1e-12)]


@on_ranks(3)
def test_one_batch_more_on_a_rank_makes_it_wait_until_the_time_limit(rank):
    uneven, done = chapter("04", "uneven"), "done after 3 of 3 steps"
    with patch.object(uneven, "batches_of", lambda *_: [torch.ones(1, 2)] * 3):
        assert uneven.hang(seconds=60) == done, "the control"
    said = uneven.hang(seconds=2).replace(BUSY, "Timed out waiting 2000ms")
    dist.barrier()  # or the others would end before it is late
    assert said == ("step 4 of 4: Timed out waiting 2000ms" if rank == 2 else done)


LATE = "Timed out waiting 2000ms"  # of one rank; how the other ends is a matter of luck
PRIOR = "Expected to have finished reduction in the prior iteration"
INDICES = "indices which did not receive grad for rank 0: 2 3"
CONVERT_ALL = "need to convert all torch.Tensor to DTensor"
INPLACE = "needed for gradient computation has been modified by an inplace operation"
SHARED = "one element of the written-to tensor refers to a single memory location"
UNEXPECTED = "Unexpected key(s) in state_dict:"
FAILURES = {  # what is seen, and what both ranks say with the cure
    "rank-branch": (LATE, ["continues"] * 2),
    "evaluate-wrapped": (LATE, ["continues"] * 2),
    "unused-parameter": (f"{PRIOR} before starting a new one", ["two steps"] * 2),
    "ready-twice": ("Expected to mark a variable ready only once", ["two steps"] * 2),
    "early-step": (f"one of the variables {INPLACE}", ["stepped"] * 2),
    "expanded-buffer": (f"unsupported operation: more than {SHARED}", ["one forward"] * 2),
    "two-writers": ("FileNotFoundError", ["saved", "did not save"]),
    "module-prefix": (f'{UNEXPECTED} "module.weight", "module.bias"', ["loaded"] * 2),
    "sharded-weights": (
        f"got mixed torch.Tensor and DTensor, {CONVERT_ALL}",
        ["loaded, and gathered 2 tensors"] * 2,
    ),
    "no-interface": ("Unable to find address for: eth99", ["joined"] * 2),
}


@cache
def tried(name: str, cured: bool = False, debug: str = "OFF") -> list[str]:
    with in_time():
        return chapter("04", "failures").run_failure(name, cured, debug)


@pytest.mark.parametrize("name", FAILURES)
def test_c02_c36_c42_each_failure_happens_and_its_cure_helps(name):
    symptom, cured = FAILURES[name]
    assert symptom in " | ".join(tried(name)).replace(BUSY, LATE)
    failed = [answer for answer in tried(name) if "Error: " in answer]
    assert len(failed) == (1 if name == "two-writers" else 2)  # either: it is a race
    assert tried(name, cured=True) == cured


def test_a_rank_that_neither_answers_nor_ends_is_not_waited_for_forever():
    assert chapter("04", "failures").run_failure("two-writers", True, seconds=0) == ["waits"] * 2


def test_troubleshooting_lists_every_entry_and_shows_what_the_failures_print():
    listed = [line.split()[0] for line in output_of("04", "failures").splitlines()]
    with patch.object(chapter("04", "failures"), "run_failure", lambda *_: ["so", "so"]):
        assert "\ncure: only global rank 0 saves\n" in output_of("04", "failures", "two-writers")
    contents, *entries = (ROOT / "docs/troubleshooting.md").read_text().split('\n<a id="')
    anchors = re.findall(r"^- .*\]\(#([\w-]+)\)", contents, re.M)
    assert anchors == [entry.split('"')[0] for entry in entries]
    found = [re.search(r"### `(.+?)`.*/failures\.py ([\w-]+)`", e, re.S) for e in entries]
    assert listed == [match[2] for match in found if match] == list(FAILURES)
    assert [match for match in found if match and match[1] not in FAILURES[match[2]][0]] == []


def test_detail_names_collectives_that_differ_and_info_unused_parameters():
    for rank, answer in enumerate(tried("rank-branch", debug="DETAIL")):
        mine, other = ("ALLREDUCE", "BROADCAST") if rank == 0 else ("BROADCAST", "ALLREDUCE")
        assert "Detected mismatch between collectives on ranks" in answer
        assert re.search(rf"Rank {rank} is running .*?OpType={mine}.*?OpType={other}", answer)
    text = "Parameters which did not receive grad for rank 0: spare.bias, spare.weight"
    for debug in ("OFF", "INFO"):
        assert f"Parameter {INDICES}" in tried("unused-parameter", debug=debug)[0]
        assert (text in tried("unused-parameter", debug=debug)[0]) == (debug == "INFO")


def test_troubleshooting_shows_what_becomes_of_a_function_that_stands_in_no_file():
    [fence] = [
        x for x in fences("bash", [ROOT / "docs/troubleshooting.md"]) if "mp.spawn" in x.text
    ]
    code = fence.text.split('"')[1]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Can't get attribute 'train' on <module '__main__' (built-in)>" in ended.stderr


def test_a_checkpoint_remembers_the_gpu_of_rank_0_unless_it_is_loaded_to_the_cpu(
    tmp_path, monkeypatch
):
    """Every rank would load onto that GPU; where there is none, loading fails."""
    monkeypatch.chdir(tmp_path)
    with patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(nn.Linear(2, 2).state_dict(), "of rank 0.pt")
    if torch.cuda.is_available():
        assert torch.load("of rank 0.pt")["weight"].device == torch.device("cuda:0")
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load("of rank 0.pt")
    assert torch.load("of rank 0.pt", map_location="cpu")["weight"].device == torch.device("cpu")
