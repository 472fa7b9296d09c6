"""The chapters of stage 04: numbers of ranks, uneven shards, the gallery of failures."""

import re
from io import BytesIO
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import ROOT, chapter, command, default_dtype, free_port, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# --- words.py


def words(*nodes: int) -> dict[str, list[int]]:
    """The rows that words.py prints, by their name and the node; of real torchruns."""
    [(status, output)] = command("04_ddp_torchrun/words.py", "--nodes", *map(str, nodes))
    assert status == 0, output
    rows, node = {}, ""
    for line in output.split("\nunder srun")[0].splitlines():
        if line.startswith("node"):
            node = line[5]
        elif row := re.match(r"  (RANK|LOCAL_RANK|rank % \d+) +([\d ]+)", line):
            rows[f"{row[1].split(' ')[0]} {node}"] = [int(number) for number in row[2].split()]
        elif sizes := re.match(r"  WORLD_SIZE (\d+), LOCAL_WORLD_SIZE (\d+)", line):
            rows[f"sizes {node}"] = [int(number) for number in sizes.groups()]
    return rows


def test_words_shows_what_torchrun_gives_to_nodes_of_unequal_size():
    rows = words(3, 2)
    assert rows["RANK 0"] + rows["RANK 1"] == [0, 1, 2, 3, 4]
    assert (rows["LOCAL_RANK 0"], rows["LOCAL_RANK 1"]) == ([0, 1, 2], [0, 1])
    assert (rows["sizes 0"], rows["sizes 1"]) == ([5, 3], [5, 2])
    assert rows["rank 0"] == rows["LOCAL_RANK 0"]
    assert rows["rank 1"] == [1, 0] != rows["LOCAL_RANK 1"]


def test_ranks_dealt_in_turn_are_those_of_other_nodes_too():
    """Every rank once, as many on a node as it has; two of one size: even and odd."""
    words_04 = chapter("04", "words")
    assert words_04.cyclic([2, 2]) == [[0, 2], [1, 3]]
    for nodes in ([8, 8], [3, 2], [1, 4, 2]):
        dealt = words_04.cyclic(nodes)
        assert [len(ranks) for ranks in dealt] == nodes
        assert sorted(chain(*dealt)) == list(range(sum(nodes)))
    assert words_04.verdict([0, 2]) == "ranks share GPU 0"
    assert words_04.verdict([3, 4]) == "another GPU than LOCAL_RANK names"
    assert words_04.verdict([2, 3]) == "the local rank"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nodes", "0"), ("--nodes", "'0'")),
        (("--nodes", "40", "40"), ("80 processes", "64 at most")),
    ],
)
def test_words_refuses_what_it_cannot_start(flags, words):
    [(status, output)] = command("04_ddp_torchrun/words.py", *flags)
    assert status == 2
    assert output.count("\n") == 1
    assert all(word in output for word in words), output


# --- uneven.py


def _hang(rank, world_size, even):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    uneven = chapter("04", "uneven")
    if even:
        uneven.batches_of = lambda rank, world_size: [torch.ones(1, 2)] * uneven.BATCHES
    said = uneven.hang(seconds=1)
    dist.barrier()  # the group of all ranks is whole
    return said


def test_one_batch_more_on_a_rank_makes_it_wait_until_the_time_limit():
    first, last = run_ranks(2, _hang, 2, False)
    assert first == "done after 3 of 3 steps"
    assert last == "step 4 of 4: Timed out waiting 1000ms"
    assert run_ranks(2, _hang, 2, True) == ["done after 3 of 3 steps"] * 2  # the control


def _join(rank, world_size, divide):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    with default_dtype(torch.float64):
        return chapter("04", "uneven").join(divide)


