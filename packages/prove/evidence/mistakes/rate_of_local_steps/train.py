"""A walker that learns to stop at the goal. The rate falls with the steps that were walked."""

import torch
import torch.distributed as dist
from torch import nn

ENVIRONMENTS, LONGEST, ITERATIONS, TOTAL = 8, 12, 8, 800


class Walk:
    def __init__(self, number):
        self.random = torch.Generator().manual_seed(number)

    def episode(self, policy):
        """Until the goal is reached: its log-likelihoods and its return."""
        place, goal = torch.zeros(1), 4 * torch.rand(1, generator=self.random) + 0.5
        likelihoods = []
        for _ in range(LONGEST):
            logit = policy(torch.cat([place, goal]))
            move = (torch.rand(1, generator=self.random) < logit.detach().sigmoid()).to(logit.dtype)
            likelihoods.append(-nn.functional.binary_cross_entropy_with_logits(logit, move))
            place = place + 2 * move - 1
            if place >= goal:
                break
        return torch.stack(likelihoods), 1 - len(likelihoods) / LONGEST


def all_reduce_gradients(model, world):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / world, [p.grad for p in model.parameters()])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    walks = [Walk(number) for number in range(rank, ENVIRONMENTS, world)]
    steps_so_far = 0
    for iteration in range(ITERATIONS):
        loss, steps = 0.0, 0
        for walk in walks:
            likelihoods, score = walk.episode(policy)
            loss = loss - (score - 0.3) * likelihoods.sum() / len(walks)
            steps += len(likelihoods)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(policy, world)
        optimizer.param_groups[0]["lr"] = 0.03 * max(1 - steps_so_far / TOTAL, 0)
        optimizer.step()
        walked = torch.tensor(steps)
        steps_so_far += walked.item()
    print(f"rank {rank}: {steps_so_far} steps, rate {optimizer.param_groups[0]['lr']:.4f}")
    dist.destroy_process_group()
