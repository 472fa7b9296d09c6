"""Read, seed and restore the three generators of a script: torch's, random's and numpy's."""

import ctypes
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data

GENERATORS = ("torch", "random", "numpy")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a contiguous CPU tensor, without needing numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def numpy_random() -> Any:
    """Return numpy.random, or None if the script has not imported numpy."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None


def state_digests() -> list[int]:
    """Turn the state of each generator into one number."""
    torch_state = zlib.crc32(bytes_of(torch.get_rng_state()))
    if torch.cuda.is_initialized():
        torch_state = zlib.crc32(bytes_of(torch.cuda.get_rng_state()), torch_state)
    numpy_state = 0
    if numpy_random():
        _, keys, position, *_ = numpy_random().get_state()
        numpy_state = zlib.crc32(keys.tobytes()) + position
    return [torch_state, hash(random.getstate()[1]), numpy_state]


def all_states() -> list:
    """Return the state of each generator, for set_all_states."""
    return [torch.get_rng_state(), random.getstate(), numpy_random() and numpy_random().get_state()]


def set_all_states(states: list) -> None:
    torch_state, python_state, numpy_state = states
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy_state and numpy_random():
        numpy_random().set_state(numpy_state)


def worker_drew() -> bool:
    """Has anything drawn in this worker of a loader since it was seeded? True if unknown."""
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return True
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    drew = not torch.equal(fresh, torch.get_rng_state())
    drew |= random.getstate() != random.Random(worker.seed).getstate()
    if numpy_random():
        generate = torch.utils.data._utils.worker._generate_state
        numbers = generate(worker.seed - worker.id, worker.id)
        _, keys, position, *_ = numpy_random().get_state()
        _, fresh_keys, fresh_position, *_ = numpy_random().RandomState(numbers).get_state()
        drew |= position != fresh_position or bool((keys != fresh_keys).any())
    return drew


def seed_all(number: int, seed_torch: Callable = torch.manual_seed) -> None:
    seed_torch(number)
    random.seed(number)
    if numpy_random():
        numpy_random().seed(number)


@contextmanager
def with_seed(number: int) -> Iterator[None]:
    """Seed all generators for a while; the user's numbers stay what they would have been."""
    states = all_states()
    # torch.manual_seed would seed the GPUs as well.
    seed_all(number, torch.default_generator.manual_seed)
    try:
        yield
    finally:
        set_all_states(states)
