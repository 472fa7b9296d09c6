"""Watch the draws of random and numpy by replacing their functions and generators.

operations.py sees the numbers that torch draws; draws.py records both.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from prove import random_state
from prove.watch.draws import Draws
from prove.watch.rank_run import RankRun, wrap

NUMPY_DRAWS = [
    "random", "random_sample", "rand", "randn", "uniform", "normal", "standard_normal", "beta",
    "gamma", "integers", "randint", "choice", "permutation", "binomial", "exponential", "poisson",
    "dirichlet", "laplace",
]  # fmt: skip


def install(run: RankRun) -> None:
    run.draws = draws = Draws(run)
    run.at_end.append(draws.finish)
    watch_resets(draws)
    watch_random(draws)
    if random_state.numpy_random():
        watch_numpy(draws)


def run_watched(
    draws: Draws, name: str, draw: Callable, args: tuple, kwargs: dict, is_own: bool = False
) -> Any:
    """Make one call that draws outside of torch. is_own: the script made the generator."""
    if not draws.active:
        if is_own:
            draws.note_between()
        return draw(*args, **kwargs)
    draws.check_states()
    with draws.paused():  # shuffle itself calls getrandbits
        value = draw(*args, **kwargs)
    draws.note_states()
    return draws.record_or_replay_value(name, args, value)


def watch_resets(draws: Draws) -> None:
    """Watch calls that set a generator's state, as checkpointing does, without a draw."""
    places: list[tuple[Any, str]] = [(torch, "set_rng_state"), (torch, "manual_seed")]
    places += [(random, "seed"), (random, "setstate")]
    if numpy_random := random_state.numpy_random():
        places += [(numpy_random, "seed"), (numpy_random, "set_state")]
    for owner, name in places:

        @wrap(owner, name)
        def reset(original: Callable, *args: Any, **kwargs: Any) -> Any:
            draws.check_states()
            result = original(*args, **kwargs)
            draws.note_states()
            return result


def stand_in_for(base: type) -> type:
    """Make a metaclass whose classes pass isinstance() for every object of the base."""

    class StandIn(type(base)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, base)

    return StandIn


def watch_random(draws: Draws) -> None:
    class Random(random.Random, metaclass=stand_in_for(random.Random)):  # type: ignore[metaclass]
        """A generator with its two basic methods watched, which all others call."""

        def random(self) -> float:
            is_own, draw = self is not instance, super().random
            return float(run_watched(draws, "random.random", draw, (), {}, is_own))

        def getrandbits(self, k: int, /) -> int:
            is_own, draw = self is not instance, super().getrandbits
            return int(run_watched(draws, "random.getrandbits", draw, (k,), {}, is_own))

    instance: Any = random._inst
    instance.__class__ = Random
    random.random, random.getrandbits = instance.random, instance.getrandbits
    random.Random = Random  # type: ignore[misc]  # generators that the script makes


def watch_numpy(draws: Draws) -> None:
    import numpy

    for name in NUMPY_DRAWS:
        if hasattr(numpy.random, name):

            @wrap(numpy.random, name)
            def draw(original: Callable, *args: Any, name: str = name, **kwargs: Any) -> Any:
                return run_watched(draws, f"numpy.{name}", original, args, kwargs)

    def watching(base: type) -> type:
        """Subclass a generator of numpy's, which is written in C and cannot be patched."""

        class Watching(base, metaclass=stand_in_for(base)):  # type: ignore[metaclass]
            def __getattribute__(self, name: str) -> Any:
                own = super().__getattribute__(name)
                if name not in NUMPY_DRAWS:
                    return own

                def draw(*args: Any, **kwargs: Any) -> Any:
                    return run_watched(draws, f"numpy.{name}", own, args, kwargs, is_own=True)

                return draw

        Watching.__name__ = base.__name__
        return Watching

    generator = watching(numpy.random.Generator)

    @wrap(numpy.random, "default_rng")
    def default_rng(original: Callable, seed: Any = None) -> Any:
        made = original(seed)
        return made if made is seed else generator(made.bit_generator)

    numpy.random.RandomState = watching(numpy.random.RandomState)  # type: ignore[misc,assignment]
