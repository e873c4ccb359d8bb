"""From /proc/PID/cgroup to the container, for every way that a node can be set up."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.runtime.cgroups import container_id_in, memory_path, own_cgroup, parse_nspid

A = "d9eb7985aa99538d222c498c263207cf05bc76a1d151c972818061d5b33d06f4"
B = "b1946ac92492d2347c6235b4d2611184f0e1c2d3a4b5968778695a4b3c2d1e0f"
UID = "0c1c3a5e-6f2b-4d8e-9b57-3f1a2c4d5e6f"
OTHER = "7d1f0b9c-52f6-4d5b-8b1c-6a0a3f8e2c11"
FILE_HASH = "9f3c1d0b6a8e4f7281c5d3b2a1907e6f"
SLICE_UID = UID.replace("-", "_")
SLICES = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + SLICE_UID + ".slice"
GUARANTEED = f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice"


def v1(path: str, memory: str = "memory") -> str:
    """As recorded on a hybrid node with runc's cgroupfs driver, controllers one by one, the unified hierarchy last."""
    controllers = ["name=systemd", "pids", "blkio", "freezer", "devices", memory, "cpuset", "cpu,cpuacct"]
    return "".join(f"{10 - at}:{each}:{path}\n" for at, each in enumerate(controllers)) + f"0::{path}\n"


KUBELET_SLICES = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod"

#: What has made the path of a container -> the path.
PATHS = {
    "cgroupfs, burstable": f"/kubepods/burstable/pod{UID}/{A}",
    "cgroupfs, besteffort": f"/kubepods/besteffort/pod{UID}/{A}",
    "cgroupfs, guaranteed": f"/kubepods/pod{UID}/{A}",
    "cgroupfs, CRI-O": f"/kubepods/burstable/pod{UID}/crio-{A}",
    "cgroupfs, a static pod": f"/kubepods/burstable/pod{FILE_HASH}/{A}",
    "systemd, containerd": f"{SLICES}/cri-containerd-{A}.scope",
    "systemd, CRI-O": f"{SLICES}/crio-{A}.scope",
    "systemd, Docker": f"{SLICES}/docker-{A}.scope",
    "systemd, guaranteed": f"{GUARANTEED}/cri-containerd-{A}.scope",
    "systemd, a static pod": f"/kubepods.slice/kubepods-pod{FILE_HASH}.slice/cri-containerd-{A}.scope",
    "systemd, the kubelet below a cgroup root of its own": f"{KUBELET_SLICES}{SLICE_UID}.slice/cri-containerd-{A}.scope",
    "a node in a Docker container": f"/docker/{B}/kubelet/kubepods/burstable/pod{UID}/{A}",
    "mixed drivers": f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{A}",
    "mixed drivers, guaranteed": f"/kubepods-pod{SLICE_UID}.slice:cri-containerd:{A}",
}
#: Who has put the process into a cgroup below the container's -> the rest of the path.
BELOW = {
    "nobody": "",
    "crun": "/container",
    "Docker in a container": f"/docker/{B}",
    "systemd in a container": "/system.slice/ssh.service",
    "a whole cluster in a container": f"/kubelet/kubepods/besteffort/pod{OTHER}/{B}",
    "a container that names its cgroups like another's": f"/kubepods-pod{OTHER.replace('-', '_')}.slice:cri-containerd:{B}",
    "the kernel, since the cgroup was removed": " (deleted)",
}


@pytest.mark.parametrize("written", [lambda path: f"0::{path}\n", v1], ids=["v2", "v1"])
@pytest.mark.parametrize("below", BELOW.values(), ids=BELOW.keys())
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_the_container_is_found(path: str, below: str, written: Callable[[str], str]) -> None:
    found = memory_path(written(path + below))
    assert found is not None
    assert container_id_in(found) == A
    assert own_cgroup(found, A) == path


@pytest.mark.parametrize(
    "text",
    [
        f"5:cpuset:/\n4:hugetlb,memory:/kubepods/pod{UID}/{A}\n1:name=systemd:/\n",
        f"4:memory:/kubepods/pod{UID}/{A}\n0::/system.slice/containerd.service\n",
        f"2:cpu:/\n1:name=systemd:{SLICES}/crio-{B}.scope\n0::/kubepods/pod{UID}/{A}\n",
    ],
    ids=[
        "memory beside another controller",
        "memory counts although the unified hierarchy differs",
        "memory is in the unified one",
    ],
)
def test_the_hierarchy_of_memory_counts(text: str) -> None:
    assert memory_path(text) == f"/kubepods/pod{UID}/{A}"


@pytest.mark.parametrize("separator", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_a_name_can_not_pass_for_a_line(separator: str) -> None:
    own = f"/kubepods/burstable/pod{UID}/{A}"
    forged = f"{separator}0:memory:/kubepods/burstable/pod{OTHER}/{B}"
    assert memory_path(f"0::{own}/x{forged}\n") == f"{own}/x{forged}"


@pytest.mark.parametrize("cgroup", [f"/system.slice/cri-containerd-{A}.scope", f"/k8s.io/{A}", f"/docker/{A}"])
def test_a_container_is_found_below_any_parent(cgroup: str) -> None:
    for path in (cgroup, f"{cgroup}/init.scope", f"{cgroup}/a/{B}"):
        assert container_id_in(path) == A
        assert own_cgroup(path, A) == cgroup


@pytest.mark.parametrize("text", ["", f"1:name=memory:/kubepods/pod{UID}/{A}\n", "no colon\n0:one colon\n0::not absolute\n"])
def test_a_text_without_a_hierarchy_of_memory_has_no_path(text: str) -> None:
    assert memory_path(text) is None


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/user.slice/user-1000.slice/session-2.scope",
        "/kubepods/burstable",
        f"/kubepods/burstable/pod{UID}",
        SLICES,
        f"{SLICES}/crio-conmon-{A}.scope",
        f"/kubepods/burstable/pod{UID}/crio-conmon-{A}",
        f"/kubepods/burstable/pod{UID}/{A[:12]}",
        f"/kubepods/burstable/pod{UID}/{A.upper()}",
        f"/k8s.io/x{A}",
    ],
)
def test_a_cgroup_that_is_no_containers_has_no_id(path: str) -> None:
    assert container_id_in(path) is None
    assert own_cgroup(path, B) is None


@given(
    st.text()
    | st.lists(st.sampled_from(["", "..", "kubepods", f"pod{UID}", A, f"crio-{A}", "\n0::"]) | st.text(max_size=8)).map("/".join)
)
def test_no_text_is_too_much(text: str) -> None:
    memory_path(text)
    assert container_id_in(text) in (None, A)
    number = parse_nspid(text)
    assert number is None or number >= 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Name:\tpython3\nUmask:\t0022\nNStgid:\t4711\t23\t9\nNSpid:\t4711\t23\t7\nNSpgid:\t4711\t23\t1\n", 7),
        ("NSpid:\t4711\n", 4711),
        ("Name:\tx\rNSpid:\t1\nNSpid:\t4711\t23\n", 23),
        ("Name:\tNSpid:\nPid:\t12\n", None),
        ("NSpid:\t\n", None),
        ("NSpid:\t" + "9" * 5000 + "\n", None),
        ("", None),
    ],
)
def test_the_innermost_number_is_read(text: str, number: int | None) -> None:
    assert parse_nspid(text) == number
