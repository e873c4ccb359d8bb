"""The wheel and the source archive, built once, and the wheel in an environment that has nothing else but what it asks for."""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.once import made_once
from tools import PROJECT
from tools.sbom import at_run_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment with gpumgr in it. `packages` is its folder of them."""

    folder: Path
    packages: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        """What a program of its `bin` printed; an exit status other than 0 fails the test."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "GPUMGR"))}
        command = [self.folder / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def build(kind: str, tree: Path, out: Path) -> Path:
    """`hatchling build` in a source tree; the one file that it leaves in `out`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, check=True, cwd=tree, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="package")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(made_once(tmp_path_factory, "wheel", partial(build, "wheel", PROJECT)).glob("*.whl"))


@pytest.fixture(scope="package")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(made_once(tmp_path_factory, "sdist", partial(build, "sdist", PROJECT)).glob("*.tar.gz"))


@pytest.fixture(scope="package")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """As `pip install gpumgr` does it, but that its locked dependencies are links to those of this environment."""
    folder = made_once(tmp_path_factory, "installed", partial(_install, wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    return Installed(folder=folder, packages=packages)


def _install(wheel: Path, folder: Path) -> None:
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in at_run_time():
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(here.locate_file(top))))
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
