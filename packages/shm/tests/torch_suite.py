"""The judge of the backend shm: torch's own tests for backends, over gloo and over shm.

    python packages/shm/tests/torch_suite.py  # make shm-suite: all four runs, and torch_suite.json
    python packages/shm/tests/torch_suite.py --only shm --ranks 3 test_send_recv_any_source

The tests are torch.testing._internal.distributed.distributed_test, which every installation of
torch has (it needs expecttest). torch runs it with the environment of its
test/distributed/test_distributed_spawn.py: BACKEND, WORLD_SIZE, INIT_METHOD and TEMP_DIR.

Many of these tests ask for gloo by its name, so here BACKEND is always gloo, and torch's entry of
that name makes a group of shm instead. Every test that passes over gloo has to pass over shm. What
does not stands in ALLOWED, with the reason. Two things differ from torch's way of running them:

- Ranks are forked, not spawned: they need not import torch again, for each of the 285 tests.
- Over shm, no test looks for events of the backend in a profile. torch keeps two lists of the
  backends that it expects to write such events, and its own backends are on them.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import unittest
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import date
from importlib import import_module
from pathlib import Path

COMMAND = "python packages/shm/tests/torch_suite.py"
BACKENDS, WORLD_SIZES = ("gloo", "shm"), (2, 3)
ALLOWED = {
    "test_ddp_logging_data_cpu": "expects that the group calls itself gloo; it is called shm",
}


def run_tests(backend: str, world_size: int, names: list[str]) -> dict[str, dict[str, str]]:
    """What passed, failed or was skipped, and why. Run it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": folder}
        environment |= {"INIT_METHOD": f"file://{folder}/shared_init_file"}
        environment |= {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120"}  # seconds, of a test
        os.environ.update(environment)
        import torch
        from torch import distributed as dist

        torch.set_num_threads(1)
        torchs = import_module("torch.testing._internal.distributed.distributed_test")
        if backend == "shm":
            import_module("shm")
            dist.Backend._plugins["GLOO"] = dist.Backend._plugins["SHM"]
            torchs.PROFILING_SUPPORTED_BACKENDS.remove("gloo")
            torchs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("gloo")

        class Suite(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        tests = unittest.defaultTestLoader.loadTestsFromTestCase(Suite)
        chosen = [each for each in tests if not names or each._testMethodName in names]
        results = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(chosen))
    bad = {test._testMethodName: why for test, why in [*results.errors, *results.failures]}
    skipped = {test._testMethodName: why for test, why in results.skipped}
    everything = [test._testMethodName for test in chosen]
    passed = {name: "" for name in everything if name not in bad and name not in skipped}
    return {"passed": passed, "failed": bad, "skipped": skipped}


def run_apart(backend: str, world_size: int) -> dict[str, dict[str, str]]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        program = [sys.executable, __file__, "--only", backend, "--out", out.name]
        program += ["--ranks", str(world_size)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(program, env=env, stderr=subprocess.STDOUT, stdout=subprocess.DEVNULL)
        return json.load(out)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BACKENDS, help="one run, over this backend")
    parser.add_argument("--ranks", type=int, choices=WORLD_SIZES, default=WORLD_SIZES[0])
    parser.add_argument("--out", type=Path, help="where that run writes what it found")
    parser.add_argument("names", nargs="*", metavar="TEST", help="of these tests")
    args = parser.parse_args()
    if args.only:
        results = run_tests(args.only, args.ranks, args.names)
        if args.out:
            args.out.write_text(json.dumps(results))
        sys.exit(bool(results["failed"]))
    import torch

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    where = {"machine": platform.machine(), **versions, "date": f"{date.today()}"}
    where |= {"command": COMMAND}
    rows, wrong = {}, []
    for world_size in WORLD_SIZES:
        by_backend = {backend: run_apart(backend, world_size) for backend in BACKENDS}
        gloo, shm = (by_backend[backend] for backend in BACKENDS)
        for backend, outcomes in by_backend.items():
            counts = {what: len(names) for what, names in outcomes.items()}
            print(f"{backend}, {world_size} ranks:", counts)
            rows[f"{backend}, {world_size} ranks"] = counts
        lost = [name for name in gloo["passed"] if name not in shm["passed"]]
        wrong += [f"{world_size} ranks: {name}" for name in lost if name not in ALLOWED]
        wrong += [f"ALLOWED has {name}, which passes" for name in ALLOWED if name not in lost]
        for name in lost:
            print(f"\n{name}: {ALLOWED.get(name, 'not allowed')}\n{shm['failed'].get(name, '')}")
    content = {"provenance": where, "tests": rows, "allowed": ALLOWED, "wrong": wrong}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(wrong) or "every test that passes over gloo passes over shm, or is allowed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
