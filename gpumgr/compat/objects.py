"""Reads Kubernetes objects as kubectl prints them: JSON or YAML, one object, several, or a List.

The text is not trusted. YAML aliases are refused, because they could multiply a small text into huge objects.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_yaml

T = TypeVar("T", bound="Object")

_MAX_BYTES: Final = 64 << 20

#: Names, and keys of labels and annotations, become arguments of printed commands, so none may begin with a hyphen.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*\Z")]
_Key = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]*\Z")]
#: An argument of a program can't contain a NUL.
_Word = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*\Z")]


class Metadata(msgspec.Struct):
    name: _Name | None = None
    namespace: _Name | None = None
    uid: str | None = None
    annotations: dict[_Key, str] = {}


class Resources(msgspec.Struct):
    limits: dict[str, str | int | float] = {}
    requests: dict[str, str | int | float] = {}


class Variable(msgspec.Struct):
    name: str | None = None
    value: _Word | None = None


class KubernetesContainer(msgspec.Struct):
    name: str | None = None
    image: str = ""
    command: list[_Word] = []
    args: list[_Word] = []
    env: list[Variable] = []
    resources: Resources = msgspec.field(default_factory=Resources)
    restart_policy: str | None = msgspec.field(name="restartPolicy", default=None)

    @property
    def words(self) -> list[str]:
        """The part of the command line that the object contains; the image may add more."""
        return [*self.command, *self.args]

    @property
    def environment(self) -> Mapping[str, str]:
        return {each.name: each.value for each in self.env if each.name is not None and each.value is not None}


class PodSpec(msgspec.Struct, rename="camel"):
    node_name: str | None = None
    node_selector: dict[_Key, str] = {}
    init_containers: list[KubernetesContainer] = []
    containers: list[KubernetesContainer] = []

    @property
    def all_containers(self) -> list[KubernetesContainer]:
        """All containers, in the order in which the kubelet allocates their devices."""
        return [*self.init_containers, *self.containers]


class Status(msgspec.Struct):
    phase: str | None = None


class Object(msgspec.Struct):
    """Any Kubernetes object. If its kind has no class below, nothing but the kind is read."""

    kind: str


class Named(Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)

    @property
    def full_name(self) -> str:
        return f"{self.metadata.namespace or 'default'}/{self.metadata.name or '?'}"


class KubernetesNode(Named):
    pass


class ConfigMap(Named):
    data: dict[str, str] = {}


class KubernetesWorkload(Named):
    @property
    def pod_spec(self) -> PodSpec:
        raise NotImplementedError


class Pod(KubernetesWorkload):
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: Status = msgspec.field(default_factory=Status)

    @property
    def pod_spec(self) -> PodSpec:
        return self.spec


class _Template(msgspec.Struct):
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class _WorkloadSpec(msgspec.Struct):
    template: _Template = msgspec.field(default_factory=_Template)


class _Templated(KubernetesWorkload):
    spec: _WorkloadSpec = msgspec.field(default_factory=_WorkloadSpec)

    @property
    def pod_spec(self) -> PodSpec:
        return self.spec.template.spec


_CLASSES: Final[Mapping[str, type[Object]]] = {
    "Node": KubernetesNode,
    "ConfigMap": ConfigMap,
    "Pod": Pod,
    **dict.fromkeys(("DaemonSet", "Deployment", "StatefulSet"), _Templated),
}


def read_objects(path: Path) -> tuple[Object, ...]:
    """All objects of a file; a List is split into its items. Raises InputError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path} has more than {_MAX_BYTES >> 20} MiB; give kubectl's output for one node")
    try:
        documents = read_documents(content)
    except InputError as error:
        raise InputError(f"{path} is neither JSON nor YAML that gpumgr can read: {error}") from error
    objects = tuple(each for document in documents for each in _flat(document, path))
    if not objects:
        raise InputError(f"{path} has no Kubernetes object; give what `kubectl get ... -o json` prints")
    return objects


def parse_object(document: Mapping[str, Any], source: object) -> Object:
    """Raises InputError, which names the `source`, the object and the key, if the structure is not Kubernetes'."""
    kind = document["kind"]
    try:
        return convert(_without_nulls(document), _CLASSES.get(kind, Object))
    except (UnreadableText, RecursionError) as error:
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        raise InputError(
            f"{source}: {kind} {name if isinstance(name, str) else '?'} is not a Kubernetes object: {error}"
        ) from error


def _without_nulls(value: Any) -> Any:
    """For Kubernetes a key with the value null is a missing key."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def of_type(objects: Iterable[Object], kind: type[T]) -> Iterator[T]:
    return (each for each in objects if isinstance(each, kind))


def _flat(document: object, path: Path) -> Iterator[Object]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise InputError(f"{path} contains something that is not a Kubernetes object; give what `kubectl get ... -o json` prints")
    kind, items = document["kind"], document.get("items")
    if not (kind.endswith("List") and isinstance(items, list)):
        yield parse_object(document, path)
        return
    for item in items:  # items of a typed list (PodList) may omit their kind
        if isinstance(item, dict) and isinstance(item.setdefault("kind", kind.removesuffix("List")), str):
            yield parse_object(item, path)
        else:
            raise InputError(
                f"{path}: {kind} has an item that is not a Kubernetes object; give what `kubectl get ... -o json` prints"
            )


def read_documents(text: bytes | str) -> list[Any]:
    """All non-empty documents of a JSON or YAML text. Raises InputError; its message does not name the text's source."""
    try:
        return decode_yaml(text, max_bytes=_MAX_BYTES)
    except UnreadableText as error:
        raise InputError(str(error)) from error
