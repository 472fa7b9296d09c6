"""Train SSD, an object detector, on a data set in COCO's format.

python scenes.py && python detector.py
For COCO: --data-dir coco --image-size 300 --augment --lr 0.0026 --epochs 65 --multistep 43 54
"""

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import redirect_stdout
from pathlib import Path

import torch
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, MultiStepLR
from torch.utils.data import DataLoader, Dataset
from torchvision import models, tv_tensors
from torchvision.datasets import CocoDetection
from torchvision.models.detection.ssd import SSD, DefaultBoxGenerator
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, save_image
from tqdm import tqdm


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--data-dir", type=Path, default=Path("data/scenes"), help="annotations/, train*/, val*/")
    add("--run-dir", type=Path, default=Path("runs/convert"), help="folder of all output")
    add("--backbone", default="resnet18", choices=[f"resnet{n}" for n in (18, 34, 50, 101, 152)])
    add("--image-size", type=int, default=128, help="images are resized to this; 300 for COCO")
    add("--augment", action="store_true", help="random color, crop and flip; not for digits")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=8, help="images per optimizer step")
    add("--lr", type=float, default=0.08, help="for a batch of 32; it is scaled to --batch-size")
    add("--warmup", type=int, default=100, help="steps until the learning rate is reached")
    add("--multistep", type=int, nargs="*", default=[4], help="divide lr by 10 after these")
    add("--eval-epochs", type=int, nargs="*", help="evaluate after these only")
    add("--amp", action="store_true", help="train in bfloat16 where that is safe")
    add("--resume", type=Path, help="continue from this checkpoint")
    add("--evaluate", action="store_true", help="evaluate, and do not train")
    add("--benchmark", action="store_true", help="train on one batch again and again; save nothing")
    add("--workers", type=int, default=4 if gpu else 0, help="processes that load images")
    add("--device", type=torch.device, default="cuda" if gpu else "cpu")
    add("--seed", type=int, default=0)
    return parser.parse_args()


# ---- 1. Data set ----
class CocoFolder(CocoDetection):
    """Images (3, H, W) of any size, and for each its boxes (N, 4), labels (N,) and image_id."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict]:
        image, objects = super().__getitem__(index)
        objects = [obj for obj in objects if not obj.get("iscrowd")]
        boxes = torch.Tensor([obj["bbox"] for obj in objects]).reshape(-1, 4)  # there may be none
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=image.size[::-1])
        labels = torch.tensor([obj["category_id"] for obj in objects], dtype=torch.int64)
        return self.steps(image, {"boxes": boxes, "labels": labels, "image_id": self.ids[index]})


def load_data(args: Namespace, part: str) -> CocoFolder:
    file = args.data_dir / f"annotations/instances_{part}.json"  # or instances_train2017
    file = next(args.data_dir.glob(f"annotations/instances_{part}*.json"), file)
    with redirect_stdout(None):  # it prints
        data = CocoFolder(args.data_dir / file.stem.removeprefix("instances_"), file)
    coco, ids = data.coco, data.coco.cats.keys() - {0}  # SSD's loss takes 0 for "no object"
    lost = {image["file_name"] for image in coco.imgs.values()} - {*os.listdir(data.root)}
    wrong = (obj["category_id"] not in ids or len(obj["bbox"]) != 4 for obj in coco.anns.values())
    if lost or not coco.imgs or any(wrong):
        raise ValueError(f"{file} has no images, or a wrong annotation, or images without a file")
    change = [v2.RandomPhotometricDistort(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *change * (args.augment and part == "train")]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.ConvertBoundingBoxFormat("XYXY")]
    data.steps = v2.Compose([*steps, v2.SanitizeBoundingBoxes(), v2.ToPureTensor()])
    return data


def make_loader(dataset: Dataset, args: Namespace, **how) -> DataLoader:
    return DataLoader(dataset, args.batch_size, collate_fn=list, num_workers=args.workers, **how)


# ---- 2. Model ----
class Backbone(nn.Sequential):
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = [images]
        for part in self:
            maps.append(part(maps[-1]))
        return {str(i): x.to(images.dtype) for i, x in enumerate(maps[1:])}  # not bfloat16


def build_model(args: Namespace, classes: int) -> nn.Module:
    net = getattr(models, args.backbone)()
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    widths = (net.fc.in_features, 256, 256)
    more = [nn.Sequential(nn.Conv2d(width, 256, 3, 2, 1), nn.ReLU()) for width in widths]
    backbone = Backbone(stem, net.layer3, net.layer4, *more)  # 300×300 -> 38, 19, 10, 5, 3, 2
    ratios = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
    anchors = DefaultBoxGenerator(ratios, scales=[0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05])
    return SSD(backbone, anchors, (args.image_size, args.image_size), classes)


# ---- 3. Loss ----
def train_epoch(model, batches, optimizer: SGD, scheduler, args: Namespace) -> float:
    """One pass over the batches; returns the mean loss."""
    model.train()
    total = torch.zeros((), device=args.device)
    for batch in tqdm(batches, disable=None):
        images = [image.to(args.device) for image, _ in batch]  # a list: they differ in size
        targets = [{key: x[key].to(args.device) for key in ("boxes", "labels")} for _, x in batch]
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp):
            loss = sum(model(images, targets).values())  # boxes and classes, per matched anchor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()  # .item() would make the CPU wait for the GPU at each step
    return total.item() / len(batches)


# ---- 4. Optimizer ----
def build_optimizer(model: nn.Module, args: Namespace, steps: int) -> tuple:
    lr = args.lr * args.batch_size / 32  # the linear rule: https://arxiv.org/abs/1706.02677
    optimizer = SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    decay = MultiStepLR(optimizer, [epoch * steps for epoch in args.multistep])
    return optimizer, ChainedScheduler([LinearLR(optimizer, 0.01, 1, args.warmup), decay])


# ---- 5. Log ----
@torch.no_grad()
def evaluate(model: nn.Module, val_set: CocoFolder, args: Namespace) -> dict[str, float]:
    """Mean average precision at IoU 0.50 to 0.95, and at 0.50, by COCO's own evaluator."""
    model.eval()
    rows = [torch.zeros(0, 7)]  # a detection: image_id, x, y, width, height, score, category_id
    start = time.perf_counter()
    for batch in tqdm(make_loader(val_set, args), disable=None):
        detections = model([image.to(args.device) for image, _ in batch])
        if len(rows) == 1:
            draw(batch, detections, val_set, args.run_dir / "detections.png")
        for (_, target), detection in zip(batch, detections, strict=True):
            ids = torch.full_like(detection["scores"], target["image_id"], dtype=torch.float64)
            detection["boxes"][:, 2:] -= detection["boxes"][:, :2]
            rows.append(torch.column_stack([ids, *detection.values()]).cpu())
    table, seconds = torch.cat(rows), time.perf_counter() - start
    if len(table) == 0:  # COCO cannot load an empty table
        return {"mAP": 0.0, "mAP@0.5": 0.0}
    with redirect_stdout(None):
        scorer = COCOeval(val_set.coco, val_set.coco.loadRes(table.numpy()), "bbox")
        for step in (scorer.evaluate, scorer.accumulate, scorer.summarize):
            step()
    mean, half = scorer.stats[:2].tolist()
    return {"mAP": mean, "mAP@0.5": half, "inference images/s": len(val_set) / seconds}


