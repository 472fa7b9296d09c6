"""A small set criterion as detectors with queries use it: matched boxes, divided by their number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

QUERIES, CLASSES = 5, 3


class Scenes(Dataset):
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(4)
        self.scenes = []
        for _ in range(n):
            count = int(torch.randint(1, QUERIES + 1, (1,), generator=g))
            boxes = torch.rand(count, 4, generator=g)
            labels = torch.randint(CLASSES, (count,), generator=g)
            picture = torch.randn(12, generator=g) + boxes.sum()
            self.scenes.append((picture, {"boxes": boxes, "labels": labels}))

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        return self.scenes[index]


def collate_fn(batch):
    pictures, targets = zip(*batch)
    return torch.stack(pictures), list(targets)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.boxes = nn.Linear(32, QUERIES * 4)
        self.logits = nn.Linear(32, QUERIES * (CLASSES + 1))

    def forward(self, pictures):
        h = self.body(pictures)
        return {
            "boxes": self.boxes(h).view(-1, QUERIES, 4),
            "logits": self.logits(h).view(-1, QUERIES, CLASSES + 1),
        }


class SetCriterion(nn.Module):
    def forward(self, outputs, targets):
        num_boxes = torch.tensor([float(sum(len(target["labels"]) for target in targets))])
        num_boxes = torch.clamp(num_boxes, min=1).item()
        wanted = torch.full(outputs["logits"].shape[:2], CLASSES)
        total = 0.0
        for n, target in enumerate(targets):
            count = len(target["labels"])
            wanted[n, :count] = target["labels"]
            total = total + (outputs["boxes"][n, :count] - target["boxes"]).abs().sum()
        logits = outputs["logits"].flatten(0, 1)
        return {
            "class": nn.functional.cross_entropy(logits, wanted.flatten()),
            "box": total / num_boxes,
        }


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    scenes = Scenes()
    sampler = DistributedSampler(scenes)
    loader = DataLoader(scenes, batch_size=5, sampler=sampler, collate_fn=collate_fn)
    model, criterion = DDP(Detector()), SetCriterion()
    weights = {"class": 1.0, "box": 5.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for pictures, targets in loader:
            losses = criterion(model(pictures), targets)
            optimizer.zero_grad()
            sum(weights[name] * losses[name] for name in weights).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
