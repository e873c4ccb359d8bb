"""Samples and containers for a node of the metrics' pictures."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.ledger.join import join
from gpumgr.ledger.node_use import Container
from gpumgr.placement.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.placement.pods import PodKey
from tests.unit.web.metrics.pictures import uuid_of

MIB = 2**20
NO_OWNERS: Final[Mapping[int, Container | None]] = MappingProxyType({})


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


def report_of(view: AgentView, node: NodeSample, owners: Mapping[int, Container | None] = NO_OWNERS, **more: Any) -> NodeReport:
    """What is used on the node; the driver answers."""
    return NodeReport(view=view, use=join(view.ledger, node, owners), **{"nvml_up": True, **more})
