"""Keeps the driver registered with the kubelet: serves its socket, and the socket at which the kubelet's plugin watcher registers it.

Invariants:
1. The driver's socket answers before the registration socket exists: the kubelet dials the one inside the registration by the other.
2. "Registered" means that the kubelet has said so since its last connection was lost: a restarted kubelet registers the driver again.
3. A socket that another process removed is created again. These are polled, since inotify events can be lost.
4. Only an orderly stop removes the sockets. A kubelet unregisters the driver when the registration socket vanishes.

Source: Kubernetes 1.37.2, pkg/kubelet/pluginmanager and pkg/kubelet/cm/dra/plugin.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.pluginregistration import PluginInfo, RegistrationStatus
from gpumgr.aio import forever, until_tick
from gpumgr.dra.service import VERSIONS
from gpumgr.errors import KubeletError
from gpumgr.rpc import wire
from gpumgr.rpc.server import DrainingServer
from gpumgr.unix_socket import MAX_PATH_BYTES, UnixSocket

_log = structlog.get_logger(__name__)

_SERVICE: Final = "/pluginregistration.Registration/"
#: In the order of preference: the kubelet takes the first version of each service that it has.
SUPPORTED: Final = [*(f"{version}.DRAPlugin" for version in VERSIONS), "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
_REMEDY: Final = (
    "start the kubelet, or set kubelet.plugins_dir and kubelet.plugins_registry_dir to the folders of its root, which a pod must have "
    "mounted at the same paths"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraLinkTiming:
    """Intervals and timeouts in seconds. The kubelet looks for new sockets at least once a second."""

    poll_seconds: float = 0.25
    retry_seconds: float = 2.0
    #: How long after the creation of the registration socket its absence of calls is reported.
    silence_seconds: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraLinkState:
    """`registrations` counts successful registrations, `error` is the last failure since."""

    registered: bool = False
    registrations: int = 0
    error: str | None = None


class DraLink:
    """Registers the driver with one kubelet. `run` is a daemon; `stop` ends it, lets running calls finish, removes the sockets.

    `plugins_dir` and `registry_dir` are the kubelet's folders plugins and plugins_registry. `instance` distinguishes two agents of a
    rolling update, None: there is only one. `make_services` makes the service objects of a socket, `end_streams` ends their streams.
    """

    def __init__(
        self,
        plugins_dir: Path,
        registry_dir: Path,
        driver: str,
        make_services: Callable[[], Collection[Any]],
        *,
        instance: str | None = None,
        end_streams: Callable[[], None] = lambda: None,
        on_state: Callable[[DraLinkState], None] = lambda _: None,
        timing: DraLinkTiming | None = None,
    ) -> None:
        folder, suffix = plugins_dir / driver, f"-{instance}" if instance else ""
        self._driver, self._make_services, self._end_streams = driver, make_services, end_streams
        self._on_state, self._timing = on_state, timing or DraLinkTiming()
        self._socket = _Socket(_short(folder, "dra", suffix))
        self._registration = _Socket(_short(registry_dir, driver, f"{suffix}-reg"))
        self._daemon: asyncio.Task[None] | None = None
        self._called = asyncio.Event()
        self._connected = False
        self.state = DraLinkState()

    @property
    def registered(self) -> bool:
        return self.state.registered

    @property
    def states(self) -> Mapping[str, DraLinkState]:
        return {self._driver: self.state}

    async def run(self) -> None:
        """Keeps the driver registered until `stop` or cancellation."""
        self._daemon = asyncio.create_task(forever("dra_link", self._keep), name="dra_link")
        await asyncio.wait([self._daemon])
        if not self._daemon.cancelled():
            self._daemon.result()

    async def stop(self, grace_seconds: float) -> None:
        """Unregisters the driver; running calls may take `grace_seconds`."""
        if self._daemon is not None:
            self._daemon.cancel()
            await asyncio.wait([self._daemon])
        await self._registration.close(grace_seconds, lambda: None)
        await self._socket.close(grace_seconds, self._end_streams)
        self._become(replace(self.state, registered=False))

    async def _keep(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._serve()
            except KubeletError as error:
                self._failed(str(error))
                await asyncio.sleep(self._timing.retry_seconds)
                continue
            await self._watch()

    async def _serve(self) -> None:
        """Opens the sockets that are not in place, the driver's first. Raises KubeletError."""
        if not self._socket.in_place:
            await self._socket.close(0.0, self._end_streams)
            await self._socket.open(self._make_services())
        if not self._registration.in_place:
            await self._registration.close(0.0, lambda: None)
            self._called.clear()
            await self._registration.open([self])

    async def _watch(self) -> None:
        """Returns when a socket is gone."""
        loop = asyncio.get_running_loop()
        opened, reported = loop.time(), False
        while self._socket.in_place and self._registration.in_place:
            await asyncio.sleep(until_tick(self._timing.poll_seconds))
            connected = bool(self._socket.connections)
            if self._connected and not connected and self.state.registered:
                _log.warning("registration_lost", driver=self._driver, reason="kubelet_disconnected")
                self._become(replace(self.state, registered=False))
            self._connected = connected
            if not reported and not self._called.is_set() and loop.time() - opened > self._timing.silence_seconds:
                reported = True
                self._failed(f"the kubelet has not called {self._registration.path}")
        _log.warning("registration_lost", driver=self._driver, reason="own_socket_removed")
        self._become(replace(self.state, registered=False))

    # -- the registration service ------------------------------------------------------------------------------------------

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires."""
        methods = {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notified}
        return {_SERVICE + name: Method(method, Cardinality.UNARY_UNARY, bytes, bytes) for name, method in methods.items()}

    async def _get_info(self, stream: Any) -> None:
        await stream.recv_message()
        self._called.set()
        info = PluginInfo(type="DRAPlugin", name=self._driver, endpoint=str(self._socket.path), supported_versions=SUPPORTED)
        await stream.send_message(bytes(info))

    async def _notified(self, stream: Any) -> None:
        status = wire.parse(RegistrationStatus, await stream.recv_message() or b"")
        await stream.send_message(b"")
        if status.plugin_registered:
            self._connected = bool(self._socket.connections)
            self._become(DraLinkState(registered=True, registrations=self.state.registrations + 1))
            _log.info("registered", driver=self._driver, registrations=self.state.registrations)
        else:
            reason = " ".join(status.error.split())[:500] or "it gives no reason"
            self._failed(f"the kubelet refuses the driver: {reason} (its version must be 1.32 or later, with DRA enabled)")

    def _failed(self, error: str) -> None:
        if error != self.state.error:
            _log.warning("registration_failed", driver=self._driver, error=error, remedy=_REMEDY)
        self._become(replace(self.state, registered=False, error=error))

    def _become(self, state: DraLinkState) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)


class _Socket:
    """A server on a socket file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = UnixSocket(path)
        self._server: DrainingServer | None = None

    @property
    def in_place(self) -> bool:
        return self._server is not None and self._socket.in_place

    @property
    def connections(self) -> Collection[object]:
        return self._server.connections if self._server is not None else ()

    async def open(self, services: Collection[Any]) -> None:
        """A socket of an earlier process is replaced, any other file is kept. Raises KubeletError."""
        server = DrainingServer(services)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            await server.start(sock=self._socket.bind(replace_served=True))
        except OSError as error:
            await server.close_now()
            raise KubeletError(f"can't listen on {self.path}: {error.strerror or error}") from error
        self._server = server

    async def close(self, grace_seconds: float, end_streams: Callable[[], None]) -> None:
        self._socket.remove()
        server, self._server = self._server, None
        if server is not None:
            await server.drain(grace_seconds, end_streams)


def _short(folder: Path, name: str, suffix: str) -> Path:
    """`folder`/`name``suffix`.sock, with a digest instead of a part of the suffix if that is too long for a unix socket."""
    path = folder / f"{name}{suffix}.sock"
    if len(str(path).encode()) <= MAX_PATH_BYTES or not suffix:
        return path
    digest = blake2b(suffix.encode(), digest_size=4).hexdigest()
    return folder / f"{name}-{digest}{'-reg' if suffix.endswith('-reg') else ''}.sock"
