"""Backend hami-core in real containers: what the library would see, after a restart too, and what a hostile tenant can do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP
from .node import Node
from .places import RUN_DIR
from .processes import wait_until
from .tenants import BLOCK, allocation, library, limited, lines, pids, tenant, wait_line

REGION = "/programs/region_client"


@pytest.fixture(scope="module")
def hami_node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    with limited(cluster, running_agent, {"enforcement": {"backend": "hami-core"}, "hami_core": library()}) as node:
        yield node


@pytest.fixture
def hami(hami_node: Node) -> Node:
    hami_node.clear()
    return hami_node


def region(node: Node, name: str) -> Path:
    return RUN_DIR / "hami-core" / allocation(node, name) / "region.cache"


def test_a_tenant_of_hami_core_sees_its_limits_at_both_places_and_its_pid_of_the_host(hami: Node) -> None:
    """A process in a pid namespace of its own learns from the agent which process of the host it is."""
    show = f"env | sort; cat /etc/ld.so.preload; {REGION} show; env -i {REGION} show; {REGION} take alloc 4294967296 alloc 1; {SLEEP}"
    hami.run([tenant("seen", show), tenant("hostpid", f"{REGION} take sleep 600; {SLEEP}")])
    wait_line(hami, "seen", "refused")
    text = lines(hami, "seen")
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=4096m" in text
    assert "CUDA_DEVICE_SM_LIMIT_0=30" in text
    assert "GPU_CORE_UTILIZATION_POLICY=force" in text
    assert "/usr/local/vgpu/libvgpu.so" in text
    assert len([each for each in text if f"memory={16 * BLOCK} cores=30 " in each]) == 2, text
    assert text[-2:] == ["granted", "refused"]
    wait_line(hami, "hostpid", "slot 0 process")
    path, slot = region(hami, "hostpid"), 1856

    def hostpid() -> int:
        return int.from_bytes(path.read_bytes()[slot + 4 : slot + 8], "little")

    wait_until("the host's pid", lambda: hostpid() in pids(hami, "hostpid"))
    assert "region_client" in Path(f"/proc/{hostpid()}/cmdline").read_text()


#: What a hostile tenant does -> the event that its pod gets.
ATTACKS = {
    "raise": ("take raise 68719476736 100 sleep 600", "GpuLimitTampered"),
    "counters": ("take uuid overflow count 2147483647 sleep 600", None),
    "truncate": ("truncate 100 sleep 600", "GpuLimitBroken"),
    "priority": ("priority 0 switch 0 sleep 600", "GpuLimitTampered"),
}


def test_hostile_tenants_do_not_affect_others(hami: Node) -> None:
    """They spoil their own region, or try to replace it from inside."""
    swaps = {"symlink": "symlink /etc/passwd", "fifo": "fifo"}
    hami.run(
        [
            tenant("honest", f"while sleep 1; do {REGION} show; done", 20, 8),
            *(tenant(name, f"{REGION} {attack}; {SLEEP}", 10, 8) for name, (attack, _) in ATTACKS.items()),
            *(tenant(name, f"{REGION} {swap}; echo tried; {REGION} show; {SLEEP}", 10, 8) for name, swap in swaps.items()),
        ]
    )
    for name, (_, code) in ATTACKS.items():
        if code is not None:
            hami.event(name, code)
    raised = region(hami, "raise")
    wait_until("the limit again", lambda: raised.read_bytes()[1600:1608] == (8 * BLOCK).to_bytes(8, "little"))
    for name in swaps:
        wait_line(hami, name, "tried")
        wait_line(hami, name, f"memory={8 * BLOCK} ")
        assert any(each.startswith("can't: ") for each in lines(hami, name))
    seen = len(lines(hami, "honest"))
    wait_until("the neighbour goes on", lambda: len(lines(hami, "honest")) > seen + 2)
    assert str(8 * BLOCK) in "\n".join(lines(hami, "honest")[seen:])
    hami.agent.ensure()
    hami.run([tenant("later", SLEEP, 10, 8)])
