"""The cells of notebook 05: `%%puzzle 3` keeps the script of its cell, and judge(3) judges it."""

import os
import sys
import tempfile
from pathlib import Path

from IPython import get_ipython

ROOT = Path(__file__).resolve().parents[1]
# As if it were installed: the kernel of Kaggle or Colab has been started before.
sys.path += [str(ROOT), str(ROOT / "packages/prove/src"), str(ROOT / "beyond/puzzles")]
os.environ["OMP_NUM_THREADS"] = "1"

from local_ranks.ranks import PROCESS_DEFAULTS  # noqa: E402

FOLDER = ROOT / "runs" / "notebook_puzzles"


def copy_of(number: int) -> Path:
    return FOLDER / f"{number:02}" / "train.py"


def puzzle(number: str, script: str) -> None:
    """Keep the cell as the script of this puzzle."""
    copy = copy_of(int(number))
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(script)


if shell := get_ipython():  # not in the processes that the notebook starts
    shell.register_magic_function(puzzle, "cell")


def judge(number: int) -> None:
    """Say whether the script of the cell above is right."""
    run(str(number))


def hint(number: int) -> None:
    """Show what prove says of it."""
    run(str(number), "--hint")


def show(number: int) -> None:
    """Show what one rank prints, beside what two ranks print."""
    run(str(number), "--show")


def run(*flags: str) -> None:
    with tempfile.NamedTemporaryFile("r") as printed:
        process = PROCESS_DEFAULTS.context().Process(target=run_judge, args=(flags, printed.name))
        process.start()
        process.join()
        print(printed.read().rstrip())


def run_judge(flags: tuple[str, ...], output: str) -> None:
    """What check_answer.py does with these flags, in a process that has imported torch."""
    import check_answer as program

    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = ["check_answer.py", f"--folder={FOLDER}", *flags]
    with program.exit_on(program.UsageError, program.ScriptError):
        sys.exit(program.main())
