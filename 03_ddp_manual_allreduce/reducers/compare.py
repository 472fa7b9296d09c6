"""What does each reducer send, when does `bucketed` send it, and do all of them give the mean?

    python 03_ddp_manual_allreduce/reducers/compare.py

Page: README.md
"""

from unittest import mock

import torch
import torch.distributed as dist
import torchvision
from tabulate import tabulate
from torch.nn import Parameter

from common.models import Net
from common.options import Parser
from local_ranks.ranks import run_ranks
from reducers import REDUCERS, Bucketed


def compare(rank: int) -> list[tuple[str, str, int, bool]]:
    """One step of `net` with each reducer: what it sends, and whether it gives the mean."""
    rows = []
    for name, make in REDUCERS.items():
        torch.manual_seed(rank)  # different weights on each rank, on purpose
        model = Net(1, 28, 10, batch_norm=False).eval().double()  # eval: without dropout
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces,
            mock.patch.object(dist, "isend", wraps=dist.isend) as messages,
        ):
            reducer = make(model)
            torch.manual_seed(0)
            batch = torch.randn(8, 1, 28, 28).double()
            expected = torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])
            shard = batch.chunk(dist.get_world_size())[rank]
            model(shard).square().mean().backward()
            reducer.finish()
        sizes = " ".join(str(call.args[0].nbytes) for call in all_reduces.call_args_list)
        pairs = zip(model.parameters(), expected, strict=True)
        equal = all(p.grad is not None and torch.allclose(p.grad, g, 0, 1e-12) for p, g in pairs)
        rows.append((name, sizes, messages.call_count, equal))
    return rows


def watch_backward(rank: int) -> list[tuple[int, str, str, int, int]]:
    """List when each bucket is sent, and how many gradients are complete by then."""
    model, rows = torchvision.models.resnet18(num_classes=10), []
    names = {parameter: name for name, parameter in model.named_parameters()}
    reducer = Bucketed(model)

    def note_buckets(parameter: Parameter) -> None:  # runs after the reducer's own hook
        complete = sum(p.grad is not None for p in names)
        for number in range(len(rows), len(reducer.sent)):
            size = f"{reducer.buckets[number].flat.nbytes / 2**20:.1f}"
            rows.append((number, size, names[parameter], complete, len(names) - complete))

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(note_buckets)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    reducer.finish()
    return rows


def main() -> None:
    Parser(__doc__).parse_args()
    print("One step of `net`, in float64:\n")
    heads = ["reducer", "bytes of each all-reduce", "messages by isend", "equals the mean"]
    print(tabulate(run_ranks(2, compare)[0], heads, disable_numparse=True))
    print("\nWhen `bucketed` sends the gradients of a ResNet-18, in one backward:\n")
    heads = ["bucket", "MiB", "sent after the gradient of", "complete", "still to come"]
    print(tabulate(run_ranks(2, watch_backward)[0], heads))


if __name__ == "__main__":
    main()
