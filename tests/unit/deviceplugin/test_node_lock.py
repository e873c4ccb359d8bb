"""One agent on a node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumgr.deviceplugin.node_lock import NodeLock, lock_folder
from gpumgr.errors import AlreadyRunning, GpumgrError


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with NodeLock(path), pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}\).*{path}"):
        NodeLock(path).acquire()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with NodeLock(path):
            pass
    NodeLock(path).release()


def test_death_releases(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os, sys; from pathlib import Path; from gpumgr.deviceplugin.node_lock import NodeLock, lock_folder\n"
        "lock = NodeLock(Path(sys.argv[1])); lock.acquire(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with NodeLock(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_deleted_lock_file_makes_no_second_lock_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with NodeLock(path):
        path.unlink()
        with NodeLock(path), pytest.raises(AlreadyRunning):
            NodeLock(path).acquire()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GpumgrError, match="No such file or directory"):
        NodeLock(tmp_path / "none" / "lock").acquire()


def test_a_plugin_folder_has_one_agent_with_any_lock_files(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(AlreadyRunning, match="another gpumgr agent serves"), lock_folder(tmp_path):
        raise AssertionError("two agents serve one folder")
    with lock_folder(tmp_path), lock_folder(tmp_path / "missing"):
        pass
