"""Train an LSTM on one long text; its state goes on from batch to batch."""

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, COLUMNS, LENGTH = 31, 8, 16

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
if COLUMNS % world_size:  # or no rank would read the last columns
    ArgumentParser().exit(2, f"error: {COLUMNS} columns do not divide by {world_size} ranks\n")
local_columns = COLUMNS // world_size
own_columns = slice(rank * local_columns, (rank + 1) * local_columns)
text = (torch.arange(6000) ** 2 + torch.randint(3, (6000,))) % VOCABULARY  # your tokens, (T,)


def to_columns(tokens: Tensor, columns: int) -> Tensor:
    """(T,) -> (T // columns, columns): each column is one stretch of the text."""
    rows = len(tokens) // columns
    return tokens[: rows * columns].view(columns, rows).T.contiguous()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 32)
        self.decoder = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor, state: tuple) -> tuple:
        output, state = self.lstm(self.embedding(tokens), state)  # (rows, columns, 32)
        return self.decoder(output), state


def losses(model: nn.Module, data: Tensor, reduction: str):
    """The loss of each batch of LENGTH rows, and the number of tokens that it is about."""
    state = tuple(torch.zeros(1, local_columns, 32, device=device) for _ in range(2))
    for row in range(0, len(data) - 1, LENGTH):
        targets = data[row + 1 : row + 1 + LENGTH]
        state = tuple(part.detach() for part in state)
        output, state = model(data[row : row + len(targets)], state)
        yield F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction=reduction), targets


train_data = to_columns(text[:5000], COLUMNS)[:, own_columns].to(device)  # columns, not rows
test_data = to_columns(text[5000:], COLUMNS)[:, own_columns].to(device)
model = Model().to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
best = float("inf")
for epoch in range(4):
    for loss, _ in losses(ddp, train_data, "mean"):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for loss, targets in losses(model, test_data, "sum"):
            total, tokens = total + loss.item(), tokens + targets.numel()
    totals = torch.tensor([total, tokens], device=device)
    dist.all_reduce(totals)
    test_loss = (totals[0] / totals[1]).item()  # so every rank takes the same branch below
    if rank == 0:
        print(f"epoch {epoch}: test loss {test_loss:.4f}, lr {optimizer.param_groups[0]['lr']}")
    if test_loss < best:
        best = test_loss
        if rank == 0:
            torch.save(model.state_dict(), "language.pt")
    else:
        optimizer.param_groups[0]["lr"] /= 4
dist.destroy_process_group()
