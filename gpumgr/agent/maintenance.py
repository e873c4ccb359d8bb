"""What an operator does with one GPU: cordon, drain, uncordon, reset.

1. A cordon is on disk before it is confirmed, and in force when it is: no grant is decided after it that does not know of it.
2. A drain is a cordon that also tells who is still there, and may ask the API server to evict them, after a restart again, until the
   GPU is uncordoned. It ends nobody itself.
3. Only a GPU that is cordoned and empty is reset. NVML can't do that, so the driver's own program does; what it says is passed on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import structlog

from gpumgr.agent.api import builtins
from gpumgr.agent.cordons import CORDONS_NOTE, REASON_CHARACTERS, Cordon, decode_cordons, encode_cordons
from gpumgr.agent.drain_evictions import DrainEvictions, Evictor
from gpumgr.agent.gpu_names import find_registered_gpu
from gpumgr.agent.ports import Checkpoint, Pods
from gpumgr.agent.rows import rows_on, unattributed_rows
from gpumgr.agent.state import AgentState
from gpumgr.aio import run_shielded
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import RegisteredGpu
from gpumgr.errors import CheckpointError, InputError, NvmlError, Refusal
from gpumgr.topology.devices import GpuProcess
from gpumgr.usage.node_use import NodeUse

log = structlog.get_logger(__name__)

Action = Literal["cordon", "drain", "uncordon", "reset"]

#: How many of those who are in the way a refusal names.
NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceRequest:
    """`gpu` is what people call a GPU: gpumgr.agent.gpu_names has the grammar. `evict`: a drain
    evicts the pods that block it. `reason` is the operator's, for everybody to read."""

    action: Action
    gpu: str
    reason: str = ""
    evict: bool = False


class Health(Protocol):
    """Who says which GPUs take anything new (gpumgr.nvml.monitor.Monitor)."""

    def cordon(self, uuid: str, message: str) -> None:
        """Nothing new goes there, also if the GPU comes only later."""
        ...

    def uncordon(self, uuid: str) -> None: ...

    async def publish_health(self) -> None:
        """When this returns, what was held or released before is in force."""
        ...

    async def processes(self, uuid: str) -> Sequence[GpuProcess] | None:
        """Those with a context on the GPU at this moment; None: the driver does not list them, or the GPU answers with an error. Raises
        NvmlError if the driver does not answer."""
        ...


#: Resets the GPU with this UUID; what the driver's program said. Raises NvmlError with its words if it did not.
Reset = Callable[[str], Awaitable[str]]


