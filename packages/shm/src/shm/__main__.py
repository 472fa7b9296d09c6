"""Runs a script over shm where it asks for gloo, without changing it.

torchrun --standalone --nproc-per-node=2 -m shm 04_ddp_torchrun/train.py
"""

import runpy
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from shm.replace import exit_with_error, replace_gloo

if __name__ == "__main__":
    parser = ArgumentParser("python -m shm", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--no-pin", action="store_false", dest="pins", help="ranks change cores")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("flags", metavar="FLAGS", nargs=REMAINDER, help="of the script")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        exit_with_error(f"{args.script} is no file: expected python -m shm SCRIPT FLAGS")
    replace_gloo(args.pins)
    sys.argv = [args.script, *args.flags]
    sys.path[0] = args.script.rpartition("/")[0]
    runpy.run_path(args.script, run_name="__main__")
