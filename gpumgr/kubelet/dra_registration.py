"""Registers the DRA driver with the kubelet, and keeps it registered.

The kubelet watches a folder for registration sockets and makes two calls at each. GetInfo returns the path of the DRA socket, which has the
driver's services. NotifyRegistrationStatus reports whether the kubelet accepted the driver. The removal of the registration socket ends a
registration. Source: pkg/kubelet/pluginmanager and pkg/kubelet/cm/dra/plugin of Kubernetes 1.37.

Invariants:
1. The registration socket is made after the DRA socket listens, and removed before the DRA socket is closed.
2. Sockets that other programs remove or replace by sockets are made again; connections and calls continue. Any other file in their place is
   kept and reported.
3. Only `suspend` and `stop` remove sockets. The next process removes the sockets of a killed process, even if its `instance` differs.

The kubelet (1.34 and later) keeps a connection to the DRA socket. The loss of this connection shows that the registration has ended.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from grpclib.const import Handler as Method

from gpumgr._pb.pluginregistration import PluginInfo, RegistrationStatus
from gpumgr.common.aio import LatestValue, forever, until_tick
from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.unix_server import LinkState, UnixServer, unary
from gpumgr.common.units import DRA_DRIVER
from gpumgr.common.unix_socket import is_served, remove_leftovers
from gpumgr.kubelet.dra_service import DraHealth, DraPlugin, Faults
from gpumgr.settings import Settings

_log = structlog.get_logger(__name__)

_SERVICE: Final = "/pluginregistration.Registration/"
_FOLDERS_REMEDY: Final = (
    "start the kubelet, or give gpumgr the folders plugins and plugins_registry of its --root-dir; a pod must have them mounted at the "
    "same paths"
)
_REFUSED_REMEDY: Final = (
    "the node needs Kubernetes 1.34 or newer with the feature gate DynamicResourceAllocation, and no other program may register this "
    "driver"
)


class LinkTiming(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds."""

    poll_seconds: float = 1.0
    #: How long the kubelet may take to register the driver before an error is reported. The kubelet looks for new sockets each second.
    patience_seconds: float = 10.0
    #: How long the kubelet may have no connection to the DRA socket, because it may be replacing the connection.
    unconnected_seconds: float = 2.0


