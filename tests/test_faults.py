"""One fault of each kind, in real runs: they end in time, say why, and resume to the bit.

The campaign of hundreds is `make faults`; its harness is tests/faults.py.
"""

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from faults import (
    DAMAGES,
    EVERY,
    FLAGS,
    KINDS,
    STEPS,
    VARIANTS,
    Fault,
    Outcome,
    difference,
    draw,
    expected,
    reference,
    trial,
)
from support import ROOT, chapter, command, free_port

watchdog = chapter("survive", "watchdog")


def survived(outcome: Outcome) -> None:
    assert not outcome.hang, outcome
    assert outcome.orphans == 0, outcome
    assert not expected(outcome), (expected(outcome), outcome.output)
    assert not outcome.wrong, outcome.wrong
    # A checkpoint every 5 steps; where the last is damaged or could not be written, the one before.
    assert outcome.lost_steps <= 2 * EVERY + 1, outcome


ALONE = ("stop", "sleep", "stop-keeper", "raise", "term", "nan")  # have a test of their own below


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ALONE])
def test_a_run_survives(kind):
    """No process stays, the others name the rank, and the resumed run ends as one without a fault.

    With loaders in two kinds: they must end with their rank, and not at a SIGTERM.
    """
    workers = int(kind in ("kill", "term-all"))
    fault = draw(kind, random.Random(kind))
    survived(trial(replace(fault, step=11, variant="net", workers=workers)))


