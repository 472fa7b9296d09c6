"""Segment discs with cross-entropy and Dice; some pixels are not labeled."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, UNKNOWN = 16, 255

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
centers, radii = torch.rand(160, 2, 1, 1) * 16, torch.rand(160, 1, 1) * 6 + 1
masks = ((rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2 < radii**2).long()
images = masks[:, None] + 0.5 * torch.randn(160, 1, 16, 16)
masks[torch.rand(masks.shape) < 0.2 * torch.rand(160, 1, 1)] = (
    UNKNOWN  # more in some than in others
)
train_set = TensorDataset(images[:128], masks[:128])
test_set = TensorDataset(images[128:], masks[128:])
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), BATCH)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
model = model.to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def dice_sums(disc: Tensor, masks: Tensor) -> Tensor:
    """The overlap of prediction and truth, and the size of both together, over the batch: (2,)"""
    truth, labeled = masks == 1, masks != UNKNOWN
    return torch.stack([(disc * truth).sum(), (disc * labeled).sum() + truth.sum()])


for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        logits = ddp(images)
        overlap, size = all_reduce(dice_sums(logits.softmax(dim=1)[:, 1], masks))  # with gradients
        labeled = (masks != UNKNOWN).sum()
        dist.all_reduce(labeled)  # a count has no gradient
        cross_entropy = F.cross_entropy(logits, masks, ignore_index=UNKNOWN, reduction="sum")
        cross_entropy = cross_entropy * world_size / labeled
        loss = cross_entropy + 1 - 2 * overlap / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, masks in test_loader:
            images, masks = images.to(device), masks.to(device)
            sums += dice_sums(model(images).argmax(dim=1), masks)
    dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch}: Dice {2 * sums[0] / sums[1]:.4f}")
if rank == 0:
    torch.save(model.state_dict(), "segmentation.pt")
dist.destroy_process_group()
