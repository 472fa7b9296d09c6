"""Segment discs with cross-entropy and Dice; some pixels are not labeled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, UNKNOWN = 16, 255

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
centers, radii = torch.rand(160, 2, 1, 1) * 16, torch.rand(160, 1, 1) * 6 + 1
masks = ((rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2 < radii**2).long()
images = masks[:, None] + 0.5 * torch.randn(160, 1, 16, 16)
masks[torch.rand(masks.shape) < 0.2 * torch.rand(160, 1, 1)] = (
    UNKNOWN  # more in some than in others
)
train_set = TensorDataset(images[:128], masks[:128])
test_set = TensorDataset(images[128:], masks[128:])
loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, BATCH)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def dice_sums(disc: Tensor, masks: Tensor) -> Tensor:
    """The overlap of prediction and truth, and the size of both together, over the batch: (2,)"""
    truth, labeled = masks == 1, masks != UNKNOWN
    return torch.stack([(disc * truth).sum(), (disc * labeled).sum() + truth.sum()])


for epoch in range(3):
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        logits = model(images)
        overlap, size = dice_sums(logits.softmax(dim=1)[:, 1], masks)
        cross_entropy = F.cross_entropy(logits, masks, ignore_index=UNKNOWN)
        loss = cross_entropy + 1 - 2 * overlap / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, masks in test_loader:
            images, masks = images.to(device), masks.to(device)
            sums += dice_sums(model(images).argmax(dim=1), masks)
    print(f"epoch {epoch}: Dice {2 * sums[0] / sums[1]:.4f}")
torch.save(model.state_dict(), "segmentation.pt")
