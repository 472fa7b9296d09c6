"""Learn features from pairs of views, as SimCLR does."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
samples = torch.randn(256, 24)
views = samples + 0.3 * torch.randn(2, 256, 24)  # two noisy views of each, as crops are of an image
train_set = TensorDataset(*views)
loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """Row i of both (B, 16) is one sample; among all rows of `second`, `first` has to find it."""
    likeness = F.normalize(first) @ F.normalize(second).T / 0.1  # (B, B)
    return F.cross_entropy(likeness, torch.arange(BATCH, device=device))


for epoch in range(3):
    total = 0.0
    for pair in loader:
        first, second = model(torch.cat(pair).to(device)).chunk(2)
        loss = contrastive_loss(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")
torch.save(model.state_dict(), "contrastive.pt")
