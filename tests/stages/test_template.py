"""The complete script: ranks agree with one plain process, and a killed run goes on to the bit."""

import re
import runpy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchvision.transforms.functional import to_pil_image

from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.scripts import launch_script, run_script
from local_ranks.stage_files import replace_once
from local_ranks.train_stage import default_dtype
from markers import fences, sides

TEMPLATE = ROOT / "05_amp_syncbn/template.py"
PIECES = ROOT / "05_amp_syncbn/pieces.md"
CPU = ("torch.cuda.is_available()", "False")
FLOAT64 = ("def main():\n", "def main():\n    torch.set_default_dtype(torch.float64)\n")
NO_DROPOUT = ("nn.Dropout()", "nn.Dropout(0.0)")
# So the ranks and the micro-batches have unequal numbers of labels.
NO_LABEL = ("(dim=1)  # 10", "(dim=1).where(torch.rand(6000) > 0.3, -100)  # 10")
EXACT = (FLOAT64, NO_DROPOUT, NO_LABEL)
Changes = tuple[tuple[str, str], ...]


class TemplateRun(NamedTuple):
    output: str  # what rank 0 prints
    statuses: list[int]
    saved: dict


def script_in(folder: Path, changes: Changes) -> Path:
    path = folder / "template.py"
    path.write_text(replace_once(TEMPLATE.read_text(), CPU, *changes))
    return path


def run(folder: Path, ranks: int, *flags: str, changes: Changes = ()) -> TemplateRun:
    """Run the script on so many ranks, with pieces of it replaced; 0 means plain python."""
    script = str(script_in(folder, changes))
    if ranks:
        results = launch_script(script, *flags, world_size=ranks, cwd=folder)
    else:
        results = run_script(script, *flags, cwd=folder)
    checkpoint = folder / "checkpoint.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {}
    return TemplateRun(results[0][1], [status for status, _ in results], saved)


@cache
def run_anew(ranks: int, *flags: str, changes: Changes = ()) -> TemplateRun:
    ended = run(scratch_folder(), ranks, *flags, changes=changes)
    assert not any(ended.statuses), ended.output
    return ended


