"""Kubernetes objects as kubectl prints them: JSON or YAML, one, several, or a List."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from gpumgr.errors import InputError

Object = Mapping[str, Any]

#: Kinds whose pods are described by a template.
WORKLOADS: Final = ("DaemonSet", "Deployment", "StatefulSet", "Pod")
_MAX_BYTES: Final = 64 << 20
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_objects(path: Path) -> tuple[Object, ...]:
    """All objects of a file, those of Lists one by one. Raises InputError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path} has more than {_MAX_BYTES >> 20} MiB; give what kubectl prints of one node")
    try:
        documents = [document for document in yaml.load_all(content, Loader=_LOADER) if document is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"{path} is neither JSON nor YAML: {said}") from error
    objects = tuple(each for document in documents for each in _flat(document, path))
    if not objects:
        raise InputError(f"{path} has no Kubernetes object; give what `kubectl get ... -o json` prints")
    return objects


def of_kind(objects: Sequence[Object], *kinds: str) -> Iterator[Object]:
    return (each for each in objects if each["kind"] in kinds)


def full_name(each: Object) -> str:
    metadata = each.get("metadata") or {}
    return f"{metadata.get('namespace') or 'default'}/{metadata.get('name') or '?'}"


def pod_spec(workload: Object) -> Object:
    """Of a pod, or of the pods that a workload makes."""
    spec = workload.get("spec") or {}
    if workload["kind"] != "Pod":
        spec = (spec.get("template") or {}).get("spec") or {}
    return spec if isinstance(spec, dict) else {}


def containers(spec: Object) -> list[Object]:
    """In the order in which the kubelet allocates."""
    listed = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return [each for each in listed if isinstance(each, dict)]


def environment(container: Object) -> Mapping[str, str]:
    """The variables whose values stand there themselves."""
    return {str(each["name"]): str(each["value"]) for each in container.get("env") or () if "name" in each and "value" in each}


def _flat(document: object, path: Path) -> Iterator[Object]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise InputError(f"{path} has something that is no Kubernetes object; give what `kubectl get ... -o json` prints")
    if document["kind"].endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            if isinstance(item, dict):  # of a typed list (PodList) the items need not say their kind
                yield from _flat({"kind": document["kind"].removesuffix("List"), **item}, path)
    else:
        yield document
