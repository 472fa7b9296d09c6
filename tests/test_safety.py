"""Nothing that comes from outside is run: checkpoints are data, and who may reach a job is told."""

import ast
import base64
import inspect
import json
import os
import pickle
import pickletools
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from support import ROOT, command, run_ranks
from test_bad_input import SCRIPTS, Trap, refused
from test_survive_input import seal

# --- What unpickles, in every Python file and notebook

OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# Each of these gets what ranks of the same program made; nothing from a file.
ALLOWED = {
    ("03_ddp_manual_allreduce/deaths.py", "all_gather_object"),  # a truth value
    ("03_ddp_manual_allreduce/deaths.py", "broadcast_object_list"),  # a path, a number
    ("03_ddp_manual_allreduce/ranks.py", "all_gather_object"),  # shapes, as texts
    ("tests/support.py", "pickle.loads"),  # what a rank answers to the test that started it
    ("tests/test_safety.py", "torch.load"),  # the control below
    ("tests/test_safety.py", "all_gather_object"),  # it shows what can happen
}
ALLOWED |= {  # the peak memory of each rank, a whole number
    (f"{folder}/train.py", "all_gather_object")
    for folder in ("03_ddp_manual_allreduce", "04_ddp_torchrun", "05_amp_syncbn", "survive")
}


def unpickling_calls(source: str) -> list[str]:
    """The calls of a program that would run what a pickle says, by the names of the libraries."""
    tree, names = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0]: a.asname and a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        full = ".".join([names.get(first) or first, *rest])
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if full == "torch.load" and given.get("weights_only") != "True":
            found.append(full)
        if full.startswith("numpy.") and given.get("allow_pickle", "False") != "False":
            found.append(full)
        if full.split(".")[0] in ("pickle", "_pickle", "dill", "joblib", "cloudpickle", "marshal"):
            found += [full] if full.split(".")[-1] in ("load", "loads", "Unpickler") else []
        if full.split(".")[-1] in OBJECT_COLLECTIVES:
            found.append(full.split(".")[-1])
    return found


def programs() -> dict[str, str]:
    """Every Python file of the repository and the code of every notebook, by its path."""
    skip = {"runs", "build"}  # and what begins with a dot: .git, .venv
    tops = [top for top in ROOT.iterdir() if top.name not in skip and top.name[0] != "."]
    paths = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    found = {}
    for path in paths:
        if path.suffix not in (".py", ".ipynb"):
            continue
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            lines = "".join("".join(cell["source"]) + "\n" for cell in cells).splitlines()
            text = "\n".join("pass" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
        found[path.relative_to(ROOT).as_posix()] = text
    return found


def test_no_file_unpickles_what_comes_from_outside():
    found = {(path, call) for path, text in programs().items() for call in unpickling_calls(text)}
    assert found == ALLOWED
    assert len(programs()) > 30


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
        "import torch as t; t.load(path, map_location='cpu')",
        "from torch import load; load(path)",
        "import pickle; pickle.load(file)",
        "import pickle as p; p.loads(data)",
        "from pickle import loads as read; read(data)",
        "import pickle; pickle.Unpickler(file).load()",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import torch.distributed as dist; dist.broadcast_object_list(things)",
        "from torch.distributed import all_gather_object as gather; gather(things, mine)",
        "import torch.distributed; torch.distributed.recv_object_list(things)",
    ],
)
def test_the_checker_finds_each_way_to_unpickle(line):
    assert unpickling_calls(line)


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.load(path, weights_only=True)",
        "import json; json.load(file)",
        "import pickle; pickle.dumps(thing)",
        "import numpy as np; np.load(path)",
        "import torch.distributed as dist; dist.all_reduce(tensor)",
    ],
)
def test_the_checker_lets_pass_what_is_data(line):
    assert unpickling_calls(line) == []


# --- A malicious checkpoint

FORMS = ["bare pickle", "inside torch.save's zip"]


def malicious(folder: Path, form: str, sealed: bool) -> tuple[Path, Path]:
    """A checkpoint that would create a file if it were unpickled. sealed: its checksum fits."""
    path, trapped = folder / "checkpoint.pt", folder / "trapped"
    if form == FORMS[0]:
        path.write_bytes(pickle.dumps(Trap(trapped), protocol=2))
    else:
        torch.save({"model": Trap(trapped), "epoch": 0}, path)
    if sealed:
        seal(path)
    return path, trapped


@pytest.mark.parametrize("form", FORMS)
def test_the_malicious_checkpoint_would_run(form, tmp_path):
    """The control: whoever loads it without weights_only has run it."""
    path, trapped = malicious(tmp_path, form, sealed=True)
    with suppress(Exception):
        torch.load(path, weights_only=False)
    assert trapped.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["--resume", "--resume=auto", "--evaluate"])
