"""The driver as the kubelet sees it: its sockets and services. They may exist before the agent can decide; calls wait until it can."""

from pathlib import Path

from gpumgr.common.aio import LatestValue
from gpumgr.kubelet.dra.health import DraHealth, Faults
from gpumgr.kubelet.dra.registration import DraLink
from gpumgr.kubelet.dra.service import DraPlugin


class DraDriver:
    """`link.run` serves the kubelet. `plugin.observe` and `link.on_state` are set by the part that decides, before `plugin.decide_with`.
    `faults`: the health of the devices, for the kubelet."""

    def __init__(self, plugins_dir: Path, registry_dir: Path, instance: str | None, pool: str) -> None:
        """Must be called inside a running event loop. `instance`: as for DraLink. `pool`: the name of the node's pool of devices."""
        self.plugin = DraPlugin(pool)
        self.faults = LatestValue[Faults]({})
        services = (self.plugin, DraHealth(pool, self.faults))
        self.link = DraLink(plugins_dir, registry_dir, services, end_streams=self.faults.end_readers, instance=instance)
