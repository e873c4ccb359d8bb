"""The wheel once it is installed, beside nothing but its locked dependencies: all that it brings is found there, and works."""

import subprocess
import sys
from pathlib import Path

from gpumgr import __version__
from gpumgr.web.responses import PAGE
from tools import PROJECT

from .conftest import Installed

IMPORT_ALL = """
import importlib, pkgutil, sys
import gpumgr
found = [each.name for each in pkgutil.walk_packages(gpumgr.__path__, "gpumgr.") if not each.name.endswith("__main__")]
for name in found:
    importlib.import_module(name)
print(len(found), *sorted({sys.modules[name].__file__.partition("gpumgr")[0] for name in found}))
"""
PROGRAMS = ("sim/nvml.c", "compat/gpu_manager/vcuda/gpu-client.c")
SHIPPED = """
import sys
from gpumgr.cli.install import SHIPPED
for name in ("gpumgr.yaml", "gpumgr.service", "install.sh"):
    print((SHIPPED / name).resolve())
"""


def test_the_command_is_there(installed: Installed) -> None:
    assert installed.run("gpumgr", "--version") == f"gpumgr, version {__version__}\n"
    assert installed.run("python", "-m", "gpumgr", "--version") == f"gpumgr, version {__version__}\n"


def test_every_module_needs_only_what_is_declared(installed: Installed) -> None:
    """None of them leads to a tool of development, nor back to the source tree."""
    number, *places = installed.run("python", "-c", IMPORT_ALL).split()
    assert int(number) > 200
    assert places == [f"{installed.packages}/"]


def test_its_types_are_seen(installed: Installed, tmp_path: Path) -> None:
    assert (installed.packages / "gpumgr" / "py.typed").is_file()
    (tmp_path / "user.py").write_text("import gpumgr\n\nwrong: int = gpumgr.__version__\n")
    python = f"--python-executable={installed.folder / 'bin' / 'python'}"
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--strict", "--config-file=", python, "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'user.py:3: error: Incompatible types in assignment (expression has type "str"' in done.stdout, (
        done.stdout + done.stderr
    )


def test_it_brings_the_simulated_nodes(installed: Installed) -> None:
    assert '"gpus":[0,1]' in installed.run("gpumgr", "place", "--sim", "hgx-h100-8", "--cores", "200")


def test_it_brings_the_unit_the_settings_and_the_script_for_libraries(installed: Installed) -> None:
    settings, unit, script = map(Path, installed.run("python", "-c", SHIPPED).split())
    assert settings.is_relative_to(installed.packages)
    assert settings.read_bytes() == (PROJECT / "config" / "gpumgr.yaml").read_bytes()
    assert unit.read_bytes() == (PROJECT / "systemd" / "gpumgr.service").read_bytes()
    assert script.read_bytes() == (PROJECT / "config" / "image" / "hami-core" / "install.sh").read_bytes()
    assert installed.run("gpumgr", "config", "check", settings) == "ok\n"


def test_it_brings_the_limiters_libraries(installed: Installed) -> None:
    said = installed.run(
        "python",
        "-c",
        "import ctypes; from gpumgr.enforcement.limiter.backend import ARBITER, LIBRARY, library_path as path; "
        "print(path(LIBRARY), ctypes.CDLL(path(ARBITER)).gm_arbiter_add(-1, 0, -1, -1))",
    )
    library, answer = said.split()
    assert Path(library).is_relative_to(installed.packages)
    assert answer == "-1"


def test_it_brings_all_that_is_not_python(installed: Installed) -> None:
    """The page, descriptions of nodes, and the programs that are compiled where they run."""
    for path in (PAGE, *(PROJECT / "gpumgr").rglob("*.yaml"), *(PROJECT / "gpumgr" / name for name in PROGRAMS)):
        assert (installed.packages / path.relative_to(PROJECT)).read_bytes() == path.read_bytes()
