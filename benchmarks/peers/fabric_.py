"""MNIST on several processes with Lightning Fabric, for peers.py.

    torchrun --standalone --nproc-per-node=2 benchmarks/peers/fabric_.py --data-dir ../shared/data

After examples/fabric/image_classifier/train_fabric.py of github.com/Lightning-AI/pytorch-lightning:
`setup`, `setup_dataloaders` and `fabric.backward`. It brings a DistributedSampler by itself.
"""

from itertools import islice

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric, seed_everything
from torch.utils.data import DataLoader

from common.models import Net
from common.options import usage_errors_exit

from recipe import begin, datasets, end_epoch, epochs, loader_options, parse_args


def main() -> None:
    args = parse_args("fabric", __doc__)
    train_set, test_set = datasets(args)
    local_batch = begin(args)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    seed_everything(args.seed, verbose=False)  # of the sampler too
    model = Net(1, 28, 10, batch_norm=args.model == "net-bn")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(args.seed + 1 + fabric.global_rank)  # dropout masks of its own for each rank

    loader = DataLoader(
        train_set, local_batch, shuffle=True, drop_last=True, **loader_options(args)
    )
    test_loader = DataLoader(test_set, 1000, **loader_options(args))
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)
    for epoch, steps in epochs(
        args, len(loader)
    ):  # Fabric's loader counts the epochs for its sampler
        model.train()
        losses = []
        for images, labels in islice(loader, steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(dim=1) == labels).sum()
        total = fabric.all_reduce(correct, reduce_op="sum")  # every rank must reach this line
        end_epoch(args, epoch, losses, total.item() / len(test_set))


if __name__ == "__main__":
    with usage_errors_exit():
        main()
