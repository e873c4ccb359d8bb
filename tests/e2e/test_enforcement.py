"""The backends in real containers, with stand-ins for what is in them: what a container sees, and what is left behind."""

import hashlib
import os
from pathlib import Path

import pytest

from tests.component.compat.gpu_manager.driver_files.host import DRIVER, Driver

from .agent import Agent
from .cluster import Cluster
from .manifests import SHOW, SLEEP, gpu_pod
from .node import Node, gpu_nodes, shown
from .places import AGENT_STATE, CDI_SPECS, RUN_DIR
from .processes import wait_until
from .tenants import (
    BLOCK,
    LIBRARY,
    SOURCES,
    Changes,
    allocation,
    control,
    gpu_index,
    library,
    limited,
    lines,
    pids,
    tenant,
    wait_line,
)

REGION, READER = "/programs/region_client", "/programs/vcuda_reader"
#: The driver of the simulated node.
VERSION = "550.90.07"


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


def region(node: Node, name: str) -> Path:
    return RUN_DIR / "hami-core" / allocation(node, name) / "region.cache"


def test_a_tenant_of_hami_core_sees_its_limits_at_both_places_and_its_pid_of_the_host(
    cluster: Cluster, running_agent: Agent
) -> None:
    """A process in a pid namespace of its own learns from the agent which process of the host it is."""
    with limited(cluster, running_agent, {"enforcement": {"backend": "hami-core"}, "hami_core": library()}) as hami:
        check_tenants(hami)


def check_tenants(hami: Node) -> None:
    show = f"env | sort; cat /etc/ld.so.preload; {REGION} show; env -i {REGION} show; {REGION} take alloc 4294967296 alloc 1; {SLEEP}"
    swap = f"{REGION} symlink /etc/passwd; {REGION} show; {SLEEP}"
    hami.run([tenant("seen", show), tenant("hostpid", f"{REGION} take sleep 600; {SLEEP}"), tenant("swap", swap, 10, 8)])
    wait_line(hami, "seen", "refused")
    text = lines(hami, "seen")
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=4096m" in text
    assert "CUDA_DEVICE_SM_LIMIT_0=30" in text
    assert "GPU_CORE_UTILIZATION_POLICY=force" in text
    assert "/usr/local/vgpu/libvgpu.so" in text
    assert len([each for each in text if f"memory={16 * BLOCK} cores=30 " in each]) == 2, text
    assert text[-2:] == ["granted", "refused"]
    wait_line(hami, "swap", f"memory={8 * BLOCK} ")
    assert any(each.startswith("can't: ") for each in lines(hami, "swap")), "the region is a mount"
    wait_line(hami, "hostpid", "slot 0 process")
    path, slot = region(hami, "hostpid"), 1856

    def hostpid() -> int:
        return int.from_bytes(path.read_bytes()[slot + 4 : slot + 8], "little")

    wait_until("the host's pid", lambda: hostpid() in pids(hami, "hostpid"))
    assert "region_client" in Path(f"/proc/{hostpid()}/cmdline").read_text()


def limits_of_gpus(node: Node) -> list[dict[str, str]]:
    found = [dict(labels) for name, labels in node.agent.metrics() if name == "gpumgr_gpu_enforcement_info"]
    return [{label: value for label, value in each.items() if label != "gpu"} for each in found]


def daemons() -> list[str]:
    """Where MPS daemons have written their process ids. Unlike a glob, the walk ignores folders that are removed during it."""
    return [folder for folder, _, names in os.walk(RUN_DIR / "mps") if "nvidia-cuda-mps-control.pid" in names]


def exclusive() -> list[int]:
    """GPUs in EXCLUSIVE_PROCESS mode."""
    return [index for index in range(8) if control().compute_mode(index) == 3]


def test_a_container_sees_its_daemon_which_ends_after_it(cluster: Cluster, running_agent: Agent) -> None:
    """Then the GPU is as before. tests/component/enforcement/mps and the lab have the rest of a daemon's life."""
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1},
        "mps": {"control_program": str(SOURCES / "fake_mps_control.py"), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as mps:
        mps.run([tenant("first", f"env | grep CUDA_MPS | sort; ls $CUDA_MPS_PIPE_DIRECTORY; echo shown; {SLEEP}")])
        wait_line(mps, "first", "shown")
        text = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M", "control"}
        assert text <= set(lines(mps, "first"))
        assert exclusive() == [gpu_index(mps, "first")]
        wanted = {"memory": "soft", "memory_by": "mps", "cores": "soft", "cores_by": "mps"}
        wait_until(f"metrics that show {wanted}", lambda: limits_of_gpus(mps) == [wanted] * 8)
        assert len(daemons()) == 1
        mps.delete(["first"])
        wait_until("no daemon and no exclusive GPU", lambda: not exclusive() and not daemons(), 120)


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