def errors(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(("kind", "ranks"), [("stop", 3), ("sleep", 2)])
def test_a_missing_rank_is_named_with_its_step_and_its_line(kind, ranks):
    """SIGSTOP, and a main thread that does something else: all end within --timeout-seconds.

    Step 12 is the last one of the epoch, so the others wait in the barrier behind it.
    """
    outcome = trial(Fault(kind, "net", ranks, ranks - 1, 12))
    survived(outcome)
    waiting = r"error: rank 0 gives up at step 12, line \d+, `agreement.barrier\(\)`: "
    missing = rf"rank {ranks - 1} did not arrive, last seen at step (\d+), line \d+, `(.+)`"
    found = re.match(waiting + missing, errors(outcome)[0])
    assert found, outcome.output
    if kind == "sleep":
        assert found.groups() == ("12", "scaler.step(optimizer)"), "it is seen where it is stuck"
    assert len(errors(outcome)) == ranks - (kind == "stop"), "a stopped process says nothing"


def test_a_stopped_rank_0_is_named_though_it_keeps_the_store():
    """Nobody can read the notes then: the others' threads block, but for the one that counts."""
    outcome = trial(Fault("stop-keeper", "net", 3, 0, 12))
    survived(outcome)
    assert len(errors(outcome)) == 2, "one on each rank that waits"
    text = "no answer from the store, which torchrun or rank 0 keeps"
    assert all(text in line for line in errors(outcome))


def test_a_rank_that_skips_a_collective_is_seen_where_it_waits():
    """Rank 1 leaves out the sum in evaluate: both wait, in vain, at two lines."""
    outcome = trial(Fault("skip", "net", 2, 1, 12))
    assert not outcome.hang
    assert outcome.orphans == 0
    assert not outcome.wrong, outcome.wrong
    assert outcome.statuses == [1, 1]
    assert len(errors(outcome)) == 2
    for line in errors(outcome):
        assert "the ranks wait in different collectives" in line
        assert re.search(r"rank 0 at step 12, line \d+, `dist.all_reduce\(totals\)", line)
        assert re.search(r"rank 1 at step 12, line \d+, `with agreement.fail_together\(", line)


def test_a_rank_that_raises_is_named_with_its_error():
    outcome = trial(Fault("raise", "net", 3, 1, 12))
    survived(outcome)
    lines = errors(outcome)
    assert len(lines) == 2, "one on each rank that waits"
    assert all("rank 1 ended at step 12, " in line for line in lines)
    assert all(line.endswith("with ValueError: a bug") for line in lines)


def test_a_loss_that_is_no_number_ends_all_ranks_alike():
    outcome = trial(Fault("nan", "net", 3, 2, 13))
    survived(outcome)
    assert outcome.statuses == [2, 2, 2]
    assert outcome.output.count("error: ") == 1
    assert "error: the loss of rank 2 is nan in step 14: " in outcome.output


def test_weights_that_are_no_numbers_are_not_saved():
    """Broken in the last step before a checkpoint, by no loss as yet."""
    outcome = trial(Fault("nan", "net", 2, 0, EVERY))
    survived(outcome)
    assert "error: a weight is nan or inf after step 5: " in outcome.output
    assert outcome.lost_steps == EVERY, "the checkpoint of this step is not written"


def test_sigterm_ends_all_ranks_after_the_same_step_with_a_checkpoint():
    """Some steps after the signal: a vote is under way for about a quarter of a second."""
    outcome = trial(Fault("term", "net", 3, 1, 8))
    survived(outcome)
    assert outcome.statuses == [0, 0, 0]
    assert outcome.lost_steps == 0, "the checkpoint is of the last step"
    assert outcome.seconds < 30, "torchrun sends SIGKILL then"
    lines = re.findall(r"rank (\d) stops after step (\d+): --resume auto", outcome.output)
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2"]
    [step] = {int(step) for _, step in lines}
    assert 8 <= step < STEPS


def test_the_checks_of_this_file_see_what_is_wrong():
    """The control: a wrong end, a wrong resume, a wrong loss."""
    good = reference("net", 2)
    losses = good["losses of the run"]
    assert difference(good, good, losses) == ""
    assert difference(good, good, [*losses[:-1], 0.0]) == "losses"
    other = reference("net", 3)
    assert "momentum 0" in difference(other, good, other["losses of the run"])
    said = "rank 0 stops after step 9: ...\nrank 1 stops after step {}: ..."
    assert not expected(Outcome(Fault("term"), [0, 0], said.format(9)))
    assert expected(Outcome(Fault("term"), [0, 1], said.format(9)))
    assert expected(Outcome(Fault("term"), [0, 0], said.format(10)))
    assert expected(Outcome(Fault("term"), [0, 0], said.format(9), lost_steps=1))
    assert expected(Outcome(Fault("kill", rank=1), [0, -9]))
    assert expected(Outcome(Fault("kill", rank=1), [1, -9], "nobody says a word"))
    assert not expected(Outcome(Fault("nan"), [2, 2], "error: the loss of rank 0"))
    assert expected(Outcome(Fault("nan"), [2, 1], "error: the loss of rank 0"))
    assert expected(Outcome(Fault("nan"), [2, 2], 2 * "error: the loss of rank 0\n"))


def test_the_campaign_draws_every_place_and_repeats_itself():
    faults = [draw(kind, random.Random(seed)) for kind in KINDS for seed in range(50)]
    assert {fault.variant for fault in faults} == set(VARIANTS)
    assert {fault.ranks for fault in faults} == {2, 3}
    assert {fault.workers for fault in faults} == {0, 1}
    assert len({fault.step for fault in faults}) > 15
    assert faults[7] == draw(faults[7].kind, random.Random(7))
    assert set(DAMAGES) < set(KINDS)


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_process_that_wrote_a_note_is_ended(same):
    """A PID is used again: the process that has it now may be anybody's."""
    store = dist.HashStore()
    dog = watchdog.Watchdog(store, 0, 2, __file__)
    dog.lost, dog.place = True, "here"
    with subprocess.Popen(["sleep", "60"]) as process:
        who = watchdog.identity(process.pid)
        assert who
        note = [7, "there", False, who if same else [*who[:-1], "0"]]
        store.set("rank 1", json.dumps(note))
        verdict = dog._diagnose(RuntimeError("gloo"))
        alive = process.poll() is None
        time.sleep(0.2)
        alive = process.poll() is None
        process.kill()
    assert verdict.startswith("rank 1 did not arrive, last seen at there: killed, stopped,")
    assert alive != same
    assert dog._first("mine") == verdict, "whoever comes later says the same"


def test_an_error_of_its_own_is_not_taken_for_a_missing_rank():
    """Even one that speaks of DistributedDataParallel: it keeps its traceback."""
    store = dist.HashStore()
    match = "in DistributedDataParallel"
    with pytest.raises(RuntimeError, match=match), watchdog.Watchdog(store, 0, 1, __file__):
        raise RuntimeError("a parameter was not used in DistributedDataParallel")
    assert b"with RuntimeError: a parameter was not used" in store.get("verdict")
    with pytest.raises(SystemExit), watchdog.Watchdog(dist.HashStore(), 0, 1, __file__):
        raise RuntimeError("gloo: Connection closed by peer")  # the control: this is one


def test_torchrun_restarts_and_the_job_heals_by_itself(tmp_path):
    """The real one: a rank is killed, torchrun restarts all, which resume from the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, signal, sys, torch\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    step, done = torch.optim.SGD.step, []\n"
        "    def die(self):\n"
        "        done.append(1)\n"
        "        return os.kill(os.getpid(), signal.SIGKILL) if len(done) == 12 else step(self)\n"
        "    torch.optim.SGD.step = die\n"
        f"sys.path.insert(0, {str(ROOT / 'survive')!r})\n"
        f"runpy.run_path({str(ROOT / 'survive' / 'train.py')!r}, run_name='__main__')\n"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_dir = tmp_path / "run"
    flags = (*FLAGS, *VARIANTS["net"], f"--data-dir={ROOT / 'data'}", f"--run-dir={run_dir}")
    flags += ("--resume=auto",)
    done = subprocess.run(
        [sys.executable, *launch, "--max-restarts=1", str(script), *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 did not arrive" in done.stderr
    ours = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    assert difference(ours, reference("net", 2), losses) == ""


@pytest.mark.parametrize(("rank", "what"), [("1", "nobody listens"), ("0", "nobody comes")])
def test_a_rendezvous_without_an_answer_ends_in_time(rank, what):
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    began = time.monotonic()
    [(status, output)] = command("survive/train.py", "--timeout-seconds=6", env=env)
    assert status == 2, (what, output)
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"2 ranks did not meet at 127.0.0.1:{env['MASTER_PORT']}" in line
    assert all(word in line for word in ("rank 0's host", "port free and open", "all ranks start"))
    assert time.monotonic() - began < 30, "far below the 600 s that are the default"
