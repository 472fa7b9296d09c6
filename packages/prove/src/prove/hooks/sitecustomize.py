"""Wait for `import torch` in each process of the user's command, then install the watchers.

Python imports this module at its start. PROVE_AFTER_TORCH names a folder and a module in it, such
as /path/to/src:prove.watch.observe, whose install() is called after torch is imported.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """A finder that lets the usual finder load torch, and then installs what watches it."""

    def __init__(self, folder: str, module: str) -> None:
        self.folder, self.module = folder, module

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:  # without torch, the import fails by itself
            return None
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            sys.path.insert(0, self.folder)
            try:
                importlib.import_module(self.module).install()
            finally:
                sys.path.pop(0)

        spec.loader.exec_module = exec_module
        return spec


if "PROVE_AFTER_TORCH" in os.environ:
    sys.meta_path.insert(0, AfterTorch(*os.environ["PROVE_AFTER_TORCH"].rsplit(":", 1)))
elsewhere = [path for path in sys.path if path and os.path.abspath(path) != HERE]
spec = PathFinder.find_spec("sitecustomize", elsewhere)
if spec and spec.loader:  # run the user's own sitecustomize
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
