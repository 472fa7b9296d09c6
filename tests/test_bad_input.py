"""A wrong call ends in one clear line and status 2, on every rank, and leaves nothing behind."""

import re
import shutil
import socket
import subprocess

import pytest
import torch
from support import ROOT, command, free_port, torchrun, train, train_once

SCRIPTS = {
    "01": "01_single_gpu/train.py",
    "02": "02_data_parallel/train.py",
    "03": "03_ddp_manual_allreduce/train.py",
    "04": "04_ddp_torchrun/train.py",
    "05": "05_amp_syncbn/train.py",
    "survive": "survive/train.py",
}
SHORT = ("--model=net-bn", "--epochs=1", "--batch-size=60")


def refused(output: str, *words: str) -> None:
    """One line, with all these words."""
    lines = [line for line in output.splitlines() if line]
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def all_refused(answers: list[tuple[int, str]], *words: str) -> None:
    """Every rank ends with status 2 and the same line."""
    assert [status for status, _ in answers] == [2] * len(answers), answers
    assert len({output for _, output in answers}) == 1, answers
    refused(answers[0][1], *words)


def refused_by_03(output: str, *words: str) -> None:
    """As above; a line per rank, or less if the first one has ended the others, as torch notes."""
    ended = re.compile(r"W.*torch/multiprocessing/spawn.py.* Terminating process \d+ via signal .*")
    lines = [line for line in output.splitlines() if not ended.fullmatch(line)]
    assert len(set(lines)) == 1, output
    refused(lines[0], *words)


