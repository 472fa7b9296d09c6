"""A call as one number, which a rank announces, and which the others compare with their own.

A collective ends right only if every rank calls the same one, with the same root, op, size and
dtype. The number holds all of them, so an error can name both calls.
"""

import torch
import torch.distributed as dist

Op = dist.ReduceOp.RedOpType
NAMES = ["all_reduce", "sparse all_reduce", "reduce", "broadcast", "all_gather", "gather"]
NAMES += ["scatter", "reduce_scatter", "all_to_all", "barrier"]
DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES_IN_ORDER = [None, *sorted(DTYPES, key=str)]  # the same order on every rank
NUMBER_OF_NAME = {name: number for number, name in enumerate(NAMES)}
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES_IN_ORDER)}
# Together 63 bits: a counter has 64, one of which is its sign
NAME_BITS, OP_BITS, DTYPE_BITS, ROOT_BITS, SIZE_BITS = 4, 4, 7, 12, 36
SIZE_SHIFT = NAME_BITS + OP_BITS + DTYPE_BITS + ROOT_BITS


def encode_call(
    name: str,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    root: int | None = None,
    op: Op | None = None,
) -> int:
    """Return a call as one number.

    size: elements of one rank's tensor, if that must be the same on all ranks.
    """
    number = 0 if root is None else root + 1
    number = number << DTYPE_BITS | NUMBER_OF_DTYPE[dtype]
    number = number << OP_BITS | (0 if op is None else op.value + 1)
    number = number << NAME_BITS | NUMBER_OF_NAME[name]
    return number if size is None else number + encode_size(size)


def encode_size(size: int) -> int:
    """Return the part of a call's number that differs between calls of the same kind."""
    return (size + 1) % 2**SIZE_BITS << SIZE_SHIFT


def decode_call(number: int) -> str:
    """Return a call as text, such as `broadcast(3 of torch.float32, root 0)`."""
    fields = []
    for bits in (NAME_BITS, OP_BITS, DTYPE_BITS, ROOT_BITS, SIZE_BITS):
        fields.append(number % 2**bits)
        number >>= bits
    name, op, dtype, root, size = fields
    arguments = []
    if dtype:
        count = f"{size - 1} of " if size else ""
        arguments.append(f"{count}{DTYPES_IN_ORDER[dtype]}")
    if root:
        arguments.append(f"root {root - 1}")
    if op:
        arguments.append(Op(op - 1).name)
    return f"{NAMES[name]}({', '.join(arguments)})"
