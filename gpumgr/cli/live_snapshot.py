"""A snapshot of a cluster: what `gpumgr simulate` needs of nodes, pods and PodDisruptionBudgets, from the API server or a file."""

import asyncio
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from gpumgr.cli.simulate import read_text
from gpumgr.cluster.simulation.json_text import JsonText, short
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer

Document = dict[str, Any]
_FORMAT: Final = {"kind": "gpumgr snapshot", "version": 1}
_REMEDY: Final = "make it with `gpumgr simulate --from-cluster --snapshot FILE` of this version"
#: The fields that are kept, by their paths. Other annotations, environment variables and the like may contain anything.
_KEPT: Final = re.compile(
    r"""[a-z]+/metadata/(name|namespace|uid|labels/.*)
    |[a-z]+/metadata/annotations/(gpumgr\.io/(inventory|placement|policy|(use|avoid|same)-.*)|tencent\.com/predicate-.*
      |nvidia\.com/((no)?use-.*|numa-bind|vgpu-mode)|hami\.io/((gpu|node)-scheduler-policy|device-scoring-weights)
      |kubernetes\.io/config\.mirror)
    |nodes/(spec/(unschedulable|taints/.*)|status/((capacity|allocatable)/.*|conditions/(type|status)))
    |pods/(metadata/(deletionTimestamp|ownerReferences/(kind|controller))|status/phase
      |spec/(nodeName|(nodeSelector|tolerations|overhead|resources|affinity/nodeAffinity/required[^/]*)/.*
        |(affinity/pod.*|topologySpreadConstraints)/topologyKey|(resourceClaims|schedulingGates)/name
        |volumes/(persistentVolumeClaim/claimName|ephemeral/.*/accessModes)
        |(containers|initContainers)/(name|restartPolicy|resources/.*|ports/hostPort)))
    |poddisruptionbudgets/spec/selector/.*""",
    re.VERBOSE,
)


def read_cluster(kubeconfig: Path) -> Document:
    """Raises GpumgrError."""
    return asyncio.run(_read(kubeconfig))


def load(file: Path) -> Document:
    """The document in the file. Under the key `places` it has the file and line of each object, for each list. Raises InputError."""
    text = JsonText(str(file), read_text(file))
    entries = {entry.key: entry for entry in text.entries("{")}
    for key, value in _FORMAT.items():
        if key not in entries:
            raise InputError(f"{file}, line 1: the key {key} is missing, so it is not a snapshot; {_REMEDY}")
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
        found += [_kept(each, kind) for each in page["items"]]
        query["continue"] = page["metadata"].get("continue") or ""
        if not query["continue"]:
            return found


def _kept(value: Any, path: str) -> Any:
    """The value with only the fields that `_KEPT` names; None if it has none of them."""
    if isinstance(value, dict):
        items = {key: new for key, each in value.items() if (new := _kept(each, f"{path}/{key}")) is not None}
        return items if items or not value else None
    if isinstance(value, list):
        elements = [new for each in value if (new := _kept(each, path)) is not None]
        return elements if elements or not value else None
    return value if _is_kept(path) else None


@lru_cache(maxsize=1 << 14)
def _is_kept(path: str) -> bool:
    return _KEPT.fullmatch(path) is not None
