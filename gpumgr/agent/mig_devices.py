"""Creates the MIG devices of containers, and destroys MIG devices that no container has (setting hami.operating_mode). Reports MIG devices
that are gone although a container holds them, also ones that the operator created (static ones).

A MIG device is created while its container is admitted, because the answer names its UUID. Until then the ledger has a reservation. A
device with processes is never destroyed.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import structlog
from msgspec.structs import replace

from gpumgr.agent.history import about
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, NvmlError, Refusal
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.instances import place_of
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger, MigDevice
from gpumgr.placement.devices import Gpu, MigInstance, MigProfile

log = structlog.get_logger(__name__)

#: The reason in the event of a pod that lost its MIG device.
MIG_DEVICE_GONE: Final = "GpuMigDeviceGone"
#: Note in the checkpoint: the ledger was lost, and may still lack containers with MIG devices.
INCOMPLETE_NOTE: Final = "mig_devices_incomplete"
#: The pause between two tries to turn MIG mode on, or to create a MIG device at the same place.
RETRY_SECONDS: Final = 30.0


class MigDriver(Protocol):
    """The driver; each call raises NvmlError. GPUs and MIG devices are named by UUID."""

    async def enable_mig(self, uuid: str) -> None: ...

    async def create_mig_instance(self, uuid: str, profile: MigProfile, start: int) -> MigInstance: ...

    async def destroy_mig_instance(self, uuid: str, instance: str) -> None:
        """Fails for a MIG device with processes; one that is gone already is no error."""
        ...

    async def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]: ...


class MigDevices:
    """Creates and destroys MIG devices one after another, under `changes`. The driver makes their UUIDs from the place, so a device must
    not be destroyed while a container gets a new one of the same UUID.

    The driver may take 30 s, so it is never called under the agent state's lock, which may be taken under `changes`.
    """

    def __init__(self, agent_state: AgentState, driver: MigDriver, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent_state, self._driver, self._clock = agent_state, driver, clock
        self.changes = asyncio.Lock()
        self._keeping = False
        self._created: set[str] = set()
        #: GPU or MIG device -> what was last reported about it.
        self._reported: dict[str, str] = {}
        self._tried: dict[str, float] = {}
        #: (GPU, memory slices) -> when no MIG device could be created there.
        self._failed: dict[tuple[str, int], float] = {}

    def keep(self) -> None:
        """Call it if the ledger was lost and is incomplete. Then only MIG devices that this process created are destroyed, because others
        may have containers."""
        if not self._keeping:
            log.warning("mig_devices_kept", reason="the ledger was lost and is incomplete: containers may have MIG devices")
        self._keeping = True

    async def create(self, allocation: Allocation) -> Allocation:
        """The reservation with all its MIG devices created. The caller holds `changes`. Raises Refusal; then the new devices were
        destroyed."""
        devices: list[MigDevice] = []
        for device in allocation.mig_devices:
            try:
                devices.append(device if device.uuid else await self._create(device))
            except Refusal:
                await self.discard(replace(allocation, mig_devices=tuple(devices)))
                raise
        return replace(allocation, mig_devices=tuple(devices), why=_why(allocation.why, devices))

    async def discard(self, allocation: Allocation) -> None:
        """Destroys the MIG devices of an allocation that is not in the ledger. The caller holds `changes`."""
        ledger = self._agent_state.ledger
        for device in allocation.mig_devices:
            if device.uuid and device.uuid not in _held(ledger):
                await self._destroy(ledger.gpu_registry.by_name[device.gpu].uuid, device.uuid)

    async def restore(self, allocation: Allocation) -> Allocation:
        """The allocation with MIG devices that exist; call it when the container starts. After a reboot they are created again. If a UUID
        changes, only a container with CDI can start, because the environment of others names the old UUID. Raises Refusal."""
        if not await self._gone(allocation.mig_devices):
            return allocation
        async with self.changes:
            current = self._allocation(allocation.id)
            made: dict[str, MigDevice] = {}
            for device in await self._gone(current.mig_devices):
                made[device.uuid] = new = await self._create(device)
                if new.uuid != device.uuid and not current.cdi:
                    await self.discard(replace(current, mig_devices=(new,)))
                    raise Refusal("gpu_unhealthy", f"{_sentence(device)}; delete the pod and create it again")
            async with self._agent_state.lock:
                current = self._allocation(allocation.id)
                ledger = self._agent_state.ledger
                for each in ledger.of(current.pod, current.uid):  # an init container and a later one may share a device
                    devices = tuple(made.get(device.uuid, device) for device in each.mig_devices)
                    if devices != each.mig_devices:
                        ledger = ledger.occupy(replace(each, mig_devices=devices, why=_why(each.why, devices)))
                try:
                    await self._agent_state.commit(ledger)
                except CheckpointError as error:
                    raise Refusal("internal", f"the new MIG devices can't be saved: {error}") from error
                return ledger.allocations[current.id]

    def _allocation(self, allocation: AllocationId) -> Allocation:
        """Raises Refusal if the allocation was freed."""
        current = self._agent_state.ledger.allocations.get(allocation)
        if current is None:
            raise Refusal("conflict", "the container's allocation was freed: its pod has ended")
        return current

    async def tend(self) -> None:
        """Call it once a second: turns MIG mode on where a GPU is idle, destroys MIG devices without a container, and reports containers
        that have lost theirs."""
        ledger, inventory = self._agent_state.ledger, self._agent_state.inventory
        gpus = _gpus(ledger, inventory)
        found: dict[str, str] = {}
        for name, gpu in gpus.items():
            # Allocations with MIG devices do not count: their containers can't run while MIG mode is off.
            idle = all(a.mig_devices for a in ledger.on(name)) and name not in inventory.quarantine.held
            if not gpu.mig_enabled and idle and gpu.uuid not in {*inventory.health.cordoned, *inventory.health.failed}:
                found |= await self._enable(gpu.uuid)
        blocked: dict[str, int] = {}
        for gpu in gpus.values():
            for instance in gpu.mig_instances:
                if (reason := await self._destroy_unless_held(gpu.uuid, instance.uuid)) is not None:
                    found[instance.uuid] = reason
                    blocked[gpu.uuid] = blocked.get(gpu.uuid, 0) | instance.memory_slices
        self._failed = {key: at for key, at in self._failed.items() if self._clock() - at < RETRY_SECONDS}
        for uuid, slices in self._failed:
            blocked[uuid] = blocked.get(uuid, 0) | slices
        await self._agent_state.change_inventory(mig_blocked=blocked)
        shown = inventory.gpus(ledger.gpu_registry)
        present = {each.uuid for gpu in shown.values() for each in gpu.mig_instances}
        for allocation in [each for each in ledger.allocations.values() if each.mig_devices or "mig" in each.device_ids]:
            devices = () if allocation.reserved else _devices(ledger, allocation)
            missing = [each for each in devices if each.gpu in shown and each.uuid not in present]
            for device in await self._gone(missing) if missing else ():
                found[device.uuid] = self._report_gone(allocation, device)
        self._reported = found

    async def _create(self, device: MigDevice) -> MigDevice:
        shown = _gpus(self._agent_state.ledger, self._agent_state.inventory).get(device.gpu)
        if shown is None:
            raise Refusal(
                "gpu_unhealthy", f"no MIG devices are created on GPU {device.gpu} now, and the container needs {device}"
            )
        # A place in `_failed` is tried again here, because MIG mode may have been off after a reboot.
        gpu, place = shown.uuid, place_of(device, shown.mig_profiles)
        try:
            for each in await self._driver.mig_instances(gpu):
                if each.memory_slices & device.memory_slices and self._may_destroy(each.uuid):
                    await self._driver.destroy_mig_instance(gpu, each.uuid)
            made = await self._driver.create_mig_instance(gpu, place.profile, place.start)
        except NvmlError as error:
            self._failed[gpu, device.memory_slices] = self._clock()
            blocked = self._agent_state.inventory.mig_blocked
            await self._agent_state.change_inventory(mig_blocked={**blocked, gpu: blocked.get(gpu, 0) | device.memory_slices})
            raise Refusal("gpu_unhealthy", f"the MIG device {device} can't be created: {error}") from error
        self._created.add(made.uuid)
        log.info("mig_device_created", gpu=gpu, device=made.uuid, profile=made.profile, slice=place.start)
        return replace(device, uuid=made.uuid, gpu_instance=made.gpu_instance, compute_instance=made.compute_instance)

    async def _destroy_unless_held(self, gpu: str, device: str) -> str | None:
        """Destroys a MIG device that no container has; returns why it is still there."""
        if device in _held(self._agent_state.ledger):
            return None
        async with self.changes:
            if device in _held(self._agent_state.ledger):
                return None
            if not self._may_destroy(device):
                return "the ledger was lost and is incomplete: a container may have it"
            present = await self._present(gpu)
            return None if present is not None and device not in present else await self._destroy(gpu, device)

    def _may_destroy(self, device: str) -> bool:
        return device not in _held(self._agent_state.ledger) and (not self._keeping or device in self._created)

    async def _destroy(self, gpu: str, device: str) -> str | None:
        """Returns why it failed; a new reason is logged."""
        try:
            await self._driver.destroy_mig_instance(gpu, device)
        except NvmlError as error:
            if self._reported.get(device) != str(error):
                log.warning("mig_device_not_destroyed", gpu=gpu, device=device, reason=str(error))
            return str(error)
        self._created.discard(device)
        log.info("mig_device_destroyed", gpu=gpu, device=device)
        return None

    async def _enable(self, gpu: str) -> Mapping[str, str]:
        """Returns why it failed, by GPU; a new reason is logged. A try may stop the GPU for a moment, so the next one waits for
        RETRY_SECONDS."""
        if gpu in self._reported and self._clock() - self._tried[gpu] < RETRY_SECONDS:
            return {gpu: self._reported[gpu]}
        self._tried[gpu] = self._clock()
        try:
            await self._driver.enable_mig(gpu)
        except NvmlError as error:
            if self._reported.get(gpu) != str(error):
                log.warning("mig_mode_not_enabled", gpu=gpu, reason=str(error))
            return {gpu: str(error)}
        log.info("mig_mode_enabled", gpu=gpu)
        return {}

    def _report_gone(self, allocation: Allocation, device: MigDevice) -> str:
        why = f"{_sentence(device)}, and {allocation.describe()} holds it"
        if device.uuid not in self._reported:
            log.error("mig_device_gone", gpu=device.gpu, holder=allocation.describe(), reason=why)
            entry = HistoryEntry(what="event", code=MIG_DEVICE_GONE, why=why)
            self._agent_state.history.add_unless_repeated(about(allocation, entry))
        return why

    async def _gone(self, devices: Sequence[MigDevice]) -> list[MigDevice]:
        """The MIG devices that the driver does not have. A GPU that does not answer is left out: its health has the reason."""
        registry = self._agent_state.ledger.gpu_registry
        present = {gpu: await self._present(registry.by_name[gpu].uuid) for gpu in {device.gpu for device in devices}}
        return [device for device in devices if (there := present[device.gpu]) is not None and device.uuid not in there]

    async def _present(self, gpu: str) -> Collection[str] | None:
        """Asks the driver, because the last snapshot may be older. None: the GPU does not answer."""
        try:
            return {each.uuid for each in await self._driver.mig_instances(gpu)}
        except NvmlError:
            return None


def _gpus(ledger: Ledger, inventory: Inventory) -> Mapping[str, Gpu]:
    shown = inventory.gpus(ledger.gpu_registry)
    return {name: shown[name] for name in inventory.mig_profiles(ledger.gpu_registry)}


def _devices(ledger: Ledger, allocation: Allocation) -> list[MigDevice]:
    """The MIG devices that were created for the container, and the static ones that it holds."""
    static = [
        MigDevice(gpu=gpu, profile=each.profile, memory_slices=0, uuid=each.uuid)
        for gpu, mask in allocation.held("mig").items()
        for each in ledger.gpu_registry.by_name[gpu].held_instances(mask)
    ]
    return [*static, *allocation.mig_devices]


def _held(ledger: Ledger) -> set[str]:
    return {device.uuid for a in ledger.allocations.values() for device in a.mig_devices}


def _sentence(device: MigDevice) -> str:
    return f"MIG device {device} no longer exists"


def _why(why: str, devices: Iterable[MigDevice]) -> str:
    return f"{why.partition('; MIG ')[0]}; MIG {', '.join(map(str, devices))}" if devices else why
