"""Draw the pictures of the READMEs again, from results/*.json and nothing else.

    python benchmarks/pictures.py

Each keeps a digest of its results and of the function that drew it; a test compares.
"""

from importlib.machinery import SourceFileLoader
from types import ModuleType

import matplotlib

from common.options import Parser

from timing import RESULTS, ROOT, Draw, draw_picture

DRAWN_BY = {
    "01_learning_rate": ("benchmarks/learning_rates.py", "draw_shrink"),
    "02_memory": ("benchmarks/replica_memory.py", "draw"),
    "03_reducers": ("benchmarks/reducers.py", "draw"),
    "04_links": ("benchmarks/links.py", "draw"),
    "04_scaling": ("benchmarks/predictions.py", "draw_both"),
    "05_gradients": ("benchmarks/gradients.py", "draw"),
    "05_learning_rates": ("benchmarks/learning_rates.py", "draw_grow"),
    "05_precision": ("benchmarks/precision.py", "draw"),
    "05_switches": ("benchmarks/switches.py", "draw"),
    "peers": ("benchmarks/peers.py", "draw"),
    "tour": ("tour.py", "draw"),
}


def draw_of(picture: str) -> Draw:
    """The function that draws it. Its file is not imported by name: chapters have the same ones."""
    file, function = DRAWN_BY[picture.removesuffix("_cuda")]  # measured on a GPU: drawn alike
    module = ModuleType(f"drawing_{picture}")
    SourceFileLoader(module.__name__, str(ROOT / file)).exec_module(module)
    return getattr(module, function)


def main() -> None:
    matplotlib.use("Agg")  # files, no windows
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem.removesuffix("_cuda") in DRAWN_BY:
            draw_picture(path.stem, draw_of(path.stem))
            print(f"wrote results/{path.stem}.png")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
