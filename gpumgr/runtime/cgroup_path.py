"""Names of cgroups: the container and pod that a path belongs to. Pure; no function raises on any text.

Sources: the kubelet's naming of pod cgroups (pkg/kubelet/cm), containerd's and CRI-O's `linux.cgroupsPath`, runc's expansion of slices,
cgroups(7), and proc(5) for /proc/PID/cgroup. `<uid>` is the pod's UID, for a static pod the 32 hex digits of its file's hash:

    cgroupfs driver   [...]/kubepods[/burstable|/besteffort]/pod<uid>/<id>                    (CRI-O: /crio-<id>)
    systemd driver    [...]/kubepods[-burstable|-besteffort]-pod<uid, _ for ->.slice/cri-containerd-<id>.scope   (crio-, docker-)
    mixed drivers     [...]/kubepods[-burstable|-besteffort]-pod<uid, _ for ->.slice:cri-containerd:<id>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ID: Final = r"(?P<id>[0-9a-f]{64})"
_RUNTIME: Final = r"(?:cri-containerd|crio|docker)"
_CLASSES: Final = ("burstable", "besteffort")
_POD_FOLDER: Final = re.compile(r"pod(?P<uid>[0-9A-Za-z][0-9A-Za-z._-]*)")
_SLICE: Final = r"(?:[^:]*-)?kubepods(?:-(?:burstable|besteffort))?-pod(?P<uid>[0-9A-Za-z][0-9A-Za-z._]*)\.slice"
_POD_SLICE: Final = re.compile(_SLICE)
_POD_AND_CONTAINER: Final = re.compile(rf"{_SLICE}:{_RUNTIME}:{_ID}")
_CONTAINER: Final = re.compile(rf"(?:{_RUNTIME}-)?{_ID}(?:\.scope)?")
_NSPID: Final = re.compile(r"^NSpid:[ \t0-9]*[ \t](?P<pid>[0-9]{1,10})[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerCgroup:
    """A container, as a path names it. `cgroup` is the path of the container's own cgroup, with a leading slash."""

    pod_uid: str
    container_id: str
    cgroup: str


def memory_path(text: str) -> str | None:
    """/proc/PID/cgroup -> the path in the hierarchy that counts memory: v1's if there is one (v1 and hybrid), else the unified one."""
    unified = None
    # The kernel keeps newlines out of names of cgroups; every other character that ends a line for Python may be in one.
    for line in text.split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        path = path.removesuffix(" (deleted)")
        if "memory" in controllers.split(","):
            return path
        if hierarchy == "0" and not controllers:
            unified = path
    return unified


def container_cgroup_in(path: str) -> ContainerCgroup | None:
    """The outermost of the kubelet's containers in `path`: a nested container (of Docker, systemd, a whole
    cluster) belongs to it. None also for paths with "..", which are relative to a cgroup namespace that is not the host's."""
    segments = path.strip("/").split("/")
    if ".." in segments:
        return None
    for at, segment in enumerate(segments):
        if joined := _POD_AND_CONTAINER.fullmatch(segment):
            return _container_cgroup(joined["uid"].replace("_", "-"), joined["id"], segments[: at + 1])
        if uid := _pod_uid(segments, at):
            container = _CONTAINER.fullmatch(segments[at + 1]) if at + 1 < len(segments) else None
            return _container_cgroup(uid, container["id"], segments[: at + 2]) if container else None
    return None


def container_id_in(path: str) -> str | None:
    """The id of the kubelet's container that `path` names, else the first container id in the path. If the kubelet names no parent
    (cgroupsPerQOS false), the runtime chooses one, such as /system.slice, /k8s.io or /docker."""
    if (place := container_cgroup_in(path)) is not None:
        return place.container_id
    found = next(filter(None, map(_CONTAINER.fullmatch, path.split("/"))), None)
    return found["id"] if found else None


def own_cgroup(path: str, container_id: str) -> str | None:
    """The cgroup of a container, from the path of one of its processes, which may be in a cgroup below; None if no name contains the id."""
    above, found, _ = path.partition(container_id)
    return above + found + path[len(above) + len(found) :].partition("/")[0] if found else None


def expand_cgroups_path(cgroups_path: str) -> str | None:
    """The OCI spec's `linux.cgroupsPath` -> a path. A path is returned as it is, "slice:prefix:name" is a systemd scope below its slices.

    None: it is malformed, or relative to the cgroup of the runtime.
    """
    if cgroups_path.startswith("/"):
        segments = [each for each in cgroups_path.split("/") if each]
        return "/" + "/".join(segments) if segments and ".." not in segments else None
    parts = cgroups_path.split(":")
    if len(parts) != 3 or "/" in cgroups_path or not parts[2]:
        return None
    slice_name, prefix, name = parts
    above = _expand(slice_name or "system.slice")
    if above is None:
        return None
    unit = name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    return f"{above}/{unit}"


def parse_nspid(text: str) -> int | None:
    """/proc/PID/status -> the process's number in its own (innermost) pid namespace."""
    found = _NSPID.search(text)
    return int(found["pid"]) if found else None


def _expand(slice_name: str) -> str | None:
    """systemd.slice(5): "a-b.slice" lies in "a.slice", "-.slice" is the root."""
    if slice_name == "-.slice":
        return ""
    parts = slice_name.removesuffix(".slice").split("-")
    if not slice_name.endswith(".slice") or not all(parts):
        return None
    return "".join(f"/{'-'.join(parts[: count + 1])}.slice" for count in range(len(parts)))


def _pod_uid(segments: Sequence[str], at: int) -> str | None:
    """The UID if the segment at `at` is a pod's cgroup."""
    if found := _POD_SLICE.fullmatch(segments[at]):
        return found["uid"].replace("_", "-")
    above = segments[:at]
    if above and above[-1] in _CLASSES:
        above = above[:-1]
    found = _POD_FOLDER.fullmatch(segments[at])
    return found["uid"] if found and above and above[-1] == "kubepods" else None


def _container_cgroup(uid: str, container_id: str, segments: Sequence[str]) -> ContainerCgroup:
    return ContainerCgroup(pod_uid=uid, container_id=container_id, cgroup="/" + "/".join(segments))
