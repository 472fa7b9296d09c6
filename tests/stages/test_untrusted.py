"""A malicious checkpoint runs nothing. Whoever reaches the store of a job, or a rank of it, can."""

import base64
import pickle
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.machine import free_port
from helpers.on_ranks import on_ranks
from helpers.refusals import Trap, assert_one_line, refusal, seal
from local_ranks.scripts import launcher_variables

# A zip file has checksums; survive also asks for one of its own, which `seal` writes.
MALICIOUS_FILES = {  # the script and its flag, whether the file is a zip file, whether it is sealed
    "04, an old file": ("04", "--resume", False, False),
    "04, a zip file": ("04", "--resume", True, False),
    "survive, an old file": ("survive", "--resume", False, False),
    "survive, a zip file": ("survive", "--resume=auto", True, False),
    "survive, a sealed old file": ("survive", "--resume", False, True),
    "survive, a sealed zip file": ("survive", "--resume=auto", True, True),
}


@pytest.mark.parametrize("kind", MALICIOUS_FILES)
def test_a_malicious_checkpoint_runs_nothing(kind, tmp_path):
    """Whoever can write the file can write its checksum, too."""
    key, how, zipped, sealed = MALICIOUS_FILES[kind]
    path, trapped = tmp_path / "checkpoint.pt", tmp_path / "trapped"
    if zipped:
        torch.save({"model": Trap(trapped), "epoch": 0}, path)
    else:
        path.write_bytes(pickle.dumps(Trap(trapped), protocol=2))
    if sealed:
        seal(path)
    before = path.read_bytes()
    flags = (f"--run-dir={tmp_path}", how if how.endswith("auto") else f"{how}={path}")
    refused_before = key == "survive" and not zipped and not sealed
    why = "damaged" if refused_before else "expected only tensors and plain values"
    env = launcher_variables(free_port(), world_size=1) if key == "04" else {}
    assert_one_line(refusal(key, "--model=net-bn", *flags, env=env), "checkpoint.pt", why)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert path.read_bytes() == before
    with suppress(Exception):  # the control: whoever loads it without weights_only has run it
        torch.load(path, weights_only=False)
    assert trapped.exists()


def test_the_store_asks_nobody_who_he_is():
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job.set("lr", "0.1")
    stranger = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    assert stranger.get("lr") == b"0.1"
    stranger.set("lr", "1000")
    assert job.get("lr") == b"1000"


def test_torchrun_unpickles_what_it_finds_there(tmp_path):
    """The reader of torchrun, given a store of this process, runs what the state says."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

    store, second = dist.HashStore(), timedelta(seconds=1)
    backend = c10d.C10dRendezvousBackend(store, "a-run")
    settings = dynamic.RendezvousSettings("a-run", 1, 1, second, second, 1)
    holder = dynamic._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
    holder.sync()
    assert not (tmp_path / "trapped").exists()  # the control: an empty store
    state = base64.b64encode(pickle.dumps(Trap(tmp_path / "trapped")))
    store.set("torch.rendezvous.a-run", state)
    with suppress(Exception):
        holder.sync()
    assert (tmp_path / "trapped").exists()


@on_ranks(2)
def test_an_object_collective_runs_what_another_rank_sends(rank):
    for name, options in (("safe", {"weights_only": True}), ("run", {})):
        things = [None, None]
        with suppress(pickle.UnpicklingError, AttributeError, TypeError):  # 2.11 has no such option
            dist.all_gather_object(things, Trap(Path(name)) if rank == 1 else "", **options)
    dist.barrier()
    assert (Path("safe").exists(), Path("run").exists()) == (False, True)
