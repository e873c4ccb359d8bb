"""Registers the node's GPUs with HAMi's scheduler: annotations of the node, written when they change.

What others hold is subtracted: HAMi's scheduler knows its own pods only. One that others share has less than 100 cores, so that no pod gets
it exclusively. A GPU that another pod has whole, or that accepts no new pods, is registered as unhealthy.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NoReturn

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.aio import until_tick
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.evaluators.mig import most_devices, without_places
from gpumgr.kubeapi.hami_mig import registered_profiles
from gpumgr.kubeapi.hami_node import (
    HANDSHAKE,
    REGISTER,
    SCORES,
    RegisteredGpu,
    device_type,
    encode_register,
    encode_register_csv,
    encode_scores,
    reported,
)
from gpumgr.kubeapi.publisher.inventory import REPORT_SECONDS, RESYNC_SECONDS
from gpumgr.topology.scores import score_matrix
from gpumgr.units import CORES_PER_GPU, Amounts

#: Between two handshakes, which old schedulers expect.
HANDSHAKE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """`count`: how many containers may share a GPU. `scheduler` "legacy": HAMi up to 2.4."""

    scheduler: Literal["current", "legacy"]
    count: int
    memory_scaling: float
    core_scaling: float


class RegisterReporter:
    """`annotate` sets an annotation of the node. `report` returns the current state. `clock` is monotonic, in seconds, `now` local time."""

    def __init__(
        self,
        annotate: Callable[[str, str | None], None],
        registration: Registration,
        *,
        report: Callable[[], NodeReport],
        pods: Pods,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._annotate, self._wanted, self._report, self._pods = annotate, registration, report, pods
        self._clock, self._now = clock, now
        self._written: dict[str, tuple[str, float]] = {}

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        while True:
            self.report()
            await asyncio.sleep(until_tick(REPORT_SECONDS))

    def report(self) -> None:
        """To be called once a second. Writes nothing before the GPUs and the node's pods are known."""
        report = self._report()
        snapshot = report.view.inventory.snapshot
        if not (snapshot.gpus and self._pods.synced):
            return
        gpus, legacy = self._gpus(report), self._wanted.scheduler == "legacy"
        self._write(REGISTER, (encode_register_csv if legacy else encode_register)(gpus), RESYNC_SECONDS)
        if len(gpus) > 1:
            uuids = [gpu.uuid for gpu in snapshot.gpus]
            self._write(SCORES, encode_scores(uuids, score_matrix(snapshot.topology)), RESYNC_SECONDS)
        if legacy and self._clock() - self._written.get(HANDSHAKE, ("", float("-inf")))[1] >= HANDSHAKE_SECONDS:
            self._write(HANDSHAKE, reported(self._now()), HANDSHAKE_SECONDS)

    def _write(self, key: str, text: str, again_seconds: float) -> None:
        before, at = self._written.get(key, ("", 0.0))
        if text != before or self._clock() - at >= again_seconds:
            self._written[key] = text, self._clock()
            self._annotate(key, text)

    def _gpus(self, report: NodeReport) -> list[RegisteredGpu]:
        view, wanted = report.view, self._wanted
        registry = view.ledger.gpu_registry
        failed, unschedulable = view.inventory.failures(registry), view.inventory.closed(registry)
        on_demand = view.inventory.mig_profiles(registry)
        others = {key: each for key, each in view.ledger.allocations.items() if not self._of_hami(each)}
        foreign = Ledger(gpu_registry=registry, allocations=others)
        made = []
        for gpu in view.inventory.snapshot.gpus:
            name = registry.by_uuid[gpu.uuid].name if gpu.uuid in registry.by_uuid else None
            held = foreign.used(name) if name is not None else Amounts()
            memory = max(0, (gpu.memory_bytes >> 20) - held.memory_mebibytes)
            cores = max(0, CORES_PER_GPU - held.cores)
            taken = sum(name in each.held("replica") for each in others.values())
            profiles = [without_places(each, held.slices) for each in on_demand.get(name or "", ())]
            offered = (
                name is not None and name not in failed and name not in unschedulable and not (gpu.mig_enabled and not profiles)
            )
            count = min(wanted.count, most_devices(profiles)) if profiles else wanted.count
            # Scaling has no meaning for MIG devices.
            scaling = (1.0, 1.0) if profiles else (wanted.memory_scaling, wanted.core_scaling)
            # HAMi's scheduler gives an exclusive GPU, 100 cores, where so many are left; beside another pod the agent refuses it.
            scaled = int(cores * scaling[1])
            if name is not None and any(not each.admin for each in foreign.on(name)):
                scaled = min(scaled, CORES_PER_GPU - 1)
            made.append(
                RegisteredGpu(
                    uuid=gpu.uuid,
                    index=gpu.index,
                    count=count if profiles else max(0, count - taken),
                    memory_mebibytes=int(memory * scaling[0]),
                    cores=scaled,
                    model=device_type(gpu.model),
                    numa=max(0, gpu.numa_node or 0),
                    mode="mig" if profiles else "hami-core",
                    mig_profiles=registered_profiles(profiles),
                    healthy=offered and memory > 0 and cores > 0 and (count > 0 if profiles else taken < count),
                )
            )
        return made

    def _of_hami(self, allocation: Allocation) -> bool:
        """HAMi's scheduler counts it."""
        pod = find_pod(self._pods, allocation.pod, allocation.uid)
        return pod is not None and pod.bound_by_hami
