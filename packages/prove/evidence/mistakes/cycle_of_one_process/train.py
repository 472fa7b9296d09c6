"""One cycle of the learning rate over the whole run, stepped after each batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 16, 3


def make_data():
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x[:, :3].argmax(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, local_batch = make_data(), GLOBAL_BATCH // dist.get_world_size()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=local_batch, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.02,
        epochs=EPOCHS,
        steps_per_epoch=len(data) // local_batch,
        anneal_strategy="linear",
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
