"""The parts of an agent that replace the device plugins in mode dra: claims, the driver's registration, and the node's ResourceSlice.

After a change to mode plugin the agent deletes the slice, and keeps claims that hold GPUs until they end.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final, Literal

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.claims import NodeClaims
from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.pods import holders_of_other_mode
from gpumgr.agent.ports import PodResources, Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import persistently, wait_at_most
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.common.rpc.unix_server import LinkState, Observe
from gpumgr.common.units import DRA_DRIVER
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, failure_text
from gpumgr.kubelet.claim_reader import ClaimReader, WaitingPods, find_shares
from gpumgr.kubelet.dra_registration import DraDriver
from gpumgr.kubelet.dra_service import WAIT_SECONDS
from gpumgr.kubelet.slice_publisher import SlicePublisher
from gpumgr.kubelet.slices import Taint, slice_devices, with_lost
from gpumgr.ledger.claims import Share, device_name
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.ledger.tables import LOST_NOTE
from gpumgr.settings import Settings
from gpumgr.settings.profile import had_mode_dra

log = structlog.get_logger(__name__)

#: How long calls are still served after the slice is deleted, because some pods are already bound.
AFTER_WITHDRAWAL_SECONDS: Final = 1.0
#: In mode plugin: the time limit of a try to delete the slice; the first and the longest pause between tries.
WITHDRAWAL_SECONDS: Final = 5.0
WITHDRAWAL_PAUSES: Final = (1.0, 600.0)
CDI_CHECK_SECONDS: Final = 1.0
RECLAIM_SECONDS: Final = 30.0
#: The pause between two tries to adopt claims, and the longest wait for the first check of the pods.
ADOPT_SECONDS: Final = 2.0
_CLOSED: Final = "node.mode of this node is plugin, so it serves no new claims: delete the pod, so that it is scheduled again"
_LOST: Final = "the ledger was lost, and which GPUs the node's pods have is not known yet"
UNHEALTHY_TAINT: Final = f"{DRA_DRIVER}/unhealthy"
CORDONED_TAINT: Final = f"{DRA_DRIVER}/cordoned"


class ClaimParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the agent that decide about claims and start their containers."""

    agent_state: AgentState
    starts: ContainerStarts
    pods: Pods
    enforcement: Enforcer
    pod_resources: PodResources


