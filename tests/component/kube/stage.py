"""A publisher in front of an API server, with a clock that its pauses advance."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpumgr.agent.ports import Eviction
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.events import Event, pod_ref
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.placement.pods import PodKey

POD = ("team", "web-0")
OTHER = ("team", "web-1")


class Time:
    """Advances with each sleep. Begins at a whole second of unix time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        #: While it is cleared, sleeping goes on.
        self.passes = asyncio.Event()
        self.passes.set()

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000 + self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.passes.wait()
        self.now += seconds
        await asyncio.sleep(0)


class Stage:
    """A publisher; `begin` runs it."""

    def __init__(self, server: ApiServer, time: Time, **options: Any) -> None:
        self.time = time
        self.publisher = Publisher(
            server, "node-1", clock=time.clock, wall=time.wall, sleep=time.sleep, jitter=lambda: 0.5, **options
        )
        self.node = self.publisher
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self.publisher.run())

    @property
    def waiting(self) -> int:
        return self.publisher.state().waiting

    def warn(self, message: str, uid: str = "uid-0") -> None:
        self.publisher.record(Event(about=pod_ref(POD, uid), reason="OverLimit", message=message, warning=True))

    def evict(self, pod: PodKey, uid: str, reason: str = "over its limit") -> None:
        """Each reason and pod is a requester of its own."""
        self.publisher.evict(f"{reason} {uid}", [Eviction(uid=uid, pod=pod, reason=reason)])

    def withdraw(self, uid: str, reason: str = "over its limit") -> None:
        self.publisher.evict(f"{reason} {uid}", ())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert self._task is None or not self._task.done(), self._task
                await asyncio.sleep(0.002)

    async def written(self) -> None:
        await self.until(lambda: self.waiting == 0)

    async def a_try(self) -> None:
        """Until the publisher has slept once more."""
        before = len(self.time.slept)
        await self.until(lambda: len(self.time.slept) > before)

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@asynccontextmanager
async def staged(kubeconfig: Path, *, run: bool = True, **options: Any) -> AsyncIterator[Stage]:
    time = Time()
    server = await ApiServer.connect(kubeconfig, clock=time.clock)
    stage = Stage(server, time, **options)
    if run:
        stage.begin()
    try:
        yield stage
    finally:
        await stage.end()
        await server.close()
