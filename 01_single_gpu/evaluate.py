"""Evaluate a checkpoint of any stage on one process: its loss and accuracy over the test set.

python 01_single_gpu/evaluate.py runs/01_single_gpu/checkpoint.pt
"""

from pathlib import Path

import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

from common.bar import progress_bar
from common.checkpoint import read_checkpoint
from common.data import load_dataset, loader_options
from common.models import build_model
from common.options import UsageError, exit_on, make_parser
from train import evaluate


def main() -> None:
    parser = make_parser("evaluate", __doc__)
    parser.add_argument("checkpoint", type=Path, help="of a stage, or of beyond/survive")
    args = parser.parse_args()
    device = torch.device(args.device)
    train_set, test_set = load_dataset(args)
    model = build_model(args.model, train_set).to(device)
    read_checkpoint(args.checkpoint, args, model, SGD(model.parameters(), args.lr))
    loader = DataLoader(test_set, args.batch_size, **loader_options(args))
    batches = progress_bar("evaluation", loader, unit="batch")
    loss, accuracy = evaluate(model, batches, device)
    print(f"test loss {loss:.4f}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
