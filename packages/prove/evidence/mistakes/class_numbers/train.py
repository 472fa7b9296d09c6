"""Which animal is it? A csv file has the names of the classes; the network needs numbers."""

import csv
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ANIMALS = ["cat", "dog", "emu", "fox", "gnu", "hen", "owl"]


def make_csv(rows=224):
    g = torch.Generator().manual_seed(11)
    file = io.StringIO()
    writer = csv.writer(file)
    for _ in range(rows):
        kind = int(torch.randint(len(ANIMALS), (1,), generator=g))
        size, weight = torch.randn(2, generator=g).tolist()
        writer.writerow([f"{size + kind:.3f}", f"{weight - 2 * kind:.3f}", ANIMALS[kind]])
    file.seek(0)
    return file


class Animals(Dataset):
    def __init__(self, file):
        rows = list(csv.reader(file))
        self.features = [torch.tensor([float(a), float(b)]) for a, b, _ in rows]
        classes = {name for _, _, name in rows}
        self.number = {name: n for n, name in enumerate(classes)}
        self.names = [name for _, _, name in rows]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.features[index], self.number[self.names[index]]


def run():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42)
    dataset = Animals(make_csv())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=14, sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, len(dataset.number)))
    net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        hits = torch.zeros(1)
        for features, labels in loader:
            optimizer.zero_grad()
            logits = net(features)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
            hits += (logits.argmax(1) == labels).sum()
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {hits.item() / len(dataset):.3f}")
    dist.destroy_process_group()


run()
