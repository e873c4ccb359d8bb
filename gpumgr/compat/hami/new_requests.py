"""The plan for a node that moves from HAMi to gpumgr with new requests. Pure.

vcuda resources are others than HAMi's, so the pods end and are created anew. `hami_takeover` has the plan in which they keep running.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from gpumgr.compat.hami.config import Config
from gpumgr.compat.hami.request import advise, requests, smallest_gpu, specs, switched_off
from gpumgr.compat.objects import KubernetesNode, Object, Pod, of_type
from gpumgr.compat.plan import HELM_INSTALL, NODE_LABEL, Plan, differing
from gpumgr.kube.hami_node import REGISTER
from gpumgr.kube.replica_requests import HAMI_ALLOCATED

#: The node label that HAMi's DaemonSet selects by default.
_LABEL: Final = {"gpu": "on"}
_PREFIX: Final = "hami.io/"
#: Annotations that users of HAMi may set on their pods, and that `gpumgr scheduler` reads, but not the agent.
_POLICIES: Final = ("hami.io/node-scheduler-policy", "hami.io/gpu-scheduler-policy")
_CORDON: Final = "hami.io/device-cordon"
_UUID: Final = re.compile("GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HamiState:
    """The inputs: `objects` of the API server, sockets of HAMi's plugin that accept connections, HAMi's folders on this host, and
    its library with the library's SHA-256. `kubelet`: the containers (pod's UID, name) to which it has given GPUs of HAMi; None: not
    known."""

    node: str
    objects: Sequence[Object] = ()
    answering: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    library: tuple[Path, str] | None = None
    kubelet: frozenset[tuple[str, str]] | None = None

    @property
    def annotations(self) -> Mapping[str, str] | None:
        """Those of the node; None: its object was not given."""
        return next((n.metadata.annotations for n in of_type(self.objects, KubernetesNode) if n.metadata.name == self.node), None)


def plan_hami(config: Config, found: HamiState, *, to: Path) -> Plan:
    pods = [pod for pod in pods_on(found) if any(each.replicas for each in specs(pod.spec, config.resources))]
    return Plan(
        settings=differing(config.settings),
        pods=tuple(_sentences(pods, config, found)) or ("no pod of this node has a GPU from HAMi",),
        notes=(*config.notes, *config.vcuda_notes, _NEW_REQUESTS, *notes(found)),
        warnings=tuple(_warnings(pods, found)),
        stop=tuple(stop(config, found.node, _delete(pods))),
        start=tuple(start(found, to)),
        rollback=tuple(rollback(config, found.node, "; their owners ask for nvidia.com/gpu again")),
        clean_up=tuple(_clean_up(found)),
    )


def start(found: HamiState, to: Path) -> Iterator[str]:
    yield f"gpumgr config check {quote(str(to))}"
    yield f"gpumgr doctor --before-start --config {quote(str(to))}"
    yield "systemctl enable --now gpumgr    # or, with gpumgr's DaemonSet:"
    yield f"{HELM_INSTALL}    # your values, too; kustomize: config/kustomize/base"
    yield f"kubectl label node {quote(found.node)} {NODE_LABEL}=enable --overwrite"
    for uuid in filter(_UUID.fullmatch, _cordoned(found)):
        yield f"gpumgr gpu cordon {uuid}    # as {_CORDON} has it"
    yield f"kubectl uncordon {quote(found.node)}"


def pods_on(found: HamiState) -> Iterator[Pod]:
    ended = ("Succeeded", "Failed")
    return (each for each in of_type(found.objects, Pod) if each.spec.node_name == found.node and each.status.phase not in ended)


def _sentences(pods: Sequence[Pod], config: Config, found: HamiState) -> Iterator[str]:
    gpu_mebibytes = smallest_gpu(found.annotations or {}, config.memory_scaling)
    for pod in pods:
        for container, asked in requests(pod.spec, pod.metadata.annotations, config.resources):
            yield f"{pod.full_name} ({container}): {advise(asked, gpu_mebibytes)}"
        if policies := [key for key in _POLICIES if key in pod.metadata.annotations]:
            yield f"{pod.full_name}: only pods of `gpumgr scheduler` are placed by {', '.join(policies)}"
        if any(switched_off(container) for container in pod.spec.all_containers):
            override = f"enforcement.overrides: [{pod.metadata.namespace or 'default'}=none]"
            yield f"{pod.full_name}: CUDA_DISABLE_CONTROL does nothing; the operator can set {override}"


#: What vcuda requests lack.
_NEW_REQUESTS: Final = (
    "pods need no scheduler of their own: `schedulerName: hami-scheduler` goes, "
    "and priority, gpumem-percentage and MIG profiles too"
)


def notes(found: HamiState) -> Iterator[str]:
    yield "metrics.hami_names serves HAMi's gauges beside gpumgr's, at http.port; gpumgr has no service on 31992 and 31993"
    if '"mode":"mig"' in (found.annotations or {}).get(REGISTER, "").replace(" ", ""):
        yield "GPUs are in HAMi's dynamic MIG: hami.operating_mode: mig continues it; static MIG devices need node.mig_strategy"
    odd = [each for each in _cordoned(found) if not _UUID.fullmatch(each)]
    if odd:
        yield f"{_CORDON} has what is no GPU's UUID, and is passed over: {', '.join(odd)}"
    if found.library is not None:
        path, sha256 = found.library
        yield (
            f"{path} (HAMi 2.8.2 or newer) can go on keeping the limits: run `gpumgr install library {path} --sha256 {sha256}` on the "
            "node; without it, MPS or the driver keeps them where they can"
        )


def _warnings(pods: Sequence[Pod], found: HamiState) -> Iterator[str]:
    if found.answering:
        yield f"HAMi's or NVIDIA's plugin answers at {' and '.join(map(str, found.answering))}: stop it before gpumgr starts"
    running = [pod.full_name for pod in pods if HAMI_ALLOCATED in pod.metadata.annotations]
    if running:
        yield f"with new requests these pods must end before gpumgr starts (without --new-requests they keep running): {', '.join(running)}"
    if found.annotations is None:
        yield no_node(found)


def no_node(found: HamiState) -> str:
    return f"the Node object {found.node} was not given: its GPUs, annotations and labels are not looked at"


def _delete(pods: Sequence[Pod]) -> Iterator[str]:
    for pod in pods:
        namespace, _, name = pod.full_name.partition("/")
        yield f"kubectl -n {quote(namespace)} delete pod {quote(name)}    # its owner makes it again, with the requests of above"


def stop(config: Config, node: str, then: Iterable[str] = ()) -> Iterator[str]:
    """HAMi's plugin leaves the node, after the commands `then`."""
    yield f"kubectl cordon {quote(node)}"
    yield from then
    removed = " ".join(quote(f"{key}-") for key in config.selector or _LABEL)
    yield f"kubectl label node {quote(node)} {removed}    # HAMi's plugin leaves this node, and only this one"


