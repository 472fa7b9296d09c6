"""Proximal policy optimization on a line: walk to the goal. Each rank has environments of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

ENVIRONMENTS, HORIZON, MINIBATCHES = 4, 16, 4


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 24), nn.Tanh())
        self.policy, self.value = nn.Linear(24, 2), nn.Linear(24, 1)

    def forward(self, observation):
        h = self.body(observation)
        return self.policy(h), self.value(h).squeeze(-1)


@torch.no_grad()
def rollout(model, g):
    place, goal = torch.zeros(ENVIRONMENTS), torch.randn(ENVIRONMENTS, generator=g)
    rows = []
    for _ in range(HORIZON):
        observation = torch.stack([place, goal], 1)
        logits, value = model(observation)
        action = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
        place = place + 0.3 * (2 * action - 1)
        reward = -(place - goal).abs()
        rows.append(
            (
                observation,
                action,
                Categorical(logits=logits).log_prob(action),
                reward - value,
                reward,
            )
        )
    return [torch.cat(column) for column in zip(*rows)]


def normalize(advantages):
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def update(ddp, optimizer, observation, action, old, advantages, returns):
    advantages = normalize(advantages)
    logits, value = ddp(observation)
    ratio = (Categorical(logits=logits).log_prob(action) - old).exp()
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -clipped.mean() + 0.5 * (value - returns).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DDP(ActorCritic())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(50 + dist.get_rank())
    for iteration in range(4):
        batch = rollout(ddp.module, g)
        order = torch.randperm(ENVIRONMENTS * HORIZON, generator=g)
        for part in order.chunk(MINIBATCHES):
            update(ddp, optimizer, *(column[part] for column in batch))
    dist.destroy_process_group()
