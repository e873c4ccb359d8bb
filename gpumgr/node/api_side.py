"""The part of the agent that uses the API server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from gpumgr.agent.container_starts import report_two_limits
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.aio import forever, persistently
from gpumgr.enforcement.mps.grace_periods import ClientsOfPods, GracePeriods
from gpumgr.kube.cache import NoPods, PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.decisions import DecisionReporter
from gpumgr.kube.publisher.hami import register
from gpumgr.kube.publisher.node_reporter import InventoryReporter, NodeReporter, report_node
from gpumgr.kube.publisher.objects import waits_for_deletion
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.node.components import Components
from gpumgr.placement.pods import PodView
from gpumgr.settings import Settings
from gpumgr.settings.profile import mig_resource, offered, replica_resources
from gpumgr.settings.schema import KubernetesSettings


@dataclass
class ApiSide:
    """`pods` implements gpumgr.agent.ports.Pods. Without an API server `pods` is empty and `publisher` is None. `start` sets `decisions`
    and `node`."""

    pods: PodCache | NoPods
    publisher: Publisher | None
    server: ApiServer | None = None
    decisions: DecisionReporter | None = None
    node: NodeReporter | None = None
    _watch: asyncio.Task[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator["ApiSide"]:
        """Raises SettingsError if the kubeconfig can't be used. When the context ends, waiting writes are dropped. The next agent makes
        them again, except events."""
        if not settings.kubernetes.enabled:
            yield cls(pods=NoPods(), publisher=None)
            return
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
        publisher = Publisher(server, settings.node.name)
        try:
            pods = PodCache(
                server,
                settings.node.name,
                resources=replica_resources(settings),
                mig_resource=mig_resource(settings),
            )
            pods.write_events = settings.kubernetes.write_events
            side = cls(pods, publisher, server)
            try:
                yield side
            finally:
                if side._watch is not None:
                    side._watch.cancel()
                    await asyncio.wait({side._watch})
        finally:
            await server.close()

    def watch(self) -> asyncio.Task[None]:
        """The first call starts the task that keeps `pods` up to date."""
        if self._watch is None:
            self._watch = asyncio.create_task(
                self.pods.run() if isinstance(self.pods, PodCache) else asyncio.sleep(0), name="watch"
            )
        return self._watch

    def api_queue(self) -> ApiQueueState | None:
        """The writes that wait for the API server; None without one."""
        if self.publisher is None or not isinstance(self.pods, PodCache):
            return None
        return replace(self.publisher.state(), unreadable=self.pods.unreadable)

    def start(self, group: asyncio.TaskGroup, components: Components) -> list[asyncio.Task[None]]:
        if not isinstance(self.pods, PodCache) or self.publisher is None:
            return []
        publisher, delete_failed = self.publisher, components.settings.kubernetes.delete_failed_pods

        def changed(before: PodView | None, after: PodView | None) -> None:
            if before is not None and before.wants_gpu and (after is None or (after.ended and not before.ended)):
                components.reconciler.soon()
            if before is None and after is not None:
                report_two_limits(components.agent_state, after)
            if delete_failed and after is not None and waits_for_deletion(after) and not waits_for_deletion(before):
                publisher.delete_pod(after.key, after.uid)

        self.pods.subscribe(changed)
        enforcement, agent_state = components.enforcement, components.agent_state
        grace_periods = GracePeriods(ClientsOfPods(enforcement.mps, enforcement.containers, lambda: agent_state.ledger).end)
        self.pods.subscribe(grace_periods.pod_changed)
        node = components.settings.node.name
        self.decisions = DecisionReporter(self.publisher, agent_state=components.agent_state, pods=self.pods, node=node)
        self.node = NodeReporter(self.publisher)
        self.apply(components.settings.kubernetes)
        reporters = {"node_reporter": self.node.report, **self._annotation_reporters(components)}
        daemons: dict[str, Callable[[], Awaitable[object]]] = {
            "publisher": self.publisher.run,
            "decision_reporter": self.decisions.run,
            "node_reports": partial(report_node, components.read_model.report, reporters),
            "grace_periods": grace_periods.run,
        }
        tasks: list[asyncio.Task[None]] = [group.create_task(forever("pods", self.watch), name="pods")]
        tasks += [group.create_task(persistently(name, run), name=name) for name, run in daemons.items()]
        return tasks

    def _annotation_reporters(self, components: Components) -> Mapping[str, Callable[[NodeReport], None]]:
        """The reporters that annotate the node; none in mode dra. There kube-scheduler chooses the GPUs, so gpumgr's scheduler
        extender must not see an inventory."""
        if components.dra is not None or self.publisher is None:
            return {}
        annotate, settings = self.publisher.annotate, components.settings
        inventory = InventoryReporter(
            annotate,
            pods=self.pods,
            enforcement=lambda: components.enforcement.limits.described,
            topology_manager=settings.kubelet.topology_manager_policy,
        )
        reporters: dict[str, Callable[[NodeReport], None]] = {"inventory_reporter": inventory.report}
        if "replica" in offered(settings) and settings.hami.scheduler != "none":
            reporters["hami_register_reporter"] = partial(register, annotate, self.pods)
        return reporters

    def apply(self, kubernetes: KubernetesSettings) -> None:
        if isinstance(self.pods, PodCache):
            self.pods.write_events = kubernetes.write_events
        if self.node is not None:
            self.node.switch(describe_node=kubernetes.describe_node, node_labels=kubernetes.node_labels)
        if self.decisions is not None:
            self.decisions.switch(annotate_pods=kubernetes.annotate_pods, write_events=kubernetes.write_events)

    async def wait_synced(self, seconds: float) -> None:
        if isinstance(self.pods, PodCache):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.pods.wait_synced()
