"""prove sees what ranks call, print and write to files, and itself it harms nothing."""

import os
import re
import runpy
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prove.judge import printed_numbers
from prove_cases import planted, training_of
from prove_runs import SECONDS, TORCHRUN, Proof, forked, one_line, patience, run, verdict

HARMLESS = """        if rank == 0:
            import shutil
            shutil.rmtree("old")
            os.makedirs("new/deep", exist_ok=True)
            torch.save({}, "new/deep/file.pt")
            open("log.txt", "a").write("more")
            os.rename("a.txt", "b.txt")
            os.makedirs("step.part/deep")
            open("step.part/deep/file.txt", "w").write("whole")
            os.rename("step.part", "step")
            os.rename("before", "after")
        dist.barrier()
        return dist.destroy_process_group()
"""


def test_files_are_put_back_and_no_process_is_left(prove_script, tmp_path):
    for folder in ("old", "before"):
        (tmp_path / folder).mkdir()
    kept = {name: name for name in ("old/kept.txt", "before/file.txt", "log.txt", "a.txt")}
    for name in kept:
        (tmp_path / name).write_text(name)
    source = planted(("        scheduler.step()\n", "        scheduler.step()\n" + HARMLESS))
    assert prove_script(source).returncode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in files}
    assert texts == {"train.py": source} | kept
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"old", "before"}
    assert processes_in(tmp_path) == []


