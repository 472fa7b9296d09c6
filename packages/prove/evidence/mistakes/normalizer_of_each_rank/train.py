"""A policy that balances points. Observations are divided by a running standard deviation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVIRONMENTS, HORIZON, ITERATIONS = 8, 10, 6


class RunningNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-2))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    @torch.no_grad()
    def update(self, x):
        count, total, square = torch.tensor(float(len(x))), x.sum(0), x.square().sum(0)
        mean = total / count
        var = square / count - mean**2
        both = self.count + count
        delta = mean - self.mean
        spread = self.var * self.count + var * count + delta**2 * self.count * count / both
        self.mean += delta * count / both
        self.var.copy_(spread / both)
        self.count.copy_(both)

    def forward(self, x):
        return (x - self.mean) / (self.var.sqrt() + 1e-6)


class Points:
    """Environment number i has random numbers of its own."""

    def __init__(self, numbers):
        self.random = [torch.Generator().manual_seed(100 + number) for number in numbers]

    def draw(self, *size):
        return torch.stack([torch.rand(*size, generator=g) for g in self.random])

    def reset(self):
        self.place = 6 * self.draw(2) - 3
        return self.place

    def step(self, action):
        push = (2 * action - 1).unsqueeze(1) * torch.tensor([0.5, -0.2])
        self.place = self.place + push + 0.3 * (self.draw(2) - 0.5)
        return self.place, -self.place.norm(dim=1)


@torch.no_grad()
def rollout(points, norm, policy):
    seen, actions, rewards = [], [], []
    observation = points.reset()
    for _ in range(HORIZON):
        chance = policy(norm(observation)).sigmoid().squeeze(1)
        action = (points.draw(1).squeeze(1) < chance).to(chance.dtype)
        seen.append(observation)
        actions.append(action)
        observation, reward = points.step(action)
        rewards.append(reward)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.cat(seen), torch.cat(actions), returns.flatten()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    model, norm = DDP(policy), RunningNorm(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    points = Points(range(rank, ENVIRONMENTS, world))
    for iteration in range(ITERATIONS):
        observations, actions, returns = rollout(points, norm, policy)
        logits = model(norm(observations)).squeeze(1)
        likelihood = -nn.functional.binary_cross_entropy_with_logits(
            logits, actions, reduction="none"
        )
        loss = -(likelihood * (returns + 10)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm.update(observations)
    print(f"rank {rank}: mean {norm.mean.tolist()}")
    dist.destroy_process_group()
