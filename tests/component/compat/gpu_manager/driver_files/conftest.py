"""A node with a driver, and a mirror of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumgr.compat.gpu_manager.driver_files.manager import DriverMirror
from gpumgr.settings.schema import VcudaSettings
from tests.component.compat.gpu_manager.driver_files.host import Driver

Mirror = Callable[..., DriverMirror]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def root(tmp_path: Path, driver: Driver) -> Path:
    """A host's root with a driver and its cache."""
    folder = tmp_path / "root"
    driver.install(folder)
    return folder


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process, which has no mount of a mirror."""
    folder = tmp_path / "proc"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "mountinfo").write_text("22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
    return folder


@pytest.fixture
def mirror(tmp_path: Path, root: Path, proc: Path, driver: Driver) -> Mirror:
    """Makes mirrors of `root` into `<tmp>/vdriver`."""
    client = tmp_path / "client"
    client.write_bytes(b"#!/bin/sh\n")

    def make(**more: object) -> DriverMirror:
        settings: dict[str, Any] = {
            "volume_conf": tmp_path / "volume.conf",
            "driver_roots": (tmp_path / "nothing", root),
            "library_path": driver.shim,
            "client_path": client,
        }
        values: dict[str, Any] = {
            "share_dir": tmp_path / "vdriver" / "nvidia",
            "whole_dir": tmp_path / "vdriver" / "origin",
            "proc_root": proc,
            "wall_clock": lambda: 1_000_000.0,
        }
        settings |= {key: more.pop(key) for key in VcudaSettings.__struct_fields__ if key in more}
        return DriverMirror(VcudaSettings(**settings), **(values | more))

    return make