class DraSide:
    """Call `run` (in mode plugin `run_out`) once the ledger is reconciled; `stop` ends it. `lost`: the ledger was lost. In mode dra
    `observe` gets the kubelet's calls, and `on_state` each change of the registration."""

    def __init__(
        self,
        settings: Settings,
        driver: DraDriver,
        server: ApiServer,
        parts: ClaimParts,
        *,
        lost: bool,
        observe: Observe = lambda *_: None,
        on_state: Callable[[LinkState], None] = lambda _state: None,
    ) -> None:
        self._settings, self._server, self._lost, self._on_state = settings, server, lost, on_state
        self._agent_state, self._pods, self._enforcement = parts.agent_state, parts.pods, parts.enforcement
        self._pod_resources = parts.pod_resources
        plugin = settings.node.mode == "plugin"
        #: Why nothing may be registered now.
        self.held_back: str | None = f"{_LOST}: the pods are not examined yet" if plugin and lost else None
        self._examined = asyncio.Event()
        #: Whether this node may have served claims.
        self._had_claims = not plugin or had_mode_dra(settings)
        node = settings.node.name
        self.claims = NodeClaims(
            agent_state=parts.agent_state,
            reader=ClaimReader(server, node),
            pods=parts.pods,
            enforcement=parts.enforcement,
            starts=parts.starts,
            share_mode=lambda: self._settings.placement.share_mode,
            closed=_CLOSED if plugin else None,
        )
        self.publisher = SlicePublisher(server, node)
        self._driver, self.link = driver, driver.link
        if not plugin:
            driver.plugin.observe, driver.link.on_state = observe, self._link_changed
        self._publishing: asyncio.Task[None] | None = None
        self._waiting_pods = WaitingPods(server, parts.pods.all, node, self.claims.held)

    @property
    def states(self) -> Mapping[str, LinkState]:
        """The state of the registration. `error` also says why the driver must not be registered yet."""
        return {DRA_DRIVER: replace(self.link.state, error=self.held_back or self.link.state.error)}

    def apply(self, settings: Settings) -> None:
        """Applies changed settings: to the slice at once, to claims from the next one on."""
        self._settings = settings
        self.update()

    def update(self) -> None:
        """Call it when the GPUs, their health or the mechanisms of new shares have changed."""
        registry, inventory = self._agent_state.ledger.gpu_registry, self._agent_state.inventory
        taints = gpu_taints(registry, inventory, self._settings.node.unhealthy_taint_effect)
        names = {gpu.uuid: gpu.name for gpu in registry.gpus}
        text, shared = "+".join(self._enforcement.choice.mechanisms), self._settings.placement.share_mode
        now = slice_devices(inventory.snapshot, names, enforcement=text, taints=taints, shared=shared)
        self.publisher.offer(with_lost(self.publisher.devices or (), now))
        failed = inventory.failures(registry)
        self._driver.faults.set({device_name(gpu.name): failed.get(gpu.name) for gpu in registry.gpus})

    async def run(self) -> None:
        """Restores the prepared claims, then serves the kubelet, until `stop` or cancellation."""
        await self._wait_for_other_mode()
        await self.claims.restore()
        if self._lost:
            await self._adopt()
        self._hold(None)
        self.update()
        self._link_changed(self.link.state)
        async with asyncio.TaskGroup() as group:
            self._publishing = group.create_task(persistently("slice_publisher", self.publisher.run), name="slice_publisher")
            group.create_task(persistently("waiting_pods", self._waiting_pods.run), name="waiting_pods")
            self._serve(group)

    async def run_out(self) -> None:
        """Ends mode dra. Deletes the slice, but only if the node may have one, because in mode plugin the agent may lack the right. Serves
        NodeUnprepareResources until no prepared claim is left, because drained pods end only after this call. If the ledger was lost,
        first adopts the claims of the node's pods."""
        async with asyncio.TaskGroup() as group:
            if self._had_claims or self._agent_state.ledger.claims:
                group.create_task(self._withdraw(), name="slice_withdrawal")
            if self._lost:
                await self._adopt()
            await self.claims.restore()
            self._hold(None)
            if not self._agent_state.ledger.claims:
                return
            daemons = self._serve(group)
            while self._agent_state.ledger.claims:  # noqa: ASYNC110 (a ledger has no event)
                await asyncio.sleep(1.0)
            for daemon in daemons:
                daemon.cancel()
            await self.link.stop(AFTER_WITHDRAWAL_SECONDS)

    def _serve(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        self._driver.plugin.decide_with(self.claims)
        return [
            group.create_task(persistently("cdi_specs", self._keep_specs), name="cdi_specs"),
            group.create_task(persistently("reclaim", self._reclaim), name="reclaim"),
            group.create_task(self.link.run(), name="dra_link"),
        ]

    async def _withdraw(self) -> None:
        pause, longest = WITHDRAWAL_PAUSES
        while not await self.publisher.withdraw(timeout_seconds=WITHDRAWAL_SECONDS):
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def stop(self, grace_seconds: float) -> None:
        """Withdraws the slice, and ends the registration a second later, because pods that were bound just before would otherwise wait for
        a minute. If another agent has registered the driver, the slice stays."""
        has_successor = await asyncio.to_thread(self.link.has_other_instance)
        # Each part has a limit, so that a hanging API server or call leaves time for the rest.
        part = grace_seconds / 3
        if self._publishing is not None and not has_successor and await self.publisher.withdraw(timeout_seconds=part):
            await asyncio.sleep(AFTER_WITHDRAWAL_SECONDS)
        await self.link.stop(part)

    async def _wait_for_other_mode(self) -> None:
        """Waits until the pods of the device plugin have ended, because claims must not get their GPUs. Ends the registration until then:
        this process may have registered while it waited for another agent."""
        while (holders := holders_of_other_mode(self._agent_state.ledger, "dra")) is not None:
            self._hold(holders)
            await self.link.suspend()
            await asyncio.sleep(2.0)

    def _hold(self, reason: str | None) -> None:
        """Sets why the driver (in mode plugin: the device plugins) must not be registered; None lifts this."""
        if reason is not None:
            if reason != self.held_back and self._settings.node.mode == "dra":
                log.warning("registration_waits", reason=reason)
            self._driver.plugin.waits_for = reason
        self.held_back = reason
        self._examined.set()

    async def held_back_by(self) -> str | None:
        """Why the device plugins must not be registered yet. Waits at most ADOPT_SECONDS for the first check."""
        if self.held_back is not None:
            await wait_at_most(self._examined, ADOPT_SECONDS)
        return self.held_back

    async def _adopt(self) -> None:
        """After the loss of the ledger: prepares the claims of the node's pods again, because the kubelet does not request that. Then
        removes LOST_NOTE."""
        while (failure := await self._adopt_once()) is not None:
            self._hold(f"{_LOST}: {failure}" if self._had_claims or self._pods.synced else None)
            await self.link.suspend()
            await asyncio.sleep(ADOPT_SECONDS)
        with suppress(CheckpointError):
            await self._agent_state.save_note(LOST_NOTE, "")

    async def _adopt_once(self) -> str | None:
        """Prepares the claims of the node's pods. Returns why a claim's GPUs are not known; None if all are known."""
        if not self._pods.synced:
            return "the API server has not listed the pods"
        used = {(pod.namespace, use.claim) for pod in self._pods.all() if not pod.ended for use in pod.claims}
        for namespace, name in sorted(used):
            try:
                uid, shares = await find_shares(self._server, self._settings.node.name, namespace, name)
            except API_FAILURES as error:
                if isinstance(error, AnswerError) and error.status == 403 and not self._had_claims:
                    log.warning(
                        "claims_not_adopted", error=str(error), consequence="claims of an earlier mode dra, if any, are not known"
                    )
                    return None
                return f"claim {namespace}/{name}: {failure_text(error)}"
            except UNREADABLE as error:
                log.error("claim_not_adopted", claim=f"{namespace}/{name}", error=str(error))
                continue
            if not shares:
                continue
            if not self._agent_state.inventory.snapshot.gpus:
                return "the driver has not listed the GPUs"
            claim, deadline = ClaimRef(namespace=namespace, name=name, uid=uid), time.monotonic() + WAIT_SECONDS
            try:
                await self.claims.prepare(claim, deadline=deadline, adopted=True)
            except Refusal as error:
                if error.code == "internal" and not self._agent_state.ledger.of_claim(uid):
                    return str(error)
                log.error("claim_not_adopted", claim=str(claim), error=str(error))
        return None

    async def _reclaim(self) -> None:
        """Frees leaked claims (`NodeClaims.reclaim`) at intervals."""

        async def find(claim: ClaimRef) -> tuple[str, Collection[Share]] | None:
            try:
                return await find_shares(self._server, self._settings.node.name, claim.namespace, claim.name)
            except (*API_FAILURES, *UNREADABLE) as error:
                failed[str(claim)] = failure_text(error)
                return None

        failed, logged = dict[str, str](), dict[str, str]()
        while True:
            await asyncio.sleep(RECLAIM_SECONDS)
            failed.clear()
            try:
                await self.claims.reclaim(find, await self._pod_resources.list())
            except (*API_FAILURES, *UNREADABLE) as error:
                failed["the kubelet's list"] = failure_text(error)
            if failed and failed != logged:
                consequence = f"these claims keep their GPUs; the agent examines them again after {RECLAIM_SECONDS:g} s"
                log.warning("leaked_claims_not_examined", errors=dict(failed), consequence=consequence)
            logged = dict(failed)

    async def _keep_specs(self) -> None:
        """Writes CDI specs again that other programs have removed or changed; all of them if the driver has numbered its GPUs anew. A
        container that restarts needs its CDI spec, but the kubelet does not prepare its claim again."""
        minors = self._minors()
        while True:
            await asyncio.sleep(CDI_CHECK_SECONDS)
            before, minors = minors, self._minors()
            intact = await asyncio.to_thread(self._enforcement.intact_specs) if minors == before else ()
            await self.claims.restore(unless=intact)

    def _minors(self) -> Mapping[str, int | None]:
        return {gpu.uuid: gpu.minor for gpu in self._agent_state.inventory.snapshot.gpus}

    def _link_changed(self, state: LinkState) -> None:
        if state.registrations > self.publisher.registration.registrations:
            self._waiting_pods.retry_now()
        self.publisher.follow(state)
        self._on_state(state)


def gpu_taints(
    registry: GpuRegistry, inventory: Inventory, unhealthy: Literal["NoSchedule", "NoExecute"]
) -> Mapping[str, tuple[Taint, ...]]:
    """GPU -> its taints, for each GPU that does not work or accepts no new containers."""
    cordoned = dict.fromkeys(inventory.unschedulable_reasons(registry), (Taint(key=CORDONED_TAINT),))
    failed = dict.fromkeys(inventory.failures(registry), (Taint(key=UNHEALTHY_TAINT, effect=unhealthy),))
    return {**cordoned, **failed}
