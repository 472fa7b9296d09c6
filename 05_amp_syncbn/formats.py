"""What the 16-bit formats make of three numbers, and how a factor saves the smallest one.

python 05_amp_syncbn/formats.py
"""

import torch
from tabulate import tabulate

NUMBERS = (1e-8, 1.001, 70_000.0)  # a small gradient, a number with digits, a large one
SCALE = 65536  # the factor with which torch.amp.GradScaler begins


def main() -> None:
    table = []
    for number in NUMBERS:
        x = torch.tensor(number)  # fp32
        scaled = (x * SCALE).half().float() / SCALE  # multiplied before fp16, divided after it
        rounded = [x, x.bfloat16(), x.half(), scaled]
        table.append([f"{value.item():.6g}" for value in rounded])
    headers = ["fp32", "bf16", "fp16", f"fp16, × {SCALE}"]
    print(tabulate(table, headers, "simple", disable_numparse=True, stralign="right"))


if __name__ == "__main__":
    main()
