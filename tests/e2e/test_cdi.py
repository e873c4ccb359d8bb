"""Injection by CDI: the container runtime reads the agent's specs, and a container has what they bring."""

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import SHOW, gpu_pod
from .node import gpu_nodes, shown
from .places import CDI_SPECS
from .processes import wait_until
from .tenants import BLOCK, library, limited, lines, tenant, wait_line

REGION = "/programs/region_client"


@pytest.mark.hami_bug("B26: CDI names of MIG devices can't be resolved")
def test_containers_have_what_cdi_brings(cluster: Cluster, running_agent: Agent) -> None:
    """A share with limits and files; the same after a restart of one that raised its limits and left a stale slot in its region; whole GPUs
    without limits; and no spec is left behind."""
    injection = {"injection": "cdi", "backend": "hami-core", "orphan_grace_seconds": 1}
    look = f"{REGION} show; cat /etc/ld.so.preload; echo >>/etc/ld.so.preload || echo read-only"
    spoil = f"{REGION} take use 4294967296 raise 68719476736 100; exit 1"
    command = f"if test -e /tmp/x/seen; then {REGION} show; {SHOW}; fi; touch /tmp/x/seen; {spoil}"
    again = tenant("again", command, restartPolicy="OnFailure")
    again["spec"]["volumes"].append({"name": "x", "emptyDir": {}})
    again["spec"]["containers"][0]["volumeMounts"].append({"name": "x", "mountPath": "/tmp/x"})
    with limited(cluster, running_agent, {"enforcement": injection, "hami_core": library()}) as node:
        node.run([tenant("share", f"{look}; {SHOW}"), gpu_pod("whole", 200, command=SHOW)])
        cluster.create([again])
        wait_until("its pod", lambda: "again" in cluster.pods.all())
        wait_line(node, "again", "shown")
        for name in ("share", "again"):
            environment, devices = shown(node, name)
            assert (environment["CUDA_DEVICE_SM_LIMIT_0"], environment["CUDA_DEVICE_MEMORY_LIMIT_0"]) == ("30", "4096m")
            assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
            assert len(gpu_nodes(devices)) == 1
            assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= devices
        (region,) = [each for each in lines(node, "again") if "memory=" in each]
        assert f"memory={16 * BLOCK} cores=30 " in region
        assert region.endswith("processes=0")
        text = lines(node, "share")
        assert any(f"memory={16 * BLOCK} cores=30 " in each for each in text)
        assert {"/usr/local/vgpu/libvgpu.so", "read-only", "/tmp/cudevshr.cache", "/etc/ld.so.preload"} <= set(text)
        environment, devices = shown(node, "whole")
        assert len(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == len(gpu_nodes(devices)) == 2
        assert not [key for key in environment if key.startswith("CUDA_")]
        node.check()
        node.cluster.delete_all()
        wait_until("no spec is left", lambda: not list(CDI_SPECS.iterdir()), 90)
