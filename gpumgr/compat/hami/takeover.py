"""Plans how gpumgr replaces HAMi's device plugin on a node while pods run, and compares the result with the plan. Pure.

The pods keep HAMi's resources and GPUs: the agent adopts them at its start (gpumgr.ledger.rebuild). Source of what containers request:
HAMi 2.10, pkg/device/nvidia.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import Amounts
from gpumgr.compat.hami.config import Config
from gpumgr.compat.objects import KubernetesContainer, KubernetesNode, Object, Pod, PodSpec, of_type
from gpumgr.compat.plan import Plan, differing, label_command, start_commands, stop_commands
from gpumgr.kube.hami_formats import (
    DEVICE_CORDON,
    HAMI_ALLOCATED,
    HAMI_NODE,
    LOCK,
    REGISTER,
    RegisteredGpu,
    decode_register,
    placed_by_hami,
    replica_request,
)
from gpumgr.kube.pods import quantity_or_0
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import ContainerKind, ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

_MOST_SHOWN: Final = 256
#: The node label that HAMi's DaemonSet selects by default.
_LABEL: Final = {"gpu": "on"}
_UUID: Final = re.compile("GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class HamiState(msgspec.Struct, frozen=True, kw_only=True):
    """`answering`: sockets of HAMi's plugin that accept connections. `folders`: HAMi's folders on this host. `library`: path and SHA-256 of
    HAMi's library. `kubelet`: (pod's UID, container's name) of the containers with GPUs from HAMi, according to the kubelet; None if not
    known."""

    node: str
    objects: Sequence[Object] = ()
    answering: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    library: tuple[Path, str] | None = None
    kubelet: frozenset[tuple[str, str]] | None = None

    @property
    def annotations(self) -> Mapping[str, str] | None:
        """The node's annotations; None if its Node object was not given."""
        return next((n.metadata.annotations for n in of_type(self.objects, KubernetesNode) if n.metadata.name == self.node), None)


def plan_take_over(config: Config, found: HamiState, *, to: Path) -> Plan:
    """`to`: the settings file that the plan writes. Raises SettingsError for values of HAMi that gpumgr's settings can't have."""
    running, problems = running_pods(config, found)
    return Plan(
        settings=differing({**config.settings, **config.replica_settings, "node.profile": "both"}),
        pods=tuple(f"{each.describe()}: keeps {_text(each.gpus)}" for each in running)
        or ("no pod of this node has a GPU from HAMi",),
        notes=(*config.notes, *_notes(found)),
        warnings=(*problems, *_warnings(running, found)),
        stop=tuple(_stop(config, found.node)),
        start=(
            *_start(found, to),
            f"gpumgr migrate hami ... --to {quote(str(to))} --verify    # on the node, with the options of this call: compares the result",
        ),
        rollback=tuple(_rollback(config, found.node)),
        # The node's annotations stay, because the agent writes them now.
        clean_up=tuple(_remove_folders(found)),
    )


def _stop(config: Config, node: str) -> Iterator[str]:
    yield f"kubectl cordon {quote(node)}"
    yield f"{label_command(node, config.selector or _LABEL, remove=True)}    # HAMi's plugin leaves this node, and only this one"


def _start(found: HamiState, to: Path) -> Iterator[str]:
    yield from start_commands(found.node, to, kustomize="config/kustomize/base")
    for uuid in filter(_UUID.fullmatch, _cordoned(found)):
        yield f"gpumgr gpu cordon {uuid}    # it is in the annotation {DEVICE_CORDON}"
    yield f"kubectl uncordon {quote(found.node)}"


def _rollback(config: Config, node: str) -> Iterator[str]:
    yield f"kubectl cordon {quote(node)}"
    yield "gpumgr checkpoint show    # delete these pods: HAMi's plugin can't adopt them"
    yield from stop_commands(node)
    yield f"{label_command(node, config.selector or _LABEL)}    # HAMi's plugin runs again, and writes its annotations again"
    yield f"kubectl uncordon {quote(node)}"