def with_join_by_hand(world_size: int, divide: bool) -> tuple[list[list[float]], torch.Tensor]:
    """In one process: sum the gradients of the ranks that still have a batch, and divide."""
    uneven = chapter("04", "uneven")
    weights = torch.ones(1, 2, dtype=torch.float64)
    batches = [uneven.batches_of(rank, world_size) for rank in range(world_size)]
    gradients = [[] for _ in batches]
    for step in range(max(map(len, batches))):
        active = [rank for rank, mine in enumerate(batches) if step < len(mine)]
        total = sum(batches[rank][step].double() for rank in active)
        gradient = total / (world_size if divide else len(active))
        weights -= 0.1 * gradient
        for rank in active:
            gradients[rank].append(gradient.mean().item())
    return gradients, weights


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("divide", [True, False])
def test_join_ends_and_divides_by_the_initial_or_by_the_active_ranks(divide, world_size):
    gradients, weights = with_join_by_hand(world_size, divide)
    for rank, (mine, ended) in enumerate(run_ranks(world_size, _join, world_size, divide)):
        assert mine == pytest.approx(gradients[rank], abs=1e-12)
        torch.testing.assert_close(ended, weights, rtol=0, atol=1e-12)
    _, other = with_join_by_hand(world_size, not divide)
    assert (other - weights).abs().max() > 0.05  # the control: it makes a difference


