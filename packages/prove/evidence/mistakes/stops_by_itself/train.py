"""Translation of digits, with early stopping on the validation loss."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("trainer")


class EarlyStopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def is_stop(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(loss, self.best)
        return self.bad >= self.patience


class NMT(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.out = nn.Embedding(10, 16), nn.Linear(16, 10)

    def forward(self, ids):
        return self.out(self.source(ids).cumsum(1).tanh())


def corpus(n, seed):
    ids = torch.randint(10, (n, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids, ids.flip(1))


@torch.no_grad()
def valid_loss(net, loader):
    losses = torch.stack(
        [nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()) for x, y in loader]
    )
    loss = losses.mean()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    torch.manual_seed(1)
    train, valid = corpus(96, 1), corpus(32, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    valid_sampler = range(dist.get_rank(), len(valid), dist.get_world_size())
    valid_loader = DataLoader(valid, batch_size=8, sampler=valid_sampler)
    net = NMT()
    ddp, stopper = DDP(net), EarlyStopper(patience=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
        loss = valid_loss(net, valid_loader)
        log.info("epoch %d: validation loss %.4f", epoch, loss)
        if stopper.is_stop(loss):
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
