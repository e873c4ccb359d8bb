"""One agent on a node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumgr.common.errors import GpumgrError
from gpumgr.kubelet.other_plugins import lock_folder, lock_node


def test_death_releases(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os, sys; from pathlib import Path; from gpumgr.kubelet.other_plugins import lock_node\n"
        "with lock_node(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with lock_node(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GpumgrError, match="No such file or directory"), lock_node(tmp_path / "none" / "lock"):
        raise AssertionError("a lock without a file")


def test_a_missing_plugin_folder_is_not_locked(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "missing"), lock_folder(tmp_path / "missing"):
        pass
