"""Write a small data set in COCO's format: pictures with handwritten digits of several sizes.

    python beyond/convert/detector/scenes.py

The digits of common/digits are 8×8 pixels. A scene holds up to seven of them, enlarged and colored,
on a background of another color. The folder has COCO's layout:

    data/scenes/annotations/instances_train.json    data/scenes/train/000001.png ...
    data/scenes/annotations/instances_val.json      data/scenes/val/000001.png ...
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

PARTS = {"train": "train", "val": "t10k"}  # training and validation share no digit
LARGEST_IOU = 0.1  # two digits in one scene may overlap so far
EMPTY = 0.04  # share of the scenes that have no digit


def read_digits(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Grey levels (N, 8, 8) between 0 and 1, and labels (N,)."""
    images = (folder / f"{PARTS[part]}-images-idx3-ubyte").read_bytes()[16:]  # after the header
    labels = (folder / f"{PARTS[part]}-labels-idx1-ubyte").read_bytes()[8:]
    pixels = torch.from_numpy(np.frombuffer(images, np.uint8).reshape(-1, 8, 8).copy())
    return pixels / 255, torch.tensor(list(labels))


def draw_scene(digits: Tensor, labels: Tensor, size: int, random: torch.Generator) -> tuple:
    """A picture (3, size, size) uint8, and the label and the box (x, y, w, h) of each digit."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=random)

    picture = uniform(0.0, 0.25, 3, 1, 1) + uniform(-0.05, 0.05, 3, size, size)  # a color and noise
    objects: list[tuple[int, list[int]]] = []
    wanted = 0 if uniform(0, 1) < EMPTY else int(uniform(2, 8))
    for _ in range(4 * wanted):  # some places are taken
        if len(objects) == wanted:
            break
        index = int(uniform(0, len(digits)))
        edge = int(uniform(0.2, 0.4) * size)  # pixels of the square that holds the digit
        left, top = (int(uniform(0, size - edge + 1)) for _ in range(2))
        ink = F.interpolate(digits[index][None, None], size=edge, mode="bilinear")[0, 0]
        rows, columns = (ink.amax(dim=dim).gt(0.25).nonzero() for dim in (1, 0))
        box = [left + int(columns[0]), top + int(rows[0])]  # the box is tight around the digit
        box += [int(columns[-1] - columns[0]) + 1, int(rows[-1] - rows[0]) + 1]
        corners = torch.tensor([[x, y, x + w, y + h] for *_, (x, y, w, h) in [*objects, (0, box)]])
        if objects and box_iou(corners[-1:], corners[:-1]).max() > LARGEST_IOU:
            continue  # it would hide another digit
        part = picture[:, top : top + edge, left : left + edge]
        part += ink * (uniform(0.75, 1.0, 3, 1, 1) - part)
        objects.append((int(labels[index]), box))
    return (picture.clamp(0, 1) * 255).byte(), objects


def write_scenes(folder: Path, part: str, digits: Path, count: int, size: int, seed: int) -> None:
    """Write `count` scenes of one part, "train" or "val". The same seed gives the same scenes."""
    images, annotations = [], []
    random = torch.Generator().manual_seed(2 * seed + list(PARTS).index(part))
    pixels, labels = read_digits(digits, part)
    (folder / part).mkdir(parents=True, exist_ok=True)
    for image_id in range(1, count + 1):
        picture, objects = draw_scene(pixels, labels, size, random)
        name = f"{image_id:06}.png"
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / part / name)
        images.append({"id": image_id, "file_name": name, "width": size, "height": size})
        for label, box in objects:
            annotation = {
                "id": len(annotations) + 1,  # COCO's evaluator takes 0 for "no match"
                "image_id": image_id,
                "category_id": label + 1,  # SSD takes 0 for "no object"
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            annotations.append(annotation)
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    (folder / "annotations").mkdir(exist_ok=True)
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
    (folder / "annotations" / f"instances_{part}.json").write_text(text)
    print(f"{folder / part}: {len(images)} scenes with {len(annotations)} digits")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("data/scenes"), help="the folder to write")
    add("--digits", type=Path, default=Path("common/digits"), help="the folder of the digits")
    add("--train", type=int, default=600, help="scenes for training")
    add("--val", type=int, default=100, help="scenes for validation")
    add("--size", type=int, default=128, help="pixels of an edge of a scene")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # for pictures this small, a second thread costs more than it does
    try:
        for part in PARTS:
            write_scenes(args.out, part, args.digits, getattr(args, part), args.size, args.seed)
    except OSError as error:
        print(f"error: {error}: name the folders by --digits and --out", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
