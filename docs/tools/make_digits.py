"""Write the handwritten digits of UCI (1,797 images of 8×8) as the IDX files in common/digits.

    pip install scikit-learn
    python docs/tools/make_digits.py

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, license CC BY 4.0; the part of it that
scikit-learn ships. Changes: gray levels 0–16 stretched to 0–255, shuffled, the first 1,500 images
as the training set, the last 297 as the test set, file format.
"""

import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parents[2] / "common" / "digits"

digits = load_digits()
order = np.random.RandomState(0).permutation(len(digits.target))  # else the test set: new writers
images = (digits.images[order] * 255 / 16).round().astype("uint8")  # (1797, 8, 8)
labels = digits.target[order].astype("uint8")  # (1797,)
for part, rows in {"train": slice(0, 1500), "t10k": slice(1500, None)}.items():
    for kind, array in {"images": images[rows], "labels": labels[rows]}.items():
        path = FOLDER / f"{part}-{kind}-idx{array.ndim}-ubyte"
        unsigned_byte = 8  # IDX's code for the type
        header = struct.pack(f">HBB{array.ndim}I", 0, unsigned_byte, array.ndim, *array.shape)
        path.write_bytes(header + array.tobytes())
        print(f"{path.name}: {array.shape}")
