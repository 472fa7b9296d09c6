"""MNIST on several processes with Hugging Face Accelerate, for peers.py.

    torchrun --standalone --nproc-per-node=2 benchmarks/peers/accelerate_.py \\
        --data-dir ../shared/data

After examples/cv_example.py of github.com/huggingface/accelerate: `prepare`, `backward` and
`gather_for_metrics`. Its seedable sampler draws the order that the stages draw.
"""

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from common.models import Net
from common.options import usage_errors_exit

from recipe import begin, datasets, end_epoch, epochs, loader_options, parse_args


def main() -> None:
    args = parse_args("accelerate", __doc__)
    train_set, test_set = datasets(args)
    local_batch = begin(args)
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    torch.manual_seed(args.seed)
    model = Net(1, 28, 10, batch_norm=args.model == "net-bn")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    set_seed(args.seed + 1, device_specific=True)  # dropout masks of its own for each rank

    loader = DataLoader(
        train_set, local_batch, shuffle=True, drop_last=True, **loader_options(args)
    )
    test_loader = DataLoader(test_set, 1000, **loader_options(args))
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    for epoch, steps in epochs(args, len(loader)):
        loader.set_epoch(epoch)
        model.train()
        losses = []
        for images, labels in islice(loader, steps):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                hits = model(images).argmax(dim=1) == labels
                correct += accelerator.gather_for_metrics(hits).sum().item()
        end_epoch(args, epoch, losses, correct / len(test_set))
    accelerator.end_training()


if __name__ == "__main__":
    with usage_errors_exit():
        main()
