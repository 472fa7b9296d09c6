"""Programs of numbered folders as modules: the number keeps `import` from them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_program(folder: str, name: str) -> ModuleType:
    """A program as a module, as in load_program("03", "reducers/ring").

    folder: how its name begins. name: without .py. The module has the name of its file, and finds
    the files beside it by theirs, as it does when it is run. So one process can load only one of
    two programs with the same name: ImportError for the second.
    """
    (path,) = ROOT.glob(f"{folder}*/{name}.py")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    loaded = Path(module.__file__ or "")
    if loaded.resolve() != path.resolve():
        raise ImportError(f"expected {path}, but {path.stem} is {loaded} in this process")
    return module
