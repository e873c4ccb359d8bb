"""Kubernetes objects as kubectl prints them: JSON or YAML, one, several, or a List. The parts that are read are validated once.

The files are not trusted: what is read from a text is never much larger than the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import yaml

from gpumgr.errors import InputError

Object = Mapping[str, Any]

#: Kinds that contain a pod template.
WORKLOADS: Final = ("DaemonSet", "Deployment", "StatefulSet", "Pod")
_MAX_BYTES: Final = 64 << 20
#: Exceptions of YAML loaders for invalid texts: a value that does not match its tag raises any of these.
_NO_YAML: Final = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Maximum nesting of lists and maps. Kubernetes objects have less than half of it; libyaml takes quadratic time for deep nesting, and
#: PyYAML's binding to it recurses until the stack overflows.
_MAX_DEPTH: Final = 100

#: Names, and keys of labels and annotations, become arguments of printed commands: none may start like an option.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*\Z")]
_Key = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]*\Z")]
#: Characters that a program's argument may contain.
_Word = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*\Z")]


class _Metadata(msgspec.Struct):
    name: _Name | None = None
    namespace: _Name | None = None
    uid: str | None = None
    annotations: dict[_Key, str | None] | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float | None] | None = None
    requests: dict[str, str | int | float | None] | None = None


class _Variable(msgspec.Struct):
    name: str | None = None
    value: _Word | None = None


class _Container(msgspec.Struct):
    name: str | None = None
    image: str | None = None
    command: list[_Word] | None = None
    args: list[_Word] | None = None
    env: list[_Variable] | None = None
    resources: _Resources | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str | None = None
    node_selector: dict[_Key, str] | None = None
    init_containers: list[_Container] | None = None
    containers: list[_Container] | None = None


class _Status(msgspec.Struct):
    phase: str | None = None


class _Named(msgspec.Struct):
    metadata: _Metadata | None = None


class _Pod(_Named):
    spec: _PodSpec | None = None
    status: _Status | None = None


class _Template(msgspec.Struct):
    spec: _PodSpec | None = None


class _WorkloadSpec(msgspec.Struct):
    template: _Template | None = None


class _Workload(_Named):
    spec: _WorkloadSpec | None = None


class _ConfigMap(_Named):
    data: dict[str, str] | None = None


_SHAPES: Final[Mapping[str, type[_Named]]] = {
    "Node": _Named,
    "ConfigMap": _ConfigMap,
    **dict.fromkeys(WORKLOADS, _Workload),
    "Pod": _Pod,
}


def read_objects(path: Path) -> tuple[Object, ...]:
    """All objects of a file; a List is split into its items. Raises InputError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path} has more than {_MAX_BYTES >> 20} MiB; give what kubectl prints of one node")
    try:
        documents = read_documents(content)
    except InputError as error:
        raise InputError(f"{path} is neither JSON nor YAML that we read: {error}") from error
    objects = tuple(each for document in documents for each in _flat(document, path))
    if not objects:
        raise InputError(f"{path} has no Kubernetes object; give what `kubectl get ... -o json` prints")
    return objects


def checked(each: Object, source: object) -> Object:
    """The object, if the parts that are read have the shape that Kubernetes defines. Raises InputError that names the `source`, the
    object and the key."""
    shape = _SHAPES.get(each["kind"])
    if shape is not None:
        try:
            msgspec.convert(each, type=shape)
        except (msgspec.ValidationError, RecursionError) as error:
            metadata = each.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else None
            raise InputError(
                f"{source}: {each['kind']} {name if isinstance(name, str) else '?'} is none of Kubernetes' objects: {error}"
            ) from error
    return each


def of_kind(objects: Sequence[Object], *kinds: str) -> Iterator[Object]:
    return (each for each in objects if each["kind"] in kinds)


def full_name(each: Object) -> str:
    metadata = each.get("metadata") or {}
    return f"{metadata.get('namespace') or 'default'}/{metadata.get('name') or '?'}"


def pod_spec(workload: Object) -> Object:
    """The spec of a pod, or of the pods that a workload creates."""
    spec = workload.get("spec") or {}
    if workload["kind"] != "Pod":
        spec = (spec.get("template") or {}).get("spec") or {}
    return spec


def containers(spec: Object) -> list[Object]:
    """In the order in which the kubelet allocates."""
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def environment(container: Object) -> Mapping[str, str]:
    """The environment variables with literal values."""
    return {
        str(each["name"]): str(each["value"] or "") for each in container.get("env") or () if "name" in each and "value" in each
    }


def _flat(document: object, path: Path) -> Iterator[Object]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise InputError(f"{path} has something that is no Kubernetes object; give what `kubectl get ... -o json` prints")
    kind, items = document["kind"], document.get("items")
    if not (kind.endswith("List") and isinstance(items, list)):
        yield checked(document, path)
        return
    for item in items:  # items of a typed list (PodList) may omit their kind
        if isinstance(item, dict) and isinstance(item.setdefault("kind", kind.removesuffix("List")), str):
            yield checked(item, path)
        else:
            raise InputError(
                f"{path}: {kind} has an item that is no Kubernetes object; give what `kubectl get ... -o json` prints"
            )


def read_documents(text: bytes | str) -> list[Any]:
    """All non-empty documents of a text. JSON, which is also YAML, is tried first: that takes a hundredth of the time.

    Raises InputError with the reason only; the caller knows the name of the text.
    """
    try:
        return [document for document in (msgspec.json.decode(text),) if document is not None]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        _check_yaml(text)
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    except _NO_YAML as error:
        raise InputError(" ".join(str(error).split())) from error


def _check_yaml(text: bytes | str) -> None:
    """Checks the events before any object is built. Raises InputError, or an exception of _NO_YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise InputError(
                f"it has the alias *{event.anchor}, and a few of those may stand for gigabytes; give what kubectl prints, which has none"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise InputError(f"it is nested more than {_MAX_DEPTH} levels deep")
