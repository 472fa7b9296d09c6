"""MNIST on several processes, put together from PyTorch's own examples, for peers.py.

    torchrun --standalone --nproc-per-node=2 benchmarks/peers/plain.py --data-dir ../shared/data

The data as in github.com/pytorch/examples/blob/main/mnist/main.py, the ranks, the sampler and the
evaluation of a shard by each rank as in imagenet/main.py there.
"""

from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.models import Net
from common.options import usage_errors_exit

from recipe import begin, datasets, end_epoch, epochs, loader_options, parse_args


def main() -> None:
    args = parse_args("plain", __doc__)
    train_set, test_set = datasets(args)
    local_batch = begin(args)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = Net(1, 28, 10, batch_norm=args.model == "net-bn")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # dropout masks of its own for each rank

    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    loader = DataLoader(train_set, local_batch, sampler=sampler, **loader_options(args))
    test_loader = DataLoader(test_set, 1000, sampler=test_sampler, **loader_options(args))
    for epoch, steps in epochs(args, len(loader)):
        sampler.set_epoch(epoch)
        ddp.train()
        losses = []
        for images, labels in islice(loader, steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(dim=1) == labels).sum()
        dist.all_reduce(correct)  # every rank must reach this line
        end_epoch(args, epoch, losses, correct.item() / len(test_set))
    dist.destroy_process_group()


if __name__ == "__main__":
    with usage_errors_exit():
        main()
