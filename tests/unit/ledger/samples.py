"""Samples and containers for a node of the metrics' pictures."""

from collections.abc import Mapping

from gpumgr.ledger.join import join
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node_use import Container, NodeUse
from gpumgr.placement.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.placement.pods import PodKey
from tests.unit.web.metrics.pictures import uuid_of

MIB = 2**20


def sample(*gpus: Mapping[int, int | None] | None, ratios: Mapping[int, float] | None = None) -> NodeSample:
    """One entry for each GPU from index 0: pid -> bytes, or None for a list that could not be read."""
    return NodeSample(
        gpus={
            uuid_of(index): GpuSample(
                uuid=uuid_of(index),
                utilization_ratio=0.75,
                processes=None
                if processes is None
                else tuple(
                    GpuProcess(pid=pid, memory_bytes=used, utilization_ratio=(ratios or {}).get(pid))
                    for pid, used in processes.items()
                ),
            )
            for index, processes in enumerate(gpus)
        }
    )


def container(letter: str, pod: PodKey, name: str = "main", *, attempt: int = 0) -> Container:
    """The container of the allocation `letter` of the metrics' pictures."""
    return Container(
        id=f"{letter}{attempt}" * 32, pod=pod, pod_uid=f"uid-{letter}", name=name, attempt=attempt, cgroup=f"/{letter}/{attempt}"
    )


def used(ledger: Ledger, node: NodeSample, owners: Mapping[int, Container | None]) -> NodeUse:
    return join(ledger, node, owners)
