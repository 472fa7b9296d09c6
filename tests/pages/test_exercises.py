"""tests/check_exercise.py says in one line what is wrong with an exercise, or that it is right."""

import pytest

from helpers.local_ranks import ROOT, command
from helpers.stage_files import FOLDERS

MEAN = "return sum(x * n for x, n in zip(batch_means, batch_sizes)) / sum(batch_sizes)"
CHUNKS = """size = -(-samples // replicas)
    return [min(size, samples - first) for first in range(0, samples, size)]"""
FLAT = """gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))"""
MEETS_OFTEN = """for x, y in zip(images.chunk(parts), labels.chunk(parts)):
        (F.cross_entropy(model(x), y) / parts).backward()"""
MEETS_ONCE = """*first, last = zip(images.chunk(parts), labels.chunk(parts))
    with model.no_sync():
        for x, y in first:
            (F.cross_entropy(model(x), y) / parts).backward()
    (F.cross_entropy(model(last[0]), last[1]) / parts).backward()"""
RENAMED = """torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)"""
GLOBAL = """import torch.distributed as dist
    dist.all_reduce(objects)
    return loss_sum * dist.get_world_size() / objects.clamp(min=1)"""
FULL = "a full disk in save 3: got an error, file: nothing that torch.load can read, expected an"
CASES = [  # the body of the function, or nothing, as it stands; what is said to it
    ("01", "", "mean_loss([0.5, 0.25, 2.0], [120, 120, 57]): got 0.9166, expected 0.68"),
    ("01", MEAN, "right"),
    ("01", "while True: pass", "ranks [0] did not end in 1 s, expected an answer"),
    ("01", "raise SystemExit(3)", "rank 0 ended with status 3 without an answer, expected"),
    ("02", "", "split_batch(5, 4): got [2, 1, 1, 1], expected [2, 2, 1]"),
    ("02", CHUNKS, "right"),
    ("02", "return 1 / 0", "ZeroDivisionError in line 11: division by zero"),
    ("03", "", "the number of all-reduces for 8 gradients: got 8, expected 1"),
    ("03", FLAT, "right"),
    ("03", "if dist.get_rank(): 1 / 0\n    dist.barrier()", "ZeroDivisionError in"),
    ("04", "", "the global batch of 2 ranks: got [3, 5"),
    ("04", "return order[rank::world_size]", "right"),
    ("05", "", "the gradient: got ["),
    ("05", MEETS_OFTEN, "the number of all-reduces for 3 micro-batches: got 3, exp"),
    ("05", MEETS_ONCE, "right"),
    ("survive", "", FULL),
    ("survive", RENAMED, "right"),
    ("convert", "", "mean gradient of ranks with (31, 12) objects: got "),
    ("convert", GLOBAL, "right"),
]


@pytest.mark.parametrize(("stage", "body", "verdict"), CASES)
def test_an_exercise_is_judged_in_one_line_and_in_time(stage, body, verdict, tmp_path):
    folder, flags = FOLDERS.get(stage, ROOT / "beyond" / stage), []
    if body:
        given = (folder / "exercise.py").read_text().rpartition('"""\n')[0]
        (tmp_path / "exercise.py").write_text(f'{given}"""\n    {body}\n')
        flags = [f"--file={tmp_path / 'exercise.py'}", f"--seconds={1 if 'while' in body else 60}"]
    [(status, output)] = command("tests/check_exercise.py", stage, *flags)
    prefix = "" if verdict == "right" else "wrong: "
    assert output.startswith(f"{folder.relative_to(ROOT)}/exercise.py: {prefix}{verdict}")
    assert (status, output.count("\n")) == (verdict != "right", 1)
