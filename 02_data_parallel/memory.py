"""What each replica holds when the loss of a step is computed: bytes, counted by tensor.

    python 02_data_parallel/memory.py

Backward has not begun. All that autograd saved is there, and so are the gradients of the previous
step, since zero_grad comes later. What backward needs and the allocator's rounding do not count.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
import torchvision
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD

from common.models import Net
from common.options import Parser
from from_scratch import apply, gather, replicate, scatter

BATCH, WORDS, LENGTH, REPLICAS = 120, 8192, 16, 4  # samples; vocabulary; words of a sample
MIB = 2**20
# parameters: with buffers; outputs: gathered, of the whole batch; loss: what it saves for backward
KINDS = ("parameters", "gradients", "optimizer", "batch", "activations", "outputs", "loss")
Example = tuple[nn.Module, Tensor, Tensor]  # a model, a whole batch, its targets
Held = list[dict[str, int]]  # the bytes of each kind, for each replica


def examples() -> dict[str, Example]:
    """Models with a batch for each: two with 10 outputs a sample, one with 16 × 8192."""
    torch.manual_seed(0)
    text, labels = torch.randint(WORDS, (BATCH, LENGTH)), torch.randint(10, (BATCH,))
    layers = nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WORDS)
    resnet18 = torchvision.models.resnet18(num_classes=10)
    return {
        "net": (Net(1, 28, 10, batch_norm=False), torch.randn(BATCH, 1, 28, 28), labels),
        "resnet18": (resnet18, torch.randn(BATCH, 3, 32, 32), labels),
        "words": (nn.Sequential(*layers), text, text),
    }


def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of all predictions: (..., classes) and (...)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def size(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors' storages, each counted once, without the storages of besides."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    left_out = {tensor.untyped_storage().data_ptr() for tensor in besides}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in left_out)


def saving_to(kept: list[Tensor]) -> saved_tensors_hooks:
    """A context in which this thread's autograd also puts all that it saves into the list."""

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    return saved_tensors_hooks(pack, lambda tensor: tensor)


class CountingReplica(nn.Module):
    """A replica that keeps what autograd saves; called with targets, it computes its own loss."""

    def __init__(self, replica: nn.Module) -> None:
        super().__init__()
        self.replica = replica
        self.saved: dict[str, list[Tensor]] = {"activations": [], "loss": []}

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        with saving_to(self.saved["activations"]):
            outputs = self.replica(x)
        if targets is None:
            return outputs
        with saving_to(self.saved["loss"]):
            return criterion(outputs, targets)[None]  # (1,): the loss, not the outputs


def bytes_after_step(model: nn.Module) -> tuple[int, int]:
    """Bytes that a step of SGD with momentum leaves behind: gradients, and its state."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # as large as a real one
    update = SGD(trained, momentum=0.9)
    update.step()
    momenta = [state["momentum_buffer"] for state in update.state.values()]
    return size(p.grad for p in trained if p.grad is not None), size(momenta)


def held_by_replica(example: Example, replicas: int, inside: bool) -> Held:
    """Count a step whose batch lies on the main device. inside: forward computes the loss."""
    model, x, targets = example
    devices = [x.device] * replicas
    parts = scatter(devices, x, targets) if inside else scatter(devices, x)
    # Copies, as on devices of their own: a virtual replica's part is a view of the whole batch.
    parts = [(tuple(tensor.clone() for tensor in args), {}) for args, _ in parts]
    counting: list = [CountingReplica(replica) for replica in replicate(model, devices)]
    outputs = gather(apply(counting, parts, devices), devices)
    on_main: list[Tensor] = []
    with saving_to(on_main):
        loss = outputs.mean() if inside else criterion(outputs, targets)  # a mean of equal parts
    held: Held = []
    for (args, _), replica in zip(parts, counting, strict=False):
        tensors = [*replica.parameters(), *replica.buffers()]
        held.append({kind: size(kept, [*tensors, *args]) for kind, kept in replica.saved.items()})
        held[-1] |= {"parameters": size(tensors), "batch": size(args)}
    held[0]["gradients"], held[0]["optimizer"] = bytes_after_step(model)
    held[0]["batch"], held[0]["outputs"] = size([x, targets]), size([outputs])
    held[0]["loss"] += size([*on_main, loss], [outputs, targets])
    return [{kind: each.get(kind, 0) for kind in KINDS} for each in held]


def count_all() -> dict[str, dict[str, Held]]:
    """Every example, with the loss outside forward and inside."""
    return {
        name: {
            "outside": held_by_replica(example, REPLICAS, inside=False),
            "inside": held_by_replica(example, REPLICAS, inside=True),
        }
        for name, example in examples().items()
    }


def main() -> None:
    rows = [
        (name, place, replica, *(n / MIB for n in (*counts.values(), sum(counts.values()))))
        for name, counts_by_place in count_all().items()
        for place, held in counts_by_place.items()
        for replica, counts in zip(("main", "other"), held, strict=False)
    ]
    print(f"MiB that each of {REPLICAS} replicas holds, with the loss outside and inside forward:")
    print(tabulate(rows, ("model", "loss", "replica", *KINDS, "total"), floatfmt=".2f"))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
