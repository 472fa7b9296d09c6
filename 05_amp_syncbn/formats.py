"""What the 16-bit formats make of three numbers, and which formats your machine has units for.

    python 05_amp_syncbn/formats.py

The last column shows how a factor saves the smallest number. A format without units still runs, but
slowly, because its numbers are converted for every operation. So mixed precision pays on a machine
that has the units.
"""

import torch
import torch.nn.functional as F
from tabulate import tabulate

from common.options import Parser

NUMBERS = (1e-8, 1.001, 70_000.0)  # a small gradient, a number with digits, a large one
SCALE = 65536  # the factor with which torch.amp.GradScaler begins

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


def rounded(number: float) -> list[str]:
    """Return a number in fp32, bf16 and fp16, and in fp16 while it is multiplied by the factor."""
    x = torch.tensor(number)  # fp32
    scaled = (x * SCALE).half().float() / SCALE  # multiplied before fp16, divided after it
    return [f"{value.item():.6g}" for value in (x, x.bfloat16(), x.half(), scaled)]


def has_units(name: str, device: torch.device) -> bool:
    """Tell whether the device multiplies in this format: fp32, tf32, bf16 or fp16."""
    if name == "fp32":
        return True
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= GPU_UNITS[name]
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in CPU_UNITS.get(name, ()))


def runs(name: str, device: torch.device) -> bool:
    """Tell whether a convolution in this format runs at all, forward and backward."""
    image = torch.ones(1, 1, 1, 1, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, FORMATS[name], enabled=name in ("bf16", "fp16")):
            F.conv2d(image, image).sum().backward()
    except RuntimeError:
        return False
    return True


def main() -> None:
    heads = ["fp32", "bf16", "fp16", f"fp16, × {SCALE}"]
    table = [rounded(number) for number in NUMBERS]
    print(tabulate(table, heads, "simple", disable_numparse=True, stralign="right"))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yes = {True: "yes", False: "no"}
    rows = [
        (name, yes[runs(name, device)], yes[has_units(name, device)])
        for name in FORMATS
        if name != "tf32" or device.type == "cuda"
    ]
    your_device = "your GPU" if device.type == "cuda" else "your CPU"
    print("\n" + tabulate(rows, (your_device, "runs", "has units")))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
