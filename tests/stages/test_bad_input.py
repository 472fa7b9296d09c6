"""A wrong call ends in one clear line and status 2, on every rank, and leaves nothing behind."""

import socket
import subprocess
from contextlib import nullcontext

import pytest
import torch
from PIL import Image

from common.data import load_dataset
from common.models import build_model
from common.options import UsageError
from helpers.machine import free_port
from helpers.refusals import SCRIPTS, assert_one_line, refusal
from helpers.small_data import few_digits
from local_ranks.scripts import launch_script, launcher_variables, run_script
from local_ranks.train_stage import options

GPUS = torch.cuda.device_count()

WHOLE, BILLION = "expected a whole number", "at least 1 and less than 1000000000 (--help"
HUGE, ALMOST = "1" + 400 * "0", "999999999"
START_WITH_TORCHRUN = "start it with torchrun --standalone --nproc-per-node=2 SCRIPT"
FIT, LIMIT = "01_single_gpu/fit.py", "--memory-limit=1GiB"
SHM = "packages/shm/src/shm/__main__.py"
COLLECTIVES = "03_ddp_manual_allreduce/collectives.py"
SHARD = "beyond/shard/train.py"
UNEVEN = "04_ddp_torchrun/uneven.py"
TOO_MANY = f"--backend=nccl --world-size={GPUS + 1}"
ONE_VALUE = "BatchNorm in resnet18 would get one value for each channel, which has no variance"
WRONG_CALLS = {  # a stage or a program with its flags, and words of the line
    "01 --batch-size=0": f"--batch-size: got '0', {WHOLE}, {BILLION}",
    "01 --lr=nan": "--lr: got 'nan', expected a number, at least 0 and less than 1e+38",
    "01 --seed=4294967296": f"{WHOLE}, at least 0 and less than 4294967296",
    "01 --epoch=3": "unrecognized arguments: --epoch=3 (--help",
    "01 --dataset=imagefolder --data-dir=nowhere": "--dataset imagefolder in --data-dir nowhere (",
    "01 --dataset=imagefolder": "'data/train'): name the right folder",
    "01 --batch-size=1501": "--batch-size 1501 is more than the 1500 training samples: try --bat",
    "01 --model=resnet18 --batch-size=1": f"{ONE_VALUE}: try twice the --batch-size",
    "02 --model=resnet18 --batch-size=2": ONE_VALUE,
    f"01 --dataset=synthetic --image-size={ALMOST}": "): try a smaller --image-size or fewer --cla",
    "01 --workers=1000": f"{WHOLE}, at least 0 and less than 1000 (",
    "01 --dataset=synthetic --image-size=15": "--model net needs --image-size 16 or more, got 15",
    "01_single_gpu/evaluate.py nowhere.pt": "cannot load nowhere.pt (FileNotFoundError: ",
    "01 --resume=/dev/zero": "/dev/zero is not a checkpoint: expected only tensors",
    "survive --resume=/dev/zero": "/dev/zero is missing, damaged or no checkpoint: name another",
    "01 --resume=": "cannot load . (IsADirectoryError: ",
    "02 --replicas=7": "--batch-size 120 does not divide by 7: try 126",
    "03 --world-size=7": "--batch-size 120 does not divide by 7: try 126",
    f"03 {TOO_MANY}": "--backend nccl needs a GPU for each rank: try --backend gloo",
    "04": START_WITH_TORCHRUN,
    "05": START_WITH_TORCHRUN,
    "05 --sync-bn=False": "--sync-bn",
    "tour --stages=01,07": "--stages 01,07: expected one or more of 01,02,03,04,05",
    "tour --ranks=7 --batch-size=120": "--batch-size 120 does not divide by 7",
    "tour --resume=auto": "the tour begins anew",
    "survive --checkpoint-every-steps=0": f"--checkpoint-every-steps: got '0', {WHOLE}, at least",
    "survive --accumulate=7": "--batch-size 120 does not divide by 7: try 126",
    "survive --clip-norm=0": "--clip-norm: got '0'",
    f"{FIT} --memory-limit=8GB": "got '8GB', expected a size above 0 and below 1048576GiB, like",
    f"{FIT} --memory-limit=0MiB": "above 0",
    f"{FIT} {LIMIT} --image-size=15": "--image-size 16 or more",
    f"{FIT} {LIMIT} --model=resnet18 --batch-size=1": "for each channel: try --batch-size 2",
    f"{FIT} --memory-limit={HUGE}GiB": "expected a size above 0 and below 1048576GiB, like 512MiB",
    f"{FIT} --batch-size={HUGE}": "at least 1 and less than 1048576 (",
    f"{FIT} --image-size={ALMOST}": "at least 1 and less than 8192 (",
    f"beyond/forecast/forecast.py --step-ms=45 --image-size={ALMOST}": "does not suit resnet50: ",
    f"{SHM} missing.py": "missing.py is no file: expected python -m shm SCRIPT FLAGS",
    f"{COLLECTIVES} --world-size=10": f"'10', {WHOLE}, at least 1 and less than 10",
    f"{COLLECTIVES} {TOO_MANY}": f"a GPU for each of {GPUS + 1} ranks, here are {GPUS}: try --ba",
    f"{COLLECTIVES} --backend=mpi": "invalid choice: 'mpi'",
    "04_ddp_torchrun/launch/rank_variables.py --nodes 33 32": "65 processes on this machine",
    "beyond/survive/own_loop.py": "own_loop.py FOLDER",
    "beyond/survive/own_loop.py nowhere": "expected a folder that exists: torchrun",
    UNEVEN: "one rank waits for nobody: start two, with torchrun",
    "beyond/puzzles/check_answer.py 99": "name: got '99', expected 1 to 12, or gap1 to gap4",
}
if not GPUS:
    WRONG_CALLS[FIT] = "there is no GPU whose memory is the limit: try --memory-limit 8GiB"
    WRONG_CALLS |= {f"{key} --device=cuda": "'cuda' (choose from 'cpu')" for key in SCRIPTS}
