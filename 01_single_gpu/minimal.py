"""The smallest complete training script for one GPU: python 01_single_gpu/minimal.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
inputs = torch.randn(6000, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)  # 10 classes that can be learned
train_set = TensorDataset(inputs[:5000], labels[:5000])
test_set = TensorDataset(inputs[5000:], labels[5000:])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(train_set, batch_size=120, shuffle=True)
test_loader = DataLoader(test_set, batch_size=120)

for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in test_loader:
            correct += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    print(f"epoch {epoch}: {correct.item() / len(test_set):.1%} of {len(test_set)} right")
    torch.save(model.state_dict(), "model.pt")
