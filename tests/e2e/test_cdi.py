"""Injection by CDI: the container runtime reads the agent's specs, and a container has what they bring."""

from collections.abc import Iterator

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import SHOW, gpu_pod
from .node import Node
from .places import CDI_SPECS
from .processes import wait_until
from .tenants import BLOCK, library, limited, lines, tenant, wait_line
from .test_pods import gpu_nodes, shown

REGION = "/programs/region_client"


@pytest.fixture(scope="module")
def cdi_node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    injection = {"injection": "cdi", "cdi_dir": str(CDI_SPECS), "backend": "hami-core", "orphan_grace_seconds": 1}
    with limited(cluster, running_agent, {"enforcement": injection, "hami_core": library()}) as node:
        yield node


@pytest.fixture
def node(cdi_node: Node) -> Node:
    cdi_node.clear()
    return cdi_node


def test_a_share_gets_device_limits_and_files(node: Node) -> None:
    look = f"{REGION} show; cat /etc/ld.so.preload; echo >>/etc/ld.so.preload || echo read-only"
    node.run([tenant("share", f"{look}; {SHOW}")])
    environment, devices = shown(node, "share")
    assert (environment["CUDA_DEVICE_SM_LIMIT_0"], environment["CUDA_DEVICE_MEMORY_LIMIT_0"]) == ("30", "4096m")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(devices)) == 1
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= devices
    text = lines(node, "share")
    assert any(f"memory={16 * BLOCK} cores=30 " in each for each in text)
    assert {"/usr/local/vgpu/libvgpu.so", "read-only", "/tmp/cudevshr.cache", "/etc/ld.so.preload"} <= set(text)


@pytest.mark.hami_bug("B26: CDI names of MIG devices can't be resolved")
def test_a_container_that_starts_again_has_the_same(node: Node) -> None:
    command = f"if test -e /tmp/x/seen; then {SHOW}; fi; touch /tmp/x/seen; exit 1"
    body = tenant("again", command, restartPolicy="OnFailure")
    body["spec"]["volumes"].append({"name": "x", "emptyDir": {}})
    body["spec"]["containers"][0]["volumeMounts"].append({"name": "x", "mountPath": "/tmp/x"})
    node.cluster.create([body])
    wait_until("its pod", lambda: "again" in node.cluster.pods.all())
    wait_line(node, "again", "shown")
    environment, devices = shown(node, "again")
    assert environment["CUDA_DEVICE_SM_LIMIT_0"] == "30"
    assert len(gpu_nodes(devices)) == 1
    node.check()


def test_whole_gpus_by_cdi_and_no_spec_is_left(node: Node) -> None:
    node.run([gpu_pod("whole", 200, command=SHOW)])
    environment, devices = shown(node, "whole")
    assert len(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == len(gpu_nodes(devices)) == 2
    assert not [key for key in environment if key.startswith("CUDA_")]
    assert list(CDI_SPECS.iterdir())
    node.delete(["whole"])
    wait_until("no spec is left", lambda: not list(CDI_SPECS.iterdir()), 90)
