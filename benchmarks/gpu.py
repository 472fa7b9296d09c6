"""Run and measure on a GPU all that needs one, in about half an hour.

    python benchmarks/gpu.py            # as `make gpu`
    python benchmarks/gpu.py --dry-run  # prints the commands, and needs no GPU

It needs Linux, PyTorch, torchvision, tabulate and pytest, but no network. Where our packages are
not installed, put PYTHONPATH=.:packages/prove/src:packages/shm/src in front. After each command,
how it ended is in results/gpu/gpu.json and its output in results/gpu/log.txt. Stop it when you
like: the next call continues, and tries again what failed.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import torch

from benchmarks.bench import SECTIONS
from benchmarks.result_files import RESULTS, provenance, write_json
from benchmarks.variants import command_of
from common.chapters import ROOT
from common.options import Parser, UsageError, exit_on

FOLDER = RESULTS / "gpu"
PACKAGES = (".", "packages/prove/src", "packages/shm/src")  # where they lie, installed or not


def list_commands() -> list[str]:
    """All of them, without `python`."""
    commands = ["-m pytest -v --tb=short -m gpu tests/stages"]
    flags = "--device cuda --run-dir runs/gpu/"
    commands.append(f"benchmarks/tour.py --ranks 1 {flags}tour")
    each = f"--standalone --nproc-per-node={max(1, torch.cuda.device_count())}"  # a GPU each
    commands.append(f"-m torch.distributed.run {each} 04_ddp_torchrun/minimal.py")
    commands.append(f"-m prove torchrun {each} 04_ddp_torchrun/train.py --run-dir runs/gpu/prove")
    two = "-m torch.distributed.run --standalone --nproc-per-node=2"  # may share one GPU
    shard = f"{two} beyond/shard/train.py --backend gloo"
    commands += [f"{shard} --shard {way} {flags}{way}" for way in ("none", "parameters")]
    shared = " --backend gloo" if torch.cuda.device_count() < 2 else ""  # nccl shares no GPU
    for key in ("03", "04", "05-bf16"):
        commands.append(f"{' '.join(command_of(key, 2))} --model net-bn{shared} {flags}{key}")
    one = "-m torch.distributed.run --standalone --nproc-per-node=1 05_amp_syncbn/train.py"
    large = (
        f"{one} --model resnet50 --dataset synthetic --image-size 224 --batch-size 64 --epochs 1"
    )
    for amp in ("off", "bf16", "fp16"):  # what each format gives a network of large layers
        commands.append(f"{large} --amp {amp} {flags}05-resnet50-{amp}")
    for name in (name for name, section in SECTIONS.items() if section.on_gpu):
        out = f"benchmarks/results/gpu/{name}.json"
        commands.append(f"benchmarks/bench.py {name} --rounds 2 --device cuda --out {out}")
    return commands


def run(command: str) -> dict:
    """Run it as a reader would, for nine minutes at most; its status and its seconds."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in PACKAGES)
    start, env = time.monotonic(), {**os.environ, "PYTHONPATH": paths}
    with (FOLDER / "log.txt").open("a") as log:
        print(f"\n$ python {command}", file=log, flush=True)
        call = ["timeout", "-k20", "540", sys.executable, *command.split()]
        status = subprocess.run(call, env=env, stdout=log, stderr=log).returncode
    for path in (ROOT / "runs" / "gpu" / "tour").glob("*.*"):  # its report and its numbers
        shutil.copy(path, FOLDER)
    return {"status": status, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print every command, run none")
    args = parser.parse_args()
    os.chdir(ROOT)
    commands = list_commands()
    if args.dry_run:
        return print(*(f"python {command}" for command in commands), sep="\n")
    if not torch.cuda.is_available():
        raise UsageError("torch sees no GPU: try --dry-run")
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / "gpu.json"
    origin = provenance("cuda", command="python benchmarks/gpu.py")
    ends = json.loads(file.read_text())["commands"] if file.exists() else {}
    left = [command for command in commands if ends.get(command, {}).get("status") != 0]
    print(f"{origin['hardware']}: {len(left)} of {len(commands)} commands are left")
    for command in left:
        print(f"python {command}", flush=True)
        ends[command] = run(command)
        print(f"  status {ends[command]['status']}, {ends[command]['seconds']} s")
        write_json(file, {"provenance": origin, "commands": ends})
    print(f"send {FOLDER.relative_to(ROOT)} as a pull request")
    if any(ends[command]["status"] for command in commands):
        raise SystemExit(1)  # its log says why; a second call tries again what failed


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
