"""The same on many: torchrun --standalone --nproc-per-node=2 classifier_ddp.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--resume", help="a checkpoint to start from")
args = parser.parse_args()

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)  # so that a plain "cuda" means this GPU, too
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

plain = transforms.Compose([transforms.Resize(28), transforms.ToTensor()])
shifted = transforms.Compose([plain, transforms.RandomCrop(28, padding=2)])
if rank == 0:  # the others wait, or several would write the same file
    datasets.MNIST(args.data, download=True)
dist.barrier()
train_set = datasets.MNIST(args.data, train=True, transform=shifted)
test_set = datasets.MNIST(args.data, train=False, transform=plain)
sampler = DistributedSampler(train_set, seed=0, drop_last=True)  # the same seed on all ranks
local_batch = args.batch_size // world_size
train_loader = DataLoader(train_set, local_batch, sampler=sampler, drop_last=True)
shard = Subset(test_set, range(rank, len(test_set), world_size))  # repeats none, unlike the sampler
test_loader = DataLoader(shard, local_batch)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2),  # (B, 1, 28, 28) -> (B, 16, 13, 13)
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2),  # -> (B, 32, 6, 6)
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(32 * 6 * 6, 10),
).to(device)
if args.resume:
    model.load_state_dict(torch.load(args.resume, device, weights_only=True))
if gpu:  # torch's SyncBatchNorm needs GPUs
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
ddp = DistributedDataParallel(model)  # sends rank 0's weights to all ranks
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)
weights = 1 / torch.bincount(train_set.targets).float()  # a rare digit counts as much as a common
weights = weights.to(device)
criterion = nn.CrossEntropyLoss(weight=weights, reduction="sum")

torch.manual_seed(1 + rank)  # from here on, each rank draws its own shifts and dropout masks
best, epochs_without_progress = 0.0, 0
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)  # else every epoch has the same order
    model.train()
    total_loss = 0.0
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        divisor = weights[labels].sum()  # reduction="mean" would divide by it
        dist.all_reduce(divisor)  # the sum over all ranks
        loss = criterion(ddp(images), labels) * world_size / divisor  # DDP divides by world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()

    model.eval()
    for buffer in model.buffers():  # without SyncBatchNorm, each rank has its own statistics
        dist.broadcast(buffer, src=0)
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    totals = torch.tensor([total_loss / len(train_loader) / world_size, correct], device=device)
    dist.all_reduce(totals)
    mean_loss, accuracy = totals[0].item(), totals[1].item() / len(test_set)
    scheduler.step(accuracy)

    if rank == 0:
        print(f"epoch {epoch}: loss {mean_loss:.4f}, accuracy {accuracy:.1%}")
    if accuracy > best:
        best, epochs_without_progress = accuracy, 0
        if rank == 0:  # only printing and saving: all ranks need `best` and the scheduler
            torch.save(model.state_dict(), "best.pt")
    else:
        epochs_without_progress += 1
    if epochs_without_progress == 5:
        break
dist.destroy_process_group()
