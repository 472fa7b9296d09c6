"""The image of .devcontainer: where there is a builder it is built, else its lines are followed."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from local_ranks.chapters import ROOT

FOLDER = ROOT / ".devcontainer"
TEXT = (FOLDER / "Dockerfile").read_text()
DEVCONTAINER = json.loads((FOLDER / "devcontainer.json").read_text())
LINES = [line.partition(" ")[::2] for line in TEXT.splitlines() if line and line[0] != "#"]
BUILD, RUN = TEXT.splitlines()[1].removeprefix("# ").split(" && ")


def those(instruction: str) -> list[str]:
    return [rest for name, rest in LINES if name == instruction]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in those("ENV") for pair in line.split())


def what_make_would_do(command: str) -> str:
    """Return the commands of `make ...` for an environment that is not there; none of them runs."""
    words = shlex.split(command.replace("$VENV", "nowhere"))
    dry_run = [*words, "-n", "VENV=nowhere"]
    return subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def is_left_out(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps this file out of the image."""
    names = [pattern.removeprefix("**/") for pattern in patterns]
    return any(fnmatch.fnmatch(part, name) for part in Path(path).parts for name in names)


def test_its_python_is_one_that_continuous_integration_tests():
    (version,) = re.findall(r"^python:(\d+\.\d+)-slim$", those("FROM")[0])
    tested = re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/test.yml").read_text())
    assert version in tested
    assert "3.9" not in tested, "the control"


def test_it_installs_as_the_readme_and_the_makefile_do():
    installed, made = (line for line in those("RUN") if "$VENV" in line)
    create, install = installed.split(" && ")
    assert install in (ROOT / "README.md").read_text()
    assert create == "python3 -m venv $VENV"
    assert "pip install" in what_make_would_do(made)
    assert "-r requirements.txt" in what_make_would_do(made)
    with pytest.raises(subprocess.CalledProcessError):  # the control: no such target
        what_make_would_do("make $VENV/redy")
    names = [name for name, _ in LINES]
    last_run = LINES.index(("RUN", made))
    assert names.index("COPY") < last_run == max(i for i, name in enumerate(names) if name == "RUN")


def test_its_user_is_not_root_and_owns_what_make_writes():
    (user,) = those("USER")
    assert user != "root"
    assert f"useradd --create-home {user}" in those("RUN")
    for folder in (environment()["VENV"], *those("WORKDIR")):
        assert folder.startswith(f"/home/{user}/")
    assert those("COPY") == [f"--chown={user} . ."]


def test_an_image_holds_what_is_committed_and_nothing_else_of_a_folder():
    ignored = [line for line in (ROOT / ".gitignore").read_text().split() if line[0] != "#"]
    left_out = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"
    ]
    assert left_out == [".git", *(f"**/{name.rstrip('/')}" for name in ignored)]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this folder is no clone")
    assert [path for path in listed.stdout.splitlines() if is_left_out(path, left_out)] == []
    assert is_left_out("beyond/runs/a.txt", left_out), "the control"


def test_the_devcontainer_builds_this_image_and_installs_the_folder_that_it_mounts():
    build = DEVCONTAINER["build"]
    assert (FOLDER / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert [DEVCONTAINER["remoteUser"]] == those("USER")
    assert set(DEVCONTAINER["runArgs"]) <= set(RUN.split())
    assert "-r requirements.txt" in what_make_would_do(DEVCONTAINER["postCreateCommand"])
    settings = DEVCONTAINER["customizations"]["vscode"]["settings"]
    python = environment()["VENV"] + "/bin/python"
    assert settings == {"python.defaultInterpreterPath": python}


def test_the_page_shows_the_two_commands_of_the_file():
    assert f"{BUILD}\n{RUN}\n" in (ROOT / "docs/machines.md").read_text()


def builder() -> str:
    """The first program that can build here, or nothing."""
    for name in filter(shutil.which, ("docker", "podman")):
        pulled = subprocess.run([name, "pull", "-q", those("FROM")[0]], capture_output=True)
        if pulled.returncode == 0:
            return name
    return ""


def test_where_there_is_a_builder_the_tour_runs_in_the_image():
    if not (name := builder()):
        pytest.skip("no docker or podman here that can fetch the base image")
    subprocess.run(shlex.split(BUILD.replace("docker", name)), cwd=ROOT, check=True, timeout=1800)
    command = shlex.split(RUN.replace("docker", name))
    flags = "FLAGS=--stages 01,04 --epochs 1 --max-steps 3"
    ran = subprocess.run([*command, flags], capture_output=True, text=True, timeout=600)
    assert "wrote runs/tour/report.md" in ran.stdout, ran.stdout + ran.stderr
    assert "pip install" not in ran.stdout, "the environment was not ready"
