"""Backend vcuda in real containers: limits read and processes registered as the library does it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def vcuda_node(cluster: Cluster, running_agent: Agent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A host with a driver's files, which the agent mirrors with the operator's library in front."""
    driver, root = Driver(tmp_path_factory.mktemp("driver")), AGENT_STATE / "root"
    driver.libraries[VERSION] = driver.libraries[DRIVER]
    driver.install(root, VERSION)
    changes: Changes = {"enforcement": {"backend": "vcuda"}, "vcuda": {**library(), "driver_roots": [str(root)]}}
    with limited(cluster, running_agent, changes) as node:
        yield node


@pytest.fixture
def vcuda(vcuda_node: Node) -> Node:
    vcuda_node.clear()
    return vcuda_node


CLIENT = "/usr/local/nvidia/bin/gpu-client"


def test_a_tenant_of_vcuda_reads_its_limits_and_registers(vcuda: Node) -> None:
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


def test_the_caller_is_identified_by_the_kernel(vcuda: Node) -> None:
    """The other pod's UID and container in the request change nothing: the caller is put under its own."""
    vcuda.run([tenant("victim", SLEEP, 20, 8)])
    uid = vcuda.cluster.pods.all()["victim"]["metadata"]["uid"]
    claim = f"{CLIENT} --addr /etc/vcuda/vcuda.sock --pod-uid {uid} --cont-name main"
    vcuda.run([tenant("liar", f"{claim}; echo ended $?; {SLEEP}")])
    wait_line(vcuda, "liar", "ended")
    victims = set(_pids_in(AGENT_STATE / "vm" / allocation(vcuda, "victim") / "pids.config"))
    assert not victims & set(pids(vcuda, "liar"))


def test_registration_goes_on_after_the_agent_was_killed(vcuda: Node) -> None:
    again = f"while sleep 1; do {READER} register {CLIENT} 2>/dev/null && echo registered; done"
    vcuda.run([tenant("lasting", again)])
    wait_line(vcuda, "lasting", "registered")
    vcuda.agent.kill()
    vcuda.agent.start()
    seen = len(lines(vcuda, "lasting"))
    wait_until("registered again", lambda: len(lines(vcuda, "lasting")) > seen + 1)
