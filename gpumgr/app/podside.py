"""The API server's side: this node's pods if there is one to ask, and what is done about pods that failed because of a refusal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import aiohttp
import structlog

from gpumgr.agent.history import History
from gpumgr.agent.picture import OutboxState
from gpumgr.aio import persistently
from gpumgr.allocator.history import Entry
from gpumgr.allocator.pods import PodView
from gpumgr.app.announcing import Announcing
from gpumgr.app.describing import Describing
from gpumgr.app.readers import Readers
from gpumgr.app.station import Station
from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.cache import NoPods, PodCache
from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.kubeapi.writer.notices import Eviction
from gpumgr.settings import Settings
from gpumgr.settings.schema import KubernetesSettings

log = structlog.get_logger(__name__)

#: Reason of the event of a pod that should be evicted, where the API server refuses that.
NOT_EVICTED = "GpuPodNotEvicted"
#: Why the kubelet fails a pod that a device plugin refused.
REFUSED = "UnexpectedAdmissionError"


@dataclass
class PodSide:
    """`pods` is the agent's port; without an API server it knows no pod, and there is no `announcer`."""

    pods: PodCache | NoPods
    announcer: Announcer | None
    delete_failed: bool
    #: Shows the node's GPUs in the API server; called once a second.
    describing: Callable[[], None] = lambda: None
    announcing: Announcing | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator["PodSide"]:
        """Raises SettingsError if the kubeconfig can't be used."""
        if not settings.kubernetes.enabled:
            yield cls(pods=NoPods(), announcer=None, delete_failed=False)
            return
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
        try:
            yield cls(
                pods=PodCache(server, settings.node.name),
                announcer=Announcer(server, settings.node.name),
                delete_failed=settings.kubernetes.delete_failed_pods,
            )
        finally:
            await server.close()

    def outbox(self) -> OutboxState | None:
        """What waits for the API server; None if there is none."""
        return self.announcer.state() if self.announcer is not None else None

    def start(self, group: asyncio.TaskGroup, station: Station, readers: Readers) -> list[asyncio.Task[None]]:
        """The daemons of this side."""
        if not isinstance(self.pods, PodCache):
            return []
        failed: asyncio.Queue[PodView] = asyncio.Queue()

        def changed(before: PodView | None, after: PodView | None) -> None:
            if before is not None and before.wants_gpu and (after is None or (after.ended and not before.ended)):
                station.housekeeping.soon()
            if self.delete_failed and after is not None and after.reason == REFUSED and after.wants_gpu and after.controlled:
                failed.put_nowait(after)

        self.pods.subscribe(changed)
        tasks: list[asyncio.Task[None]] = [group.create_task(self.pods.run(), name="pods")]
        if self.announcer is not None:
            self.apply(station.settings.kubernetes, readers)
            announcing = self.announcing = self._announcing(self.announcer, self.pods, station)
            self.announcer.on_refused_eviction = partial(tell_refused_eviction, station.books.history)
            tasks.append(group.create_task(persistently("announcer", self.announcer.run), name="announcer"))
            tasks.append(group.create_task(persistently("announcing", announcing.run), name="announcing"))
        if self.delete_failed:
            tasks.append(group.create_task(_delete(self.pods, failed), name="delete_failed_pods"))
        return tasks

    def apply(self, kubernetes: KubernetesSettings, readers: Readers) -> None:
        """What is shown in the API server, from now on."""
        if self.announcer is not None:
            self.describing = Describing(
                self.announcer,
                picture=readers.picture,
                describe_node=kubernetes.describe_node,
                node_labels=kubernetes.node_labels,
            )
        if self.announcing is not None:
            self.announcing.switch(annotate_pods=kubernetes.annotate_pods, write_events=kubernetes.write_events)

    def _announcing(self, announcer: Announcer, pods: PodCache, station: Station) -> Announcing:
        kubernetes = station.settings.kubernetes
        return Announcing(
            announcer,
            books=station.books,
            pods=pods,
            describe=lambda: self.describing(),
            node=station.settings.node.name,
            annotate_pods=kubernetes.annotate_pods,
            write_events=kubernetes.write_events,
        )

    async def wait_synced(self, seconds: float) -> None:
        """Until the pods of this node are known, or for so long."""
        if isinstance(self.pods, PodCache):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.pods.wait_synced()


def tell_refused_eviction(history: History, eviction: Eviction, why: str) -> None:
    """Who drains a GPU finds it there, and the pod's owner in its events; of a repeated attempt nothing is said."""
    message = f"the pod is not evicted ({eviction.reason}): {why}"
    history.add_news(Entry(at=history.now(), what="event", code=NOT_EVICTED, pod=eviction.pod, pod_uid=eviction.uid, why=message))


async def _delete(pods: PodCache, failed: asyncio.Queue[PodView]) -> None:
    """Setting `kubernetes.delete_failed_pods`: the owner makes a new pod at once instead of after its back-off."""
    while True:
        view = await failed.get()
        try:
            if await pods.delete_pod(view):
                log.info("failed_pod_deleted", pod="/".join(view.key), pod_uid=view.uid)
        except (GpumgrError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("failed_pod_not_deleted", pod="/".join(view.key), pod_uid=view.uid, error=str(error))
