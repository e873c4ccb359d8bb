"""The chart with `privileged: false`, run for real: what is left of the agent's rights is enough to place pods and to limit them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .agent import Agent
from .cluster import Cluster
from .daemonset import RUN, Installed, installed
from .manifests import SLEEP
from .node import cleared
from .processes import wait_until
from .tenants import BLOCK, allocation, library, tenant, wait_line

SYS_PTRACE = 19  # capabilities(7): the bit in /proc/PID/status
CHANGES = {"enforcement": {"backend": "hami-core", "orphan_grace_seconds": 1.0}}


@pytest.fixture
def agent(cluster: Cluster, running_agent: Agent) -> Iterator[Installed]:
    with cleared(cluster, running_agent):
        pass
    with installed(cluster, running_agent) as agent:
        agent.stop()
        agent.configure({**CHANGES, "hami_core": library()})
        agent.start(privileged=False)
        yield agent


def rights_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_pods_have_limits_and_keep_their_files_from_an_agent_with_one_capability(cluster: Cluster, agent: Installed) -> None:
    with cleared(cluster, agent) as node:
        node.run([tenant("stays", f"/programs/region_client show; {SLEEP}"), tenant("goes", SLEEP)])
        rights = rights_of(agent.pid())
        assert {int(rights[key], 16) for key in ("CapPrm", "CapEff", "CapBnd")} == {1 << SYS_PTRACE}
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
        wait_line(node, "stays", f"memory={16 * BLOCK} cores=30 ")
        kept, left = (RUN / "hami-core" / allocation(node, name) for name in ("stays", "goes"))
        assert kept.is_dir()
        node.delete(["goes"])
        agent.kill()  # the next agent finds one folder that a container has mounted, and one without a mount
        wait_until("the ended pod's files gone", lambda: not left.exists(), 120)
        assert kept.is_dir()
        node.check()
        node.delete(["stays"])
        agent.wait_empty()
