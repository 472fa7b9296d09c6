"""Makes all ranks decide the same: on errors, on nan, and on when to stop after SIGTERM.

python beyond/survive/agree.py

If one rank leaves the loop alone, the others wait for it. So every decision is a small collective.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

VOTE_SECONDS = 0.25  # from one vote to the next
LONGEST_INTERVAL = 50  # steps from one vote to the next, in case they suddenly become slow


class AgreementError(ValueError):
    """The ranks must not continue: they would do different things, or train on nan."""


class Agreement:
    """Decides over CPU tensors and a gloo group of its own, so that no GPU waits, and no gradient.

    stopped: whether all ranks stop after this step.
    """

    def __init__(self, seconds: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self.sigterm = threading.Event()  # SLURM and Kubernetes send it some time before SIGKILL
        signal.signal(signal.SIGTERM, lambda *_: self.sigterm.set())
        self.stopped = False
        self.steps, self.started = 0, time.monotonic()  # since the last vote
        self.interval = 1  # steps from one vote to the next, the same on all ranks
        self.pending: tuple[Any, Tensor] | None = None  # the vote that is not yet read

    def vote(self) -> bool:
        """Return whether all ranks stop, since one has received SIGTERM. Call it after each step.

        Only about four steps per second take part. Such a step starts a vote, and the next such
        step reads it: by then it has arrived, so no step waits. All ranks read the same vote.
        """
        self.steps += 1
        if self.steps >= self.interval:
            self._read_vote()
            if not self.stopped:
                self._start_vote()
        return self.stopped

    def _read_vote(self) -> None:
        """Read the pending vote now. Every rank must reach this line."""
        if self.pending:
            work, votes = self.pending
            work.wait()
            sigterm, self.interval = votes.tolist()
            self.stopped, self.pending = bool(sigterm), None

    def _start_vote(self) -> None:
        now = time.monotonic()
        interval = round(VOTE_SECONDS * self.steps / (now - self.started))
        proposal = min(max(1, interval), LONGEST_INTERVAL) if self.rank == 0 else 0
        votes = torch.tensor([int(self.sigterm.is_set()), proposal])
        self.pending = dist.all_reduce(votes, dist.ReduceOp.MAX, self.group, async_op=True), votes
        self.steps, self.started = 0, now

    def barrier(self) -> None:
        """Call it before a read that waits for the GPU: if a rank is dead, this raises an error."""
        dist.barrier(self.group)  # every rank must reach this line

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """All ranks continue after this block, or none does. The lowest failed rank says why."""
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = torch.tensor(self.rank if error else self.world_size)
        dist.all_reduce(failed, dist.ReduceOp.MIN, self.group)  # every rank must reach this line
        if failed < self.world_size:
            raise error if error and failed == self.rank else SystemExit(2)

    def require_same(self, value: int, name: str) -> None:
        """Raise AgreementError if this rank's value differs from rank 0's."""
        expected = torch.tensor(value)  # rank 0's
        dist.broadcast(expected, 0, self.group)  # every rank must reach this line
        with self.fail_together():
            if value != expected:
                raise AgreementError(f"{name} is {value} on rank {self.rank}, {expected} on rank 0")

    def mean_or_end(
        self, losses: Tensor, model: nn.Module, step: int, scale: float = 1.0
    ) -> Tensor:
        """Return the mean over all ranks, (steps,); end all if a loss or a weight is not finite.

        losses: (steps,), of this rank. step: the number of the last one. scale: of the loss, fp16.
        """
        self.barrier()
        self._read_vote()
        local = losses.cpu()
        ranks = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(ranks, local, self.group)  # every rank must reach this line
        with self.fail_together():
            refuse_nan(torch.stack(ranks), model, step)
            if scale < 2**-24:  # each skipped step halves it, and no smaller one will help
                why = f"gradients are inf or nan even with the loss scaled by {scale:.0e}"
                raise AgreementError(f"{why}: try --amp bf16, or a lower --lr")
        return torch.stack(ranks).mean(dim=0)


def refuse_nan(losses: Tensor, model: nn.Module, step: int) -> None:
    """Raise AgreementError if a loss, weight or buffer is nan or inf. losses: (ranks, steps)."""
    hint = "nothing is saved from here on; try a lower --lr with --resume auto"
    for index, rank in (~losses.isfinite()).T.nonzero().tolist()[:1]:  # the first step, lowest rank
        number = step - losses.shape[1] + index + 1
        value = losses[rank, index].item()
        raise AgreementError(f"the loss of rank {rank} is {value} in step {number}: {hint}")
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise AgreementError(f"a weight is nan or inf after step {step}: {hint}")


def stop_together(rank: int, port: int) -> None:
    """Train for show: rank 1 receives SIGTERM in step 100, and both stop after the same step."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    agreement = Agreement(seconds=10)
    step = 0
    seconds = 0.0  # the time that votes took
    while not agreement.stopped:
        step += 1
        time.sleep(0.02)  # a training step
        dist.all_reduce(torch.zeros(1))  # stands for the gradients
        if rank == 1 and step == 100:
            os.kill(os.getpid(), signal.SIGTERM)
            print("rank 1 receives SIGTERM in step 100")
        start = time.perf_counter()
        agreement.vote()
        seconds += time.perf_counter() - start
    print(f"rank {rank} stops after step {step}; votes took {seconds / step * 1e6:.0f} µs per step")
    dist.destroy_process_group()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(stop_together, args=(store.port,), nprocs=2)


if __name__ == "__main__":
    main()