def draw(batch: list, detections: list[dict], val_set: CocoFolder, file: Path) -> None:
    tiles, categories = [], val_set.coco.cats
    for (image, _), detection in list(zip(batch, detections, strict=True))[:8]:
        sure, edges = detection["scores"].cpu() > 0.3, torch.tensor(image.shape[:0:-1]).repeat(2)
        names = [categories.get(k, {}).get("name", "?") for k in detection["labels"][sure].tolist()]
        image = v2.functional.resize(image, [256, 256])
        boxes = detection["boxes"].cpu()[sure] * 256 / edges
        tiles.append(draw_bounding_boxes(image, boxes, names, "yellow") if names else image)
    save_image(tiles, file, nrow=4)


def log(args: Namespace, values: dict[str, float]) -> None:
    line = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
    print(line, flush=True)
    with (args.run_dir / "log.txt").open("a") as file:
        print(line, file=file)


# ---- 6. Saving ----
def save(folder: Path, better: bool, epoch: int, best: float, **parts) -> None:
    states = {name: part.state_dict() for name, part in parts.items()}
    for file in ["last.pt", "best.pt"][: 1 + better]:
        torch.save({"epoch": epoch, "best": best, **states}, folder / file)


# ---- 7. Loading ----
def load(file: Path, args: Namespace, **parts) -> tuple[int, float]:
    state = torch.load(file, map_location=args.device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["epoch"], state["best"]


def main() -> None:
    args = parse_args()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    try:
        train_set, val_set = load_data(args, "train"), load_data(args, "val")
        loader = make_loader(train_set, args, shuffle=True)
        model = build_model(args, max(train_set.coco.cats) + 1).to(args.device)
        optimizer, scheduler = build_optimizer(model, args, len(loader))
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        first, best = load(args.resume, args, **parts) if args.resume else (0, 0.0)
    except Exception as error:
        ArgumentParser().exit(2, f"error: {type(error).__name__}: {error}\n")
    if args.evaluate:
        return log(args, evaluate(model, val_set, args))
    for epoch in range(first, args.epochs):
        torch.manual_seed(args.seed + epoch)  # a resumed run draws the same numbers
        batches = [next(iter(loader))] * len(loader) if args.benchmark else loader
        start = time.perf_counter()
        values = {"epoch": epoch + 1}
        values["loss"] = train_epoch(model, batches, optimizer, scheduler, args)
        values["images/s"] = len(train_set) / (time.perf_counter() - start)
        if args.eval_epochs is None or epoch + 1 in args.eval_epochs:
            values |= evaluate(model, val_set, args)
        log(args, values)
        better, best = values.get("mAP", 0) > best, max(values.get("mAP", 0), best)
        if not args.benchmark:
            save(args.run_dir, better, epoch + 1, best, **parts)


if __name__ == "__main__":
    main()
