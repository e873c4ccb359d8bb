"""What the settings mean for the parts of the agent: resources, replicas, MIG devices, and the library of the backend hami-core."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpumgr.common.units import DRA_DRIVER, MIG_PREFIX, MIG_RESOURCE, REPLICA_RESOURCE, RESOURCE_NAMES, RESOURCES, Resource
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import Settings


def offered(settings: Settings) -> Sequence[Resource]:
    """The resources that are registered with the kubelet in mode plugin, besides MIG devices."""
    return {"tencent": RESOURCES, "hami": ("replica",), "both": (*RESOURCES, "replica")}[settings.node.profile]


def replicas(settings: Settings) -> int:
    """How many replicas of each GPU are offered: ids of HAMi's resource, one for each container that may share the GPU."""
    return settings.hami.device_split_count if "replica" in offered(settings) else 0


def resource_names(settings: Settings) -> Mapping[Resource, str]:
    return {**RESOURCE_NAMES, "replica": settings.hami.count_resource}


def mig_resource(settings: Settings) -> str | None:
    """The resource of existing MIG devices (strategy single), or the prefix of their resources (mixed). None: not offered."""
    return {"none": None, "single": settings.hami.count_resource, "mixed": MIG_PREFIX}[settings.node.mig_strategy]


def mig_on_demand(settings: Settings) -> Collection[str] | None:
    """The profiles of the MIG devices that are created for containers (empty: all). None: none are created."""
    wanted = settings.hami.operating_mode == "mig" and "replica" in offered(settings)
    return settings.hami.mig_profiles if wanted else None


def mig_offered(settings: Settings) -> bool:
    return mig_resource(settings) is not None or mig_on_demand(settings) is not None


def inner_names(settings: Settings) -> Mapping[str, str]:
    """The name of a resource in the kubelet -> its name in the agent. If the settings name another resource than nvidia.com/gpu, the
    resource nvidia.com/gpu belongs to another device plugin and maps to ""."""
    count = MIG_RESOURCE if settings.node.mig_strategy == "single" else REPLICA_RESOURCE
    return {REPLICA_RESOURCE: "", settings.hami.count_resource: count}


def replica_resources(settings: Settings) -> ReplicaResources | None:
    """HAMi's resources; None if this agent does not serve them."""
    return settings.hami if "replica" in offered(settings) else None


def had_mode_dra(settings: Settings) -> bool:
    """Whether gpumgr's DRA driver has run on this node: its folder exists. False if the folder is not mounted."""
    return (settings.kubelet.plugins_dir / DRA_DRIVER).is_dir()


#: The name of the link to the selected library, and of the library in its own folder.
LIBRARY: Final = "libvgpu.so"
#: The file with the version, beside the library.
VERSION: Final = "version"
_SHA256: Final = re.compile("[0-9a-f]{64}")


def hami_core_library(settings: Settings) -> tuple[Path | None, str | None]:
    """Path and SHA-256 from the settings, or else of the installed library (None, None: there is none).

    Each installed library is in a folder of its own below checkpoint.dir, which is named after the library's SHA-256. A link selects one
    library for new containers. `gpumgr install library` and the image of config/image/hami-core make folder and link.
    """
    given, folder = settings.hami_core, settings.checkpoint.library_dir
    if given.library_path is None and given.library_sha256 is None:
        with suppress(OSError):  # nothing is installed, or it is not a link
            selected = Path(os.readlink(folder / LIBRARY))
            if selected.name == LIBRARY and _SHA256.fullmatch(str(selected.parent)):
                return folder / selected, selected.parent.name
    return given.library_path, given.library_sha256
