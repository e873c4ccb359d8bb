"""The plan for a node that moves from HAMi to gpumgr. Pure.

The resources differ, so pods cannot be taken over: pods that HAMi placed end before gpumgr starts, and are created with new requests.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Final

from gpumgr.migrate.hami_config import Config
from gpumgr.migrate.hami_request import ALLOCATED, REGISTER, advise, gpu_sizes, switched_off, wishes
from gpumgr.migrate.objects import Object, containers, full_name, of_kind, pod_spec
from gpumgr.migrate.plan import HELM_INSTALL, NODE_LABEL, Plan, differing

#: The node label that HAMi's DaemonSet selects by default.
_LABEL: Final = {"gpu": "on"}
_PREFIX: Final = "hami.io/"
#: Annotations that users of HAMi may set on their pods.
_USERS: Final = (
    "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/nouse-gpuuuid",
    "nvidia.com/numa-bind",
    "nvidia.com/vgpu-mode",
    "hami.io/node-scheduler-policy",
    "hami.io/gpu-scheduler-policy",
)
_CORDON: Final = "hami.io/device-cordon"
_UUID: Final = re.compile("GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The inputs: `objects` of the API server, sockets of HAMi's plugin that accept connections, HAMi's folders on this host, and
    its library with the library's SHA-256."""

    node: str
    objects: Sequence[Object] = ()
    answering: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    library: tuple[Path, str] | None = None


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    spec: Object
    annotations: Mapping[str, Any] = field(default_factory=dict)


def plan_hami(config: Config, found: Found, *, to: Path) -> Plan:
    node = next((each for each in of_kind(found.objects, "Node") if (each.get("metadata") or {}).get("name") == found.node), None)
    metadata = (node or {}).get("metadata") or {}
    pods = [pod for pod in _pods_on(found) if [*wishes(pod.spec, pod.annotations, config.names)]]
    return Plan(
        settings=differing(config.settings),
        pods=tuple(_told(pods, config, metadata.get("annotations") or {})) or ("no pod of this node has a GPU from HAMi",),
        notes=(*config.notes, *_notes(found, metadata.get("annotations") or {})),
        warnings=tuple(_warnings(pods, found, node)),
        stop=tuple(_stop(pods, config, found.node)),
        start=(
            f"gpumgr config check {quote(str(to))}",
            f"gpumgr doctor --before-start --config {quote(str(to))}",
            "systemctl enable --now gpumgr    # or, with gpumgr's DaemonSet:",
            f"{HELM_INSTALL}    # your values, too; kustomize: config/kustomize/base",
            f"kubectl label node {quote(found.node)} {NODE_LABEL}=enable --overwrite",
            *_cordons(metadata.get("annotations") or {}),
            f"kubectl uncordon {quote(found.node)}",
        ),
        rollback=tuple(_rollback(config, found.node)),
        clean_up=tuple(_clean_up(found, metadata.get("annotations"))),
    )


def _pods_on(found: Found) -> Iterator[_Pod]:
    for each in of_kind(found.objects, "Pod"):
        spec, phase = pod_spec(each), (each.get("status") or {}).get("phase")
        if spec.get("nodeName") == found.node and phase not in ("Succeeded", "Failed"):
            yield _Pod(full_name(each), spec, (each.get("metadata") or {}).get("annotations") or {})


def _told(pods: Sequence[_Pod], config: Config, annotations: Mapping[str, Any]) -> Iterator[str]:
    gpu_mebibytes = min(gpu_sizes(annotations, config.memory_scaling).values(), default=None)
    for pod in pods:
        for container, wish in wishes(pod.spec, pod.annotations, config.names):
            yield f"{pod.name} ({container}): {advise(wish, gpu_mebibytes).describe()}"
        if unknown := [key for key in _USERS if key in pod.annotations]:
            yield f"{pod.name}: gpumgr does not read {', '.join(unknown)}"
        if any(switched_off(container) for container in containers(pod.spec)):
            namespace = pod.name.partition("/")[0]
            yield f"{pod.name}: CUDA_DISABLE_CONTROL does nothing; the operator can set enforcement.overrides: [{namespace}=none]"


