"""Find what a module holds now in the place of a parameter that an optimizer holds.

A script may put a new parameter there, as some do in each forward with a codebook that they update
without a gradient. The optimizer then goes on holding the old one, of which the model knows nothing
any more. What happens to the model is seen in its place.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[weakref.ref, str]  # a module, and the name that it has for the parameter


class Places:
    def __init__(self) -> None:
        # By the id of a parameter, which is kept alive here, so that no other gets the same id.
        self.noted: dict[int, tuple[Tensor, list[Place]]] = {}
        self.lent = False  # True while functional_call lends a module other tensors

    @contextmanager
    def lending(self) -> Iterator[None]:
        before, self.lent = self.lent, True
        try:
            yield
        finally:
            self.lent = before

    def note(self, parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
        """Note where these parameters are, unless that is known already."""
        new = {id(p): p for p in parameters if id(p) not in self.noted}
        if self.lent or not new:
            return
        found: dict[int, list[Place]] = {}
        for module in modules:
            for name, p in module._parameters.items():
                if id(p) in new:
                    found.setdefault(id(p), []).append((weakref.ref(module), name))
        self.noted |= {number: (new[number], places) for number, places in found.items()}

    def now(self, parameter: Tensor) -> Tensor:
        """Return what its module holds in the place of this parameter: itself, as a rule."""
        _, places = self.noted.get(id(parameter), (parameter, []))
        if self.lent or hasattr(parameter, "full_tensor"):  # fully_shard lends whole parameters
            return parameter
        held = [
            module._parameters.get(name)
            for reference, name in places
            if (module := reference()) is not None
        ]
        new = [p for p in held if type(p) is nn.Parameter]
        return next((p for p in new if p is parameter), new[0]) if new else parameter
