"""Pods that the limiter limits: their annotations, and the limits in their pages."""

from pathlib import Path
from typing import Final

import aiohttp

from gpumgr.enforcement.limiter import pages
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tests.background import until

from .stage import app, run

MIB: Final = 1 << 20


async def started(node: SimulatedNode, name: str, cores: int, blocks: int) -> SimPod:
    """A pod that runs. The agent has written its annotation of what containers hold, which the commands read."""
    pod = await run(node, name, app(cores, blocks))
    api = node.api
    assert api is not None
    await until(lambda: ALLOCATIONS in api.annotations(pod.uid))
    return pod


async def annotate(node: SimulatedNode, pod: SimPod, **annotations: str | None) -> None:
    """Keys without their prefix, with `_` for `-`."""
    assert node.api is not None
    url = f"{node.api.url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
    named = {f"gpumgr.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    body, kind = {"metadata": {"annotations": named}}, {"Content-Type": "application/merge-patch+json"}
    async with aiohttp.ClientSession() as http, http.patch(url, json=body, headers=kind) as answer:
        assert answer.status == 200


def page(node: SimulatedNode, pod: SimPod, name: str = "limits") -> Path:
    (allocation,) = node.ledger().of(None, pod.uid)
    return node.folder / "run/limiter" / allocation.id / f"{name}.{pages.VERSION}"


def limits(node: SimulatedNode, pod: SimPod) -> tuple[int, int]:
    """Cores and MiB in the container's page."""
    (found,) = pages.decode_limits(page(node, pod).read_bytes())
    return found.share_percent, found.memory_bytes // MIB
