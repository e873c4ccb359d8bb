"""A snapshot of a cluster: what `gpumgr simulate` needs of nodes, pods and PodDisruptionBudgets, from the API server or a file."""

import asyncio
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from gpumgr.cli.text_file import read_text
from gpumgr.cluster.simulation.json_text import JsonText
from gpumgr.cluster.simulation.texts import short
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer
from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION

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
#: The texts that get other names, by their paths; of resources the keys below a path.
_NAMED: Final = {
    "node": r"nodes/metadata/name|pods/spec/nodeName|.*/matchFields/values|.*/predicate-node",
    "pod": r"(pods|poddisruptionbudgets)/metadata/name|.*/claimName|pods/spec/(resourceClaims|schedulingGates)/name",
    "namespace": r"[a-z]+/metadata/namespace",
    "owner": r"pods/metadata/ownerReferences/kind",
    "resource": r"nodes/status/(capacity|allocatable)|pods/spec/((containers/|initContainers/)?resources/(requests|limits)|overhead)",
    "value": r"[a-z]+/metadata/labels/.*|.*/(nodeSelector|matchLabels)/.*|.*/matchExpressions/values|.*/(taints|tolerations)/value",
}
#: Of these the texts that stay, because they mean the same in every cluster.
_COMMON: Final = {
    "value": "-?[0-9]*|true|false",
    "owner": "DaemonSet|ReplicaSet|StatefulSet|Deployment|Job|CronJob|ReplicationController|Node|Pod",
    "resource": r"[^/]*|([a-z0-9.-]+\.)?(kubernetes\.io|k8s\.io|gpumgr\.io|nvidia\.com|tencent\.com|amd\.com|intel\.com)/.*",
}
_PREFIX: Final = {"resource": "example.com/resource"}


def read_cluster(kubeconfig: Path) -> Document:
    """Raises GpumgrError."""
    return asyncio.run(_read(kubeconfig))


def load(file: Path) -> Document:
    """With `places`: for each list the file and line of its objects. Raises InputError."""
    text = JsonText(str(file), read_text(file))
    entries = {entry.key: entry for entry in text.entries("{")}
    for key, value in _FORMAT.items():
        if key not in entries:
            raise InputError(f"{file}, line 1: the key {key} is missing, so it is no snapshot; {_REMEDY}")
        if entries[key].value != value:
            found = short(json.dumps(entries[key].value))
            raise InputError(f"{text.place(entries[key].at)}: {key} is {found}, and {json.dumps(value)} is expected; {_REMEDY}")
    document = {key: entry.value for key, entry in entries.items()}
    document["places"] = {}
    for key in ("nodes", "pods", "poddisruptionbudgets"):
        if document.get(key) is not None:
            document["places"][key] = [text.place(each.at) for each in text.entries("[", entries[key].at)]
        elif key != "poddisruptionbudgets":
            raise InputError(f"{file}, line 1: the list {key} is missing; {_REMEDY}")
    return document


def save(document: Document, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n")


def anonymised(document: Document) -> Document:
    """With other names of nodes, pods and namespaces, values of labels and taints, kinds of owners and resources. Equal texts stay equal,
    and names keep their order. Texts that mean the same in every cluster stay."""
    found = _replaceable(document)
    found["value"] -= found["node"]
    aliases = {
        kind: {
            text: f"{_PREFIX.get(kind, kind)}-{number:0{len(str(len(texts)))}}" for number, text in enumerate(sorted(texts), 1)
        }
        for kind, texts in found.items()
    }
    aliases["value"] |= aliases["node"]
    return {**_renamed(document, lambda kind, text: aliases[kind].get(text, text)), "anonymised": True}


def foreign_texts(spec: Document) -> list[str]:
    """What a pod's spec demands of a node in names that an anonymised snapshot does not have."""
    found = _replaceable({"pods": [{"spec": spec}]})
    demands = found["node"] | found["value"] | found["resource"]
    return sorted(each for each in demands if not re.fullmatch(r"((example\.com/)?resource|node|value)-[0-9]+", each))


def _replaceable(document: Document) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {kind: set() for kind in _NAMED}
    _renamed(document, lambda kind, text: found[kind].add(text) or text)  # type: ignore[func-returns-value]
    return {kind: {each for each in texts if not re.fullmatch(_COMMON.get(kind, ""), each)} for kind, texts in found.items()}


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

    def rename(path: str, key: str) -> str:
        return alias("resource", key) if _kind(path) == "resource" else key

    return {key: _walked(each, key, change, rename) for key, each in document.items()}


def _walked(
    value: Any, path: str, change: Callable[[str, Any], Any], rename: Callable[[str, str], str] = lambda _path, key: key
) -> Any:
    """With other leaves and keys. None: without this leaf, and without what has no other leaf."""
    if isinstance(value, dict):
        walked = ((key, _walked(each, f"{path}/{key}", change, rename)) for key, each in value.items())
        items = {rename(path, key): new for key, new in walked if new is not None}
        return items if items or not value else None
    if isinstance(value, list):
        elements = [new for each in value if (new := _walked(each, path, change, rename)) is not None]
        return elements if elements or not value else None
    return change(path, value)


@lru_cache(maxsize=1 << 14)
def _kept(path: str) -> bool:
    return _KEPT.fullmatch(path) is not None


@lru_cache(maxsize=1 << 14)
def _kind(path: str) -> str | None:
    return next((kind for kind, places in _NAMED.items() if re.fullmatch(places, path)), None)
