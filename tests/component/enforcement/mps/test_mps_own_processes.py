"""The servers of gpumgr's daemons, which the driver lists like any program, are recognized, and nothing else is.

Measured with driver 580 on an H200: the server is a child of the daemon, has its environment, and is listed from its first client on.
"""

from pathlib import Path

import pytest

from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.commands import ProtocolSetting
from tests.component.enforcement.mps.place import BOTH, UUID, Place, own, tenant


@BOTH
async def test_a_server_is_own_for_an_agent_that_has_just_started(place: Place, setting: ProtocolSetting) -> None:
    """Samples are taken before the daemons are adopted, and a server may have outlived its daemon."""
    place.behave(servers_outlive=True)
    old = await place.started(protocol=setting)
    server = (await place.attach(old, tenant()))[1]["server"]
    await old.close()
    await place.kill_daemon()
    new = await place.agent()
    assert own(new, server) == {server}
    await new.recover([tenant()])
    assert own(new, server) == {server}


def proc(root: Path, pid: int, *, cgroup: str = "0::/system.slice", name: str = "nvidia-cuda-mps-server", pipe: str = "") -> Path:
    folder = root / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"{cgroup}\n")
    (folder / "cmdline").write_bytes(f"{name}\0-multiuser-server\0".encode())
    (folder / "environ").write_bytes(f"A=b\0CUDA_MPS_PIPE_DIRECTORY={pipe}\0".encode())
    return folder


CONTAINERS = [
    "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope",
    f"0::/system.slice/cri-containerd-{'a1' * 32}.scope",
    f"0::/k8s.io/{'a1' * 32}",
    f"12:memory:/docker/{'a1' * 32}/init.scope\n0::/",
]


async def test_a_tenant_can_not_pass_for_a_server(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever the runtime puts its container."""
    backend = await place.started(protocol="2")
    pipe = str(place.folder.pipe)
    proc(tmp_path, 1, pipe=pipe)
    proc(tmp_path, 2, pipe=pipe, name="python3")
    proc(tmp_path, 3, pipe="/tmp/nvidia-mps")  # the daemon of another program
    for pid, cgroup in enumerate(CONTAINERS, 4):
        proc(tmp_path, pid, pipe=pipe, cgroup=cgroup)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert backend.own_pids(dict.fromkeys(range(1, 9), 10)) == {1}


async def test_a_server_in_the_agents_own_container_is_own(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So is the client with which an agent in a pod tries a daemon."""
    backend = await place.started(protocol="2")
    for cgroup in (f"0::/docker/{'b2' * 32}", f"12:memory:/kubepods/burstable/pod1/{'b2' * 32}\n0::/"):
        root = tmp_path / cgroup[:2]
        (root / "self").symlink_to(proc(root, 1, pipe=str(place.folder.pipe), cgroup=cgroup))
        monkeypatch.setattr(processes, "PROC", root)
        assert backend.own_pids({1: 10}) == {1}


@pytest.mark.parametrize("cgroup", CONTAINERS)
def test_a_process_in_a_container_is_no_daemon_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str) -> None:
    for pid, where in ((1, cgroup), (2, "0::/system.slice/mps.service")):
        folder = proc(tmp_path / str(pid), pid, pipe="/tmp/x", cgroup=where)
        (folder / "cmdline").write_bytes(b"nvidia-cuda-mps-control\0-d\0")
        (folder / "environ").write_bytes(f"CUDA_MPS_PIPE_DIRECTORY=/tmp/x\0CUDA_VISIBLE_DEVICES={UUID}\0".encode())
    monkeypatch.setattr(processes, "PROC", tmp_path / "1")
    assert processes.daemon_of_others(UUID) is None
    monkeypatch.setattr(processes, "PROC", tmp_path / "2")
    assert processes.daemon_of_others(UUID) == (2, "/tmp/x")


async def test_a_server_that_exits_is_still_own_and_a_new_process_with_its_pid_is_not(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver lists a process until it has freed its memory; the kernel shows neither its arguments nor its environment any more."""
    backend = await place.started(protocol="2")
    folder = proc(tmp_path, 1, pipe=str(place.folder.pipe))
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert backend.own_pids({1: 10}) == {1}
    for name in ("cmdline", "environ"):
        (folder / name).write_bytes(b"")
    assert backend.own_pids({1: 10}) == {1}
    assert backend.own_pids({1: 99}) == set()
