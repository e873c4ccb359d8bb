"""A publisher in front of an API server, with a clock that its pauses advance."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpumgr.agent.ports import Eviction
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.events import Event, pod_ref
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.placement.pods import PodKey
from tests.background import background, until

POD = ("team", "web-0")
OTHER = ("team", "web-1")


class Time:
    """Advances with each sleep. Begins at a whole second of unix time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        #: While it is cleared, no sleep ends.
        self.passes = asyncio.Event()
        self.passes.set()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.passes.wait()
        self.now += seconds
        await asyncio.sleep(0)


class Stage:
    def __init__(self, server: ApiServer, time: Time, **options: Any) -> None:
        self.time = time
        self.publisher = Publisher(
            server,
            "node-1",
            clock=lambda: time.now,
            wall=lambda: 1_800_000_000 + time.now,
            sleep=time.sleep,
            jitter=lambda: 0.5,
            **options,
        )

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

    async def written(self) -> None:
        await until(lambda: self.waiting == 0)

    async def a_try(self) -> None:
        """Waits until the publisher has slept once more."""
        before = len(self.time.slept)
        await until(lambda: len(self.time.slept) > before)


@asynccontextmanager
async def resting(kubeconfig: Path, **options: Any) -> AsyncIterator[Stage]:
    """A publisher that does not run."""
    time = Time()
    server = await ApiServer.connect(kubeconfig, clock=lambda: time.now)
    try:
        yield Stage(server, time, **options)
    finally:
        await server.close()


@asynccontextmanager
async def staged(kubeconfig: Path, **options: Any) -> AsyncIterator[Stage]:
    async with resting(kubeconfig, **options) as stage, background(stage.publisher.run()):
        yield stage
