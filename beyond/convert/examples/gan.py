"""Train a generator and a critic in DCGAN's order."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
angles = torch.rand(256) * 6.28
train_set = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))  # points of a circle
loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
noise = torch.Generator().manual_seed(1)


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)]
    return nn.Sequential(*layers).to(device)


def critic_loss(scores: Tensor, target: float) -> Tensor:
    """How wrong the critic is: target 1 is real, 0 is fake."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


generator, critic = network(8, 2), network(2, 1)
generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for epoch in range(3):
    for (real,) in loader:
        real = real.to(device)
        fake = generator(torch.randn(len(real), 8, generator=noise).to(device))
        critic_optimizer.zero_grad()
        critic_loss(critic(real), 1.0).backward()  # BatchNorm sees real samples only,
        critic_loss(critic(fake.detach()), 0.0).backward()  # then fake ones only
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        loss = critic_loss(critic(fake), 1.0)
        loss.backward()
        generator_optimizer.step()
    print(f"epoch {epoch}: loss of the generator {loss.item():.4f}")
    with torch.no_grad():
        samples = generator(torch.randn(64, 8, generator=noise).to(device))
    torch.save(samples, "samples.pt")