def rollback(config: Config, node: str, why: str) -> Iterator[str]:
    """gpumgr leaves the node, and HAMi's plugin comes back; `why`: the pods are deleted."""
    node = quote(node)
    yield f"kubectl cordon {node}"
    yield f"gpumgr checkpoint show    # delete these pods{why}"
    yield "systemctl disable --now gpumgr    # or, with gpumgr's DaemonSet:"
    yield f"kubectl label node {node} {NODE_LABEL}=disable --overwrite"
    pairs = " ".join(quote(f"{key}={value}") for key, value in (config.selector or _LABEL).items())
    yield f"kubectl label node {node} {pairs}    # HAMi's plugin comes back, and writes its annotations anew"
    yield f"kubectl uncordon {node}"


def _cordoned(found: HamiState) -> list[str]:
    texts = (found.annotations or {}).get(_CORDON, "").split(",")
    return [text.strip() for text in texts if text.strip()]


def _clean_up(found: HamiState) -> Iterator[str]:
    keys = sorted(key for key in found.annotations if key.startswith(_PREFIX)) if found.annotations else [REGISTER]
    if keys:
        yield f"kubectl annotate node {quote(found.node)} {' '.join(quote(f'{key}-') for key in keys)}"
    yield from remove_folders(found)
    yield "helm uninstall hami -n NAMESPACE    # after the last node: scheduler, webhook and DaemonSet"


def remove_folders(found: HamiState) -> Iterator[str]:
    for folder in found.folders:
        yield f"rm -r {quote(str(folder))}    # when no pod of HAMi's is left on this node"
