"""The node's GPUs and their health: the driver's latest snapshot, failures, cordons and the quarantine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.answer import GrantedGpu
from gpumgr.ledger.ids import NO_IDS, GpuRegistry, Masks
from gpumgr.ledger.instances import MigStrategy, offered_instances
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.ledger.node import NodeDevices, NodeView, node_devices
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import Gpu, GpuFailure, MigProfile, NodeSample, NodeSnapshot, Topology
from gpumgr.placement.mig import without_places
from gpumgr.placement.requests import Scaling
from gpumgr.placement.select import Policy

#: All memory slices, as bits.
_EVERYWHERE: Final = -1
_NOT_IN_MIG_MODE: Final = "its MIG mode is not on yet: hami.operating_mode mig turns it on once the GPU is idle"
EMPTY = NodeSnapshot(gpus=(), topology=Topology((), ()))

_T = TypeVar("_T")


def _once(method: "Callable[[Inventory, GpuRegistry], _T]") -> "Callable[[Inventory, GpuRegistry], _T]":
    """Caches the method's result, which callers must not change. Inventory and registry are immutable."""

    @wraps(method)
    def computed(self: "Inventory", gpu_registry: GpuRegistry) -> _T:
        known = self._computed.get(method.__name__)
        if known is None or known[0] is not gpu_registry:
            known = self._computed[method.__name__] = gpu_registry, method(self, gpu_registry)
        result: _T = known[1]
        return result

    return computed


