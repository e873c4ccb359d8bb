"""Targets of the Makefile, on a tree of their own."""

import subprocess
from pathlib import Path

from tools import PROJECT


def test_an_old_wheel_does_not_stay_beside_the_new_one(tmp_path: Path) -> None:
    """`dist/gpumgr-*.whl` is what the guide and the Dockerfile install."""
    builder = tmp_path / ".venv/bin/hatchling"
    builder.parent.mkdir(parents=True)
    builder.write_text("#!/bin/sh\ntouch dist/gpumgr-2-py3-none-any.whl\n")
    builder.chmod(0o755)
    for name in ("requirements.lock", "pyproject.toml", ".venv/.locked", ".venv/.installed"):
        (tmp_path / name).touch()
    (tmp_path / "dist").mkdir()
    for name in ("gpumgr-1-py3-none-any.whl", "gpumgr-1.tar.gz"):
        (tmp_path / "dist" / name).touch()
    # VENV is given, since the make that runs the tests may pass on its own.
    command = ["make", "-f", str(PROJECT / "Makefile"), "VENV=.venv", "wheel"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == ["gpumgr-1.tar.gz", "gpumgr-2-py3-none-any.whl"]