def _notes(found: Found, annotations: Mapping[str, Any]) -> Iterator[str]:
    yield "metrics.hami_names serves HAMi's gauges beside gpumgr's, at http.port; gpumgr has no service on 31992 and 31993"
    yield "pods need no scheduler of their own: `schedulerName: hami-scheduler` goes, and priority, gpumem-percentage and MIG profiles too"
    if '"mode":"mig"' in str(annotations.get(REGISTER) or "").replace(" ", ""):
        yield "GPUs in MIG mode are not offered: `nvidia-smi -i INDEX -mig 0` for each, when nobody uses it"
    odd = [each for each in _cordoned(annotations) if not _UUID.fullmatch(each)]
    if odd:
        yield f"{_CORDON} has what is no GPU's UUID, and is passed over: {', '.join(odd)}"
    if found.library is not None:
        path, sha256 = found.library
        yield (
            f"{path} can go on keeping the limits: copy it to a folder of yours, and set hami_core.library_path and "
            f"hami_core.library_sha256: {sha256} (HAMi 2.8.2 or newer); without it, MPS or the driver keeps them where they can"
        )


def _warnings(pods: Sequence[_Pod], found: Found, node: Object | None) -> Iterator[str]:
    if found.answering:
        yield f"HAMi's or NVIDIA's plugin answers at {' and '.join(map(str, found.answering))}: stop it before gpumgr starts"
    running = [pod.name for pod in pods if ALLOCATED in pod.annotations]
    if running:
        yield f"gpumgr can't know of GPUs that HAMi gave out, and must not start before these have ended: {', '.join(running)}"
    if node is None:
        yield f"the Node object {found.node} was not given: its GPUs, annotations and labels are not looked at"


def _stop(pods: Sequence[_Pod], config: Config, node: str) -> Iterator[str]:
    node = quote(node)
    yield f"kubectl cordon {node}"
    for pod in pods:
        namespace, _, name = pod.name.partition("/")
        yield f"kubectl -n {quote(namespace)} delete pod {quote(name)}    # its owner makes it again, with the requests of above"
    keys = " ".join(quote(f"{key}-") for key in config.selector or _LABEL)
    yield f"kubectl label node {node} {keys}    # HAMi's plugin leaves this node, and only this one"


def _rollback(config: Config, node: str) -> Iterator[str]:
    node = quote(node)
    yield f"kubectl cordon {node}"
    yield "gpumgr checkpoint show    # delete these pods; their owners ask for nvidia.com/gpu again"
    yield "systemctl disable --now gpumgr    # or, with gpumgr's DaemonSet:"
    yield f"kubectl label node {node} {NODE_LABEL}=disable --overwrite"
    pairs = " ".join(quote(f"{key}={value}") for key, value in (config.selector or _LABEL).items())
    yield f"kubectl label node {node} {pairs}    # HAMi's plugin comes back, and writes its annotations anew"
    yield f"kubectl uncordon {node}"


def _cordoned(annotations: Mapping[str, Any]) -> list[str]:
    return [part.strip() for part in str(annotations.get(_CORDON) or "").split(",") if part.strip()]


def _cordons(annotations: Mapping[str, Any]) -> Iterator[str]:
    for uuid in filter(_UUID.fullmatch, _cordoned(annotations)):
        yield f"gpumgr gpu cordon {uuid}    # as {_CORDON} has it"


def _clean_up(found: Found, annotations: Mapping[str, Any] | None) -> Iterator[str]:
    keys = [REGISTER] if annotations is None else sorted(key for key in annotations if key.startswith(_PREFIX))
    if keys:
        yield f"kubectl annotate node {quote(found.node)} {' '.join(quote(f'{key}-') for key in keys)}"
    for folder in found.folders:
        yield f"rm -r {quote(str(folder))}    # when no pod of HAMi's is left on this node"
    yield "helm uninstall hami -n NAMESPACE    # after the last node: scheduler, webhook and DaemonSet"
