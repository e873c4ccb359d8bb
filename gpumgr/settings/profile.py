"""What the settings node.profile and hami mean for the agent's parts. Pure."""

from collections.abc import Collection, Mapping, Sequence

from gpumgr.common.units import MIG_PREFIX, MIG_RESOURCE, REPLICA_RESOURCE, RESOURCE_NAMES, RESOURCES, Resource
from gpumgr.settings import Settings
from gpumgr.settings.hami_resources import ReplicaResources


def offered(settings: Settings) -> Sequence[Resource]:
    """The resources that are registered with the kubelet in mode plugin."""
    return {"tencent": RESOURCES, "hami": ("replica",), "both": (*RESOURCES, "replica")}[settings.node.profile]


def replicas(settings: Settings) -> int:
    """How many replicas of each GPU are offered."""
    return settings.hami.device_split_count if "replica" in offered(settings) else 0


def resource_names(settings: Settings) -> Mapping[Resource, str]:
    return {**RESOURCE_NAMES, "replica": settings.hami.count_resource}


def mig_resource(settings: Settings) -> str | None:
    """The resource of MIG devices, or the beginning of such resources; None if they are not offered."""
    return {"none": None, "single": settings.hami.count_resource, "mixed": MIG_PREFIX}[settings.node.mig_strategy]


def mig_on_demand(settings: Settings) -> Collection[str] | None:
    """The profiles of the MIG devices that are created for containers (empty: all); None: no MIG devices are created."""
    wanted = settings.hami.operating_mode == "mig" and "replica" in offered(settings)
    return settings.hami.mig_profiles if wanted else None


def mig_offered(settings: Settings) -> bool:
    """Whether MIG devices are offered or created."""
    return mig_resource(settings) is not None or mig_on_demand(settings) is not None


def inner_names(settings: Settings) -> Mapping[str, str]:
    """Resource in the kubelet's lists -> the name by which the agent knows it. If the settings name another resource, nvidia.com/gpu
    belongs to another plugin."""
    count = MIG_RESOURCE if settings.node.mig_strategy == "single" else REPLICA_RESOURCE
    return {REPLICA_RESOURCE: "", settings.hami.count_resource: count}


def replica_resources(settings: Settings) -> ReplicaResources | None:
    """The settings of HAMi's resources; None: this agent does not serve requests of them."""
    return settings.hami if "replica" in offered(settings) else None
