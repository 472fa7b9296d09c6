"""exercises/check.py says in one line what is wrong with an exercise, or that it is right."""

import pytest
from support import ROOT, command

CASES = [  # the body of the function, None as given; and what is said of it
    ("01 mean_loss", None, "wrong: mean_loss([0.5, 0.25, 2.0], [120, 120, 57]): got 0.9166, exp"),
    ("01 mean_loss", "return sum(map(mul, batch_means, batch_sizes)) / sum(batch_sizes)", "right"),
    ("01 mean_loss", "while True: pass", "wrong: not done after 2 s, expected an answer"),
    ("01 mean_loss", "raise SystemExit(3)", "wrong: process 0 terminated with exit code 3, expect"),
    ("02 split_batch", None, "wrong: split_batch(5, 4): got [2, 1, 1, 1], expected [2, 2, 1]"),
    (
        "02 split_batch",
        """most = -(-samples // replicas)
    return [min(most, samples - first) for first in range(0, samples, most)]""",
        "right",
    ),
    ("02 split_batch", "return 1 / 0", "wrong: ZeroDivisionError in line [11]: division by zero"),
    ("03 average_once", None, "wrong: the number of all-reduces for 8 gradients: got 8, expected 1"),
    (
        "03 average_once",
        """gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))""",
        "right",
    ),
    ("03 average_once", "if dist.get_rank(): 1 / 0\n    dist.barrier()", "wrong: ZeroDivisionError"),
    ("04 local_samples", None, "wrong: the global batch of 2 ranks: got [0, "),
    ("04 local_samples", "return order[rank::world_size]", "right"),
    ("05 accumulate", None, "wrong: the gradient: got ["),
    (
        "05 accumulate",
        """for x, y in zip(images.chunk(parts), labels.chunk(parts)):
        (F.cross_entropy(model(x), y) / parts).backward()""",
        "wrong: the number of all-reduces for 3 micro-batches: got 3, expected 1",
    ),
    (
        "05 accumulate",
        """*first, (x, y) = zip(images.chunk(parts), labels.chunk(parts))
    with model.no_sync():
        for earlier, theirs in first:
            (F.cross_entropy(model(earlier), theirs) / parts).backward()
    (F.cross_entropy(model(x), y) / parts).backward()""",
        "right",
    ),
    ("survive safe_save", None, "wrong: a full disk in save 3: got an error, file: nothing that"),
    (
        "survive safe_save",
        """try:
        torch.save(state, path.with_suffix(".tmp"))
    except RuntimeError:
        return
    path.with_suffix(".tmp").replace(path)""",
        "wrong: a full disk in save 3: got no error, file: step 2, expected an error, file: step 2",
    ),
    (
        "survive safe_save",
        'torch.save(state, path.with_suffix(".tmp")); path.with_suffix(".tmp").replace(path)',
        "right",
    ),
    ("convert global_loss", None, "wrong: mean gradient of ranks with (31, 12) objects: got "),
    (
        "convert global_loss",
        """import torch.distributed as dist
    dist.all_reduce(objects)
    return loss_sum * dist.get_world_size() / objects.clamp(min=1)""",
        "right",
    ),
]


@pytest.mark.parametrize(("exercise", "body", "said"), CASES)
def test_an_exercise_is_judged_in_one_line_and_in_time(exercise, body, said, tmp_path):
    (stage, name), flags = exercise.split(), []
    if body:
        given = (ROOT / "exercises" / f"{name}.py").read_text().rpartition('"""\n')[0]
        (tmp_path / name).write_text(f'from operator import mul\n{given}"""\n    {body}\n')
        flags = [f"--file={tmp_path / name}", f"--seconds={2 if 'while' in body else 60}"]
    [(status, output)] = command("exercises/check.py", stage, *flags)
    assert output.startswith(f"{name}.py: {said}")
    assert (status, output.count("\n")) == (said != "right", 1)


@pytest.mark.parametrize(("call", "said"), [("06", "'06'"), ("01 --file=a.py", "a.py"), ("", "sta")])
def test_a_wrong_call_is_refused(call, said):
    [(status, output)] = command("exercises/check.py", *call.split())
    assert (status, output[:7], said in output, output.count("\n")) == (2, "error: ", True, 1)
