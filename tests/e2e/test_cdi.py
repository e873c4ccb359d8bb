"""Injection by CDI: what a container gets, read from the agent's spec by the interface's own library as a runtime would.

Debian's containerd (1.6) is older than CDI, so the library stands in for the runtime's last step.
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import SHOW, SLEEP, gpu_pod
from .node import Node
from .places import RUN_DIR, cache
from .processes import wait_until
from .tenants import allocation, library, limited, tenant

FOLDER = RUN_DIR / "cdi"


@pytest.fixture(scope="module")
def node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    injection = {"injection": "cdi", "cdi_dir": str(FOLDER), "backend": "hami-core", "orphan_grace_seconds": 1}
    with limited(cluster, running_agent, {"enforcement": injection, "hami_core": library()}) as node:
        yield node


def injected(node: Node, name: str) -> dict[str, Any]:
    """The spec of an empty container with the pod's device in it."""
    command = [str(cache() / "cdi" / "cdi"), str(FOLDER), f"gpumgr.io/gpu={allocation(node, name)}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    spec: dict[str, Any] = json.loads(done.stdout)
    return spec


def test_a_share_gets_device_limits_and_files(node: Node) -> None:
    node.run([tenant("share", SLEEP)])
    spec = injected(node, "share")
    env = dict(each.split("=", 1) for each in spec["process"]["env"])
    assert (env["CUDA_DEVICE_SM_LIMIT_0"], env["CUDA_DEVICE_MEMORY_LIMIT_0"]) == ("30", "4096m")
    assert env["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert [each["path"] for each in spec["linux"]["devices"]].count("/dev/nvidiactl") == 1
    mounts = {each["destination"]: each for each in spec["mounts"]}
    assert mounts["/tmp/cudevshr.cache"]["source"].startswith(str(RUN_DIR / "hami-core"))
    assert "ro" in mounts["/etc/ld.so.preload"]["options"]


def test_whole_gpus_come_by_name_too_and_nothing_is_left(node: Node) -> None:
    node.clear()
    node.run([gpu_pod("whole", 200, command=SHOW)])
    spec = injected(node, "whole")
    env = dict(each.split("=", 1) for each in spec["process"]["env"])
    assert len(env["NVIDIA_VISIBLE_DEVICES"].split(",")) == 2
    assert not [key for key in env if key.startswith("CUDA_")]
    assert len(list(FOLDER.iterdir())) >= 1
    node.delete(["whole"])
    wait_until("no spec is left", lambda: not list(FOLDER.iterdir()), 90)
