"""Python runs this in each process of the recorded command: it waits for `import torch`."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """A finder that lets the usual finder load torch, and then installs what records it."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            sys.path.insert(0, os.path.dirname(HERE))
            try:
                import timeline_record

                timeline_record.install(os.environ["TIMELINE_FOLDER"])
            finally:
                sys.path.pop(0)

        spec.loader.exec_module = exec_module
        return spec


if "TIMELINE_FOLDER" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
elsewhere = [path for path in sys.path if path and os.path.abspath(path) != HERE]
if spec := PathFinder.find_spec("sitecustomize", elsewhere):  # the user may have one, too
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
