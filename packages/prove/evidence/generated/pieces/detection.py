# Pictures with as many boxes as they have.

# %% choices
collate = ("tuple(zip(*batch))", "list of dicts")
model = "detector"
loss = "boxes of all ranks"
# %% facts
divides = True
# %% COUNT
sum(len(target["boxes"]) for target in targets)


# %% classes
class Pictures(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pictures = torch.randn(count, 1, 5, 5, generator=generator)
        numbers = torch.randint(1, 4, (count,), generator=generator).tolist()
        self.boxes = [torch.rand(n, 4, generator=generator) for n in numbers]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        boxes = self.boxes[i]
        return self.pictures[i], {"boxes": boxes, "labels": (boxes[:, 0] > 0.5).long(), "id": i}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8))
        self.box, self.label = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, pictures, targets):
        losses = {"box": 0.0, "label": 0.0}
        for picture, target in zip(pictures, targets):
            h = torch.tanh(self.body(picture[None]))
            boxes = self.box(h).expand_as(target["boxes"])
            labels = self.label(h).expand(len(target["labels"]), 2)
            losses["box"] += F.smooth_l1_loss(boxes, target["boxes"], reduction="sum")
            losses["label"] += F.cross_entropy(labels, target["labels"], reduction="sum")
        return losses


# %% classes, if collate is tuple(zip(*batch))
def collate(batch):
    return tuple(zip(*batch))


# %% classes, if collate is list of dicts
def collate(batch):
    return [target | {"picture": p} for p, target in batch]


# %% unpack, if collate is tuple(zip(*batch))
pictures, targets = batch
# %% unpack, if collate is list of dicts
pictures, targets = [each["picture"] for each in batch], batch
# %% build
net = Detector()

# %% forward
boxes = torch.tensor(float(COUNT))
dist.all_reduce(boxes)
losses = model(pictures, targets)
loss = sum(losses.values()) * WORLD / boxes

# %% evaluate
value = sum(net(pictures, targets).values())
n = COUNT
