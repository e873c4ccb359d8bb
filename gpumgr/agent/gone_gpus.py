"""Forgets registered GPUs that were removed for good, so that the node does not report them as missing forever: on an operator's request,
or when another GPU is at their PCI address.

The driver must not list such a GPU, and it must have no allocation and no process of an ended container. If it returns, it gets the same
name, and its cordon is still in force.
"""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from gpumgr.agent.inventory import EMPTY
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.tables import decode_note, encode_note

log = structlog.get_logger(__name__)

#: The checkpoint's note: UUID of a registered GPU -> the PCI address at which the driver listed it last.
ADDRESSES_NOTE: Final = "gpu_addresses"
#: The kubelet crashes if an id vanishes while it allocates that id. So a GPU's ids are Unhealthy for this time before it is forgotten.
_PATIENCE_SECONDS: Final = 10.0


class GoneGpus:
    """Before `restore`, `look` does nothing. `clock` is monotonic, in seconds."""

    def __init__(self, agent_state: AgentState, *, clock: Callable[[], float]) -> None:
        self._agent_state, self._clock = agent_state, clock
        self._addresses: Mapping[str, str] | None = None
        #: UUID -> when another GPU was seen first at its address.
        self._replaced_since: dict[str, float] = {}

    def restore(self, notes: Mapping[str, str]) -> None:
        """Restores the addresses; call it after the quarantine is restored. A note that can't be read counts as empty: an operator
        can still forget the GPUs."""
        try:
            self._addresses = decode_note(notes, ADDRESSES_NOTE, dict[str, str])
        except CheckpointError as error:
            log.warning("gpu_addresses_lost", reason=str(error))
            self._addresses = {}

    async def look(self) -> None:
        """Records the addresses of the listed GPUs, and forgets GPUs that were replaced. Call it after each sample."""
        if self._addresses is None:
            return
        agent_state = self._agent_state
        registered, listed = agent_state.ledger.gpu_registry.by_uuid, agent_state.inventory.snapshot.gpus
        addresses = {uuid: place for uuid, place in self._addresses.items() if uuid in registered}
        addresses |= {gpu.uuid: gpu.bus_id for gpu in listed if gpu.uuid in registered and gpu.bus_id is not None}
        try:
            if addresses != self._addresses:
                await agent_state.save_note(ADDRESSES_NOTE, encode_note(addresses))
                self._addresses = addresses
            await self._forget_replaced(addresses, {gpu.bus_id: gpu.uuid for gpu in listed})
        except CheckpointError as error:
            log.error("gpu_not_forgotten", reason=str(error))

    async def _forget_replaced(self, addresses: Mapping[str, str], present: Mapping[str | None, str]) -> None:
        now, state = self._clock(), self._agent_state
        replaced = {uuid: present[place] for uuid, place in addresses.items() if present.get(place, uuid) != uuid}
        self._replaced_since = {uuid: self._replaced_since.get(uuid, now) for uuid in replaced}
        for uuid, since in self._replaced_since.items():
            gpu = state.ledger.gpu_registry.by_uuid.get(uuid)
            if gpu is not None and now - since >= _PATIENCE_SECONDS and self._obstacle(gpu) is None:
                await self._forget(gpu, f"{replaced[uuid]} is at its PCI address {addresses[uuid]}")

    async def forget(self, gpu: RegisteredGpu, why: str) -> None:
        """Raises Refusal with the obstacle."""
        obstacle, label = self._obstacle(gpu), self._agent_state.node().label(gpu.name)
        if self._agent_state.inventory.snapshot is EMPTY:
            obstacle = "the driver has not listed the node's GPUs yet"
        if obstacle is not None:
            raise Refusal("conflict", f"{label} can't be forgotten: {obstacle}")
        try:
            await self._forget(gpu, why)
        except CheckpointError as error:
            raise Refusal(
                "internal", f"{label} can't be forgotten, since the ledger can't be saved; nothing was changed: {error}"
            ) from error

    def _obstacle(self, gpu: RegisteredGpu) -> str | None:
        state = self._agent_state
        snapshot = state.inventory.snapshot
        if gpu.uuid in {each.uuid for each in snapshot.gpus} | {each.uuid for each in snapshot.failures}:
            return "the driver lists it; `gpumgr gpu cordon` takes it out of service"
        if holders := state.ledger.on(gpu.name):
            return f"it is still granted to {', '.join(a.describe() for a in holders)}: delete these pods first"
        return state.inventory.quarantine.reason(gpu.name)

    async def _forget(self, gpu: RegisteredGpu, why: str) -> None:
        """Raises CheckpointError; then nothing has changed."""
        await self._agent_state.forget_gpu(gpu.name, HistoryEntry(what="gpu", code="forgotten", gpus=(gpu.name,), why=why))
        log.info("gpu_forgotten", gpu=gpu.uuid, reason=why)