def _remove_folders(found: HamiState) -> Iterator[str]:
    for folder in found.folders:
        yield f"rm -r {quote(str(folder))}    # when no running pod of this node has its GPUs from HAMi's plugin"


def _notes(found: HamiState) -> Iterator[str]:
    yield "metrics.hami_names serves HAMi's gauges beside gpumgr's, at http.port; gpumgr has no service on 31992 and 31993"
    if '"mode":"mig"' in (found.annotations or {}).get(REGISTER, "").replace(" ", ""):
        yield "GPUs are in HAMi's dynamic MIG: the setting `hami.operating_mode: mig` continues it. Static devices need node.mig_strategy"
    odd = [each for each in _cordoned(found) if not _UUID.fullmatch(each)]
    if odd:
        yield f"{DEVICE_CORDON} contains texts that are not the UUID of a GPU and are ignored: {', '.join(odd)}"
    if found.library is not None:
        path, sha256 = found.library
        yield (
            f"{path} (HAMi 2.8.2 or newer) can continue to limit containers (enforcement.backend hami-core): run `gpumgr install library "
            f"{path} --sha256 {sha256}` on the node; otherwise gpumgr's own limiter limits them"
        )


def _cordoned(found: HamiState) -> list[str]:
    texts = (found.annotations or {}).get(DEVICE_CORDON, "").split(",")
    return [text.strip() for text in texts if text.strip()]


def _pods_on(found: HamiState) -> Iterator[Pod]:
    ended = ("Succeeded", "Failed")
    return (each for each in of_type(found.objects, Pod) if each.spec.node_name == found.node and each.status.phase not in ended)


def running_pods(config: Config, found: HamiState) -> tuple[Sequence[Allocation], Sequence[str]]:
    """(containers that the agent adopts, reasons why it can't adopt others). `gpus` of a container: UUID -> the amounts that HAMi's
    scheduler chose."""
    running: list[Allocation] = []
    problems: list[str] = []
    for pod in _pods_on(found):
        containers = specs(pod.spec, config.resources)
        text = pod.metadata.annotations.get(HAMI_ALLOCATED)
        if not any(spec.replicas for spec in containers) or (text is None and pod.status.phase == "Pending"):
            continue
        if text is None or pod.metadata.annotations.get(HAMI_NODE) != found.node:
            problems.append(f"{pod.full_name}: HAMi's scheduler has chosen no GPUs of this node for it; delete it first")
            continue
        try:
            placed = placed_by_hami(text, containers)
        except ValueError as error:
            problems.append(
                f"{pod.full_name}: the annotation {HAMI_ALLOCATED} can't be read: {str(error)[:_MOST_SHOWN]}; delete it first"
            )
            continue
        kinds = {spec.name: spec.kind for spec in containers}
        namespace, _, pod_name = pod.full_name.partition("/")
        running += [
            Allocation(
                id=f"{pod.full_name}/{name}",
                pod=(namespace, pod_name),
                uid=pod.metadata.uid,
                container=name,
                init=kinds[name] == "init",
                gpus=_sums(gpus),
            )
            for name, gpus in placed
        ]
    return running, problems


def _sums(gpus: Iterable[tuple[str, Amounts]]) -> Mapping[str, Amounts]:
    """Sums for each GPU, because a container may have several MIG devices of one GPU."""
    sums: dict[str, Amounts] = {}
    for uuid, amounts in gpus:
        sums[uuid] = sums.get(uuid, Amounts()) + replace(amounts, replicas=1)
    return sums


def _text(gpus: Mapping[str, Amounts]) -> str:
    return ", ".join(
        f"{uuid} ({amounts.memory_mebibytes} MiB, {amounts.cores or 'no limit of'} cores)" for uuid, amounts in gpus.items()
    )


def specs(pod_spec: PodSpec, resources: ReplicaResources) -> list[ContainerSpec]:
    found: list[tuple[KubernetesContainer, ContainerKind]] = [
        (each, "sidecar" if each.restart_policy == "Always" else "init") for each in pod_spec.init_containers
    ]
    found += [(each, "app") for each in pod_spec.containers]
    return [ContainerSpec(name=each.name or "?", kind=kind, replicas=_request_of(each, resources)) for each, kind in found]


