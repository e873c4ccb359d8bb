"""What all readers are shown, whatever they read it by: Prometheus, the page, scripts, gpu-manager's clients.

One picture is taken once a sample period; nobody who reads makes the agent ask the driver, the kubelet or the API server.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpumgr.agent.maintenance import Maintenance, Order
from gpumgr.agent.picture import OutboxState, Picture
from gpumgr.agent.ports import Pods
from gpumgr.agent.writer import AgentView
from gpumgr.aio import Latest
from gpumgr.allocator.history import Entry
from gpumgr.allocator.pods import PodKey
from gpumgr.app.station import Station
from gpumgr.display.messages import usage_message
from gpumgr.metrics.exposition import Exposition
from gpumgr.units import RESOURCE_OF
from gpumgr.web.state import state_document
from gpumgr.web.story import known_pods, story


class Readers:
    """Implements web.sources.Sources. `outbox` tells what waits for the API server (None: there is none), `connections` how many the
    web server has open and how many it refused."""

    def __init__(
        self,
        station: Station,
        *,
        pods: Pods,
        maintenance: Maintenance,
        outbox: Callable[[], OutboxState | None],
    ) -> None:
        self._station, self._pods, self._maintenance, self._outbox = station, pods, maintenance, outbox
        self._exposition = Exposition(station.metrics, self.picture)
        self._states: Latest[bytes] = Latest(b"")
        self._drawn_at = float("-inf")
        self._drawing = asyncio.Lock()
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)

    # -- once a sample period ----------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Draws anew what is being read."""
        await self._exposition.refresh()
        if self._states.readers:
            async with self._drawing:
                await self._draw()

    async def _draw(self) -> None:
        picture, history, began = self.picture(), self.history(), time.monotonic()
        self._states.set(await asyncio.to_thread(lambda: msgspec.json.encode(state_document(picture, history))))
        self._drawn_at = began

    # -- web.sources.Sources -----------------------------------------------------------------------------------------------

    def picture(self) -> Picture:
        station = self._station
        reasons = {uuid: health.word for uuid, health in station.monitor.health.items() if health.word is not None}
        connections, refused = self.connections()
        return Picture(
            view=station.view(),
            node=station.settings.node.name,
            at=time.time(),
            registered={RESOURCE_OF[kind]: state.registered for kind, state in station.link.states.items()},
            not_ready=tuple(station.not_ready()),
            cordons=self._maintenance.cordons,
            outbox=self._outbox(),
            connections=connections,
            connections_refused=refused,
            sample=station.sample,
            sampled_at=station.sampled_at,
            nvml_up=station.nvml_up,
            nvml_errors=station.nvml.call_errors,
            streams={RESOURCE_OF[kind]: watched.readers for kind, watched in station.devices.items()},
            reasons=reasons,
            use=station.truth.use,
            over=station.truth.over,
            enforcement=station.enforcing.told(),
            vcuda_registrations=dict(station.enforcing.vcuda.registrations),
            mps_daemon_restarts=station.enforcing.mps.restarts(),
        )

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        return await self._exposition.scrape(accept, accept_encoding)

    def not_alive(self) -> Sequence[str]:
        return self._station.not_alive()

    def not_ready(self) -> Sequence[str]:
        return self._station.not_ready()

    def no_driver(self) -> Sequence[str]:
        return self._station.no_driver()

    def view(self) -> AgentView:
        return self._station.view()

    @property
    def states(self) -> Latest[bytes]:
        return self._states

    async def state(self) -> bytes:
        async with self._drawing:
            if time.monotonic() - self._drawn_at >= self._station.settings.nvml.sample_period_seconds:
                await self._draw()
        return self._states.value

    def usage(self) -> Mapping[str, Any]:
        return usage_message(self.picture(), self._pods)

    def history(self) -> Sequence[Entry]:
        return self._station.books.history.entries()

    def story(self, namespace: str, pod: str) -> Mapping[str, Any] | None:
        return story(self.picture(), self._pods.get((namespace, pod)), namespace, pod, self.history())

    def pods(self) -> Sequence[PodKey]:
        return known_pods(self._station.view().ledger, self._pods.all(), self.history())

    async def maintain(self, order: Order) -> Mapping[str, Any]:
        return await self._maintenance.follow(order)