FLAGS = [
    (("--batch-size=0",), ("--batch-size", "'0'", "whole number, at least 1")),
    (("--batch-size=-8",), ("--batch-size", "'-8'")),
    (("--epochs=0",), ("--epochs", "'0'")),
    (("--epochs=ten",), ("--epochs", "'ten'", "whole number")),
    (("--lr=nan",), ("--lr", "'nan'", "number, from 0 to 1e+38")),
    (("--seed=99999999999999999999",), ("--seed", "whole number, from 0 to 4294967295")),
    (("--workers=-1",), ("--workers", "'-1'")),
    (("--dataset=svhn",), ("--dataset", "'svhn'", "digits", "mnist")),
    (("--model=vgg",), ("--model", "'vgg'", "net-bn")),
    (("--epoch=3",), ("unrecognized", "--epoch=3", "--help")),
    (("--data-dir=nowhere",), ("--dataset digits", "--data-dir nowhere", "name the right folder")),
    (("--dataset=imagefolder",), ("--data-dir data", "data/train")),
    (("--batch-size=3000",), ("3000", "1500 training samples", "--batch-size 750")),
    (("--dataset=synthetic", "--image-size=12"), ("--image-size 16", "got 12")),
    (("--evaluate=nowhere.pt",), ("cannot load nowhere.pt", "No such file")),
    (("--resume=nowhere.pt",), ("cannot load nowhere.pt", "No such file")),
    (("--resume=",), ("cannot load", "No such file")),
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
    refused(output, "--device", "'cuda'", "choose from 'cpu'")
    assert not (tmp_path / "run").exists()


def with_damaged_digits(folder, damage):
    shutil.copytree(ROOT / "data" / "digits", folder / "digits")
    damage(folder / "digits" / "train-images-idx3-ubyte")
    return (f"--data-dir={folder}", f"--run-dir={folder / 'run'}")


DAMAGES = {
    "missing": (lambda file: file.unlink(), ["train-images-idx3-ubyte"]),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-100]), ["95900"]),
    "empty": (lambda file: file.write_bytes(b""), []),
    "another-format": (lambda file: file.write_bytes(b"\x89PNG\r\n" + file.read_bytes()), []),
    "too-few": (
        lambda file: file.write_bytes(
            file.read_bytes()[:4] + (700).to_bytes(4, "big") + file.read_bytes()[8 : 16 + 700 * 64]
        ),
        ["700 images, 1500 labels"],
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_data_set_is_refused(damage, words, tmp_path):
    flags = with_damaged_digits(tmp_path, damage)
    [(status, output)] = command(SCRIPTS["01"], *flags)
    assert status == 2
    refused(output, "cannot read --dataset digits", f"--data-dir {tmp_path}", *words)
    assert not (tmp_path / "run").exists()


class Trap:
    """A pickled object that would leave a file behind if it were ever loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def checkpoint(kind, folder):
    good = train_once("01", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    path = folder / "checkpoint.pt"
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickled-object":
        torch.save({"model": Trap(folder / "trapped")}, path)
    elif kind == "another-file":
        torch.save([1, 2, 3], path)
    elif kind == "another-dict":
        torch.save({"model": {}}, path)
    else:
        shutil.copy(good, path)
    return path


CHECKPOINTS = [
    ("truncated", (), ("cannot load",)),
    ("empty", (), ("cannot load",)),
    ("pickled-object", (), ("is not a checkpoint", "more than plain values")),
    ("another-file", (), ("cannot load", "use one that a stage saved")),
    ("another-dict", (), ("cannot load", "use one that a stage saved")),
    ("good", ("--model=net",), ("was saved with --model net-bn",)),
    ("good", ("--dataset=synthetic",), ("was saved with --dataset digits",)),
]


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
@pytest.mark.parametrize(("kind", "flags", "words"), CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(kind, flags, words, how, tmp_path):
    path = checkpoint(kind, tmp_path)
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
    refused(output, "cannot load", "size mismatch for fc2.weight")


@pytest.mark.parametrize("key", ["01", "04"])
def test_a_checkpoint_from_inside_an_epoch_is_refused(key, tmp_path):
    inside = train_once("01", 1, "--max-steps=3", dtype=torch.float32).folder / "checkpoint.pt"
    flags = (f"--resume={inside}", "--device=cpu", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command(SCRIPTS[key], *flags)
    assert status == 2
    refused(output, "checkpoint.pt was saved inside an epoch: resume it with survive/train.py")
    assert not (tmp_path / "run").exists()


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
    (("--batch-size=61",), ("--batch-size 61 does not divide by 2", "try 62")),
    (("--data-dir=nowhere",), ("nowhere",)),
    (("--resume=nowhere.pt",), ("nowhere.pt",)),
    (("--batch-size=3000",), ("1500 training samples",)),
]


@pytest.mark.parametrize("key", ["04", "05"])
@pytest.mark.parametrize(("flags", "words"), ON_ALL_RANKS, ids=lambda value: " ".join(value)[:30])
def test_each_rank_finds_by_itself_what_is_wrong(key, flags, words, tmp_path):
    """Before the ranks meet: none of them waits for another one."""
    flags = (*flags, "--device=cpu", f"--run-dir={tmp_path / 'run'}")
    answers = command(SCRIPTS[key], *flags, ranks=2, env=launcher(free_port()))
    all_refused(answers, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "words"), ON_ALL_RANKS[:2], ids=["launcher", "ranks"])
def test_03_ends_all_its_ranks_and_tells_why(flags, words, tmp_path):
    [(status, output)] = command(SCRIPTS["03"], *flags, f"--run-dir={tmp_path / 'run'}")
    assert status == 2
    refused_by_03(output, *words)
    assert not (tmp_path / "run").exists()


def test_03_ends_all_its_ranks_when_only_rank_0_cannot_write(tmp_path):
    (tmp_path / "file").write_text("mine")
    [(status, output)] = command(SCRIPTS["03"], f"--run-dir={tmp_path / 'file'}")
    assert status == 2
    lines = [line for line in output.splitlines() if not line.startswith("global batch")]
    refused_by_03("\n".join(lines), "cannot write to --run-dir")


def test_more_nccl_ranks_than_gpus_are_refused(tmp_path):
    ranks = torch.cuda.device_count() + 1
    flags = ("--backend=nccl", f"--world-size={ranks}", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = command(SCRIPTS["03"], *flags)
    assert status == 2
    refused(output, "--backend nccl needs a GPU for each rank", "--backend gloo")
    assert not (tmp_path / "run").exists()


OF_A_STAGE = [
    ("02", "--replicas=0", ("--replicas", "'0'", "whole number, at least 1")),
    ("02", "--replicas=7", ("--batch-size 120 does not divide by 7", "try 126")),
    ("03", "--world-size=0", ("--world-size", "'0'", "whole number, at least 1")),
    ("03", "--backend=tcp", ("--backend", "'tcp'", "gloo")),
    ("05", "--amp=fp8", ("--amp", "'fp8'", "bf16")),
    ("05", "--accumulate=0", ("--accumulate", "'0'", "at least 1")),
    ("05", "--accumulate=7", ("--batch-size 120 does not divide by 7", "try 126")),
    ("05", "--clip-norm=0", ("--clip-norm", "'0'")),
    ("05", "--lr-rule=cubic", ("--lr-rule", "'cubic'", "sqrt")),
    ("05", "--base-batch-size=0", ("--base-batch-size", "'0'")),
    ("05", "--warmup-epochs=-1", ("--warmup-epochs", "'-1'")),
    ("05", "--lr-decay=never", ("--lr-decay", "'never'", "cosine")),
    ("05", "--sync-bn=False", ("--sync-bn", "False")),
]


@pytest.mark.parametrize(("key", "flag", "words"), OF_A_STAGE)
def test_wrong_flags_of_one_stage_are_refused(key, flag, words, tmp_path):
    run_dir = tmp_path / "run"
    [(status, output)] = command(SCRIPTS[key], f"--run-dir={run_dir}", "--device=cpu", flag)
    assert status == 2
    refused(output, *words)
    assert not run_dir.exists()


LONE = ("--model=resnet18", "--device=cpu")  # at 28 pixels, its last layers have a single pixel


@pytest.mark.parametrize(
    ("key", "ranks", "flags"),
    [
        ("01", 1, ("--batch-size=1",)),
        ("02", 1, ("--batch-size=2",)),
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
    words = ("BatchNorm in resnet18 gets one value", "try a larger --batch-size")
    all_refused(answers, *words)


def test_03_refuses_batch_norm_of_one_value():
    with pytest.raises(AssertionError, match="BatchNorm in resnet18 gets one value"):
        train("03", 2, "--model=resnet18", "--batch-size=2")


def test_synchronized_batch_norm_trains_with_one_sample_a_rank(tmp_path):
    """The control: two ranks have two values together."""
    flags = (*LONE, "--batch-size=2", "--max-steps=1", f"--run-dir={tmp_path / 'run'}")
    answers = command(SCRIPTS["05"], *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [0, 0], answers


@pytest.mark.parametrize("key", ["04", "05"])
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_half_a_launcher_is_refused(name, key):
    env = {each: value for each, value in launcher(free_port()).items() if each != name}
    [(status, output)] = command(SCRIPTS[key], env=env)
    assert status == 2
    refused(output, f"{name} is not set: start with torchrun, or export it")


def test_04_on_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        [(status, output)] = command(SCRIPTS["04"], env=launcher(port))
    assert status == 2
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"port: {port}" in lines[0]
    assert "Traceback" not in output


def test_under_torchrun_what_only_rank_0_finds_ends_the_other_rank_too(tmp_path):
    """Rank 1 waits for rank 0 already: torchrun ends it."""
    (tmp_path / "file").write_text("mine")
    done = torchrun(2, SCRIPTS["04"], f"--run-dir={tmp_path / 'file'}")
    assert done.returncode != 0
    assert done.stderr.count("error: cannot write to --run-dir") == 1
    assert "exitcode  : 2" in done.stderr.replace("exitcode: 2", "exitcode  : 2")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--stages=01,07",), ("--stages 01,07", "01,02,03,04,05")),
        (("--ranks=0",), ("--ranks", "'0'")),
        (("--ranks=7", "--batch-size=120"), ("--batch-size 120 does not divide by 7",)),
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
