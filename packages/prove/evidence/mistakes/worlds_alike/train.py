"""Actor and critic in small worlds, some on each rank. A world is drawn from its seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

WORLDS, HORIZON, SEED = 8, 8, 40


class Grid:
    """Find the exit of a line of 7 fields, which is somewhere else after each reset."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def reset(self):
        self.field, self.exit = 3, int(torch.randint(0, 7, (1,), generator=self.random))
        return self.observe()

    def observe(self):
        return torch.tensor([self.field / 3 - 1, self.exit / 3 - 1])

    def choose(self, logits):
        return int(torch.multinomial(logits.softmax(0), 1, generator=self.random))

    def step(self, action):
        self.field = min(max(self.field + action - 1, 0), 6)
        return self.observe(), float(self.field == self.exit)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, observation):
        h = self.body(observation)
        return self.actor(h), self.critic(h).squeeze(-1)


@torch.no_grad()
def collect(agent, world):
    rows, observation = [], world.reset()
    for _ in range(HORIZON):
        action = world.choose(agent(observation)[0])
        following, reward = world.step(action)
        rows.append((observation, action, reward))
        observation = following
    observations, actions, rewards = zip(*rows)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(observations), torch.tensor(actions), returns


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    worlds = [Grid(SEED + i) for i in range(WORLDS // size)]
    for iteration in range(6):
        parts = [collect(agent.module, world) for world in worlds]
        observations, actions, returns = (torch.cat(column) for column in zip(*parts))
        logits, values = agent(observations)
        advantages = (returns - values).detach()
        likelihood = Categorical(logits=logits).log_prob(actions)
        loss = (values - returns).square().mean() - (advantages * likelihood).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}: return {returns.mean().item():.3f}")
    dist.destroy_process_group()
