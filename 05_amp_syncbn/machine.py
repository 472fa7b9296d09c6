"""Which number formats this machine has units for, which it imitates, and whether it can compile.

    python 05_amp_syncbn/machine.py

A format without units still runs, but slowly: its numbers are converted for every operation. Mixed
precision pays on a machine that has the units.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate

from common.options import Parser, UsageError
from common.record import hardware

FORMATS = {
    "fp32": torch.float32,
    "tf32": torch.float32,  # fp32 in memory; the units of a GPU round it to 11 digits on the way in
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
CPU_UNITS = {  # the instructions that multiply in the format
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16"),
}
GPU_UNITS = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}  # the lowest compute capability


def has_units(name: str, device: torch.device) -> bool:
    """Whether the device multiplies in this format: fp32, tf32, bf16 or fp16."""
    if name == "fp32":
        return True
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= GPU_UNITS[name]
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in CPU_UNITS.get(name, ()))


def refuse_format(name: str, device: torch.device) -> None:
    """UsageError if a convolution in this format, forward and backward, does not run at all."""
    one = torch.ones(1, 1, 1, 1, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, FORMATS[name], enabled=name in ("bf16", "fp16")):
            F.conv2d(one, one).sum().backward()
    except RuntimeError as error:
        raise UsageError(
            f"--amp {name} does not run on this {device.type} ({error}): try another --amp"
        ) from error


def refuse_no_compiler(device: torch.device) -> None:
    """UsageError if torch.compile finds no compiler."""
    try:
        torch.compile(torch.sin)(torch.ones(1, device=device))
    except RuntimeError as error:
        why = " ".join(str(error).partition("\n\n")[0].split())
        raise UsageError(
            f"torch.compile does not work here ({why}): install a C++ compiler, for instance g++"
        ) from error


def answer(check: Callable[..., None], *args: object) -> str:
    try:
        check(*args)
    except UsageError:
        return "no"
    return "yes"


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(hardware(device, torch.cuda.device_count()))
    rows = [
        (name, answer(refuse_format, name, device), "yes" if has_units(name, device) else "no")
        for name in FORMATS
        if name != "tf32" or device.type == "cuda"
    ]
    print(tabulate(rows, ("format", "runs", "has units")))
    print(f"torch.compile runs: {answer(refuse_no_compiler, device)}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
