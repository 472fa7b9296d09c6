"""Fine-tuning: the new head is trained first, and the body joins in the second epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BackboneFinetuning:
    def __init__(self, unfreeze_at_epoch=1):
        self.unfreeze_at_epoch = unfreeze_at_epoch

    def before_training(self, model):
        model.body.requires_grad_(False)

    def before_epoch(self, trainer, epoch):
        if epoch == self.unfreeze_at_epoch:
            trainer.net.body.requires_grad_(True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    def __init__(self, net, callback, epochs):
        self.net, self.callback, self.epochs = net, callback, epochs
        callback.before_training(net)
        self.model = DDP(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def fit(self, loader):
        for epoch in range(self.epochs):
            loader.sampler.set_epoch(epoch)
            self.callback.before_epoch(self, epoch)
            for x, y in loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    x = torch.randn(144, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=9, sampler=DistributedSampler(data))
    trainer = Trainer(Net(), BackboneFinetuning(), epochs=4)
    trainer.fit(loader)
    total = sum(p.abs().sum().item() for p in trainer.net.parameters())
    print(f"rank {dist.get_rank()}: {total:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
