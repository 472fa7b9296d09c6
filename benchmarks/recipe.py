"""MNIST on several processes, as PyTorch's examples, two libraries and the documents do it.

    torchrun --standalone --nproc-per-node=2 benchmarks/recipe.py plain --data-dir ../shared/data

It takes the flags of the stages and prints what these print. Data and loop as in mnist/main.py of
github.com/pytorch/examples.
"""

import json
import os
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import load_dataset
from common.models import Net
from common.options import cut_batch, make_parser, usage_errors_exit

# A library takes the model and its optimizer, what makes a DataLoader of the training and of the
# test set, and the seed. It returns them and what sets the epoch, backward, and counts all hits.


def plain(
    net: Net, optimizer: SGD, train: partial, test: partial, seed: int, backward: Any = None
) -> tuple:
    """Ranks, sampler, and a shard of the evaluation for each rank: as in imagenet/main.py."""
    dist.init_process_group("gloo")
    sampler = DistributedSampler(train.args[0], seed=seed, drop_last=True)
    loaders = train(sampler=sampler), test(sampler=DistributedSampler(test.args[0], shuffle=False))

    def count(hits: Tensor) -> Tensor:
        total = hits.sum()
        dist.all_reduce(total)  # every rank must reach this line
        return total

    model = net if backward else DistributedDataParallel(net)
    return model, optimizer, *loaders, sampler.set_epoch, backward or Tensor.backward, count


def documents(net: Any, *others: Any) -> tuple:
    """As the documents print it: no DDP, but a message per parameter, each waited for."""

    def backward(loss: Tensor) -> None:
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # the sum; every rank must reach this line
            parameter.grad /= dist.get_world_size()

    return partial(plain, backward=backward)(net, *others)


def accelerate(net: Net, optimizer: SGD, train: partial, test: partial, seed: int) -> tuple:
    """As in examples/cv_example.py of huggingface/accelerate, in the order of the stages."""
    from accelerate import Accelerator, utils

    order = utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    library = Accelerator(cpu=True, dataloader_config=order)
    made = library.prepare(net, optimizer, train(shuffle=True, drop_last=True), test())
    methods = made[2].set_epoch, library.backward
    return *made, *methods, lambda hits: library.gather_for_metrics(hits).sum()


def fabric(net: Net, optimizer: SGD, train: partial, test: partial, seed: int) -> tuple:
    """As in examples/fabric/image_classifier/train_fabric.py of Lightning-AI/pytorch-lightning."""
    from lightning_fabric import Fabric, seed_everything

    library = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    library.launch()
    seed_everything(seed, verbose=False)  # of its own DistributedSampler too, which counts epochs
    loaders = library.setup_dataloaders(train(shuffle=True, drop_last=True), test())
    made = *library.setup(net, optimizer), *loaders, lambda epoch: None, library.backward
    return *made, lambda hits: library.all_reduce(hits.sum(), reduce_op="sum")


LIBRARIES = {each.__name__: each for each in (plain, accelerate, fabric, documents)}
TRANSFORM = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def main() -> None:
    parser = make_parser("recipe", __doc__)
    parser.add_argument("library", choices=tuple(LIBRARIES))
    text = "ours: common/data.py in the place of one picture after the other"
    parser.add_argument("--data", default="pictures", choices=("pictures", "ours"), help=text)
    parser.set_defaults(dataset="mnist")
    args = parser.parse_args()
    import_module(PACKAGES.get(args.library, "torch"))  # before the first line: not in the epoch
    sets: list = [MNIST(args.data_dir, part, TRANSFORM) for part in (True, False)]
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    if args.data == "ours":
        sets = list(load_dataset(args))
        options["collate_fn"] = lambda batch: batch  # it gives a batch, not a list of samples
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_batch = cut_batch(args.batch_size, world_size)
    if rank == 0:
        print(f"global batch {args.batch_size} = {world_size} × {local_batch}", flush=True)
    torch.manual_seed(args.seed)
    net = Net(1, 28, 10, batch_norm=args.model == "net-bn")
    optimizer = SGD(net.parameters(), args.lr, args.momentum)
    train = partial(DataLoader, sets[0], local_batch, **options)
    test = partial(DataLoader, sets[1], 1000, **options)
    made = LIBRARIES[args.library](net, optimizer, train, test, args.seed)
    model, optimizer, loader, test_loader, set_epoch, backward, count = made
    torch.manual_seed(args.seed + 1 + rank)  # dropout masks of its own for each rank
    losses: list[Tensor] = []
    for epoch in range(args.epochs):
        if len(losses) >= args.max_steps:
            break
        set_epoch(epoch)
        model.train()
        for images, labels in islice(loader, args.max_steps - len(losses)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            hits = sum(count(net(x).argmax(dim=1) == labels).item() for x, labels in test_loader)
        if rank == 0:
            accuracy = hits / len(sets[1])
            print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {accuracy:.2%}", flush=True)
    means = torch.stack(losses) / world_size  # (steps,), of the local batch
    dist.all_reduce(means)  # every rank must reach this line
    if rank == 0:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"loss": loss}) + "\n" for loss in means.tolist()]
        (args.run_dir / "metrics.jsonl").write_text("".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    with usage_errors_exit():
        main()