def distance(weights: dict, others: dict) -> float:
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def weights_of_a_plain_loop(
    epochs: int, clip: float, changes: Changes = EXACT, weight: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Train in one process: no DDP, no micro-batches, the mean loss of the samples with a label."""
    namespace = runpy.run_path(str(script_in(scratch_folder(), changes)))
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        train_set, _ = namespace["make_datasets"]()
        model, optimizer = namespace["make_model_and_optimizer"](torch.device("cpu"))
    sampler = DistributedSampler(train_set, 1, 0)
    steps_per_epoch = 42  # 41 of 120 samples and one of 60
    for step in range(epochs * steps_per_epoch):
        epoch, batch = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        x, y = train_set[list(sampler)[120 * batch : 120 * (batch + 1)]]
        rise, fall = 20 * (step + 1), (epochs * steps_per_epoch - step) / 0.95
        optimizer.param_groups[0]["lr"] = 0.1 * min(rise, fall) / (epochs * steps_per_epoch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y, weight, ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


FLAGS = ("--epochs=2", "--clip=0.9")
ACCUMULATED = (*FLAGS, "--accumulate=2")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(0, FLAGS), (1, ACCUMULATED), (2, FLAGS), (2, ACCUMULATED), (3, ACCUMULATED)],
)
def test_ranks_and_micro_batches_reach_the_weights_of_a_plain_loop(ranks, flags):
    """Each rank has 83 micro-batches, so the last window of an epoch has one, and that is short."""
    ended = run_anew(ranks, *flags, changes=EXACT)
    assert distance(ended.saved["model"], weights_of_a_plain_loop(2, 0.9)) < 1e-10
    assert ended.output == run_anew(0, *FLAGS, changes=EXACT).output
    assert len(ended.output.splitlines()) == 4


@pytest.mark.parametrize(
    "change",
    [
        ("sums(ddp, batch", "sums(model, batch"),
        ("world_size / window[1]", "1 / window[1]"),
        ("dist.all_reduce(window)", "window *= world_size"),
        ("sampler.set_epoch(epoch)", "pass"),
        ("or i == len(loader)", "or False"),
        ("// (world_size * args.accumulate)", "// args.accumulate"),
    ],
)
def test_each_of_these_lines_is_needed(change):
    """The control of the test above."""
    ended = run_anew(2, *ACCUMULATED, changes=(*EXACT, change))
    right = run_anew(0, *FLAGS, changes=EXACT)
    assert distance(ended.saved["model"], right.saved["model"]) > 1e-6


# Where the last rank dies, in the second epoch or later, once: it leaves a file that says so.
DIE = "os.path.exists('{0}') or (open('{0}', 'w').close(), os.kill(os.getpid(), 9))"
PLACES = {
    "step": "                scaler.unscale_(optimizer)\n",
    "evaluation": "        dist.all_reduce(test)\n",
    "half a checkpoint": "                file.flush()\n",
    "checkpoint without its name": "            os.replace(",
    "next epoch": "        sampler.set_epoch(epoch)",
}


def dying(ranks: int) -> Changes:
    """The changes after which the last rank dies once in each of these places; rank 0 saves."""
    changes = []
    for place, line in PLACES.items():
        indent = line[: -len(line.lstrip())]
        rank = 0 if "checkpoint" in place else max(ranks - 1, 0)
        condition = f"epoch == {1 + len(changes) % 3} and rank == {rank}"
        death = f"{indent}if {condition}:\n{indent}    {DIE.format(place)}\n"
        changes.append((line, death + line))
    return tuple(changes)


# Workers draw numbers, too: augmentation.
NOISE = (
    "    return TensorDataset(x[:4980], y[:4980]),",
    "    class Noisy(TensorDataset):\n"
    "        def __getitem__(self, i):\n"
    "            x, y = super().__getitem__(i)\n"
    "            return x + 0.1 * torch.randn(64), y\n\n"
    "    return Noisy(x[:4980], y[:4980]),",
)
LONG = ("--epochs=4", "--accumulate=2", "--amp=bf16", "--workers=1")


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_run_that_is_killed_five_times_ends_with_the_same_bits(ranks, tmp_path):
    """With dropout, workers that draw noise, bf16, and on 3 ranks, where the order of sums counts.

    While one rank dies, another may reach its own place, so the files count and not the runs.
    """
    whole = run_anew(ranks, *LONG, changes=(NOISE,))
    changes = (NOISE, *dying(ranks))
    for _ in range(len(PLACES) + 1):
        ended = run(tmp_path, ranks, *LONG, changes=changes)
        if not any(ended.statuses):
            break
    assert {path.name for path in tmp_path.iterdir()} >= PLACES.keys(), "it died in each place"
    assert distance(ended.saved["model"], whole.saved["model"]) == 0
    momentum, same = (each.saved["optimizer"]["state"] for each in (ended, whole))
    assert all(
        torch.equal(momentum[i]["momentum_buffer"], same[i]["momentum_buffer"]) for i in same
    )
    assert ended.output.splitlines()[-2:] == whole.output.splitlines()[-2:]


@pytest.mark.parametrize(
    "change",
    [
        ("torch.manual_seed(1 +", "torch.manual_seed(torch.seed() +"),
        ("    steps, done =", "    optimizer.state.clear()\n    steps, done ="),
        ("    sums(ddp.eval(), loader", "    0 and sums(ddp.eval(), loader"),
    ],
    ids=["seed", "optimizer", "first backward"],
)
def test_without_one_of_these_a_resumed_run_is_another(change, tmp_path):
    """The control: stopped after one epoch, and resumed on three ranks."""
    stopped = ('range(saved["epoch"], args.epochs):', 'range(saved["epoch"], args.epochs)[:1]:')
    flags = ("--epochs=2", "--amp=bf16")
    whole = run_anew(3, *flags, changes=(change,) if "seed" not in change[0] else ())
    for _ in range(2):
        ended = run(tmp_path, 3, *flags, changes=(stopped, change))
        assert not any(ended.statuses), ended.output
    assert distance(ended.saved["model"], whole.saved["model"]) > 0


def test_a_resumed_run_with_a_larger_batch_is_as_far_in_its_schedule():
    """Its epochs have fewer steps, so a saved count of steps would be past the end."""
    folder = scratch_folder()
    run(folder, 1, "--epochs=3", "--batch-size=60")
    ended = run(folder, 1, "--epochs=5", "--batch-size=240")
    assert not any(ended.statuses), ended.output
    group = ended.saved["optimizer"]["param_groups"][0]
    assert group["lr"] == 0, "at its end"
    assert group["initial_lr"] == 0.1
    losses = [
        float(line.split()[4].rstrip(",")) for line in ended.output.splitlines() if "test" in line
    ]
    assert len(losses) == 2
    assert max(losses) < 1


def test_a_finished_run_says_so_and_names_the_flags_that_differ(tmp_path):
    run(tmp_path, 1, "--epochs=1")
    again = run(tmp_path, 2, "--epochs=1", "--amp=bf16")
    differ = "{'amp': 'off', 'ranks': 1}"
    assert again.output == f"checkpoint.pt: 1 of 1 epochs, flags then: {differ}\n"


def test_a_rank_that_does_not_see_the_checkpoint_ends_the_run(tmp_path):
    """As on a machine with a disk of its own: else rank 0 alone would go on from the epoch."""
    run(tmp_path, 1, "--epochs=1")
    other_disk = "    if rank == 1:\n        args.checkpoint = 'elsewhere.pt'\n"
    elsewhere = ("    parts = {", other_disk + "    parts = {")
    ended = run(tmp_path, 2, "--epochs=2", changes=(elsewhere,))
    assert all(ended.statuses), ended.output


def test_an_overflow_of_one_rank_is_skipped_by_all():
    """A skipped step halves the scale. The control does not look for overflows."""
    late = "(1e9 if (epoch, i, rank) == (1, 20, 1) else 1)"
    overflow = ("sums(ddp, batch, device)", f"sums(ddp, [batch[0] * {late}, batch[1]], device)")
    flags = ("--epochs=2", "--amp=fp16")
    ended, calm = (run_anew(2, *flags, changes=changes) for changes in ((overflow,), ()))
    assert ended.saved["scaler"]["scale"] == calm.saved["scaler"]["scale"] / 2
    assert all(tensor.isfinite().all() for tensor in ended.saved["model"].values())
    blind = (("scaler.step(optimizer)", "optimizer.step()"), overflow)
    spoiled = run_anew(2, *flags, changes=blind).saved["model"]
    assert not all(tensor.isfinite().all() for tensor in spoiled.values())


def pieces_of_the_page() -> list[str]:
    return [fence.text for fence in fences("python", [PIECES])]


def functions_of(number: int) -> Changes:
    """The functions of the template, each with that of a piece; its classes stand before them."""
    source = TEMPLATE.read_text()
    parts = pieces_of_the_page()[number].rstrip().split("\n\n\n")
    classes = "".join(f"{part}\n\n\n" for part in parts if part.startswith("class"))
    changes = []
    for part in parts:
        if part.startswith("def"):
            begin = source.index(part[: part.index("(")])
            old = source[begin : source.index("\n\n\n", begin)]
            changes.append((old, part if changes else classes + part))
    return tuple(changes)


def test_with_the_language_model_of_the_page_ranks_agree_with_one_process(tmp_path):
    """In float64, without dropout. The control: with dropout, ranks draw masks of their own."""
    no_dropout = ("norm_first=True", "norm_first=True, dropout=0.0")
    saved = {}
    for dropout in (False, True):
        for ranks in (1, 2):
            folder = tmp_path / f"{dropout} {ranks}"
            folder.mkdir()
            (folder / "input.txt").write_bytes(bytes(i * i % 251 for i in range(4_000)))
            made = functions_of(1)
            if not dropout:
                made = tuple((old, new.replace(*no_dropout)) for old, new in made)
            ended = run(folder, ranks, "--epochs=1", "--batch-size=8", changes=(FLOAT64, *made))
            assert not any(ended.statuses), ended.output
            saved[dropout, ranks] = ended.saved["model"]
    assert distance(saved[False, 1], saved[False, 2]) < 1e-10
    assert distance(saved[True, 1], saved[True, 2]) > 1e-3


def test_with_the_class_weights_of_the_page_ranks_agree_with_a_plain_loop():
    """The control: with the template's own sums, they do not."""
    ours = TEMPLATE.read_text()
    old = ours[ours.index("    loss = nn.functional.cross_entropy") : ours.index("\n\n\ndef main")]
    weights = (0.5 + torch.arange(10.0)) / 5
    given = f"    class_weights = torch.tensor({weights.tolist()}, dtype=torch.float64)\n"
    change = (old, given + pieces_of_the_page()[2].rstrip())
    changes, flags = (FLOAT64, NO_DROPOUT), ("--epochs=2", "--clip=0.9", "--accumulate=2")
    ended = run_anew(2, *flags, changes=(*changes, change))
    plain = weights_of_a_plain_loop(2, 0.9, changes, weight=weights.double())
    assert distance(ended.saved["model"], plain) < 1e-10
    assert distance(run_anew(2, *flags, changes=changes).saved["model"], plain) > 1e-3
    shares = [float(share) for share in re.findall(r"([\d.]+)% right", ended.output)]
    assert len(shares) == 4
    assert max(shares) <= 100


def test_with_the_pieces_of_the_page_it_trains_a_resnet(tmp_path):
    """Six images of a folder for each class, two ranks: BatchNorm's buffers are rank 0's."""
    for number in range(24):
        folder = tmp_path / ("train", "test")[number % 2] / f"class {number % 4 // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (3, 40, 40), dtype=torch.uint8)
        to_pil_image(pixels).save(folder / f"{number}.png")
    ended = run(tmp_path, 2, "--epochs=1", "--batch-size=4", changes=functions_of(0))
    assert not any(ended.statuses), ended.output
    assert ended.saved["model"]["bn1.num_batches_tracked"] == 3


def early_stopping() -> Changes:
    """The lines that the page adds."""
    [diff] = [fence.text for fence in fences("diff", [PIECES])]
    return tuple(sides(part) for part in diff.split(" ...\n"))


def test_early_stopping_of_the_page_also_counts_over_a_stop(tmp_path):
    """With a rate of 0, no epoch after the first is better. The control: what is not saved."""
    still = ("lr=0.1", "lr=0.0")
    start, count, save = early_stopping()
    for changes, last in (((start, count, save), 4), ((start, count), 6)):
        folder = tmp_path / str(last)
        folder.mkdir()
        for epochs in (2, 9):
            ended = run(folder, 2, f"--epochs={epochs}", changes=(still, *changes))
            assert not any(ended.statuses), ended.output
        assert ended.saved["epoch"] == last


BATCHNORM = ("nn.Dropout(0.0)", "nn.BatchNorm1d(96)")


@pytest.mark.gpu
def test_on_a_gpu_the_weights_are_those_of_a_cpu(tmp_path):
    """In float64, over nccl, with SyncBatchNorm, which has no other rank here."""
    flags, changes = ("--epochs=1", "--accumulate=2"), (*EXACT, BATCHNORM)
    on_gpu = run(tmp_path, 1, *flags, "--sync-bn", changes=(*changes, ("False", CPU[0])))
    assert not any(on_gpu.statuses), on_gpu.output
    assert (
        distance(on_gpu.saved["model"], run_anew(1, *flags, changes=changes).saved["model"]) < 1e-8
    )


@pytest.mark.parametrize(
    ("ranks", "flags", "env", "message"),
    [
        (2, ("--batch-size=25",), {}, "--batch-size must be a multiple of --accumulate times 2"),
        (1, ("--accumulate=0",), {}, "--batch-size must be a multiple of --accumulate times 1"),
        (0, (), {"SLURM_STEP_NUM_TASKS": "4"}, "let each node's task start torchrun"),
    ],
)
def test_a_wrong_call_ends_in_one_line(ranks, flags, env, message, tmp_path):
    start = launch_script if ranks else run_script
    how = {"world_size": ranks} if ranks else {}
    for status, output in start(str(TEMPLATE), *flags, env=env, cwd=tmp_path, **how):
        assert status == 2
        assert message in output.splitlines()[-1]
