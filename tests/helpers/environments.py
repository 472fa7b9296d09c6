"""Virtual environments that have some distributions and nothing else; nothing is downloaded."""

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path


def make_environment(folder: Path, *names: str) -> Path:
    """Make a virtual environment, and return its Python.

    It has these distributions as they are installed here, and what they require.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in names:
        link_with_requirements(name, packages)
    return folder / "bin" / "python"


def link_with_requirements(name: str, folder: Path) -> None:
    """Link an installed distribution, and what it requires, into another folder."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # for another system or Python
    tops = {Path(file).parts[0] for file in distribution.files or [] if Path(file).parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(str(distribution.locate_file(top)))
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            link_with_requirements(re.split(r"[^\w.-]", requirement)[0], folder)
