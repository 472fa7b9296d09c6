"""Train an LSTM on one long text; its state goes on from batch to batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, COLUMNS, LENGTH = 31, 8, 16

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    state = tuple(torch.zeros(1, COLUMNS, 32, device=device) for _ in range(2))
    for row in range(0, len(data) - 1, LENGTH):
        targets = data[row + 1 : row + 1 + LENGTH]
        state = tuple(part.detach() for part in state)
        output, state = model(data[row : row + len(targets)], state)
        yield F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction=reduction), targets


train_data = to_columns(text[:5000], COLUMNS).to(device)
test_data = to_columns(text[5000:], COLUMNS).to(device)
model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
best = float("inf")
for epoch in range(4):
    for loss, _ in losses(model, train_data, "mean"):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for loss, targets in losses(model, test_data, "sum"):
            total, tokens = total + loss.item(), tokens + targets.numel()
    print(f"epoch {epoch}: test loss {total / tokens:.4f}, lr {optimizer.param_groups[0]['lr']}")
    if total / tokens < best:
        best = total / tokens
        torch.save(model.state_dict(), "language.pt")
    else:
        optimizer.param_groups[0]["lr"] /= 4