class Maintenance:
    """`restore` comes before the first GPU is offered.

    `announcer` None: there is no API server. `kept_by` says of a UUID, in words that follow "can't be reset:", what of our own has the GPU
    in use (an MPS daemon), None if nothing has. `use` is the latest look at who uses what, None before the first.
    """

    def __init__(
        self,
        *,
        agent_state: AgentState,
        health: Health,
        checkpoint: Checkpoint,
        pods: Pods,
        publisher: Evictor | None,
        reset: Reset,
        kept_by: Callable[[str], str | None] = lambda _: None,
        use: Callable[[], NodeUse | None] = lambda: None,
    ) -> None:
        self._agent_state, self._health, self._checkpoint, self._pods = agent_state, health, checkpoint, pods
        self._reset, self._kept_by, self._use = reset, kept_by, use
        self._evictions = DrainEvictions(agent_state=agent_state, pods=pods, evictor=publisher) if publisher is not None else None
        self._cordons: Mapping[str, Cordon] = {}
        self._turn = asyncio.Lock()

    @property
    def cordons(self) -> Mapping[str, Cordon]:
        """By UUID."""
        return self._cordons

    def restore(self, notes: Mapping[str, str]) -> None:
        """After a restart: what was cordoned before it. Raises CheckpointError if the note can't be read."""
        self._cordons = decode_cordons(notes.get(CORDONS_NOTE, "{}"))
        for uuid, cordon in self._cordons.items():
            self._health.cordon(uuid, cordon.sentence)

    async def evict_again(self) -> None:
        """After a restart, once the API server's pods are known: asks for the evictions that drains of before it asked for."""
        async with self._turn:
            for uuid, cordon in self._cordons.items():
                card = self._agent_state.ledger.gpu_registry.by_uuid.get(uuid)
                if card is not None and cordon.evict and self._evictions is not None:
                    self._evictions.request(card, cordon, again=True)

    async def execute(self, order: MaintenanceRequest) -> Mapping[str, Any]:
        """Carries the order out, to its end even if nobody waits for it any more; what became of it and who is on the GPU, as JSON.

        Raises InputError for a GPU that is not known or a reason that is too long, Refusal if it can't be done now.
        """
        return await run_shielded(self._follow(order), name=f"gpu_{order.action}")

    async def _follow(self, order: MaintenanceRequest) -> Mapping[str, Any]:
        order = replace(order, reason=" ".join(order.reason.split()))
        if len(order.reason) > REASON_CHARACTERS:
            raise InputError(f"the reason has {len(order.reason)} characters; {REASON_CHARACTERS} at most")
        async with self._turn:
            agent_state = self._agent_state
            card = find_registered_gpu(
                order.gpu, agent_state.ledger.gpu_registry, agent_state.node().indices, agent_state.inventory.snapshot.failures
            )
            match order.action:
                case "cordon" | "drain":
                    done = await self._close(card, order)
                case "uncordon":
                    done = {"changed": await self._put(card, None, order.reason)}
                    if self._evictions is not None:
                        self._evictions.cancel(card)
                case "reset":
                    done = await self._reset_empty(card, order)
            return {"action": order.action, **self._state(card), **done}

    # -- cordons -----------------------------------------------------------------------------------------------------------

    async def _close(self, card: RegisteredGpu, order: MaintenanceRequest) -> dict[str, Any]:
        """A cordon never takes a drain back, and one without a reason keeps the reason of before."""
        drain = order.action == "drain"
        evict = drain and order.evict
        if evict and self._evictions is None:
            raise Refusal(
                "invalid_request",
                "there is no API server to ask for evictions: this agent runs standalone; drain without evicting, and end the pods another "
                "way",
            )
        before = self._cordons.get(card.uuid) or Cordon(since=self._agent_state.history.now())
        reason = order.reason or before.reason
        cordon = replace(before, reason=reason, draining=before.draining or drain, evict=before.evict or evict)
        done: dict[str, Any] = {"changed": await self._put(card, cordon, cordon.reason)}
        if evict and self._evictions is not None:
            done |= self._evictions.request(card, cordon)
        return done

    async def _put(self, card: RegisteredGpu, cordon: Cordon | None, why: str) -> bool:
        """False: so it was already."""
        if cordon == self._cordons.get(card.uuid):
            return False
        cordons = {uuid: kept for uuid, kept in self._cordons.items() if uuid != card.uuid}
        if cordon is not None:
            cordons[card.uuid] = cordon
        code = "uncordoned" if cordon is None else "draining" if cordon.draining else "cordoned"
        entry = self._agent_state.history.numbered(Entry(what="gpu", code=code, gpus=(card.name,), why=why))
        try:
            await self._checkpoint.save_note(CORDONS_NOTE, encode_cordons(cordons), (entry,))
        except CheckpointError as error:
            raise Refusal("internal", f"it can't be remembered, so nothing was changed: {error}") from error
        self._cordons = cordons
        if cordon is None:
            self._health.uncordon(card.uuid)
        else:
            self._health.cordon(card.uuid, cordon.sentence)
        await self._health.publish_health()
        log.info(f"gpu_{code}", gpu=card.uuid, reason=why)
        self._agent_state.history.add(entry, saved=True)
        return True

    # -- who is there ------------------------------------------------------------------------------------------------------

    def _state(self, card: RegisteredGpu) -> dict[str, Any]:
        """`gpu`, `cordon`, and what is on it: `containers` as /api/state has them, `strangers`, and whether it is `empty`.

        It is not while nobody looked: after a restart, who sits there without an allocation is not known for a moment.
        """
        cordon = self._cordons.get(card.uuid)
        containers = rows_on(card, self._agent_state.ledger.on(card.name), self._pods)
        use = self._use()
        strangers = unattributed_rows(card, use)
        return {
            "at": self._agent_state.history.now(),
            "gpu": {"uuid": card.uuid, "name": card.name, "index": self._agent_state.node().indices.get(card.name)},
            "cordon": asdict(cordon) if cordon else None,
            "empty": use is not None and not containers and not strangers,
            "containers": [builtins(row) for row in containers],
            "strangers": [builtins(row) for row in strangers],
        }

    # -- reset -------------------------------------------------------------------------------------------------------------

    async def _reset_empty(self, card: RegisteredGpu, order: MaintenanceRequest) -> dict[str, Any]:
        cordon, label = self._cordons.get(card.uuid), self._label(card)
        if cordon is None:
            raise Refusal(
                "conflict",
                f"{label} can't be reset: it is not cordoned, so somebody may be placed there any moment; drain it first",
            )
        if holders := self._agent_state.ledger.on(card.name):
            raise Refusal(
                "conflict", f"{label} can't be reset: {_named([a.describe() for a in holders])} still on it; drain it first"
            )
        if obstacle := self._kept_by(card.uuid):
            raise Refusal("conflict", f"{label} can't be reset: {obstacle}")
        try:
            await self._refuse_processes(card)
            said = await self._reset(card.uuid)
        except NvmlError as error:
            log.warning("gpu_not_reset", gpu=card.uuid, reason=str(error))
            raise Refusal("conflict", f"{label} was not reset: {error}") from error
        why = order.reason or cordon.reason
        log.info("gpu_reset", gpu=card.uuid, reason=why)
        self._agent_state.history.add(Entry(what="gpu", code="reset", gpus=(card.name,), why=why))
        return {"said": said}

    async def _refuse_processes(self, card: RegisteredGpu) -> None:
        """Where nobody can list them (the GPU is lost, say), the driver's program still refuses while one has the GPU open."""
        processes = await self._health.processes(card.uuid)
        if processes:
            names = [f"pid {p.pid} ({'?' if p.memory_bytes is None else p.memory_bytes >> 20} MiB)" for p in processes]
            raise Refusal(
                "conflict", f"{self._label(card)} can't be reset: {_named(names)} still on it, in no allocation; end them first"
            )

    def _label(self, card: RegisteredGpu) -> str:
        return self._agent_state.node().label(card.name)


def _named(names: Sequence[str]) -> str:
    """`a, b and 3 more are`."""
    more = len(names) - NAMED
    listed = ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
