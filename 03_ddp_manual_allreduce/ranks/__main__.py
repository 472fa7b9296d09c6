"""Four ranks on this machine introduce themselves, and add up their numbers.

python -m ranks
"""

from common.options import Parser, UsageError, exit_on
from ranks import introduce, run_ranks

if __name__ == "__main__":
    with exit_on(UsageError):
        Parser(__doc__).parse_args()
        print(*run_ranks(4, introduce), sep="\n")
