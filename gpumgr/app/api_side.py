"""The API server's side of the agent: the pods of this node, what is published, and the deletion of pods that failed by a refusal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

import structlog

from gpumgr.agent.node_report import OutboxState
from gpumgr.agent.shared_limits import report_two_limits
from gpumgr.aio import persistently
from gpumgr.allocator.pods import PodView
from gpumgr.app.components import Components
from gpumgr.app.read_model import ReadModel
from gpumgr.kubeapi.cache import NoPods, PodCache
from gpumgr.kubeapi.client import API_FAILURES, ApiServer
from gpumgr.kubeapi.publisher.decisions import DecisionReporter
from gpumgr.kubeapi.publisher.hami_register import RegisterReporter
from gpumgr.kubeapi.publisher.inventory import InventoryReporter
from gpumgr.kubeapi.publisher.node_reporter import NodeReporter
from gpumgr.kubeapi.publisher.publisher import Publisher
from gpumgr.settings import Settings
from gpumgr.settings.profile import mig_resource, offered, replica_resources
from gpumgr.settings.schema import KubernetesSettings

log = structlog.get_logger(__name__)

#: Reason of a pod that the kubelet fails because a device plugin refused it.
REFUSED: Final = "UnexpectedAdmissionError"
#: How long the stop waits for what is still to be published.
FLUSH_SECONDS: Final = 1.0


@dataclass
class ApiSide:
    """`pods` is the agent's port; without an API server it has no pods, and `publisher` is None. The reporters exist from `start` on."""

    pods: PodCache | NoPods
    publisher: Publisher | None
    delete_failed: bool
    server: ApiServer | None = None
    decisions: DecisionReporter | None = None
    node: NodeReporter | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator["ApiSide"]:
        """Raises SettingsError if the kubeconfig can't be used. At the end what is due is still published, for FLUSH_SECONDS at most."""
        if not settings.kubernetes.enabled:
            yield cls(pods=NoPods(), publisher=None, delete_failed=False)
            return
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
        publisher = Publisher(server, settings.node.name)
        try:
            pods = PodCache(
                server,
                settings.node.name,
                resources=replica_resources(settings),
                mig_resource=mig_resource(settings),
                write_events=settings.kubernetes.write_events,
            )
            yield cls(pods, publisher, settings.kubernetes.delete_failed_pods, server)
            await publisher.flush(FLUSH_SECONDS)
        finally:
            await server.close()

    def outbox(self) -> OutboxState | None:
        """What waits for the API server; None without one."""
        if self.publisher is None or not isinstance(self.pods, PodCache):
            return None
        return replace(self.publisher.state(), unreadable=self.pods.unreadable)

    def start(self, group: asyncio.TaskGroup, components: Components, readers: ReadModel) -> list[asyncio.Task[None]]:
        """The daemons of this side."""
        if not isinstance(self.pods, PodCache) or self.publisher is None:
            return []
        failed: asyncio.Queue[PodView] = asyncio.Queue()

        def changed(before: PodView | None, after: PodView | None) -> None:
            if before is not None and before.wants_gpu and (after is None or (after.ended and not before.ended)):
                components.reconciler.soon()
            if before is None and after is not None:
                report_two_limits(components.agent_state, after)
            if self.delete_failed and after is not None and after.reason == REFUSED and after.wants_gpu and after.controlled:
                failed.put_nowait(after)

        self.pods.subscribe(changed)
        node, scheduler = components.settings.node.name, components.settings.hami.scheduler
        self.decisions = DecisionReporter(self.publisher, agent_state=components.agent_state, pods=self.pods, node=node)
        self.node = NodeReporter(self.publisher.node, report=readers.report)
        inventory = InventoryReporter(
            self.publisher.node.annotate,
            report=readers.report,
            pods=self.pods,
            enforcement=components.enforcement.describe_limits,
            topology_manager=components.settings.kubelet.topology_manager_policy,
        )
        reporters = [("inventory_reporter", inventory.run)]
        if "replica" in offered(components.settings) and scheduler != "none":
            register = RegisterReporter(
                self.publisher.node.annotate,
                scheduler=scheduler,
                report=readers.report,
                pods=self.pods,
            )
            reporters.append(("hami_register_reporter", register.run))
        self.apply(components.settings.kubernetes)
        tasks: list[asyncio.Task[None]] = [group.create_task(self.pods.run(), name="pods")]
        for name, run in (
            ("publisher", self.publisher.run),
            ("decision_reporter", self.decisions.run),
            ("node_reporter", self.node.run),
            # The scheduler extender must not choose GPUs that kube-scheduler gives to claims.
            *(reporters if components.dra is None else []),
        ):
            tasks.append(group.create_task(persistently(name, run), name=name))
        if self.delete_failed:
            tasks.append(group.create_task(_delete(self.pods, failed), name="delete_failed_pods"))
        return tasks

    def apply(self, kubernetes: KubernetesSettings) -> None:
        """Sets what is published from now on."""
        if self.node is not None:
            self.node.switch(describe_node=kubernetes.describe_node, node_labels=kubernetes.node_labels)
        if self.decisions is not None:
            self.decisions.switch(annotate_pods=kubernetes.annotate_pods, write_events=kubernetes.write_events)

    async def wait_synced(self, seconds: float) -> None:
        """Waits until the pods of this node are known, or the time has passed."""
        if isinstance(self.pods, PodCache):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.pods.wait_synced()


async def _delete(pods: PodCache, failed: asyncio.Queue[PodView]) -> None:
    """Setting `kubernetes.delete_failed_pods`: the owner creates a new pod at once instead of after its back-off."""
    while True:
        view = await failed.get()
        try:
            if await pods.delete_pod(view):
                log.info("failed_pod_deleted", pod="/".join(view.key), pod_uid=view.uid)
        except API_FAILURES as error:
            log.warning("failed_pod_not_deleted", pod="/".join(view.key), pod_uid=view.uid, error=str(error))
