"""Backend vcuda in real containers: limits read and processes registered as the library does it."""

import hashlib
from pathlib import Path

from tests.component.compat.gpu_manager.driver_files.host import DRIVER, Driver

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP
from .node import Node
from .places import AGENT_STATE
from .processes import wait_until
from .tenants import BLOCK, LIBRARY, Changes, allocation, library, limited, lines, pids, tenant, wait_line

READER = "/programs/vcuda_reader"


#: The driver of the simulated node.
VERSION = "550.90.07"


def test_a_tenant_of_vcuda_reads_its_limits_and_registers(cluster: Cluster, running_agent: Agent, tmp_path: Path) -> None:
    """On a host with a driver's files, which the agent mirrors with the operator's library in front."""
    driver, root = Driver(tmp_path), AGENT_STATE / "root"
    driver.libraries[VERSION] = driver.libraries[DRIVER]
    driver.install(root, VERSION)
    changes: Changes = {"enforcement": {"backend": "vcuda"}, "vcuda": {**library(), "driver_roots": [str(root)]}}
    with limited(cluster, running_agent, changes) as node:
        check_registration(node)


def check_registration(vcuda: Node) -> None:
    show = f"env | grep NVIDIA; {READER} config; sha256sum /usr/local/nvidia/lib64/libcuda.so.1; ls /usr/local/nvidia/lib64"
    vcuda.run([tenant("seen", f"{show}; {READER} register; echo registered $?; {SLEEP}")])
    wait_line(vcuda, "seen", "registered")
    text = lines(vcuda, "seen")
    assert f"{hashlib.sha256(LIBRARY.read_bytes()).hexdigest()}  /usr/local/nvidia/lib64/libcuda.so.1" in text
    assert f"libcuda.so.{VERSION}" in text
    assert "registered 0" in text
    assert "NVIDIA_VISIBLE_DEVICES=void" in text
    assert str(16 * BLOCK) in "\n".join(text)
    folder = AGENT_STATE / "vm" / allocation(vcuda, "seen")
    wait_until("its processes are listed", lambda: set(pids(vcuda, "seen")) <= set(_pids_in(folder / "pids.config")))
    known = _pids_in(folder / "pids.config")
    assert known == sorted(known)


def _pids_in(path: Path) -> list[int]:
    data = path.read_bytes()
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
