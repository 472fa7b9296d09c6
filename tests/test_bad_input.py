"""A wrong call ends in one clear line and status 2, on every rank, and leaves nothing behind."""

import hashlib
import shutil
import socket
import subprocess
from unittest.mock import patch

import pytest
import torch
from support import ROOT, command, free_port, load_stage, run_ranks, torchrun, train_once

from common.checkpoint import MARK
from common.options import UsageError

SCRIPTS = {
    "01": "01_single_gpu/train.py",
    "02": "02_data_parallel/train.py",
    "03": "03_ddp_manual_allreduce/train.py",
    "04": "04_ddp_torchrun/train.py",
    "05": "05_amp_syncbn/train.py",
}
SHORT = ("--model=net-bn", "--epochs=1", "--batch-size=60")


def refused(output: str, *words: str) -> None:
    """One line, with all these words."""
    lines = [line for line in output.splitlines() if line]
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


FLAGS = [
    (("--batch-size=0",), ("--batch-size", "'0'", "whole number from 1 up")),
    (("--batch-size=-8",), ("--batch-size", "'-8'")),
    (("--epochs=0",), ("--epochs", "'0'")),
    (("--epochs=ten",), ("--epochs", "'ten'", "whole number")),
    (("--lr=nan",), ("--lr", "'nan'", "number from 0 to 1e+38")),
    (("--seed=99999999999999999999",), ("--seed", "whole number from 0 to 4294967295")),
    (("--workers=-1",), ("--workers", "'-1'")),
    (("--dataset=svhn",), ("--dataset", "'svhn'", "digits", "mnist")),
    (("--model=vgg",), ("--model", "'vgg'", "net-bn")),
    (("--epoch=3",), ("unrecognized", "--epoch=3", "--help")),
    (("--data-dir=nowhere",), ("nowhere", "--data-dir")),
    (("--dataset=imagefolder",), ("train/CLASS", "--data-dir")),
    (("--batch-size=3000",), ("3000", "1500 training samples", "--batch-size 750")),
    (("--dataset=synthetic", "--image-size=12"), ("16 pixels", "12")),
    (("--evaluate=nowhere.pt",), ("nowhere.pt", "no checkpoint")),
    (("--resume=nowhere.pt",), ("nowhere.pt", "no checkpoint")),
    (("--resume=",), ("no checkpoint",)),
    (("--lr=1e39",), ("--lr", "'1e39'")),
    (("--resume=auto", "--evaluate=some.pt"), ("--evaluate", "not allowed with", "--resume")),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=lambda value: " ".join(value)[:40])
def test_wrong_flags_are_refused(flags, words, tmp_path):
    run_dir = tmp_path / "run"
    data = () if any(flag.startswith("--data-dir") for flag in flags) else ("--data-dir=data",)
    [(status, output)] = command(SCRIPTS["01"], f"--run-dir={run_dir}", *data, *flags)
    assert status == 2
    refused(output, *words)
    assert not run_dir.exists()


def test_a_right_call_is_not_refused(tmp_path):
    """The control of everything here."""
    [(status, output)] = command(SCRIPTS["01"], f"--run-dir={tmp_path / 'run'}", "--max-steps=1")
    assert status == 0, output
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
@pytest.mark.parametrize("key", SCRIPTS)
def test_cuda_without_a_gpu_is_refused(key, tmp_path):
    [(status, output)] = command(SCRIPTS[key], "--device=cuda", f"--run-dir={tmp_path / 'run'}")
    assert status == 2
    refused(output, "--device cuda needs a GPU", "--device cpu")
    assert not (tmp_path / "run").exists()


