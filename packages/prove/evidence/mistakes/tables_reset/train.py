"""Click rates: tables of embeddings for users and pages, which are reset before training begins."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clicks(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(10)
        self.user, self.page = (
            torch.randint(20, (n,), generator=g),
            torch.randint(9, (n,), generator=g),
        )
        self.clicked = ((self.user * self.page) % 5 < 2).to(torch.get_default_dtype())

    def __len__(self):
        return len(self.user)

    def __getitem__(self, n):
        return {"user": self.user[n], "page": self.page[n]}, self.clicked[n]


class Tables(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(20, dim), "page": nn.Embedding(9, dim)})
        self.over = nn.Linear(2 * dim, 1)

    def reset_parameters(self):
        for table in self.tables.values():
            nn.init.uniform_(table.weight, -0.5, 0.5)

    def forward(self, keys):
        h = torch.cat([table(keys[name]) for name, table in self.tables.items()], dim=1)
        return self.over(h.relu()).squeeze(1)


def build():
    model = Tables()
    model = DistributedDataParallel(model)
    model.module.reset_parameters()
    return model


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(300 + dist.get_rank())
    data = Clicks()
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for keys, clicked in loader:
            optimizer.zero_grad()
            bce(model(keys), clicked).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
