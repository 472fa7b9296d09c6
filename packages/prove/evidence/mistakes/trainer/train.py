"""Trains a new head on a frozen body first, and the body too from the fourth epoch on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def flowers(count, seed):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :4] * x[:, 4:]).argmax(1))


class Trainer:
    def __init__(self, net, train_set, batch_size, unfreeze_at):
        self.net, self.unfreeze_at = net, unfreeze_at
        self.sampler = DistributedSampler(train_set)
        self.loader = DataLoader(train_set, batch_size, sampler=self.sampler)
        self.net[0].requires_grad_(False)
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def on_epoch_start(self, epoch):
        self.sampler.set_epoch(epoch)
        if epoch == self.unfreeze_at:
            self.net[0].requires_grad_(True)

    def fit(self, epoch):
        self.on_epoch_start(epoch)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def test(self, x, y):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        right = (self.net(x[rank::world_size]).argmax(1) == y[rank::world_size]).sum()
        dist.all_reduce(right)
        return right.item() / len(y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
    net, batch_size = nn.Sequential(body, nn.Linear(48, 4)), 32 // dist.get_world_size()
    trainer = Trainer(net, flowers(512, seed=1), batch_size, unfreeze_at=3)
    for epoch in range(8):
        trainer.fit(epoch)
        accuracy = trainer.test(*flowers(800, seed=2).tensors)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
