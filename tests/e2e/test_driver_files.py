"""A container without a container toolkit loads the driver's libcuda: of a share, a whole GPU, a MIG device, a claim, HAMi's resource."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.placement.devices import MigInstance
from gpumgr.sim.control import SimControl
from tests.component.compat.gpu_manager.driver_files.host import CUDA, DRIVER, Driver

from .agent import Agent
from .cluster import Cluster
from .dra import claiming, in_mode_dra, request, template
from .manifests import SLEEP, Json, container, pod
from .node import Node
from .places import AGENT_STATE
from .processes import wait_until
from .tenants import FOLDER, limited, mounted, wait_line
from .test_hami_plugin import REPLICA
from .test_mig import GPU, RESOURCE, mig_uuid

#: The driver of the simulated node.
VERSION = "550.90.07"
ROOT: Final = AGENT_STATE / "driver-root"
#: What the busybox image lacks of an ordinary one. It has no cache of libraries, as an image has no entry for a driver.
C_LIBRARY = ("/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6")
LOADS = """
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*who)(void) = driver ? (int (*)(void))dlsym(driver, "who") : 0;
  if (who) printf("loaded %d\\n", who()); else printf("failed: %s\\n", dlerror());
  return !who;
}
"""
#: Writes which driver was loaded, without LD_LIBRARY_PATH and with one of the container's own.
SHOW = f"/programs/loads; LD_LIBRARY_PATH=/elsewhere /programs/loads; test -x /usr/bin/nvidia-smi && env; echo shown; {SLEEP}"


@pytest.fixture(scope="module", autouse=True)
def driver(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A root with a driver's files, and the tenants' program that loads it."""
    made = Driver(tmp_path_factory.mktemp("driver"))
    made.libraries[VERSION] = made.libraries[DRIVER]
    made.install(ROOT, VERSION)
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-o", str(FOLDER / "loads"), "-x", "c", "-"], input=LOADS, text=True, check=True)


def settings(way: str = "mounts", **more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`more`: by section."""
    return {
        "container": {"driver_files": way},
        "vcuda": {"driver_roots": [str(ROOT)], "volume_conf": str(ROOT / "volume.conf")},
        **{section: dict(values) for section, values in more.items()},
    }


def with_c_library(main: Json) -> tuple[Json, dict[str, Any]]:
    main, fields = mounted(main)
    for number, path in enumerate(C_LIBRARY):
        main["volumeMounts"].append({"name": f"c{number}", "mountPath": path, "readOnly": True})
        fields["volumes"].append({"name": f"c{number}", "hostPath": {"path": str(Path(path).resolve()), "type": "File"}})
    return main, fields


def loading(name: str, limits: Mapping[str, str]) -> Json:
    main, fields = with_c_library(container(command=SHOW, resources={"limits": dict(limits)}))
    return pod(name, [main], **fields)


def check_loaded(node: Node, name: str, visible: str) -> None:
    wait_line(node, name, "shown")
    text = node.cluster.log_of(name).splitlines()
    assert text[:2] == [f"loaded {CUDA}"] * 2
    environment = dict(line.split("=", 1) for line in text if "=" in line)
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith(visible)
    assert "LD_LIBRARY_PATH" not in environment


LIMITS: Final[Mapping[str, Mapping[str, str]]] = {
    "share": {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "16"},
    "whole": {"tencent.com/vcuda-core": "100"},
    "hami": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096"},
    "mig": {RESOURCE: "1"},
}


@pytest.mark.parametrize("injection", ["mounts", "cdi"])
def test_containers_without_a_toolkit_load_the_driver(injection: str, cluster: Cluster, running_agent: Agent) -> None:
    enforcement = {"backend": "none", "injection": injection, "orphan_grace_seconds": 1}
    changes = settings(node={"profile": "both", "mig_strategy": "mixed"}, enforcement=enforcement)
    with limited(cluster, running_agent, changes) as node, with_mig_device(running_agent, node):
        wait_until("replicas offered", lambda: node.resources.allocatable(REPLICA).get(REPLICA))
        node.run([loading(name, limits) for name, limits in LIMITS.items()])
        for name in LIMITS:
            check_loaded(node, name, "MIG-" if name == "mig" else "GPU-")


@contextmanager
def with_mig_device(agent: Agent, node: Node) -> Iterator[None]:
    control = SimControl(AGENT_STATE / "sim" / "control.txt")
    device = MigInstance(uuid=mig_uuid(0), profile="1g.10gb", gpu_instance=0, compute_instance=0, memory_bytes=10 << 30)
    control.set_mig_instances(GPU, {0: device})
    control.set_mig(GPU, enabled=True)
    try:
        wait_until("a MIG device offered", lambda: node.resources.allocatable(RESOURCE) == {RESOURCE: 1})
        yield
        node.cluster.delete_all()
        agent.wait_empty()
    finally:
        control.set_mig(GPU, enabled=False)
        control.set_mig_instances(GPU, {})
    node.wait_offered(agent.offer)


def test_a_claim_s_container_loads_the_driver(cluster: Cluster, running_agent: Agent) -> None:
    with in_mode_dra(cluster, running_agent, settings(enforcement={"backend": "none"})) as node:
        node.make(template("share", request("gpu", 30, "5Gi")))
        main, fields = with_c_library(container(command=SHOW))
        body = claiming("claim", "share", main)
        body["spec"]["volumes"] = fields["volumes"]
        node.run([body])
        check_loaded(node, "claim", "GPU-")