@pytest.mark.parametrize(
    ("key", "sealed"), [("04", False), ("05", False), ("survive", False), ("survive", True)]
)
def test_a_malicious_checkpoint_runs_nothing(key, sealed, how, form, tmp_path):
    """survive asks for a checksum first; whoever can write the file can write that, too."""
    path, trapped = malicious(tmp_path, form, sealed)
    flags = (how,) if how.endswith("auto") else (f"{how}={path}",)
    before = path.read_bytes()
    [(status, output)] = command(
        SCRIPTS[key], "--model=net-bn", "--device=cpu", f"--run-dir={tmp_path}", *flags
    )
    assert status == 2, output
    unsealed = key == "survive" and not sealed
    refused(output, "checkpoint.pt", "damaged" if unsealed else "more than plain values")
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert path.read_bytes() == before
    assert not trapped.exists()


# --- The rendezvous store


def test_the_store_asks_nobody_who_he_is():
    """A client that knows the port reads and overwrites what another has put there."""
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job.set("lr", "0.1")
    stranger = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    assert stranger.get("lr") == b"0.1"
    stranger.set("lr", "1000")
    assert job.get("lr") == b"1000"
    apart = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not apart.check(["lr"])  # the control: another port is another store


def listening(pid):
    """The addresses and ports where that process listens, as Linux writes them."""
    links = []
    for file in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # of the listing itself
            links.append(os.readlink(f"/proc/{pid}/fd/{file}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in links:
                address, port = cells[1].split(":")
                found.append((address, int(port, 16)))
    return found


RANK = f"""
import json, os
from contextlib import suppress
from pathlib import Path
import torch.distributed as dist

{inspect.getsource(listening)}

dist.init_process_group("gloo")
agent = listening(os.getppid())
key, states = "torch.rendezvous." + os.environ["TORCHELASTIC_RUN_ID"], []
for _, port in agent:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if store.check([key]):
        states.append(store.get(key).decode())
told = dict(agent=agent, rank=listening(os.getpid()), states=states)
print(json.dumps(told | dict(master_port=int(os.environ["MASTER_PORT"]))))
"""
LOOPBACK, EVERYWHERE = {"0100007F"}, {"0" * 8, "0" * 32}  # as /proc/net/tcp writes them


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> dict:
    """What a rank under the real torchrun --standalone sees; gloo on loopback, as train.py asks."""
    script = tmp_path_factory.mktemp("job") / "listening.py"
    script.write_text(RANK)
    flags = ("--standalone", "--nproc-per-node=1", str(script))
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    [(status, output)] = command(torch.distributed.run.__file__, *flags, env=env)
    assert status == 0, output
    return json.loads(output.splitlines()[-1])


needs_proc = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="needs Linux: it reads /proc/net/tcp"
)


@needs_proc
def test_torchruns_stores_listen_on_every_address_and_gloo_on_loopback(job):
    assert {address for address, _ in job["agent"]} <= EVERYWHERE
    assert len(job["agent"]) == 2  # where torchruns meet, and where the ranks meet
    assert job["master_port"] in [port for _, port in job["agent"]]
    assert {address for address, _ in job["rank"]} == LOOPBACK


@needs_proc
def test_torchrun_keeps_the_state_of_its_rendezvous_in_the_store_as_a_pickle(job):
    """Any client reads it, and could set it; it is read here without being unpickled."""
    [state] = job["states"]
    names = [arg for _, arg, _ in pickletools.genops(base64.b64decode(state))]
    assert "torch.distributed.elastic.rendezvous.dynamic_rendezvous" in names


def test_torchrun_unpickles_what_it_finds_there(tmp_path):
    """Its own reader, on a store of this process: what the state says is run."""
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


def _gather(rank, path, options):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    things = [None, None]
    with suppress(pickle.UnpicklingError, AttributeError):  # an open file is no answer either
        dist.all_gather_object(things, Trap(path) if rank == 1 else "", **options)
    return path.exists()


def test_an_object_collective_runs_what_another_rank_sends(tmp_path):
    assert run_ranks(2, _gather, tmp_path / "trapped", {}) == [True, True]
    if torch.__version__[:4] != "2.11":  # where it cannot be refused yet
        safe = run_ranks(2, _gather, tmp_path / "not-trapped", {"weights_only": True})
        assert safe == [False, False]


@needs_proc
def test_gloo_listens_where_it_is_told():
    """GLOO_SOCKET_IFNAME; without it, at the address that the machine's name stands for."""
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    assert set(run_ranks(2, _gloo_addresses, env=env)) == {tuple(LOOPBACK)}
    with pytest.raises(AssertionError, match="Unable to find address for: eth99"):
        run_ranks(2, _gloo_addresses, env={"GLOO_SOCKET_IFNAME": "eth99"})


def _gloo_addresses(rank):
    before = set(listening("self"))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return tuple(sorted({address for address, _ in set(listening("self")) - before}))
