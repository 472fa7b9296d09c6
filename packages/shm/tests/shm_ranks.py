"""Ranks on this machine for the tests: processes that run a function and return its result.

    run_on_ranks(2, function, argument)  # what function(rank, argument) returns on each of two

    @on_ranks(2)                         # the body of the test runs on each of two, over gloo
    def test_ranks_agree(rank): ...

A fork server imports torch once, and each rank is a copy of it that is there in milliseconds.
"""

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection
from importlib import import_module
from inspect import Signature, signature
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60  # more than any rank takes; a hang ends here
PRELOADED = ["pytest", "shm", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"]


def patience(seconds: float) -> float:
    """Return a time limit that only a hang reaches: longer if more processes wait for a core."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def make_store() -> dist.TCPStore:
    """Return the store where ranks meet. The caller holds it as long as they run."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launcher_variables(rank: int, world_size: int, store: dist.TCPStore) -> dict[str, str]:
    """Return what torchrun tells a rank if all ranks are on this machine and it keeps the store."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": 0}
    variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in variables.items()}


def run_on_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    may_die: Collection[int] = (),
    seconds: float = SECONDS,
) -> list:
    """Return what function(rank, *args) returns on each rank; it joins a process group itself.

    function: defined in a module, so that another process can import it. may_die: ranks that may
    end without an answer, which is then None. All ranks have ended when this returns or raises.
    """
    context, store = multiprocessing.get_context("forkserver"), make_store()
    processes, rank_of_answer = [], {}
    answers: dict[int, Any] = {}
    end = time.monotonic() + patience(seconds)
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            variables = launcher_variables(rank, world_size, store)
            process = context.Process(
                target=answer_as_rank, args=(rank, variables, sender, function, args)
            )
            process.start()
            sender.close()
            processes.append(process)
            rank_of_answer[receiver] = rank
        while len(answers) < world_size:
            missing = [answer for answer, rank in rank_of_answer.items() if rank not in answers]
            ready = wait(missing, max(0, end - time.monotonic()))
            if not ready:
                late = [rank_of_answer[answer] for answer in missing]
                raise TimeoutError(f"ranks {late} did not end in {seconds:g} s")
            for answer in ready:
                rank = rank_of_answer[answer]
                answers[rank] = receive(answer, rank, rank in may_die)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [answers[rank] for rank in range(world_size)]


def receive(answer: Connection, rank: int, may_die: bool) -> Any:
    """Return the answer of a rank; raise RuntimeError with its traceback if it has failed."""
    try:
        has_result, result = answer.recv()
    except EOFError:
        if may_die:
            return None
        raise RuntimeError(f"rank {rank} ended without an answer") from None
    if not has_result:
        raise RuntimeError(f"rank {rank}: {result}")
    return result


def answer_as_rank(
    rank: int, variables: dict[str, str], answer: Connection, function: Callable, args: tuple
) -> None:
    """Be that rank: answer with what the function returns, or with its traceback."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(variables)
    torch.set_num_threads(1)  # with more threads the ranks would compete for the cores
    try:
        result = True, function(rank, *args)
    except Exception:
        result = False, traceback.format_exc()
    answer.send_bytes(pickle.dumps(result))  # send() would hand tensors over as shared memory


def end_with_parent() -> None:
    """End this process when its parent ends, even if its main thread waits in C++."""
    multiprocessing.parent_process().join()
    os._exit(1)


def on_ranks(ranks: int = 0, backend: str = "gloo") -> Callable:
    """Run the body of a test on so many ranks of a process group.

    Without a number, its argument `ranks` says how many.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def start(**arguments: Any) -> None:
            body = test.__module__, test.__name__, backend, arguments
            run_on_ranks(ranks or arguments["ranks"], run_body, *body)

        _, *others = signature(test).parameters.values()  # pytest gives all of them but `rank`
        start.__signature__ = Signature(others)
        start.body = test
        return start

    return decorate


def run_body(rank: int, module: str, test: str, backend: str, arguments: dict[str, Any]) -> None:
    """Run the body of that test as one of its ranks."""
    body = getattr(import_module(module), test).body  # its module may register the backend
    dist.init_process_group(backend)
    body(rank, **arguments)


def gather_from_ranks(value: Any) -> list:
    """Return what each rank gives, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
