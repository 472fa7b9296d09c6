"""Your own training loop, kept alive by four files: launch, agree, durable and watchdog.

torchrun --standalone --nproc-per-node=2 own_loop.py FOLDER
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import durable
from agree import Agreement
from launch import join_process_group, read_launcher
from watchdog import Watchdog

if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
    print("error: expected a folder that exists:", __doc__.split("\n")[2], file=sys.stderr)
    sys.exit(2)
CHECKPOINT = Path(sys.argv[1], "checkpoint.pt")


def train(device: torch.device, agreement: Agreement, watchdog: Watchdog) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, losses = 0, []
    path = durable.newest_whole(CHECKPOINT)  # 1. the newest that is whole
    if path:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    agreement.require_same(step, "the step to resume from")  # 2. all ranks see one disk
    watchdog.step = lambda: step  # 3. its messages name the step
    ddp = DistributedDataParallel(model)
    while step < 200 and not agreement.stopped:  # 4. all ranks stop after the same step
        step += 1
        durable.reseed(0, step, agreement.rank)  # 5. a resumed run draws the same numbers
        x = torch.randn(16, 8).to(device)
        loss = (ddp(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)  # a larger model takes longer
        losses.append(loss.detach())
        agreement.vote()  # 6. after each step: has a rank received SIGTERM?
        if step % 50 == 0 or agreement.stopped:
            agreement.mean_or_end(torch.stack(losses), model, step)  # 7. ends all ranks on nan
            losses.clear()
            with agreement.fail_together():  # 8. a full disk ends all ranks, not only rank 0
                if agreement.rank == 0:
                    with durable.replacing(CHECKPOINT) as file:  # 9. a kill leaves a whole one
                        state = {"model": model.state_dict(), "step": step}
                        torch.save(state | {"optimizer": optimizer.state_dict()}, file)
    print(f"rank {agreement.rank} ends after step {step}")


if __name__ == "__main__":
    rank, local_rank, world_size, local_world_size = read_launcher()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # srun may show each rank a single GPU, which is then GPU 0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    store = join_process_group(device, rank, world_size, local_world_size, 60)  # 10. a time limit
    agreement = Agreement(seconds=60)  # 11. after the ranks have met
    with Watchdog(store.clone(), rank, world_size, __file__, 60) as watchdog:  # 12. names the dead
        train(device, agreement, watchdog)
    dist.destroy_process_group()
