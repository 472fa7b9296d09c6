"""The chapters on the path: an import of this module lets their programs be imported by name.

    import local_ranks.chapters
    from ring import ring_all_reduce

A number keeps `import` from the folders of the stages, so their programs are found without them. A
test keeps the names apart. Only train.py and minimal.py exist several times: nothing imports those.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(path for top in ("0?_*", "beyond") for path in ROOT.glob(f"{top}/**/*.py"))
FOLDERS = sorted({path.parent for path in PROGRAMS})

sys.path[0:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]
