"""Creates the MIG devices of containers, and destroys those that no container has (setting hami.operating_mode).

A MIG device is created while its container is admitted, since the answer names its UUID. It belongs to an allocation from the commit
on: what a crash leaves between the two is destroyed later. One with processes is never destroyed.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import structlog

from gpumgr.agent.history import about
from gpumgr.agent.state import AgentState
from gpumgr.allocator.history import HistoryEntry
from gpumgr.allocator.ledger import Allocation, MigDevice
from gpumgr.allocator.mig_places import place_of
from gpumgr.errors import CheckpointError, NvmlError, Refusal
from gpumgr.topology.devices import MigInstance, MigProfile

log = structlog.get_logger(__name__)

#: Reason of the event of a pod that holds a MIG device that was destroyed.
MIG_DEVICE_GONE: Final = "GpuMigDeviceGone"
#: Between two tries to turn MIG mode on.
MIG_MODE_SECONDS: Final = 30.0


class MigDriver(Protocol):
    """The driver; each call raises NvmlError. GPUs and MIG devices are named by UUID."""

    async def enable_mig(self, uuid: str) -> None: ...

    async def create_mig_instance(self, uuid: str, profile: MigProfile, start: int) -> MigInstance: ...

    async def destroy_mig_instance(self, uuid: str, instance: str) -> None:
        """Refuses one with processes; one that is gone is no error."""
        ...

    async def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]: ...


class MigDevices:
    def __init__(self, agent_state: AgentState, driver: MigDriver, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent_state, self._driver, self._clock = agent_state, driver, clock
        self._kept: frozenset[str] = frozenset()
        #: Destroyed, and still in the last snapshot.
        self._destroyed: set[str] = set()
        #: GPU or MIG device -> what was last reported about it.
        self._reported: dict[str, str] = {}
        #: GPU -> when MIG mode was last tried to turn on.
        self._tried: dict[str, float] = {}

    def keep(self) -> None:
        """The ledger was lost and could not be rebuilt completely: the MIG devices that exist now may have containers, and are kept until
        the agent's next start."""
        self._kept = frozenset(each.uuid for gpu in self._agent_state.inventory.snapshot.gpus for each in gpu.mig_instances)

    async def create(self, allocation: Allocation) -> Allocation:
        """The allocation with all its MIG devices created. The caller holds the agent state's lock. Raises Refusal."""
        devices = [device if device.uuid else await self._create(device) for device in allocation.mig_devices]
        return replace(allocation, mig_devices=tuple(devices), why=_why(allocation.why, devices))

    async def restore(self, allocation: Allocation) -> Allocation:
        """To be called when the container starts. After a reboot its MIG devices are gone: they are created again if the container gets
        them by CDI, since otherwise its environment names the former UUIDs. Raises Refusal."""
        async with self._agent_state.lock:
            gone = await self._gone(allocation.mig_devices)
            if not gone:
                return allocation
            if not allocation.cdi:
                raise Refusal("gpu_unhealthy", f"{_sentence(gone[0])}; delete the pod and create it again")
            made = {each.uuid: await self._create(each) for each in gone}
            ledger = self._agent_state.ledger
            for each in ledger.of(allocation.pod, allocation.uid):  # an init container may have left it to this one
                devices = tuple(made.get(device.uuid, device) for device in each.mig_devices)
                if devices != each.mig_devices:
                    ledger = ledger.occupy(replace(each, mig_devices=devices, why=_why(each.why, devices)))
            try:
                await self._agent_state.commit(ledger)
            except CheckpointError as error:
                raise Refusal("internal", f"the new MIG devices can't be remembered: {error}") from error
            return ledger.allocations[allocation.id]

    async def tend(self) -> None:
        """To be called once a second: turns MIG mode on where a GPU is idle, destroys MIG devices without a container, and reports
        containers without theirs."""
        async with self._agent_state.lock:
            ledger, inventory = self._agent_state.ledger, self._agent_state.inventory
            registry = ledger.gpu_registry
            gpus = {name: inventory.gpus(registry)[name] for name in inventory.mig_profiles(registry)}
        allocations = ledger.allocations.values()
        held = {device.uuid for a in allocations for device in a.mig_devices}
        present = {each.uuid: registry.by_name[name].uuid for name, gpu in gpus.items() for each in gpu.mig_instances}
        self._destroyed &= present.keys()
        found = dict[str, str]()
        for name, gpu in gpus.items():
            if not gpu.mig_enabled and name not in ledger.occupied:
                found |= await self._enable(gpu.uuid)
        # By UUID, so that a device that was created since then is not affected.
        for uuid in present.keys() - held - self._kept - self._destroyed:
            found |= await self._destroy(present[uuid], uuid)
        await self._agent_state.set_mig_stuck(found.keys() & present.keys())
        for allocation in [a for a in allocations if any(device.uuid not in present for device in a.mig_devices)]:
            for device in await self._gone(allocation.mig_devices):
                found[device.uuid] = why = f"{_sentence(device)}, and {allocation.describe()} holds it"
                if device.uuid not in self._reported:
                    log.error("mig_device_gone", gpu=device.gpu, holder=allocation.describe(), reason=why)
                    entry = HistoryEntry(what="event", code=MIG_DEVICE_GONE, why=why)
                    self._agent_state.history.add_unless_repeated(about(allocation, entry))
        self._reported = found

    async def _create(self, device: MigDevice) -> MigDevice:
        ledger, inventory = self._agent_state.ledger, self._agent_state.inventory
        registered = ledger.gpu_registry.by_name[device.gpu]
        place = place_of(device, inventory.mig_profiles(ledger.gpu_registry)[device.gpu])
        held = {each.uuid for a in ledger.allocations.values() for each in a.mig_devices} | self._kept
        try:
            for each in inventory.gpus(ledger.gpu_registry)[device.gpu].mig_instances:
                if each.uuid not in held and each.memory_slices & device.memory_slices:
                    await self._driver.destroy_mig_instance(registered.uuid, each.uuid)
            made = await self._driver.create_mig_instance(registered.uuid, place.profile, place.start)
        except NvmlError as error:
            raise Refusal("gpu_unhealthy", f"the MIG device {device} can't be created: {error}") from error
        log.info("mig_device_created", gpu=device.gpu, device=made.uuid, profile=made.profile, slice=place.start)
        return replace(device, uuid=made.uuid, gpu_instance=made.gpu_instance, compute_instance=made.compute_instance)

    async def _gone(self, devices: tuple[MigDevice, ...]) -> list[MigDevice]:
        """Those that the driver does not have. It is asked now, since the last snapshot may be older than the device."""
        registry = self._agent_state.ledger.gpu_registry
        present = set[str]()
        for gpu in {device.gpu for device in devices}:
            try:
                present |= {each.uuid for each in await self._driver.mig_instances(registry.by_name[gpu].uuid)}
            except NvmlError:  # the health of the GPU has the reason
                present |= {device.uuid for device in devices if device.gpu == gpu}
        return [device for device in devices if device.uuid not in present]

    async def _enable(self, gpu: str) -> Mapping[str, str]:
        """{} or, of a failure, its reason, which is logged when it changes. A try may take the GPU a second, so failed ones are rare."""
        if gpu in self._reported and self._clock() - self._tried[gpu] < MIG_MODE_SECONDS:
            return {gpu: self._reported[gpu]}
        self._tried[gpu] = self._clock()
        try:
            await self._driver.enable_mig(gpu)
        except NvmlError as error:
            if self._reported.get(gpu) != str(error):
                log.warning("mig_mode_off", gpu=gpu, reason=str(error))
            return {gpu: str(error)}
        log.info("mig_mode_on", gpu=gpu)
        return {}

    async def _destroy(self, gpu: str, device: str) -> Mapping[str, str]:
        """As `_enable`."""
        try:
            await self._driver.destroy_mig_instance(gpu, device)
        except NvmlError as error:
            if self._reported.get(device) != str(error):
                log.warning("mig_device_not_destroyed", gpu=gpu, device=device, reason=str(error))
            return {device: str(error)}
        self._destroyed.add(device)
        log.info("mig_device_destroyed", gpu=gpu, device=device)
        return {}


def _sentence(device: MigDevice) -> str:
    return f"MIG device {device} does not exist any more"


def _why(why: str, devices: Iterable[MigDevice]) -> str:
    """With the UUIDs."""
    return f"{why.partition('; MIG ')[0]}; MIG {', '.join(map(str, devices))}" if devices else why
