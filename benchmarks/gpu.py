"""Run and measure on a GPU all that needs one, in about half an hour.

    PYTHONPATH=. python benchmarks/gpu.py            # as `make gpu`
    PYTHONPATH=. python benchmarks/gpu.py --dry-run  # print the commands; needs no GPU

It needs Linux, PyTorch, torchvision, matplotlib, tabulate and pytest, but no network. After each
command, how it ended is in results/gpu/gpu.json and its output in results/gpu/log.txt. The next
call leaves out the commands that have ended, and repeats those that a time limit has cut off. What
came of all of them is one page with a picture: results/gpu/README.md.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from tabulate import tabulate

from bench import BENCH
from common.options import Parser, UsageError, exit_on, float_at_least
from run_stage import ROOT, command_of

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
MADE = ("runs/gpu/tour/tour.*", "runs/gpu/tour/report.md", "benchmarks/results/*-x-*.json")
CUT_OFF = (124, 137)  # exit statuses of `timeout`
CIFAR10 = "beyond/survive/cifar10.py --amp bf16 --epochs 24 --batch-size 512 --lr 0.1"


def list_commands() -> list[str]:
    """All of them, without `python`. Tests that need a GPU have `gpu` in their names."""
    commands = ["-m pytest -v --tb=short tests -k gpu"]
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
    commands += [f"benchmarks/bench.py --device cuda --only {section}" for section in BENCH]
    if Path("data/cifar-10-batches-py").exists():
        commands.append(f"{CIFAR10} {flags}cifar10")
    return commands


def run(command: str, seconds: float) -> dict:
    """Run it as a reader would; its status, its seconds, and the summary that it wrote."""
    start, env = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT)}
    with (RESULTS / "log.txt").open("a") as log:
        print(f"\n$ python {command}", file=log, flush=True)
        call = ["timeout", "-k20", f"{seconds:.0f}", sys.executable, *command.split()]
        status = subprocess.run(call, env=env, stdout=log, stderr=log).returncode
    ended = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    for summary in Path(command.split()[-1]).glob("summary.json"):  # of --run-dir
        ended["summary"] = json.loads(summary.read_text())
    for path in (path for pattern in MADE for path in ROOT.glob(pattern)):
        (RESULTS / path.name).write_bytes(path.read_bytes())
    return ended


def write_page(results: dict[str, dict], hardware: str) -> None:
    """All that has ended, on one page."""
    rows = []
    for command, ended in results.items():
        speed = ended.get("summary", {}).get("samples_per_second", "")
        rows.append((f"`python {command}`", ended["status"], ended["seconds"], speed))
    heads = ("command", "exit status", "seconds", "samples/s")
    page = f"# {hardware}, PyTorch {torch.__version__}\n\n{tabulate(rows, heads, 'github')}\n"
    if (RESULTS / "tour.png").exists():
        page += "\n![The five stages on this machine](tour.png)\n"
    (RESULTS / "README.md").write_text(page)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print every command, run none")
    text = "for all; the next call continues"
    parser.add_argument("--minutes", default=28.0, type=float_at_least(0), help=text)
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.dry_run:
        return print(*(f"python {command}" for command in list_commands()), sep="\n")
    if not torch.cuda.is_available():
        raise UsageError("torch sees no GPU: try --dry-run")
    RESULTS.mkdir(exist_ok=True)
    file, end = RESULTS / "gpu.json", time.monotonic() + 60 * args.minutes
    results = json.loads(file.read_text()) if file.exists() else {}
    commands, gpus = list_commands(), torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}"
    ended = sum(results.get(command, {}).get("status", 124) not in CUT_OFF for command in commands)
    print(f"{hardware}: {len(commands)} commands, {ended} ended before, {args.minutes:g} minutes")
    for command in commands:
        seconds = min(end - time.monotonic(), 540)  # at most nine minutes for one
        if results.get(command, {}).get("status", 124) in CUT_OFF and seconds > 1:
            print(f"python {command}", flush=True)
            results[command] = run(command, seconds)
            print(f"  status {results[command]['status']}, {results[command]['seconds']} s")
            file.write_text(json.dumps(results, indent=2) + "\n")
            write_page(results, hardware)
    print(f"see {(RESULTS / 'README.md').relative_to(ROOT)}, and send it as a pull request")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
