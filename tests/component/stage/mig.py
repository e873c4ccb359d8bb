"""MIG devices in memory, by NVML's rules, for tests with one event loop. The simulated driver behind the real binding has the same ones."""

import asyncio
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpumgr.agent.inventory import EMPTY
from gpumgr.common.errors import NvmlError
from gpumgr.placement.devices import Gpu, MigInstance, MigProfile, NodeSnapshot
from gpumgr.placement.mig import MigPlace
from tests.mig_profiles import H100

MEBIBYTES = 81559


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class MemoryMig:
    """Implements MigDriver. `processes`: MIG devices with processes. `broken`: what each creation fails with. UUIDs recur, as the driver's
    do, unless the `generation` is another one."""

    snapshot: NodeSnapshot = EMPTY
    processes: set[str] = field(default_factory=set)
    broken: str = ""
    destroyed: list[str] = field(default_factory=list)
    generation: str = ""
    #: Each creation waits for it, and `creating` is set until then.
    created: asyncio.Event = field(default_factory=_set_event)
    creating: asyncio.Event = field(default_factory=asyncio.Event)

    def gpu(self, uuid: str) -> Gpu:
        return next(gpu for gpu in self.snapshot.gpus if gpu.uuid == uuid)

    def places(self, uuid: str) -> list[tuple[str, int]]:
        """(profile, first memory slice) of each MIG device, by slice."""
        found = [
            (each.profile, (each.memory_slices & -each.memory_slices).bit_length() - 1) for each in self.gpu(uuid).mig_instances
        ]
        return sorted(found, key=lambda pair: pair[1])

    async def enable_mig(self, uuid: str) -> None:
        self._set(replace(self.gpu(uuid), mig_enabled=True))

    async def create_mig_instance(self, uuid: str, profile: MigProfile, start: int) -> MigInstance:
        self.creating.set()
        await self.created.wait()
        if self.broken:
            raise NvmlError(self.broken)
        gpu, slices = self.gpu(uuid), MigPlace(profile=profile, start=start).memory_slices
        if not gpu.mig_enabled:
            raise NvmlError("MIG mode is off")
        assert start in next(each.starts for each in gpu.mig_profiles if each.name == profile.name)
        if any(each.memory_slices & slices for each in gpu.mig_instances):
            raise NvmlError("nvmlDeviceCreateGpuInstanceWithPlacement: Insufficient Resources (NVML error 19)")
        made = MigInstance(
            uuid=f"MIG-{gpu.index}-{profile.name}-{start}{self.generation}",
            profile=profile.name,
            gpu_instance=start,
            compute_instance=0,
            memory_bytes=profile.memory_mebibytes << 20,
            memory_slices=slices,
        )
        self._set(replace(gpu, mig_instances=(*gpu.mig_instances, made)))
        return made

    async def destroy_mig_instance(self, uuid: str, instance: str) -> None:
        if instance in self.processes:
            raise NvmlError(f"{instance} has processes")
        self.lose(uuid, instance)
        self.destroyed.append(instance)

    async def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:
        return self.gpu(uuid).mig_instances

    async def set_mode(self, uuid: str, *, enabled: bool) -> None:
        self._set(replace(self.gpu(uuid), mig_enabled=enabled))

    def lose(self, uuid: str, instance: str) -> None:
        """The MIG device is gone, as after a reboot."""
        gpu = self.gpu(uuid)
        self._set(replace(gpu, mig_instances=tuple(each for each in gpu.mig_instances if each.uuid != instance)))

    def _set(self, gpu: Gpu) -> None:
        gpus = tuple(gpu if each.uuid == gpu.uuid else each for each in self.snapshot.gpus)
        self.snapshot = replace(self.snapshot, gpus=gpus)


def with_mig(node: NodeSnapshot, *, enabled: bool = True) -> NodeSnapshot:
    """The node with H100 GPUs that support MIG."""
    gpus = tuple(replace(gpu, memory_bytes=MEBIBYTES << 20, mig_enabled=enabled, mig_profiles=H100) for gpu in node.gpus)
    return replace(node, gpus=gpus)