@pytest.mark.parametrize(("samples", "ranks"), [(10, 4), (12, 4), (297, 2), (5, 3)])
def test_the_even_samplers_give_every_rank_as_many(samples, ranks):
    dealt = chapter("04", "uneven").dealt
    padded, dropped, cut = (dealt(samples, ranks, how) for how in ("pad", "drop_last", "range"))
    assert {len(shard) for shard in padded} == {-(-samples // ranks)}
    assert {len(shard) for shard in dropped} == {samples // ranks}
    assert len({len(shard) for shard in cut}) == 1 + bool(samples % ranks)  # the control
    assert sorted(chain(*cut)) == list(range(samples))
    assert len(list(chain(*padded))) - len(set(chain(*padded))) == -samples % ranks
    assert samples - len(set(chain(*dropped))) == samples % ranks


def test_uneven_tells_all_of_it():
    """The whole chapter, on two ranks as torchrun starts them."""
    env = {"RANK": "{RANK}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port())}
    flags = ("--seconds", "1")
    answers = command("04_ddp_torchrun/uneven.py", *flags, ranks=2, env=env)
    assert [status for status, _ in answers] == [0, 0], answers
    assert "rank 1: step 4 of 4: Timed out waiting 1000ms" in answers[0][1]
    assert answers[0][1].count("gradients 1.5 1.5 1.5") == 4
    assert "\n" not in answers[1][1].strip()[:1]  # rank 1 prints nothing of its own


def test_uneven_alone_is_refused():
    [(status, output)] = command("04_ddp_torchrun/uneven.py")
    assert status == 2
    assert output.startswith("error: one rank waits for nobody: start two, with torchrun")


# --- gallery.py

LATE = "Timed out waiting 2000ms"  # of one rank; how the other ends is a matter of luck
SYMPTOMS = {
    "rank-branch": LATE,
    "evaluate-wrapped": LATE,
    "unused-parameter": "Parameter indices which did not receive grad for rank 0: 2 3",
    "two-writers": "FileNotFoundError",
    "module-prefix": 'Unexpected key(s) in state_dict: "module.weight", "module.bias"',
    "no-interface": "Unable to find address for: eth99",
}
CURED = {
    "rank-branch": ["continues"] * 2,
    "evaluate-wrapped": ["continues"] * 2,
    "unused-parameter": ["two steps"] * 2,
    "two-writers": ["saved", "did not save"],
    "module-prefix": ["loaded"] * 2,
    "no-interface": ["joined"] * 2,
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_failure_of_the_gallery_fails_and_its_cure_helps(name):
    gallery = chapter("04", "gallery")
    answers = gallery.try_entry(name, cured=False)
    assert SYMPTOMS[name] in " | ".join(answers)
    failed = [answer for answer in answers if "Error: " in answer]
    assert len(failed) == (1 if name == "two-writers" else 2)  # either: it is a race
    assert gallery.try_entry(name, cured=True) == CURED[name]


def test_the_gallery_lists_its_entries():
    [(status, output)] = command("04_ddp_torchrun/gallery.py")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == list(SYMPTOMS)
    assert set(chapter("04", "gallery").ENTRIES) == set(SYMPTOMS)
    [(status, output)] = command("04_ddp_torchrun/gallery.py", "nosuch")
    assert (status, output.count("\n")) == (2, 1)


def test_detail_names_the_collectives_that_do_not_fit():
    """Without it, time-outs: see above."""
    answers = chapter("04", "gallery").try_entry("rank-branch", False, "DETAIL")
    for rank, answer in enumerate(answers):
        mine, other = ("ALLREDUCE", "BROADCAST") if rank == 0 else ("BROADCAST", "ALLREDUCE")
        assert "Detected mismatch between collectives on ranks" in answer
        assert re.search(rf"Rank {rank} is running .*?OpType={mine}.*?OpType={other}", answer)


def test_info_names_the_parameters_without_gradient():
    gallery = chapter("04", "gallery")
    text = "Parameters which did not receive grad for rank 0: spare.bias, spare.weight"
    assert text in gallery.try_entry("unused-parameter", False, "INFO")[0]
    assert text not in gallery.try_entry("unused-parameter", False, "OFF")[0]


def test_ddp_on_gloo_may_die_under_detail_and_works_under_info():
    """torch's DDP takes the wrapper that DETAIL puts around gloo for gloo itself.

    What it then reads is not its own: the ranks die, or by luck do not. Never do they explain.
    """
    gallery, works = chapter("04", "gallery"), CURED["module-prefix"]
    assert set(gallery.try_entry("module-prefix", True, "DETAIL")) <= {"ended by SIGSEGV", *works}
    assert gallery.try_entry("module-prefix", True, "INFO") == works


def _broadcasts(rank):
    """The modes in which DDP has broadcast: two steps, an evaluation on rank 0, two steps."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ddp, modes = DistributedDataParallel(nn.BatchNorm1d(4)), []
    broadcast = ddp._sync_buffers
    ddp._sync_buffers = lambda: (modes.append(ddp.training), broadcast())
    for step in range(4):
        if step == 2 and rank == 0:
            ddp.eval()
            with torch.no_grad():
                for _ in range(5):
                    ddp(torch.ones(2, 4))
            ddp.train()
        ddp(torch.ones(2, 4)).sum().backward()
    return modes


def test_evaluating_through_the_wrapper_broadcasts_once_more_and_the_next_step_once_less():
    """So without a barrier between, gloo's ranks notice nothing."""
    assert run_ranks(2, _broadcasts) == [[True, True, False, True], [True] * 4]


def _saved_on(device):
    """A checkpoint as a process would write that holds its model on that device."""
    file = BytesIO()
    with patch("torch.serialization.location_tag", lambda storage: device):
        torch.save(nn.Linear(2, 2).state_dict(), file)
    file.seek(0)
    return file


def test_a_checkpoint_remembers_the_gpu_of_rank_0_unless_it_is_loaded_to_the_cpu():
    """Every rank would load onto that GPU; where there is none, loading fails."""
    if torch.cuda.is_available():
        loaded = torch.load(_saved_on("cuda:0"), weights_only=True)
        assert {tensor.device for tensor in loaded.values()} == {torch.device("cuda", 0)}
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(_saved_on("cuda:0"), weights_only=True)
    loaded = torch.load(_saved_on("cuda:0"), map_location="cpu", weights_only=True)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_the_page_shows_what_the_gallery_prints():
    """The first column of the table: words of a real answer."""
    page = (ROOT / "04_ddp_torchrun" / "GALLERY.md").read_text()
    rows = re.findall(r"^\| [^|]*?`([^`]+)`[^|]*\|.*gallery\.py ([\w-]+)`", page, re.M)
    assert [name for _, name in rows] == list(SYMPTOMS)
    for shown, name in rows:
        assert shown in SYMPTOMS[name]
