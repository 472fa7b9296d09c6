"""Which number formats this machine has units for, and which it imitates.

    python 05_amp_syncbn/machine.py

A format without units still runs, but slowly: its numbers are converted for every operation. Mixed
precision pays on a machine that has the units.
"""

import os
import platform
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate

from common.options import Parser

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


def hardware(device: torch.device, processes: int) -> str:
    """The name of the CPU, or of the GPUs that this many processes use."""
    if device.type == "cuda":
        gpus = min(processes, torch.cuda.device_count())
        return f"{gpus} x {torch.cuda.get_device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def has_units(name: str, device: torch.device) -> bool:
    """Whether the device multiplies in this format: fp32, tf32, bf16 or fp16."""
    if name == "fp32":
        return True
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= GPU_UNITS[name]
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in CPU_UNITS.get(name, ()))


def runs(name: str, device: torch.device) -> bool:
    """Whether a convolution in this format runs at all, forward and backward."""
    one = torch.ones(1, 1, 1, 1, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, FORMATS[name], enabled=name in ("bf16", "fp16")):
            F.conv2d(one, one).sum().backward()
    except RuntimeError:
        return False
    return True


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(hardware(device, torch.cuda.device_count()))
    yes = {True: "yes", False: "no"}
    rows = [
        (name, yes[runs(name, device)], yes[has_units(name, device)])
        for name in FORMATS
        if name != "tf32" or device.type == "cuda"
    ]
    print(tabulate(rows, ("format", "runs", "has units")))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