class DraLink:
    """Registers the driver with one kubelet. `run` is a daemon. `stop` ends it, lets calls in progress finish, and removes the sockets."""

    def __init__(
        self,
        plugins_dir: Path,
        registry_dir: Path,
        services: Sequence[DraPlugin | DraHealth],
        *,
        end_streams: Callable[[], None] = lambda: None,
        instance: str | None = None,
        timing: LinkTiming | None = None,
    ) -> None:
        """Must be called inside a running event loop. `plugins_dir` and `registry_dir`: the kubelet's folders, absolute, at the same paths
        as for the kubelet. `end_streams` ends all streaming calls of the services. `instance`: a name for each process of a rolling update,
        such as the pod's UID, so that each process has its own sockets."""
        dra, registration = socket_paths(plugins_dir, registry_dir, instance)
        self._versions = [version for service in services for version in service.versions]
        self._timing = timing or LinkTiming()
        #: Called after each change of the state, which includes each registration that the kubelet confirms.
        self.on_state: Callable[[LinkState], None] = lambda _state: None
        self._dra = UnixServer(dra, services, end_streams)
        self._registration = UnixServer(registration, [self])
        self._daemon: asyncio.Task[None] | None = None
        self._registrations = 0
        self._problem: str | None = None  # what is wrong with the sockets
        self._refusal: str | None = None  # why the kubelet refuses the driver
        self._confirmed = False  # the kubelet reported success for this registration socket
        self._since = 0.0  # when the registration socket was made; 0.0: there is none
        self._connected_at = 0.0  # when the kubelet last answered a registration, or had a connection to the DRA socket
        self.state = LinkState()
        self._remove_leftovers()

    def has_other_instance(self) -> bool:
        """Whether another process offers this driver to the kubelet. Blocks while it connects to each socket."""
        own, folder = self._registration.path, self._registration.path.parent
        return any(path != own and is_served(path) for path in folder.glob(socket_patterns()[1]))

    async def run(self) -> None:
        """Keeps the driver registered until `stop` or cancellation. A cancellation keeps the sockets. May be called again."""
        async with asyncio.TaskGroup() as group:
            self._daemon = group.create_task(forever("dra_link", self._keep), name="dra_link")

    async def suspend(self) -> None:
        """Ends `run` and the registration."""
        if self._daemon is not None:
            self._daemon.cancel()
            await asyncio.wait([self._daemon])
        self._registration.remove()
        self._confirmed, self._since = False, 0.0
        self._become(LinkState(registrations=self._registrations))

    async def stop(self, grace_seconds: float) -> None:
        """Calls in progress get `grace_seconds`."""
        await self.suspend()
        await self._registration.drain(0)
        await self._dra.drain(grace_seconds)

    def __mapping__(self) -> dict[str, Method]:
        return {
            _SERVICE + rpc: unary(rpc, answer, _log)
            for rpc, answer in (("GetInfo", self._info), ("NotifyRegistrationStatus", self._notified))
        }

    async def _info(self, _request: bytes) -> bytes:
        endpoint = str(self._dra.path)
        return bytes(PluginInfo(type="DRAPlugin", name=DRA_DRIVER, endpoint=endpoint, supported_versions=self._versions))

    async def _notified(self, request: bytes) -> bytes:
        status = wire.parse(RegistrationStatus, request)
        self._confirmed = status.plugin_registered
        self._connected_at = asyncio.get_running_loop().time()
        if status.plugin_registered:
            self._refusal = None
            self._registrations += 1
        else:
            self._refusal = f"the kubelet refuses the driver {DRA_DRIVER}: {status.error or 'no reason given'}; {_REFUSED_REMEDY}"
        # Called later, because an error of the callback must not become the answer to the kubelet: that would undo the registration.
        asyncio.get_running_loop().call_soon(self._report)
        return b""

    async def _keep(self) -> None:
        self._remove_leftovers()
        while True:
            try:
                await self._serve()
            except KubeletError as error:
                self._problem = str(error)
            else:
                self._problem = None
            self._report()
            await asyncio.sleep(until_tick(self._timing.poll_seconds))

    def _remove_leftovers(self) -> None:
        """Removes sockets without a listener, because the kubelet would try them forever."""
        for server, pattern in zip((self._dra, self._registration), socket_patterns(), strict=True):
            for path in remove_leftovers(server.path.parent, pattern):
                _log.info("leftover_socket_removed", socket=str(path))

    async def _serve(self) -> None:
        """Makes the sockets that are not in place. Raises KubeletError."""
        if not self._dra.in_place:
            folder = self._dra.path.parent
            _check_folder(folder.parent)
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise KubeletError(f"can't make the folder {folder}: {error.strerror}") from error
            await self._start(self._dra)
        if not self._registration.in_place:
            self._confirmed = False
            self._refusal = None
            _check_folder(self._registration.path.parent)
            await self._start(self._registration)
            self._since = asyncio.get_running_loop().time()

    async def _start(self, server: UnixServer) -> None:
        await server.listen()
        if self._since:
            _log.warning("socket_made_again", socket=str(server.path), reason="the file was removed or replaced")

    def _observed(self) -> LinkState:
        now = asyncio.get_running_loop().time()
        if self._dra.connections:
            self._connected_at = now
        lost = now - self._connected_at > self._timing.unconnected_seconds
        error = self._problem or self._refusal
        if error is None and self._confirmed and lost:
            error = f"the kubelet closed its connection to {self._dra.path}; start the kubelet"
        if error is None and not self._confirmed and now - self._since > self._timing.patience_seconds:
            patience = f"within {self._timing.patience_seconds:g} s"
            error = f"the kubelet has not registered the driver at {self._registration.path} {patience}; {_FOLDERS_REMEDY}"
        return LinkState(registered=self._confirmed and not lost, registrations=self._registrations, error=error)

    def _report(self) -> None:
        before, state = self.state, self._observed()
        if state.registered and (not before.registered or state.registrations != before.registrations):
            _log.info("registered", driver=DRA_DRIVER, registrations=state.registrations)
        elif before.registered and not state.registered:
            _log.warning("registration_lost", driver=DRA_DRIVER, reason=state.error or "the registration socket was removed")
        elif state.error not in (None, before.error):
            _log.warning("registration_failed", driver=DRA_DRIVER, error=state.error)
        self._become(state)

    def _become(self, state: LinkState) -> None:
        if state != self.state:
            self.state = state
            self.on_state(state)


def socket_paths(plugins_dir: Path, registry_dir: Path, instance: str | None) -> tuple[Path, Path]:
    """The paths of the DRA socket and the registration socket. The names have a hash of `instance`, because a unix
    socket's path has a limit."""
    suffix = "" if instance is None else f"-{hashlib.sha256(os.fsencode(instance)).hexdigest()[:16]}"
    return (plugins_dir.absolute() / DRA_DRIVER / f"dra{suffix}.sock", registry_dir.absolute() / f"{DRA_DRIVER}{suffix}-reg.sock")


def socket_patterns() -> tuple[str, str]:
    """Glob patterns for the DRA sockets (in the driver's folder) and the registration sockets of all instances."""
    return "dra*.sock", f"{DRA_DRIVER}-*reg.sock"


def _check_folder(folder: Path) -> None:
    """Raises KubeletError if the folder does not exist. It is not created, because no kubelet would watch it."""
    if not folder.is_dir():
        raise KubeletError(f"the folder {folder} does not exist; {_FOLDERS_REMEDY}")


class DraDriver:
    """Set `plugin.observe` and `link.on_state` before `plugin.decide_with` is called. `faults`: the health of the devices."""

    def __init__(self, settings: Settings) -> None:
        """Must be called inside a running event loop."""
        kubelet, pool = settings.kubelet, settings.node.name
        self.plugin = DraPlugin(pool)
        self.faults = LatestValue[Faults]({})
        services = (self.plugin, DraHealth(pool, self.faults))
        self.link = DraLink(
            kubelet.plugins_dir,
            kubelet.plugins_registry_dir,
            services,
            end_streams=self.faults.end_readers,
            instance=settings.process.instance,
        )
