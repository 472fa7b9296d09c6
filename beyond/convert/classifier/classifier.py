"""Train a classifier of handwritten digits on one GPU, or on the CPU: python classifier.py"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--resume", help="a checkpoint to start from")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

plain = transforms.Compose([transforms.Resize(28), transforms.ToTensor()])
shifted = transforms.Compose([plain, transforms.RandomCrop(28, padding=2)])
train_set = datasets.MNIST(args.data, train=True, download=True, transform=shifted)
test_set = datasets.MNIST(args.data, train=False, download=True, transform=plain)
train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, args.batch_size)

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
    model.load_state_dict(torch.load(args.resume, weights_only=True))
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)
weights = 1 / torch.bincount(train_set.targets).float()  # a rare digit counts as much as a common
criterion = nn.CrossEntropyLoss(weight=weights.to(device))

best, epochs_without_progress = 0.0, 0
for epoch in range(args.epochs):
    model.train()
    total_loss = 0.0
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    accuracy = correct / len(test_loader.dataset)
    scheduler.step(accuracy)

    print(f"epoch {epoch}: loss {total_loss / len(train_loader):.4f}, accuracy {accuracy:.1%}")
    if accuracy > best:
        best, epochs_without_progress = accuracy, 0
        torch.save(model.state_dict(), "best.pt")
    else:
        epochs_without_progress += 1
    if epochs_without_progress == 5:
        break
