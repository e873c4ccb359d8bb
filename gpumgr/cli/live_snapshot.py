"""A snapshot of a cluster: what `gpumgr simulate` needs of nodes, pods and PodDisruptionBudgets, from the API server or a file."""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from gpumgr.errors import GpumgrError, InputError
from gpumgr.kubeapi.client import API_FAILURES, AnswerError, ApiServer
from gpumgr.kubeapi.cluster_annotations import PLACEMENT_ANNOTATION

Document = dict[str, Any]
_FORMAT: Final = {"kind": "gpumgr snapshot", "version": 1}
_REMEDY: Final = "make it with `gpumgr simulate --from-cluster --snapshot FILE` of this version"
#: The fields that are kept, by their paths. Other annotations, environment variables and the like may contain anything.
_KEPT: Final = re.compile(
    r"""[a-z]+/metadata/(name|namespace|uid|labels/.*)
    |[a-z]+/metadata/annotations/(gpumgr\.io/(inventory|placement|policy|(use|avoid|same)-.*)|tencent\.com/predicate-.*
      |nvidia\.com/((no)?use-.*|numa-bind)|hami\.io/(gpu|node)-scheduler-policy|kubernetes\.io/config\.mirror)
    |nodes/(spec/(unschedulable|taints/.*)|status/((capacity|allocatable)/.*|conditions/(type|status)))
    |pods/(metadata/(deletionTimestamp|ownerReferences/(kind|controller))|status/phase
      |spec/(nodeName|(nodeSelector|tolerations|overhead|resources|affinity/nodeAffinity/required[^/]*)/.*
        |(affinity/pod.*|topologySpreadConstraints)/topologyKey|(resourceClaims|schedulingGates)/name
        |volumes/(persistentVolumeClaim/claimName|ephemeral/.*/accessModes)
        |(containers|initContainers)/(name|restartPolicy|resources/.*|ports/hostPort)))
    |poddisruptionbudgets/spec/selector/.*""",
    re.VERBOSE,
)
#: The texts that get other names, by their paths.
_NAMED: Final = {
    "node": r"nodes/metadata/name|pods/spec/nodeName|.*/matchFields/values|.*/predicate-node",
    "pod": r"(pods|poddisruptionbudgets)/metadata/name|.*/claimName|pods/spec/(resourceClaims|schedulingGates)/name",
    "namespace": r"[a-z]+/metadata/namespace",
    "value": r"[a-z]+/metadata/labels/.*|.*/(nodeSelector|matchLabels)/.*|.*/matchExpressions/values|.*/(taints|tolerations)/value",
}


def read_cluster(kubeconfig: Path) -> Document:
    """Raises GpumgrError."""
    return asyncio.run(_read(kubeconfig))


def load(file: Path) -> Document:
    """Raises InputError."""
    try:
        document = msgspec.json.decode(file.read_bytes(), type=Document)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: it can't be read: {error}; {_REMEDY}") from error
    lists = all(isinstance(document.get(key), list) for key in ("nodes", "pods"))
    if not lists or {key: document.get(key) for key in _FORMAT} != _FORMAT:
        raise InputError(f"{file}: it is no snapshot of version 1; {_REMEDY}")
    return document


def save(document: Document, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n")


def anonymised(document: Document) -> Document:
    """With other names of nodes, pods and namespaces, and other values of labels and taints. Equal texts stay equal, and names keep their
    order. Numbers, true and false stay, since they have a meaning of their own."""
    found: dict[str, set[str]] = {kind: set() for kind in _NAMED}
    _renamed(document, lambda kind, text: found[kind].add(text) or text)  # type: ignore[func-returns-value]
    found["value"] = {each for each in found["value"] - found["node"] if not re.fullmatch("-?[0-9]*|true|false", each)}
    aliases = {
        kind: {text: f"{kind}-{number:0{len(str(len(texts)))}}" for number, text in enumerate(sorted(texts), start=1)}
        for kind, texts in found.items()
    }
    aliases["value"] |= aliases["node"]
    return _renamed(document, lambda kind, text: aliases[kind].get(text, text))


async def _read(kubeconfig: Path) -> Document:
    server = await ApiServer.connect(kubeconfig, remedy="give another --kubeconfig")
    try:
        nodes = await _items(server, "/api/v1/nodes")
        pods = await _items(server, "/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
        try:
            budgets: list[Any] | None = await _items(server, "/apis/policy/v1/poddisruptionbudgets")
        except AnswerError as error:
            if error.status != 403:
                raise
            budgets = None
    except API_FAILURES as error:
        remedy = "check its address, and the rights to list nodes and pods"
        raise GpumgrError(f"the cluster of {kubeconfig} can't be read: {error or type(error).__name__}; {remedy}") from error
    finally:
        await server.close()
    return {**_FORMAT, "nodes": nodes, "pods": pods, "poddisruptionbudgets": budgets}


async def _items(server: ApiServer, path: str, **query: str) -> list[Any]:
    kind, found, query = path.rpartition("/")[2], [], {**query, "limit": "500"}
    while True:
        page = await server.read("GET", path, query=query)
        found += [_walked(each, kind, lambda place, leaf: leaf if _kept(place) else None) for each in page["items"]]
        query["continue"] = page["metadata"].get("continue") or ""
        if not query["continue"]:
            return found


def _renamed(document: Document, alias: Callable[[str, str], str]) -> Document:
    def change(path: str, leaf: Any) -> Any:
        if path.endswith(PLACEMENT_ANNOTATION):
            return re.sub(r'("node"\s*:\s*")([^"]*)', lambda found: found[1] + alias("node", found[2]), leaf)
        return alias(kind, leaf) if isinstance(leaf, str) and (kind := _kind(path)) is not None else leaf

    return {key: _walked(each, key, change) for key, each in document.items()}


def _walked(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """With other leaves. None: without this leaf, and without what has no other leaf."""
    if isinstance(value, dict):
        items = {key: new for key, each in value.items() if (new := _walked(each, f"{path}/{key}", change)) is not None}
        return items if items or not value else None
    if isinstance(value, list):
        elements = [new for each in value if (new := _walked(each, path, change)) is not None]
        return elements if elements or not value else None
    return change(path, value)


@lru_cache(maxsize=1 << 14)
def _kept(path: str) -> bool:
    return _KEPT.fullmatch(path) is not None


@lru_cache(maxsize=1 << 14)
def _kind(path: str) -> str | None:
    return next((kind for kind, places in _NAMED.items() if re.fullmatch(places, path)), None)
