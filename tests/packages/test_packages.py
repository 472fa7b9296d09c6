"""The two packages work without the course: their wheels, in an environment with torch alone.

Each wheel is built from a source distribution, which has the tests of its package, too.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.environments import make_environment
from helpers.machine import free_port
from local_ranks.chapters import ROOT
from local_ranks.machine import timeout_under_load
from local_ranks.ranks import torchrun_variables

NAMES = ("prove", "shm")
KINDS = (".py", ".c", ".md", ".typed")  # kinds of files in a wheel
BUILT = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
print(dist.get_backend())
torch.manual_seed(0)
data = torch.randn(32, 8)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, 4, sampler=sampler):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Make an environment with both wheels, torch, and nothing else, beside the archives."""
    folder = tmp_path_factory.mktemp("alone")
    python = make_environment(folder, "torch")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build_sdist = "from setuptools import build_meta; build_meta.build_sdist('..')"
    for name in NAMES:  # build a copy, because a build writes beside its sources
        shutil.copytree(ROOT / "packages" / name, folder / name, ignore=BUILT)
        build = [sys.executable, "-c", build_sdist]
        subprocess.run(build, cwd=folder / name, check=True, stdout=subprocess.DEVNULL)
        [sdist] = folder.glob(f"*{name}-*.tar.gz")
        # Without isolation, pip builds with the setuptools that is here, and downloads nothing.
        wheel = ["wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist]
        subprocess.run([*pip, *wheel], check=True)
    wheels = [str(path) for path in folder.glob("*.whl")]
    install = ["--python", python, "install", "--no-deps", "--no-index", *wheels]
    subprocess.run([*pip, *install], check=True)
    return folder


@pytest.fixture
def run(environment, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a program of that environment beside the script above."""
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"OMP_NUM_THREADS": "1", "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}

    def start(program: str, *arguments: str | Path) -> subprocess.CompletedProcess:
        call = [environment / "bin" / program, *arguments]
        how = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
        return subprocess.run(call, **how, timeout=timeout_under_load(120))

    return start


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_has_its_license_its_metadata_and_no_file_but_those_of_its_package(
    name, environment
):
    [wheel] = [path for path in environment.glob("*.whl") if name in path.name]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        [info] = {file.split("/")[0] for file in files if ".dist-info/" in file}
        metadata = archive.read(f"{info}/METADATA").decode()
        licenses = archive.read(f"{info}/licenses/LICENSE").decode()
    sources = ROOT / "packages" / name / "src"
    of_package = (path for path in sources.rglob("*") if path.suffix in KINDS)
    expected = {str(path.relative_to(sources)) for path in of_package}
    assert {file for file in files if not file.startswith(info)} == expected
    assert f"{name}/py.typed" in files
    assert licenses == (ROOT / "LICENSE").read_text()
    [version] = re.findall(
        r'^__version__ = "(.+)"$', (sources / name / "__init__.py").read_text(), re.M
    )
    for line in (
        f"Version: {version}",
        "License-Expression: MIT",
        "Author: The maintainers",
        "Classifier: Operating System :: POSIX :: Linux",
    ):
        assert f"\n{line}\n" in metadata
    assert re.search(r"\nRequires-Dist: torch<\d[\d.]*,>=\d", metadata), "torch has an upper bound"
    changes = (ROOT / "packages" / name / "CHANGELOG.md").read_text()
    assert f"\n## {version}\n" in changes


@pytest.mark.parametrize("name", NAMES)
def test_a_source_distribution_has_all_that_the_tests_of_its_package_need(name, environment):
    [sdist] = environment.glob(f"*{name}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.partition("/")[2] for member in archive.getnames()}
    sources = environment / name
    for folder in ("tests", "evidence", "examples"):
        needed = {path for path in (sources / folder).rglob("*") if path.is_file()}
        assert {str(path.relative_to(sources)) for path in needed} <= files
    assert "tests/conftest.py" in files


@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_an_index_shows_has_no_link_that_only_the_repository_has(name):
    page = (ROOT / "packages" / name / "README.md").read_text()
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", page) == []


def test_the_environment_has_torch_and_nothing_of_the_course(run):
    names = ("torch", "prove", "shm", "common", "matplotlib", "pytest")
    find = "from importlib.util import find_spec; print(*[name for name in {} if find_spec(name)])"
    assert run("python", "-c", find.format(names)).stdout.split() == ["torch", "prove", "shm"]


FIND_PLUGIN = """
from importlib.metadata import entry_points
from pathlib import Path
import prove
for entry in entry_points(group="pytest11"):
    print(entry.name, entry.value, Path(prove.__file__).with_name("pytest_plugin.py").exists())
"""


def test_pytest_would_find_the_fixture_of_prove_which_needs_no_pytest_there(run):
    assert run("python", "-c", FIND_PLUGIN).stdout == "prove prove.pytest_plugin True\n"


def test_prove_judges_a_script_there_and_explains_its_cures_by_a_page_that_came_along(
    run, tmp_path
):
    """The script has one mistake, so the other rows say that it is right."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("sampler.set_epoch(epoch)", "pass"))
    judged = run(
        "python", "-m", "prove", "torchrun", "--standalone", "--nproc-per-node=2", "train.py"
    )
    assert re.search("^right +one rank", judged.stdout, re.M), judged.stdout + judged.stderr
    assert judged.returncode == 1
    [words] = re.findall(r"\(python (-m prove --explain .*)\)", judged.stdout)
    assert run("python", *words.split()).stdout.startswith("## Every epoch has the same order")


def test_a_script_runs_over_shm_there(run):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = run("python", *launch, "-m", "shm", "train.py")
    printed = re.findall("shm|gloo", process.stdout)  # both ranks print, and their lines may mix
    assert (process.returncode, printed) == (0, ["shm", "shm"]), process.stderr


def test_the_timeline_of_a_script_is_recorded_there(run, tmp_path):
    """Without torchrun, to save its import of torch: one process that is told that it is alone."""
    alone = [f"{name}={value}" for name, value in torchrun_variables(0, 1, free_port()).items()]
    process = run(
        "python", ROOT / "benchmarks" / "timeline.py", "env", *alone, "python", "train.py"
    )
    assert re.search("^process ", process.stdout, re.M), process.stdout + process.stderr
    assert (tmp_path / "timeline.svg").exists()
