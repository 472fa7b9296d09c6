"""What the tests of beyond/convert share: its scripts, their runs, and what prove says of them."""

from functools import cache
from pathlib import Path

from local_ranks.machine import scratch_folder
from local_ranks.scripts import launch_script, run_script
from local_ranks.stage_files import fresh_module
from prove_runs import TORCHRUN, verdicts
from repository_pages import ROOT

CONVERT = ROOT / "beyond" / "convert"
CLASSIFIER, DETECTOR, EXAMPLES = (CONVERT / x for x in ("classifier", "detector", "examples"))
SMALL = ("--image-size=64", "--batch-size=4", "--warmup=1", "--workers=0", "--device=cpu")


def load(name: str | Path, *changes: tuple[str, str], folder: Path = CONVERT):
    return fresh_module(folder / name, [(str(name), *change) for change in changes])


def script_of(folder: Path) -> Path:
    return folder / f"{folder.name}.py"


def versions(folder: Path) -> list[str]:
    """The script for one GPU, and what it is after each step."""
    return load("apply_steps.py").versions_of(script_of(folder))


@cache
def converted(folder: Path) -> Path:
    """The script for many GPUs, which the last step leaves."""
    script = scratch_folder() / f"{folder.name}_ddp.py"
    script.write_text(versions(folder)[-1])
    return script


def launch(file: Path, *flags: str, ranks: int = 2) -> tuple:
    """The status of each rank, and the output of each; ranks=0 is plain python."""
    flags = (*SMALL, f"--run-dir={scratch_folder()}", *flags)
    joined = {"TORCH_DIST_INIT_BARRIER": "1"}  # a rank that ends at once lets the others join
    how = {"world_size": ranks, "env": joined}
    answers = launch_script(str(file), *flags, **how) if ranks else run_script(str(file), *flags)
    return tuple(zip(*answers, strict=True))


def proof(folder: Path, source: str, *options: str, flags: tuple = ()) -> dict[str, str]:
    """The verdict of each row of prove's table, of a script with these flags."""
    (folder / "mine.py").write_text(source)
    return verdicts(folder, "--batches=2", *options, *TORCHRUN, "mine.py", *flags)
