"""The plan for a node where gpumgr takes the place of HAMi's device plugin while pods run, and the comparison afterwards. Pure.

The pods keep HAMi's resources. The agent adopts them at its start, with the GPUs that HAMi's scheduler chose (`allocator.rebuild`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Final

from gpumgr.common.units import Amounts
from gpumgr.compat.hami.config import Config
from gpumgr.compat.hami.new_requests import HamiState, no_node, notes, pods_on, remove_folders, rollback, start, stop
from gpumgr.compat.hami.request import specs
from gpumgr.compat.plan import Plan, differing
from gpumgr.kube.hami_node import LOCK, REGISTER, RegisteredGpu, decode_register, describe_lock
from gpumgr.kube.replica_requests import HAMI_ALLOCATED, HAMI_NODE, placed_by_hami
from gpumgr.ledger.ledger import Allocation, Ledger

_MOST_SHOWN: Final = 256


def plan_take_over(config: Config, found: HamiState, *, to: Path) -> Plan:
    """Raises SettingsError for values of HAMi's that gpumgr can't have."""
    running, problems = running_pods(config, found)
    return Plan(
        settings=differing({**config.settings, **config.replica_settings, "node.profile": "both"}),
        pods=tuple(f"{each.describe()}: keeps {_text(each.gpus)}" for each in running)
        or ("no pod of this node has a GPU from HAMi",),
        notes=(*config.notes, *notes(found)),
        warnings=(*problems, *_warnings(running, found)),
        stop=tuple(stop(config, found.node)),
        start=(
            *start(found, to),
            f"gpumgr migrate hami ... --to {quote(str(to))} --verify    # on the node, with the options of this call: compares the result",
        ),
        rollback=tuple(rollback(config, found.node, ": HAMi's plugin can't adopt them")),
        # The annotations of the node are the agent's now, and HAMi's scheduler may stay.
        clean_up=tuple(remove_folders(found)),
    )


def running_pods(config: Config, found: HamiState) -> tuple[Sequence[Allocation], Sequence[str]]:
    """The containers that the agent adopts with what HAMi's scheduler chose for them, and why it can't adopt others. Their GPUs have UUIDs
    as names."""
    running: list[Allocation] = []
    problems: list[str] = []
    for pod in pods_on(found):
        containers = specs(pod.spec, config.resources)
        text = pod.metadata.annotations.get(HAMI_ALLOCATED)
        if not any(spec.replicas for spec in containers) or (text is None and pod.status.phase == "Pending"):
            continue
        if text is None or pod.metadata.annotations.get(HAMI_NODE) != found.node:
            problems.append(f"{pod.full_name}: HAMi's scheduler has chosen no GPUs of this node for it; end it first")
            continue
        try:
            placed = placed_by_hami(text, containers)
        except ValueError as error:
            problems.append(
                f"{pod.full_name}: the annotation {HAMI_ALLOCATED} can't be read: {str(error)[:_MOST_SHOWN]}; end it first"
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
    """A container may have several MIG devices of one GPU."""
    sums: dict[str, Amounts] = {}
    for uuid, amounts in gpus:
        sums[uuid] = sums.get(uuid, Amounts()) + replace(amounts, replicas=1)
    return sums


def _text(gpus: Mapping[str, Amounts]) -> str:
    return ", ".join(
        f"{uuid} ({amounts.memory_mebibytes} MiB, {amounts.cores or 'no limit of'} cores)" for uuid, amounts in gpus.items()
    )


def _warnings(running: Sequence[Allocation], found: HamiState) -> Iterator[str]:
    if found.annotations is None:
        yield no_node(found)
        return
    if lock := found.annotations.get(LOCK):
        try:
            holder = describe_lock(lock)
        except ValueError as error:
            holder = f"which can't be read: {error}"
        yield f"HAMi's scheduler has locked this node ({LOCK} {holder}): wait until the annotation is gone; after 5 minutes, remove it"
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
                yield f"{each.describe()}: the kubelet has no GPU of it; look at the pod, and end it if it does not run"
        for uid, container in sorted(found.kubelet - mine, key=str):
            yield f"pod uid {uid} ({container}): the kubelet has GPUs of it, and it is none of the pods above; end it first"


def _misplaced(running: Sequence[Allocation], registered: Mapping[str, RegisteredGpu]) -> Iterator[str]:
    for each in running:
        for uuid in each.gpus:
            if uuid not in registered:
                yield f"{each.describe()}: HAMi has registered no GPU {uuid[:_MOST_SHOWN]} on this node; end it first"
            elif registered[uuid].mode == "mig":
                yield f"{each.describe()}: it has a MIG device of {uuid}, which the agent does not adopt; end it first"
    for uuid, amounts in Ledger(allocations={each.id: each for each in running}).by_amount.items():
        gpu = registered.get(uuid)
        if gpu and (amounts.memory_mebibytes > gpu.memory_mebibytes or amounts.cores > gpu.cores or amounts.replicas > gpu.count):
            has = f"{gpu.memory_mebibytes} MiB, {gpu.cores} cores, {gpu.count} containers"
            yield (
                f"{uuid}: its pods have {amounts.memory_mebibytes} MiB, {amounts.cores} cores, {amounts.replicas} containers, and HAMi "
                f"registered {has}; end one of them first, or it is not adopted"
            )


def differences(running: Sequence[Allocation], ledger: Ledger) -> Iterator[str]:
    """Between the pods of HAMi's and what the agent has adopted."""
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