class HardwareHealth(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and MIG devices by UUID. `failed`: GPU or MIG device -> why it does not work. `lost`: the failed GPUs that fell off the bus.
    `cordoned`: GPU that works -> why it accepts no new containers. `in_mig_mode`: the GPUs that are cordoned only because of MIG mode."""

    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    cordoned: Mapping[str, str] = msgspec.field(default_factory=dict)
    in_mig_mode: Collection[str] = ()
    lost: Collection[str] = ()


class Inventory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The state of the hardware at one instant (immutable), and the settings that decide which part is offered.

    `replicas`: how many ids of nvidia.com/gpu each GPU offers; `scaling`: how many times these ids may grant its memory and its cores.
    `mig_on_demand`: the profiles of MIG devices that are created for containers, on GPUs that then have no shares (empty: all profiles;
    None: no device is created). `mig_blocked`: GPU's UUID -> memory slices, as bits, where no MIG device can be created now.
    `burst_mebibytes`: GPU -> memory that containers hold above their requests.
    """

    snapshot: NodeSnapshot = EMPTY
    health: HardwareHealth = HardwareHealth()
    quarantine: Quarantine = msgspec.field(default_factory=Quarantine)
    replicas: int = 0
    scaling: Scaling = (1.0, 1.0)
    mig_strategy: MigStrategy = "none"
    mig_on_demand: Collection[str] | None = None
    policy: Policy = "binpack"
    mig_blocked: Mapping[str, int] = msgspec.field(default_factory=dict)
    burst_mebibytes: Mapping[GpuName, int] = msgspec.field(default_factory=dict)

    @cached_property
    def _computed(self) -> dict[str, tuple[GpuRegistry, Any]]:
        """Method -> registry and result of its last call."""
        return {}

    def register(self, gpu_registry: GpuRegistry) -> GpuRegistry:
        instances = offered_instances(self.snapshot.gpus, self.mig_strategy)
        for gpu in self.snapshot.gpus:
            gpu_registry = gpu_registry.register(gpu.uuid, gpu.memory_mebibytes, self.replicas, instances.get(gpu.uuid, ()))
        return gpu_registry

    def instances(self, gpu_registry: GpuRegistry) -> Masks:
        """The MIG devices that exist now, work, and are offered."""
        found = offered_instances(self.snapshot.gpus, self.mig_strategy).values()
        works = [each.uuid for instances in found for each in instances if each.uuid not in self.health.failed]
        return gpu_registry.known("mig", works) if works else NO_IDS

    @_once
    def mig_profiles(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, tuple[MigProfile, ...]]:
        """GPU with MIG devices on demand -> its profiles with the places that are not blocked. A profile that the settings exclude is
        kept, without places, because a device's part of the GPU is computed with the largest profile."""
        if self.mig_on_demand is None:
            return {}
        return {
            name: tuple(
                without_places(each, self.mig_blocked.get(gpu.uuid, 0) if self._may_create(each) else _EVERYWHERE)
                for each in gpu.mig_profiles
            )
            for name, gpu in self.gpus(gpu_registry).items()
            if gpu.mig_profiles
        }

    def _may_create(self, profile: MigProfile) -> bool:
        return not self.mig_on_demand or profile.name in self.mig_on_demand

    @_once
    def gpus(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, Gpu]:
        """The GPUs that the driver lists now, by name."""
        return {gpu_registry.by_uuid[gpu.uuid].name: gpu for gpu in self.snapshot.gpus if gpu.uuid in gpu_registry.by_uuid}

    def indices(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, int]:
        """Names -> NVML's indices, also for registered GPUs that the driver can't describe."""
        failed = [(failure.uuid, failure.index) for failure in self.snapshot.failures if failure.uuid is not None]
        shown = [(gpu.uuid, gpu.index) for gpu in self.snapshot.gpus]
        return {gpu_registry.by_uuid[uuid].name: index for uuid, index in (*failed, *shown) if uuid in gpu_registry.by_uuid}

    def unnamed(self, gpu_registry: GpuRegistry) -> Sequence[GpuFailure]:
        """GPUs that the driver can't describe, if they are not registered or their UUIDs are not known."""
        return [failure for failure in self.snapshot.failures if failure.uuid not in gpu_registry.by_uuid]

    def granted(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, GrantedGpu]:
        """Registered GPU -> what a response says about it. A GPU that the driver does not list has no device node."""
        shown = self.gpus(gpu_registry)
        return {
            registered.name: GrantedGpu(
                uuid=registered.uuid,
                minor=gpu.minor if gpu else None,
                instances={each.uuid: (each.gpu_instance, each.compute_instance) for each in gpu.mig_instances} if gpu else {},
            )
            for registered in gpu_registry.gpus
            for gpu in [shown.get(registered.name)]
        }

    @_once
    def failures(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, str]:
        """GPU -> why it does not work. A registered GPU that the driver does not list counts as failed."""
        shown = self.gpus(gpu_registry)
        reasons = {
            gpu.name: self.health.failed.get(gpu.uuid) or (None if gpu.name in shown else "the driver does not list it")
            for gpu in gpu_registry.gpus
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def gone(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, str]:
        """GPU -> why no container can start on it: it fell off the bus, or the driver answers and does not list it."""
        answered = self.snapshot.gpus or self.snapshot.driver_version is not None
        shown = {gpu.uuid for gpu in self.snapshot.gpus} | {failure.uuid for failure in self.snapshot.failures}
        missing = {gpu.uuid for gpu in gpu_registry.gpus if answered and gpu.uuid not in shown}
        reasons = self.failures(gpu_registry)
        return {gpu.name: reasons[gpu.name] for gpu in gpu_registry.gpus if gpu.uuid in {*missing, *self.health.lost}}

    @_once
    def unschedulable_reasons(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, str]:
        """GPU -> why it accepts no new containers, apart from `failures`."""
        without_mig = self._without_mig(gpu_registry)
        reasons = {}
        for gpu in gpu_registry.gpus:
            cordon = self.health.cordoned.get(gpu.uuid)
            quarantine = self.quarantine.reason(gpu.name) if gpu.name in self.quarantine.held else None
            # A GPU that is cordoned only because of MIG mode still grants MIG devices, so a quarantine is the more important reason.
            own = quarantine or cordon if gpu.uuid in self.health.in_mig_mode else cordon or quarantine
            reasons[gpu.name] = without_mig.get(gpu.name) or own
        return {name: reason for name, reason in reasons.items() if reason}

    @_once
    def _without_mig(self, gpu_registry: GpuRegistry) -> Mapping[GpuName, str]:
        """GPU -> why no MIG device can be created on it on demand."""
        reasons, on_demand = {}, self.mig_profiles(gpu_registry)
        for name, gpu in self.gpus(gpu_registry).items():
            if name in on_demand and not any(map(self._may_create, gpu.mig_profiles)):
                names = ", ".join(profile.name for profile in gpu.mig_profiles)
                reasons[name] = f"hami.mig_profiles has none of its profiles, which are {names}"
            elif name in on_demand and not gpu.mig_enabled and gpu.uuid not in self.health.cordoned:
                reasons[name] = _NOT_IN_MIG_MODE
        return reasons

    def view(self, gpu_registry: GpuRegistry, *, visible_blocks: Masks = NO_IDS) -> NodeView:
        return replace(self._view(gpu_registry), visible_blocks=visible_blocks)

    @_once
    def _view(self, gpu_registry: GpuRegistry) -> NodeView:
        rows = {
            gpu_registry.by_uuid[g.uuid].name: row for row, g in enumerate(self.snapshot.gpus) if g.uuid in gpu_registry.by_uuid
        }
        failures = self.failures(gpu_registry)
        otherwise_closed = {*failures, *self.quarantine.held, *self._without_mig(gpu_registry)}
        return NodeView(
            topology=self.snapshot.topology,
            rows=rows,
            indices=self.indices(gpu_registry),
            unschedulable={**self.unschedulable_reasons(gpu_registry), **failures},
            policy=self.policy,
            instances=self.instances(gpu_registry),
            failed_instances={
                each.uuid: self.health.failed[each.uuid]
                for gpu in self.snapshot.gpus
                for each in gpu.mig_instances
                if each.uuid in self.health.failed
            },
            in_mig_mode={
                gpu.name for gpu in gpu_registry.gpus if gpu.uuid in self.health.in_mig_mode and gpu.name not in otherwise_closed
            },
            shown=self.gpus(gpu_registry),
            mig_profiles=self.mig_profiles(gpu_registry),
            burst_mebibytes=self.burst_mebibytes,
        )

    def node_devices(self, ledger: Ledger, open_ids: Collection[AllocationId]) -> NodeDevices:
        registry = ledger.gpu_registry
        failed = self.failures(registry).keys()
        return node_devices(ledger, self.view(registry), failed=failed, replicas=self.replicas, open_ids=open_ids)

    def processes(
        self, gpu_registry: GpuRegistry, sample: NodeSample, started: Mapping[int, int]
    ) -> Mapping[GpuName, list[Process]]:
        """GPU with a readable process list -> its processes with their start times."""
        return {
            gpu_registry.by_uuid[uuid].name: [(p.pid, started[p.pid]) for p in gpu.processes if p.pid in started]
            for uuid, gpu in sample.gpus.items()
            if uuid in gpu_registry.by_uuid and gpu.processes is not None
        }
