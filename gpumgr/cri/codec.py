"""The few CRI v1 messages that gpumgr uses, read and written by hand (`proto/runtime/v1/api.proto` has the numbers).

A node lists some hundred containers once a second with all their annotations; only what names a container is read.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from gpumgr.rpc import wire
from gpumgr.usage.containers import Container

_RUNNING: Final = 1
_NAMESPACE: Final = "io.kubernetes.pod.namespace"
_POD: Final = "io.kubernetes.pod.name"
_UID: Final = "io.kubernetes.pod.uid"
_CONTAINER: Final = "io.kubernetes.container.name"
#: ContainerStatusRequest.verbose = true
_VERBOSE: Final = b"\x10\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Who answers: "containerd" or "cri-o", its version, and the version of the interface."""

    name: str
    version: str
    api_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProcess:
    """What the runtime's verbose status says of a container beside the interface; None where it says nothing.

    `cgroups_path` is the OCI runtime spec's `linux.cgroupsPath`, not yet a path: see `place.path_of`.
    """

    pid: int | None = None
    cgroups_path: str | None = None


class _Linux(msgspec.Struct, frozen=True):
    cgroups_path: str = msgspec.field(name="cgroupsPath", default="")


class _Spec(msgspec.Struct, frozen=True):
    linux: _Linux | None = None


class _Info(msgspec.Struct, frozen=True):
    """The object under the key "info", as containerd (internal/cri/server/container_status.go) and CRI-O (server/container_status.go)
    have it alike; containerd 1.6 and later write more fields beside."""

    pid: int = 0
    spec: _Spec | None = msgspec.field(name="runtimeSpec", default=None)


_info: Final = msgspec.json.Decoder(_Info)


def parse_version(data: bytes) -> Runtime:
    """A VersionResponse. Raises WireError."""
    texts: dict[int, list[str]] = {2: [], 3: [], 4: []}
    wire.scan(data, 0, len(data), texts)
    return Runtime(name=_last(texts[2]), version=_last(texts[3]), api_version=_last(texts[4]))


def parse_containers(data: bytes) -> tuple[Container, ...]:
    """A ListContainersResponse: the containers that the kubelet made (they have its labels), of all states. Raises WireError."""
    found = (_container(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1)
    return tuple(container for container in found if container is not None)


def status_request(container_id: str) -> bytes:
    """A ContainerStatusRequest that asks for everything."""
    return wire.text_field(1, container_id) + _VERBOSE


def parse_status(data: bytes) -> FirstProcess:
    """A ContainerStatusResponse to a verbose request. Raises WireError, or msgspec.DecodeError if the JSON is not as expected."""
    text = dict(_entry(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 2).get("info")
    if text is None:
        return FirstProcess()
    info = _info.decode(text)
    path = info.spec.linux.cgroups_path if info.spec is not None and info.spec.linux is not None else ""
    return FirstProcess(pid=info.pid if info.pid > 0 else None, cgroups_path=path or None)


def _container(data: bytes, start: int, end: int) -> Container | None:
    ids: dict[int, list[str]] = {1: []}
    numbers = wire.scan(data, start, end, ids)
    name, attempt, labels = "", 0, dict[str, str]()
    for number, inner_start, inner_end in wire.spans(data, start, end):
        if number == 3:
            names: dict[int, list[str]] = {1: []}
            attempt = wire.scan(data, inner_start, inner_end, names).get(2, 0)
            name = _last(names[1])
        elif number == 8:
            label, value = _entry(data, inner_start, inner_end)
            labels[label] = value
    if not labels.get(_UID):
        return None
    return Container(
        id=_last(ids[1]),
        pod=(labels.get(_NAMESPACE, ""), labels.get(_POD, "")),
        pod_uid=labels[_UID],
        name=labels.get(_CONTAINER) or name,
        attempt=attempt,
        running=numbers.get(6, 0) == _RUNNING,
        created_at=numbers.get(7, 0) / 1e9,
    )


def _entry(data: bytes, start: int, end: int) -> tuple[str, str]:
    """The one entry of a map<string, string> at start..end."""
    texts: dict[int, list[str]] = {1: [], 2: []}
    wire.scan(data, start, end, texts)
    return _last(texts[1]), _last(texts[2])


def _last(values: list[str]) -> str:
    """Of a field that comes several times the last counts."""
    return values[-1] if values else ""