def _request_of(container: KubernetesContainer, resources: ReplicaResources) -> ReplicaRequest | None:
    wanted = {**container.resources.requests, **container.resources.limits}
    if any(name in wanted for name in resources.amounts):  # HAMi's webhook adds the missing number of GPUs
        wanted = {resources.count_resource: 1, **wanted}
    for name in {resources.core_resource, resources.memory_percentage_resource} & wanted.keys():
        wanted[name] = min(quantity_or_0(str(wanted[name])), 100)  # HAMi grants at most 100
    return replica_request(wanted, resources, quantity_or_0)


def _warnings(running: Sequence[Allocation], found: HamiState) -> Iterator[str]:
    if found.annotations is None:
        yield f"the Node object {found.node} was not given: its GPUs, annotations and labels are not compared"
        return
    if lock := found.annotations.get(LOCK):
        shown = f"{LOCK}: {lock[:_MOST_SHOWN]}"
        yield f"HAMi's scheduler has locked this node ({shown}): wait until the annotation is gone; after 5 minutes, remove it"
    try:
        registered = {gpu.uuid: gpu for gpu in decode_register(found.annotations.get(REGISTER) or "[]")}
    except ValueError as error:
        yield f"the annotation {REGISTER} can't be read, so no GPU is compared: {str(error)[:_MOST_SHOWN]}"
    else:
        yield from _misplaced(running, registered)
    if found.kubelet is not None:
        mine = {(each.uid, each.container) for each in running}
        for each in running:
            if (each.uid, each.container) not in found.kubelet:
                yield f"{each.describe()}: it has no GPU according to the kubelet; examine the pod, and delete it if it does not run"
        for uid, container in sorted(found.kubelet - mine, key=str):
            yield f"pod uid {uid} ({container}): it has GPUs according to the kubelet, but is not among the pods above; delete it first"


def _misplaced(running: Sequence[Allocation], registered: Mapping[str, RegisteredGpu]) -> Iterator[str]:
    for each in running:
        for uuid in each.gpus:
            if uuid not in registered:
                yield f"{each.describe()}: HAMi has registered no GPU {uuid[:_MOST_SHOWN]} on this node; delete it first"
            elif registered[uuid].mode == "mig":
                yield f"{each.describe()}: it has a MIG device of {uuid}, which the agent does not adopt; delete it first"
    for uuid, amounts in Ledger(allocations={each.id: each for each in running}).by_amount.items():
        gpu = registered.get(uuid)
        if gpu and (amounts.memory_mebibytes > gpu.memory_mebibytes or amounts.cores > gpu.cores or amounts.replicas > gpu.count):
            has = f"{gpu.memory_mebibytes} MiB, {gpu.cores} cores, {gpu.count} containers"
            yield (
                f"{uuid}: its pods have {amounts.memory_mebibytes} MiB, {amounts.cores} cores, {amounts.replicas} containers, and HAMi "
                f"registered {has}; delete one of the pods first, or the agent does not adopt all of them"
            )


def differences(running: Sequence[Allocation], ledger: Ledger) -> Iterator[str]:
    """How the containers that the agent has adopted differ from HAMi's pods."""
    registry = ledger.gpu_registry
    adopted = {(a.uid, a.container): a for a in ledger.allocations.values()}
    for each in running:
        allocation = adopted.get((each.uid, each.container))
        if allocation is None:
            yield f"{each.describe()} is not adopted: the log has the reason (allocation_not_adopted)"
            continue
        for uuid, amounts in each.gpus.items():
            name = registry.by_uuid[uuid].name if uuid in registry.by_uuid else None
            if name is None or name not in allocation.gpus:
                yield f"{each.describe()} is adopted on {', '.join(allocation.gpus)} and not on {uuid}, which HAMi's scheduler chose"
            elif allocation.gpus[name].memory_mebibytes < amounts.memory_mebibytes:
                has = allocation.gpus[name].memory_mebibytes
                yield f"{each.describe()} is adopted with {has} MiB of {uuid} instead of {amounts.memory_mebibytes} MiB"