def with_damaged_digits(folder, damage):
    shutil.copytree(ROOT / "data" / "digits", folder / "digits")
    damage(folder / "digits" / "train-images-idx3-ubyte")
    return (f"--data-dir={folder}", f"--run-dir={folder / 'run'}")


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "empty": lambda file: file.write_bytes(b""),
    "another-format": lambda file: file.write_bytes(b"\x89PNG\r\n\x1a\n" + file.read_bytes()),
    "too-few": lambda file: file.write_bytes(
        file.read_bytes()[:4] + (700).to_bytes(4, "big") + file.read_bytes()[8 : 16 + 700 * 64]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_data_set_is_refused(damage, tmp_path):
    flags = with_damaged_digits(tmp_path, DAMAGES[damage])
    [(status, output)] = command(SCRIPTS["01"], *flags)
    assert status == 2
    refused(output, "train-images-idx3-ubyte")
    assert not (tmp_path / "run").exists()


class Trap:
    """A pickled object that would leave a file behind if it were ever loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def seal(path):
    """Give a file the checksum that ours end with, as one would who wants it to be loaded."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + MARK + digest.encode())


def damaged_checkpoint(kind, folder):
    good = train_once("01", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    path = folder / "checkpoint.pt"
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickled-object":
        torch.save({"model": Trap(folder / "trapped")}, path)
        seal(path)
    elif kind == "without-checksum":
        torch.save({"model": Trap(folder / "trapped")}, path)
    elif kind == "one-bit-flipped":
        content = bytearray(good.read_bytes())
        content[len(content) // 2] ^= 1  # amid the weights
        path.write_bytes(content)
    elif kind == "another-file":
        torch.save([1, 2, 3], path)
        seal(path)
    else:
        shutil.copy(good, path)
    return path


CHECKPOINTS = [
    ("truncated", (), ("damaged",)),
    ("empty", (), ("checkpoint.pt",)),
    ("one-bit-flipped", (), ("damaged",)),
    ("pickled-object", (), ("tensors and plain values",)),
    ("without-checksum", (), ("checksum",)),
    ("another-file", (), ("not a checkpoint",)),
    ("good", ("--model=net",), ("--model net-bn", "--model net:")),
    ("good", ("--dataset=synthetic",), ("--dataset digits", "--dataset synthetic")),
]


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
@pytest.mark.parametrize(("kind", "flags", "words"), CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(kind, flags, words, how, tmp_path):
    path = damaged_checkpoint(kind, tmp_path)
    run_dir = tmp_path / "run"
    call = (*SHORT, *flags, f"{how}={path}", f"--run-dir={run_dir}")
    [(status, output)] = command(SCRIPTS["01"], *call)
    assert status == 2
    refused(output, "checkpoint.pt", *words)
    assert not run_dir.exists()
    assert not (tmp_path / "trapped").exists(), "loading ran code"


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    flags = ("--dataset=synthetic", "--max-steps=1", f"--run-dir={tmp_path}")
    assert command(SCRIPTS["01"], *flags, "--classes=7")[0][0] == 0
    path = f"--evaluate={tmp_path / 'checkpoint.pt'}"
    [(status, output)] = command(SCRIPTS["01"], *flags, path)
    assert status == 2
    refused(output, "does not fit", "--classes")


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    [(status, output)] = command(SCRIPTS["01"], f"--run-dir={tmp_path / 'file'}")
    assert status == 2
    refused(output, "--run-dir", "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_pictures_of_other_classes_are_refused(tmp_path):
    from PIL import Image

    for folder in ("train/cat", "train/dog", "test/cat", "test/owl"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / folder / "1.png")
    flags = ("--dataset=imagefolder", "--batch-size=1", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command(SCRIPTS["01"], f"--data-dir={tmp_path}", *flags)
    assert status == 2
    refused(output, "['cat', 'dog']", "['cat', 'owl']")


def launcher(port: int, ranks: int = 2) -> dict[str, str]:
    own = {"RANK": "{RANK}", "LOCAL_RANK": "{RANK}"}
    all_ = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return own | all_ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


ON_ALL_RANKS = [
    (("--batch-size=61",), ("61", "2", "ranks", "--batch-size 60 or --batch-size 62")),
    (("--data-dir=nowhere",), ("nowhere",)),
    (("--resume=nowhere.pt",), ("nowhere.pt",)),
    (("--run-dir=LICENSE",), ("--run-dir LICENSE",)),
]


@pytest.mark.parametrize("key", ["04", "05"])
@pytest.mark.parametrize(("flags", "words"), ON_ALL_RANKS, ids=lambda value: " ".join(value)[:30])
def test_all_ranks_end_together_and_one_tells_why(key, flags, words):
    answers = command(SCRIPTS[key], "--device=cpu", *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [2, 2]
    refused("".join(output for _, output in answers), *words)


def test_03_ends_all_its_ranks_and_one_tells_why(tmp_path):
    flags = ("--batch-size=61", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command(SCRIPTS["03"], *flags)
    assert status == 2
    refused(output, "61", "2 ranks")
    assert not (tmp_path / "run").exists()


def test_a_file_that_only_one_rank_lacks_ends_both(tmp_path):
    """The last rank reads another folder, as on a second machine that lacks the file."""
    good = train_once("01", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    (tmp_path / "0").mkdir()
    shutil.copy(good, tmp_path / "0" / "checkpoint.pt")
    script = tmp_path / "run.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / '04_ddp_torchrun')!r})\n"
        f"sys.argv.append('--resume={tmp_path}/' + os.environ['RANK'] + '/checkpoint.pt')\n"
        f"runpy.run_path({str(ROOT / SCRIPTS['04'])!r}, run_name='__main__')\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of an earlier run\n")
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path / 'run'}")
    answers = command(str(script), *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [2, 2]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of an earlier run\n"
    refused("".join(output for _, output in answers), "1/checkpoint.pt")


def test_more_nccl_ranks_than_gpus_are_refused(tmp_path):
    ranks = torch.cuda.device_count() + 1
    flags = ("--backend=nccl", f"--world-size={ranks}", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command(SCRIPTS["03"], *flags)
    assert status == 2
    refused(output, "nccl", f"{ranks} ranks", "--backend gloo")


STAGE_03 = [
    (("--reducer=best",), ("--reducer", "'best'", "per-parameter", "shared-memory")),
    (("--world-size=0",), ("--world-size", "'0'", "whole number from 1 up")),
    (("--backend=tcp",), ("--backend", "'tcp'", "gloo")),
]


@pytest.mark.parametrize(("flags", "words"), STAGE_03, ids=lambda value: value[0])
def test_wrong_flags_of_stage_03_are_refused(flags, words, tmp_path):
    run_dir = tmp_path / "run"
    [(status, output)] = command(SCRIPTS["03"], f"--run-dir={run_dir}", *flags)
    assert status == 2
    refused(output, *words)
    assert not run_dir.exists()


STAGE_04 = [
    (("--checkpoint-every-steps=0",), ("--checkpoint-every-steps", "'0'", "from 1 up")),
    (("--timeout-seconds=5",), ("--timeout-seconds", "'5'", "from 6 up")),
]


@pytest.mark.parametrize("key", ["04", "05"])
@pytest.mark.parametrize(("flags", "words"), STAGE_04, ids=lambda value: value[0])
def test_wrong_flags_of_stages_04_and_05_are_refused(key, flags, words, tmp_path):
    run_dir = tmp_path / "run"
    [(status, output)] = command(SCRIPTS[key], f"--run-dir={run_dir}", *flags)
    assert status == 2
    refused(output, *words)
    assert not run_dir.exists()


STAGE_05 = [
    (("--amp=fp8",), ("--amp", "'fp8'", "bf16")),
    (("--accumulate=0",), ("--accumulate", "'0'", "from 1 up")),
    (("--accumulate=7",), ("120", "7 parts", "--batch-size 119 or --batch-size 126")),
    (("--clip-norm=0",), ("--clip-norm", "'0'")),
    (("--lr-rule=cubic",), ("--lr-rule", "'cubic'", "sqrt")),
    (("--base-batch-size=0",), ("--base-batch-size", "'0'")),
    (("--warmup-epochs=-1",), ("--warmup-epochs", "'-1'")),
    (("--lr-decay=never",), ("--lr-decay", "'never'", "cosine")),
    (("--comm-hook=int8",), ("--comm-hook", "'int8'", "bf16")),
    (("--sync-bn=False",), ("--sync-bn", "False")),
]


@pytest.mark.parametrize(("flags", "words"), STAGE_05, ids=lambda value: value[0])
def test_wrong_flags_of_stage_05_are_refused(flags, words, tmp_path):
    run_dir = tmp_path / "run"
    [(status, output)] = command(SCRIPTS["05"], f"--run-dir={run_dir}", "--device=cpu", *flags)
    assert status == 2
    refused(output, *words)
    assert not run_dir.exists()


LONE = ("--model=resnet18", "--device=cpu")  # at 28 pixels, its last layers have a single one


@pytest.mark.parametrize(
    ("key", "ranks", "flags"),
    [
        ("01", 1, ("--batch-size=1",)),
        ("03", 1, ("--batch-size=2",)),
        ("04", 2, ("--batch-size=2",)),
        ("05", 1, ("--batch-size=1",)),
        ("05", 2, ("--batch-size=2", "--no-sync-bn")),
        ("05", 2, ("--batch-size=4", "--accumulate=2", "--no-sync-bn")),
    ],
)
def test_batch_norm_of_one_value_is_refused(key, ranks, flags, tmp_path):
    flags = (*LONE, *flags, f"--run-dir={tmp_path / 'run'}")
    env = launcher(free_port()) if ranks > 1 else {}
    answers = command(SCRIPTS[key], *flags, ranks=ranks, env=env)
    assert [status for status, _ in answers] == [2] * ranks
    words = ("BatchNorm gets one sample", "resnet18", "--batch-size")
    refused("".join(output for _, output in answers), *words)


def test_synchronized_batch_norm_trains_with_one_sample_a_rank(tmp_path):
    """The control: two ranks have two values together."""
    flags = (*LONE, "--batch-size=2", "--max-steps=1", f"--run-dir={tmp_path / 'run'}")
    answers = command(SCRIPTS["05"], *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [0, 0], answers


def test_a_machine_without_a_compiler_is_told_so(tmp_path):
    flags = ("--compile", "--device=cpu", f"--run-dir={tmp_path / 'run'}")
    env = {**launcher(free_port()), "CXX": "no-such-compiler", "PATH": str(tmp_path)}
    answers = command(SCRIPTS["05"], *flags, ranks=2, env=env)
    assert [status for status, _ in answers] == [2, 2], answers
    lines = [line for _, output in answers for line in output.splitlines() if "error:" in line]
    assert len(lines) == 1, answers
    assert "--compile" in lines[0]
    assert "g++" in lines[0]


def _without_halves(rank, flags):
    """A device whose convolutions do not take fp16, as torch says it of such an operation."""
    import sys

    stage, ends = load_stage("05"), (UsageError, SystemExit)
    convolve = stage.F.conv2d

    def refuse(x, *args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("\"conv2d\" not implemented for 'Half'")
        return convolve(x, *args, **kwargs)

    sys.argv = ["train.py", *flags]
    with patch.object(stage.F, "conv2d", refuse), pytest.raises(ends) as caught:
        stage.main()
    return type(caught.value).__name__, str(caught.value)


def test_a_device_without_the_format_is_told_so(tmp_path):
    """The lowest rank tells why, the others just end with status 2."""
    flags = ("--amp=fp16", "--device=cpu", "--data-dir=data", f"--run-dir={tmp_path / 'run'}")
    (kind, text), other = run_ranks(2, _without_halves, flags)
    assert kind == "UsageError"
    assert all(word in text for word in ("--amp fp16", "cpu", "not implemented for 'Half'"))
    assert other == ("SystemExit", "2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None}, ("MASTER_ADDR expected", "--standalone")),
        ({"MASTER_PORT": "soon"}, ("MASTER_PORT is soon", "whole number")),
        ({"MASTER_PORT": "70000"}, ("MASTER_PORT 70000",)),
        ({"MASTER_PORT": "0"}, ("MASTER_PORT 0", "free port")),
        ({"WORLD_SIZE": None, "LOCAL_RANK": None}, ("LOCAL_RANK is not", "WORLD_SIZE is not set")),
        ({"RANK": "2"}, ("RANK 2", "WORLD_SIZE 2")),
    ],
    ids=["no-address", "port-text", "port-high", "port-zero", "two-missing", "rank-too-high"],
)
def test_04_with_half_a_launcher_is_refused(change, words):
    env = launcher(free_port()) | {name: value for name, value in change.items() if value}
    env = {name: value for name, value in env.items() if change.get(name, value)}
    [(status, output)] = command(SCRIPTS["04"], env=env)
    assert status == 2
    refused(output, *words)


def test_04_on_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        [(status, output)] = command(SCRIPTS["04"], env=launcher(port))
    assert status == 2
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"127.0.0.1:{port}" in lines[0]
    assert "Traceback" not in output


def test_under_torchrun_the_line_is_there_and_nothing_hangs(tmp_path):
    flags = ("--batch-size=61", f"--run-dir={tmp_path / 'run'}")
    done = torchrun(2, SCRIPTS["04"], *flags)
    assert done.returncode != 0
    assert done.stderr.count("error: a global batch of 61") == 1
    assert "exitcode  : 2" in done.stderr.replace("exitcode: 2", "exitcode  : 2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--stages=01,07",), ("--stages 01,07", "01,02,03,04,05")),
        (("--ranks=0",), ("--ranks", "'0'")),
        (("--ranks=7", "--batch-size=120"), ("120", "7 ranks")),
        (("--resume=auto",), ("only trains",)),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_the_tour_refuses_wrong_calls_at_once(flags, words, tmp_path):
    [(status, output)] = command("tour.py", *flags, f"--run-dir={tmp_path / 'run'}")
    assert status == 2
    refused(output, *words)
    assert not (tmp_path / "run").exists()


def test_no_process_is_left_behind(tmp_path):
    """After all of the above: a rank that still waits for another would be seen by its run-dir."""
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert not [line for line in done.stdout.splitlines() if str(tmp_path.parent) in line]