WRONG_CALLS_OF_TWO_RANKS = {  # both find it, or they end together: none waits for the other
    "04 --model=resnet18 --batch-size=2": ONE_VALUE,
    "05 --model=resnet18 --batch-size=2 --no-sync-bn": ONE_VALUE,
    f"{SHARD} --device=cpu --dataset=digits --model=resnet18 --batch-size=2": ONE_VALUE,
    "survive --model=resnet18 --batch-size=4 --accumulate=2 --no-sync-bn": ONE_VALUE,
    "survive --batch-size=61": "--batch-size 61 does not divide by 2: try 62",
    "survive --dataset=imagefolder --data-dir=nowhere": "--data-dir nowhere",
    "survive --resume=nowhere.pt": "nowhere.pt is missing",
    "survive --run-dir=LICENSE": "cannot write to --run-dir",  # only rank 0 finds that
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_wrong_flags_are_refused(call):
    assert_one_line(refusal(*call.split(" ")), WRONG_CALLS[call])


@pytest.mark.parametrize("call", WRONG_CALLS_OF_TWO_RANKS)
def test_wrong_flags_are_refused_on_two_ranks(call):
    assert_one_line(refusal(*call.split(" "), world_size=2), WRONG_CALLS_OF_TWO_RANKS[call])


@pytest.mark.parametrize("key", ["04", "05", SHARD])
def test_a_wrong_batch_size_is_refused_before_the_ranks_connect(key):
    """This rank is alone, so it would wait for the other one."""
    env = launcher_variables(free_port())
    line = refusal(key, "--device=cpu", "--batch-size=61", env=env)
    assert_one_line(line, "--batch-size 61 does not divide by 2: try 62")


@pytest.mark.parametrize("key", ["04", "05", SHARD, "survive"])
def test_a_network_interface_that_is_not_here_is_refused(key):
    env, script = {"GLOO_SOCKET_IFNAME": "eth99"}, SCRIPTS.get(key, key)
    for status, output in launch_script(script, "--device=cpu", env=env):
        assert status == 2
        assert_one_line(output, "Unable to find address for: eth99")


def test_shm_shows_its_own_help_and_leaves_the_flags_of_a_script_to_it(tmp_path):
    [(status, output)] = run_script(SHM, "--help")
    assert status == 0
    assert output.startswith("usage: python -m shm [-h] [--no-pin] SCRIPT ...\n")
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    assert run_script(SHM, f"{tmp_path}/script.py", "--help", "-x") == [(0, "['--help', '-x']\n")]


RIGHT_CALLS = [  # at the limits
    ("01", 1, ["--batch-size=300", "--seed=4294967295", "--epochs=1", "--lr=0", "--workers=0"]),
    ("05", 2, ["--batch-size=2", "--model=resnet18"]),  # SyncBatchNorm sees both images
]


@pytest.mark.parametrize(("key", "ranks", "flags"), RIGHT_CALLS)
def test_a_right_call_is_not_refused(key, ranks, flags, tmp_path):
    """The control of everything here. The data set has 300 samples."""
    flags = (*few_digits(), *flags, "--device=cpu", "--max-steps=1", f"--run-dir={tmp_path}")
    start = launch_script if ranks == 2 else run_script
    answers = start(SCRIPTS[key], *flags)
    assert [status for status, _ in answers] == [0] * ranks, answers
    assert (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(("size", "refuses"), [(32, True), (33, False)])
def test_a_batch_of_one_is_refused_where_batchnorm_would_refuse_it(size, refuses):
    """The control is a picture of which four pixels are left."""
    train_set, _ = load_dataset(options("--dataset=synthetic", f"--image-size={size}"))
    model = build_model("resnet18", train_set, batch=2)
    for error, call in (
        (UsageError, lambda: build_model("resnet18", train_set, batch=1)),
        (ValueError, lambda: model(train_set[0][0][None])),
    ):
        with pytest.raises(error, match=r"(per|for each) channel") if refuses else nullcontext():
            call()


def test_pictures_of_other_classes_are_refused(tmp_path):
    for folder in ("train/cat", "train/dog", "test/cat", "test/owl"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / folder / "1.png")
    output = refusal("01", "--dataset=imagefolder", "--batch-size=1", f"--data-dir={tmp_path}")
    assert_one_line(output, "classes ['cat', 'dog'] for training, ['cat', 'owl'] for the test")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_picture_is_refused_by_its_name(workers, tmp_path):
    """Whoever opens it, the process itself or a worker, which hands a whole traceback over."""
    for name in ("train/a/1", "train/a/2", "test/a/1"):
        picture = tmp_path / f"{name}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(picture)
    damaged = tmp_path / "train" / "a" / "2.png"  # the stage itself opens only the first one
    damaged.write_bytes(damaged.read_bytes()[:60])
    flags = ("--dataset=imagefolder", "--batch-size=2", "--image-size=16", "--device=cpu")
    flags += (f"--data-dir={tmp_path}", f"--workers={workers}", f"--run-dir={tmp_path / 'run'}")
    [(status, output)] = run_script(SCRIPTS["01"], *flags)
    error = f"error: cannot read {damaged} (image file is truncated): replace or remove it"
    assert (status, output) == (2, f"global batch 2 = 1 × 2\n{error}\n")


def test_a_folder_that_only_rank_0_of_03_cannot_write_ends_the_other_rank_too(tmp_path):
    (tmp_path / "file").write_text("mine")
    [(status, output)] = run_script(SCRIPTS["03"], "--device=cpu", f"--run-dir={tmp_path / 'file'}")
    assert status == 2, output
    assert output.count("error: cannot write to --run-dir") == 1
    assert (tmp_path / "file").read_text() == "mine"
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in running.stdout, "a rank still waits for another"


def test_04_on_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        [(status, output)] = run_script(SCRIPTS["04"], env=launcher_variables(port))
    assert status == 2
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"port: {port}" in line
    assert "Traceback" not in output