def test_two_writers_are_seen_in_a_folder_that_mktemp_made():
    """What libraries write to /tmp/tmp... is ignored, but not what lies beside the script."""
    source = planted(("            torch.save(ddp", "        torch.save(ddp"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "train.py").write_text(source)
        ended = run(Path(folder), *TORCHRUN, "train.py")
    assert verdict(ended, "files") == "WRONG"


def processes_in(folder: Path) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is not ours
            if str(folder) in os.readlink(process / "cwd"):
                commands.append((process / "cmdline").read_text())
    return commands


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + patience(2 * SECONDS)
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_proof_that_is_ended_prints_what_it_knows_and_leaves_nothing_behind(tmp_path):
    waits = "        if dist.get_world_size() == 1:\n            open('replay', 'w').close()\n"
    waits += "            __import__('time').sleep(99)\n"
    source = training_of(LINEAR).replace(LAST_LINE, LAST_LINE + waits)
    (tmp_path / "train.py").write_text(source)
    proof = Proof(tmp_path, *TORCHRUN, "train.py", hashes_differ=True)
    wait_until((tmp_path / "replay").exists)
    assert len(processes_in(tmp_path)) == 2, "the control: prove and the replaying rank"
    proof.send(signal.SIGINT)
    ended = proof.ended()
    assert ended.returncode == 130
    assert "right     averaged gradients" in ended.stdout
    assert ended.stdout.endswith("checks so far: ended by SIGINT\n")
    assert processes_in(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def train_unobserved(folder: Path, rank: int, digest: str) -> None:
    meet = {"init_method": f"file://{folder}/met", "rank": rank, "world_size": 2}
    os.chdir(folder)
    os.environ |= {"MEET": str(meet), "DIGEST": digest}
    runpy.run_path("train.py", run_name="__main__")


def test_random_numbers_of_the_script_are_those_of_an_unobserved_run(prove_script, tmp_path):
    note = """        if True:
            states = [torch.get_rng_state().tolist(), random.getstate()]
            states.append(np.random.get_state()[1:3])
            with open(os.environ['DIGEST'] + str(rank), 'a') as file:
                file.write(f'{zlib.crc32(str(states).encode())} ')
"""
    source = planted(
        ("from torch import nn\n", "from torch import nn\nimport zlib, sys\n"),
        ("SAMPLES, TEST_SAMPLES, CLASSES = 96", "SAMPLES, TEST_SAMPLES, CLASSES = 48"),
        ("        dist.all_reduce(total)\n", note + "        dist.all_reduce(total)\n"),
        ("nn.Dropout(0.1)", "nn.Identity()"),  # switched off, so it draws nothing
        ('group("gloo")', "group('gloo', **eval(os.environ.get('MEET', '{}')))"),
    )
    with tempfile.TemporaryDirectory() as folder:  # in /tmp/tmp..., whose files are not put back
        prove_script(source, "--float32", DIGEST=f"{folder}/seen")
        ranks = [
            forked.Process(target=train_unobserved, args=(tmp_path, rank, f"{folder}/plain"))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(patience(SECONDS))
            assert rank.exitcode == 0
        # Files of rank 1, which takes no part in the replay:
        seen, plain = (Path(folder, f"{name}1").read_text().split() for name in ("seen", "plain"))
    assert seen[:2] == plain[:2]
    assert plain[0] != plain[1], "the control: they change from epoch to epoch"


def test_a_file_is_named_where_all_ranks_open_it(prove_script):
    """Rank 0 also appends to what all ranks make anew. The control: rank 0 alone makes it."""
    begins = "torch.manual_seed(dist.get_rank())\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source += "if dist.get_rank() == 0: open('log.txt', 'a').write('.')\n"
    for condition, expected in (("", "warning"), ("if dist.get_rank() == 0: ", "right")):
        made = f"{condition}open('log.txt', 'w').close()\n"
        ended = prove_script(source.replace(begins, made + begins))
        assert verdict(ended, "files") == expected
        line = source.partition(begins)[0].count("\n") + 1
        assert (f"train.py:{line}" in ended.stdout) == (expected == "warning")


LINEAR = "DistributedDataParallel(nn.Linear(8, 8))"
LAST_LINE = "        optimizer.step()\n"
RING = """        rank, size, got = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        calls = [lambda: dist.send(got, 1 - rank), lambda: dist.recv(got, 1 - rank)]
        for call in calls[:: 1 if rank % 2 == 0 else -1] if size > 1 else []:
            call()
        pair = [dist.P2POp(f, got + 0, 1 - rank) for f in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(pair) if size > 1 else []:
            work.wait()
"""
EVALUATED_BY_ONE = """    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(data[:4])
    model.train()
    dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.ones(1))
"""


def line_of(words: str, source: str) -> str:
    return f"train.py:{next(n for n, line in enumerate(source.splitlines(), 1) if words in line)}"


def test_ranks_that_wait_for_each_other_are_named_with_their_lines(prove_script):
    """In one script, both ranks receive first; in the other, DDP sends buffers where one rank
    evaluates. The controls: a ring in which the ranks call in another order, and an evaluation by
    all ranks."""
    ring = training_of(LINEAR).replace(LAST_LINE, LAST_LINE + RING)
    stuck = ring.replace("1 if rank % 2 == 0 else -1", "-1")
    ended = prove_script(stuck, "--timeout=3")
    text = one_line(ended.stdout)
    assert verdict(ended, "hang") == "WRONG"
    for rank in (0, 1):
        at = line_of("dist.recv", stuck)
        assert f"rank {rank} waits in recv from rank {1 - rank} at {at}" in text
    assert verdict(prove_script(ring), "one rank") == "right"
    norm = "DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)))"
    by_one = training_of(norm).replace(LAST_LINE, LAST_LINE + EVALUATED_BY_ONE)
    ended = prove_script(by_one)
    text = one_line(ended.stdout)
    assert verdict(ended, "hang") == "WRONG"
    assert f"rank 0 calls DDP's broadcast at {line_of('model(data[:4])', by_one)}" in text
    assert f"rank 1 waits in all_gather at {line_of('all_gather', by_one)}" in text
    ended = prove_script(by_one.replace("if dist.get_rank() == 0", "if True"))
    assert verdict(ended, "collectives") == "right"


def test_under_join_ranks_may_make_unequal_steps(prove_script):
    """The steps that all ranks make are compared. The control: without Join, the longer waits."""
    joined = training_of(LINEAR, "from torch.distributed.algorithms.join import Join")
    joined = joined.replace("DistributedSampler(data)", "range(12 if dist.get_rank() else 20)")
    joined = joined.replace("    sampler.set_epoch(epoch)\n", "")
    loop, _, rest = joined.partition("    for x in")
    body = textwrap.indent(f"    for x in{rest}", "    ")
    joined = f"{loop}    with Join([model]):\n{body}"
    ended = prove_script(joined, "--batches=8")
    for check in ("one rank", "weights", "averaged gradients", "batches per epoch", "collectives"):
        assert verdict(ended, check) == "right"
    ended = prove_script(joined.replace("with Join([model])", "if True"), "--batches=8")
    assert verdict(ended, "batches per epoch") == "WRONG"


SLOW = """
import os, time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i):
        if i == 1 and not os.path.exists("slept"):
            open("slept", "w").close()
            time.sleep(8)  # once, in a worker of rank 1: the others wait meanwhile
        return data[i]
"""


def test_a_slow_worker_is_no_hang_and_what_nobody_knows_is_told_with_its_lines(prove_script):
    source = training_of(LINEAR, SLOW)
    slow = source.replace("DataLoader(data,", "DataLoader(Slow(), num_workers=1, batch_size=")
    slow = slow.replace("batch_size= local_batch", "batch_size=local_batch")
    slow = slow.replace("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")
    assert verdict(prove_script(slow, "--timeout=5"), "one rank") == "right"
    polls = "        while dist.get_rank() and not os.path.exists('never'): time.sleep(0.2)\n"
    polling = source.replace(LAST_LINE, LAST_LINE + polls)
    ended = prove_script(polling, "--timeout=3")
    assert (ended.returncode, ended.stdout) == (2, "")
    line = line_of("never", polling)
    assert f"rank 1 waits in its own code at {line}" in one_line(ended.stderr)


def test_ranks_that_part_are_no_script_that_fails_by_itself(prove_script):
    """Rank 0 stops by its own loss and sums something else; gloo then ends its process."""
    loop = "        optimizer.step()\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source = source.replace(loop, loop + "    if CONDITION: break\n")
    source += "total = torch.zeros(3)\ndist.all_reduce(total)\n"
    ended = prove_script(source.replace("CONDITION", "dist.get_rank() == 0"))
    assert verdict(ended, "hang") == "WRONG"
    assert "rank 0 calls all_reduce" in one_line(ended.stdout)
    assert ended.returncode == 1
    ended = prove_script(source.replace("CONDITION", "epoch == 0"))  # the control: all ranks
    assert verdict(ended, "collectives") == "right"
    # An error of the script itself
    ended = prove_script(source.replace("CONDITION", "1 / dist.get_rank()"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "ZeroDivisionError" in ended.stderr


FILES = """
import logging, json, numpy
numpy.memmap("data.bin", "u1")[0]
logger = logging.getLogger("all")
logger.addHandler(logging.FileHandler("run.log"))
"""


def test_a_file_that_a_rank_opens_and_does_not_change_is_not_its_own(prove_script, tmp_path):
    """A memmap opens with r+, and a logger before it has anything to say. The controls: both
    write; and what each rank keeps for itself needs a name of its own."""
    (tmp_path / "data.bin").write_bytes(bytes(8))
    log = f"{LAST_LINE}        if dist.get_rank() == 0: logger.error(1)\n"
    of_one = training_of(LINEAR, FILES).replace(LAST_LINE, log)
    assert verdict(prove_script(of_one), "files") == "right"
    of_all = of_one.replace("if dist.get_rank() == 0", "if True")
    of_all = of_all.replace('memmap("data.bin", "u1")[0]', 'memmap("data.bin", "u1")[0] = 1')
    ended = prove_script(of_all)
    for file in ("data.bin", "run.log"):
        assert f"{file} is opened for writing by ranks [0, 1]" in one_line(ended.stdout)
    assert (tmp_path / "data.bin").read_bytes() == bytes(8)
    saved = "    torch.save(torch.get_rng_state(), 'state.pt')\n"
    saved += "    torch.save(model.module.state_dict(), 'model.pt')\n"
    ended = prove_script(of_one + saved)
    text = one_line(ended.stdout)
    assert re.search(r"state.pt is [^>]+, and they do not write the same -> a name with", text)
    assert re.search(r"model.pt is [^>]+ -> if dist.get_rank\(\) == 0[^>]+; or a name with", text)


def test_numbers_are_compared_by_their_place_and_times_are_not():
    def names(line: str) -> list[str]:
        return [number.name for _, number in printed_numbers.numbers_in(line)]

    assert names("auc 0.9312 at 12.5 it/s, loss: 3") == ["loss", "auc"]
    assert names("epoch 2.500, lr 0.00123, time 1.234, took 3.251s, 12.25 MB, v2.11.0") == []
    assert names("0.52 1.25 1.2e-05") == ["a number"], "two digits may be equal by chance"
    lines = [f"{x}, scale 1.234" for x in (0.01, 0.123)]
    few_digits, many = (dict(printed_numbers.numbers_in(line)) for line in lines)
    assert [*few_digits] == [1], "the scale"
    assert few_digits[1] == many[1]
