"""Tenants with limits: agents with other settings, pods that have the tenants' programs at hand, and where their files are."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpumgr.sim.control import SimControl
from tests.libvgpu import SOURCE as LIBRARY_SOURCE
from tests.libvgpu import build

from .agent import Agent
from .cluster import Cluster
from .manifests import Json, container, pod
from .node import Node, cleared
from .places import AGENT_STATE, CGROUPS, PROJECT, STATE
from .processes import wait_until
from .traces import processes_below

SOURCES = PROJECT / "tests" / "data" / "enforcement"
FOLDER = STATE / "programs"


def build_programs() -> Path:
    """Compiles every program of the test data, statically: the pods' image has no C library. The folder with the programs."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for source in sorted(set(SOURCES.glob("*.c")) - {LIBRARY_SOURCE}):
        program = FOLDER / source.stem
        if not program.exists():
            subprocess.run(["cc", "-static", "-O1", "-Wall", "-o", program, source], check=True)
    return FOLDER


def mounted(container: Json) -> tuple[Json, dict[str, Any]]:
    """The container with the programs in /programs, and the pod's fields for it."""
    mount = {"name": "programs", "mountPath": "/programs", "readOnly": True}
    volumes = [{"name": "programs", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    return {**container, "volumeMounts": [*container.get("volumeMounts", []), mount]}, {"volumes": volumes}


Changes = Mapping[str, Mapping[str, Any]]
LIBRARY = AGENT_STATE / "library.so"

BLOCK = 1 << 28


@contextmanager
def limited(cluster: Cluster, agent: Agent, changes: Changes) -> Iterator[Node]:
    """A node with an agent that enforces as `changes` say; an ordinary one again afterwards."""
    build_programs()
    with cleared(cluster, agent) as node, agent.configured(changes):
        yield node
        node.clear()


def tenant(name: str, command: str, cores: int = 30, memory: int = 16, **spec: Any) -> Json:
    """A pod with one share that runs `command` with the tenants' programs at hand."""
    main, fields = mounted(container(cores=cores, memory=memory, command=command))
    return pod(name, [main], **fields, **spec)


def lines(node: Node, name: str) -> list[str]:
    return node.cluster.log_of(name).splitlines()


def wait_line(node: Node, name: str, line: str) -> None:
    wait_until(f"{line!r} of {name}", lambda: any(line in each for each in lines(node, name)))


def allocation(node: Node, name: str) -> str:
    (holding,) = node.ledger_of(name)
    return holding.allocation


def pids(node: Node, name: str) -> list[int]:
    """The host's pids of the processes in a pod's first container (its sandbox has one of its own)."""
    status = node.cluster.pods.all()[name]["status"]["containerStatuses"][0]
    identity = status["containerID"].rpartition("/")[2]
    folders = _cgroups_of(CGROUPS / "memory", identity) or _cgroups_of(CGROUPS, identity)
    return sorted({pid for folder in folders for pid in processes_below(folder)})


def _cgroups_of(top: Path, identity: str) -> list[Path]:
    """Unlike a glob, the walk ignores cgroups that are removed during it."""
    return [Path(folder) / identity for folder, below, _ in os.walk(top) if identity in below]


def control() -> SimControl:
    return SimControl(AGENT_STATE / "sim" / "control.txt")


def library() -> dict[str, str]:
    """An operator's library, with its checksum. What a container loads is no part of these tests: it exports what the agent asks for."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    return {"library_path": str(LIBRARY), "library_sha256": build(LIBRARY)}


def gpu_index(node: Node, name: str) -> int:
    """NVML's index of the GPU of a pod."""
    (holding,) = node.ledger_of(name)
    return node.agent.gpu_index(holding.gpus[0])
