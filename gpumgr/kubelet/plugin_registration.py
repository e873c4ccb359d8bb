"""Keeps the agent's resources registered with the kubelet: serves the sockets, and registers again when a registration is lost.

Invariants:
1. Nothing here ends the process. A kubelet that is unavailable, hangs or refuses is logged once and retried.
2. Register is called once the plugin's own socket listens, because the kubelet connects to it inside Register.
3. A resource's registration is lost when kubelet.sock is new, its own socket is missing, or it has no ListAndWatch stream. This is polled,
   because inotify events can be lost.
4. The kubelet has closed its connection to the earlier socket *before* Register. Kubelets 1.25 to 1.35 find clients by resource name, so
   the end of an old stream would disconnect the new registration.
5. Each registration has a new socket path. Kubelets since 1.36 find clients by resource name and path. If a plugin registers again at a
   known path, the kubelet forgets the client but not its endpoint, and refuses the path until it restarts.
6. Nothing is registered while `held_back_by` returns a reason. Once it has returned None, it is not called again and the agent stays
   registered: pods may then hold GPUs that only this process knows of, and another plugin would grant these GPUs again.
"""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr._pb.deviceplugin.v1beta1 import RegisterRequest
from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue, forever, until_tick
from gpumgr.common.errors import KubeletError
from gpumgr.common.files import FileIdentity
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import RESOURCE_NAMES, Resource
from gpumgr.common.unix_socket import remove_leftovers
from gpumgr.kubelet.plugin import OPTIONS, DevicePlugin, PluginServer

_log = structlog.get_logger(__name__)

#: The sockets' names begin with these words. They are short, because the whole path must fit a unix socket.
SOCKET_STEMS: Final[dict[Resource, str]] = {
    "core": "gpumgr-core",
    "memory": "gpumgr-mem",
    "replica": "gpumgr-gpu",
    "mig": "gpumgr-mig",
}
KUBELET_SOCKET_NAME: Final = "kubelet.sock"
_REMEDY: Final = (
    "start the kubelet, or set kubelet.device_plugin_dir to the folder of its kubelet.sock; if the agent runs in a pod, "
    "that folder must be mounted in it"
)


class LinkTiming(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. The kubelet may take 10 s to dial back inside Register."""

    poll_seconds: float = 0.25
    #: The interval of the poll while the kubelet watches the devices. It may be longer, because the end of a stream is noticed at once.
    watched_poll_seconds: float = 1.0
    register_timeout_seconds: float = 15.0
    first_retry_seconds: float = 0.1
    last_retry_seconds: float = 5.0
    #: If no stream is open for this time, the resource is registered again.
    unwatched_seconds: float = 1.0
    #: The same limit directly after Register. A kubelet may dial for 10 s, and kubelets before 1.25 answer Register first.
    first_watch_seconds: float = 12.0
    #: When a socket is replaced: how long calls and then the kubelet's disconnection may take together.
    handover_seconds: float = 5.0
    #: The interval of the calls of `held_back_by`.
    held_back_seconds: float = 2.0


class KubeletLink:
    """`run` is a daemon; `stop` ends it."""

    def __init__(
        self,
        folder: Path,
        agent: Agent,
        devices: Mapping[Resource, LatestValue[bytes]],
        *,
        timing: LinkTiming | None = None,
        on_state: Callable[[str, LinkState], None] = lambda _key, _state: None,
        observe: Callable[[str, str, str, float], None] = lambda *_: None,
        held_back_by: Callable[[], Awaitable[str | None]] | None = None,
        names: Mapping[Resource, str] = RESOURCE_NAMES,
    ) -> None:
        """`folder`: the kubelet's device plugin folder. `devices`: kind of resource -> its encoded device list. `observe` gets each call's
        name, resource, outcome and duration in seconds. `held_back_by` returns why not to register yet, with a remedy; it is called until
        it returns None."""
        self._held_back_by = held_back_by
        self._timing = timing or LinkTiming()
        self._folder, self._agent, self._on_state, self._observe = folder, agent, on_state, observe
        self._resources = {str(kind): self._make(kind, kind, names[kind], watched) for kind, watched in devices.items()}
        self._daemons: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None

    def _make(self, key: str, kind: Resource, name: str, watched: LatestValue[bytes]) -> "_ResourceLink":
        make_plugin = partial(DevicePlugin, kind, self._agent, watched, lambda rpc, *call: self._observe(rpc, key, *call))
        return _ResourceLink(self._folder, SOCKET_STEMS[kind], name, make_plugin, self._timing, partial(self._on_state, key))

    def add(self, kind: Resource, name: str, watched: LatestValue[bytes]) -> None:
        """Adds a resource, also while `run` runs. `name` is its key in `states` and for `observe`."""
        self._resources[name] = self._make(name, kind, name, watched)
        if self._group is not None:
            self._start_registration(self._group, name)

    def _start_registration(self, group: asyncio.TaskGroup, key: str) -> None:
        name = f"kubelet_link_{key}"
        self._daemons.append(group.create_task(forever(name, self._resources[key].stay_registered), name=name))

    @property
    def states(self) -> dict[str, LinkState]:
        return {key: resource.state for key, resource in self._resources.items()}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._daemons.append(group.create_task(self._start(group), name="kubelet_link_start"))

    async def _start(self, group: asyncio.TaskGroup) -> None:
        await self._wait_until_not_held_back()
        remove_leftovers(self._folder, "gpumgr-*.sock")
        for key in self._resources:
            self._start_registration(group, key)
        self._group = group

    async def stop(self, grace_seconds: float) -> None:
        """Calls in progress may take `grace_seconds`; then the streams end and the sockets are removed."""
        self._group = None
        for daemon in self._daemons:
            daemon.cancel()
        if self._daemons:
            await asyncio.wait(self._daemons)
        # The kubelet refuses pods as soon as the first stream has ended. One pod needs calls for all resources, so all servers must be idle
        # first.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        servers = [server for each in self._resources.values() for server in each.servers]
        while not all(each.idle for each in servers) and (left := deadline - loop.time()) > 0:
            await asyncio.gather(*(each.wait_idle(left) for each in servers))
        left = max(0.0, deadline - loop.time())
        await asyncio.gather(*(resource.drain(left) for resource in self._resources.values()))

    async def _wait_until_not_held_back(self) -> None:
        logged = None
        while self._held_back_by is not None and (reason := await self._held_back_by()) is not None:
            if reason != logged:
                _log.warning("registration_waits", reason=reason)
                for resource in self._resources.values():
                    resource.hold_back(reason)
            logged = reason
            await asyncio.sleep(self._timing.held_back_seconds)


class _ResourceLink:
    def __init__(
        self,
        folder: Path,
        stem: str,
        name: str,
        make_plugin: Callable[[], DevicePlugin],
        timing: LinkTiming,
        on_state: Callable[[LinkState], None],
    ) -> None:
        self._name, self._folder, self._stem = name, folder, stem
        self._kubelet_socket = folder / KUBELET_SOCKET_NAME
        self._make_plugin = make_plugin
        self._timing = timing
        self._on_state = on_state
        #: The last one serves the present registration. The others are earlier ones that have not ended yet.
        self.servers: list[PluginServer] = []
        self._log = _log.bind(resource=name)
        self.state = LinkState()

    async def stay_registered(self) -> None:
        """Registers, waits until the registration is lost, and repeats. Never returns."""
        retry_seconds = self._timing.first_retry_seconds
        kubelet = lost = None
        while True:
            before, kubelet = kubelet, FileIdentity.at(self._kubelet_socket)
            if kubelet != before:
                retry_seconds = self._timing.first_retry_seconds
            try:
                server = await self._serve()
                # Read directly before Register: if the socket was replaced earlier, this registration already reaches the new kubelet.
                kubelet = FileIdentity.at(self._kubelet_socket)
                await self._register(server.path.name)
                # None: the kubelet was started in between, and has made this socket.
                kubelet = kubelet or FileIdentity.at(self._kubelet_socket)
            except KubeletError as error:
                self._failed(str(error))
                await self._pause(retry_seconds * random.uniform(0.5, 1.0), kubelet)
                retry_seconds = min(2 * retry_seconds, self._timing.last_retry_seconds)
                continue
            retry_seconds = self._timing.first_retry_seconds
            former, lost = lost, await self._until_lost(server, kubelet)
            if not former == lost == "never_watched":  # a kubelet that never watches is logged once
                self._log.warning("registration_lost", reason=lost)
            self._become(replace(self.state, registered=False))
            # A kubelet that starts removes its earlier socket before it makes the new one.
            await self._pause(self._timing.unwatched_seconds, None)

    def hold_back(self, reason: str) -> None:
        self._become(replace(self.state, error=reason))

    async def drain(self, grace_seconds: float) -> None:
        await asyncio.gather(*(server.drain(grace_seconds) for server in self.servers))
        self.servers.clear()
        self._become(replace(self.state, registered=False))

    async def _register(self, endpoint: str) -> None:
        """`endpoint`: the name of the socket. Raises KubeletError."""
        request = RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=self._name, options=OPTIONS)
        async with UnixChannel(self._kubelet_socket) as channel:
            try:
                await channel.unary(
                    "/v1beta1.Registration/Register", request, bytes, timeout_seconds=self._timing.register_timeout_seconds
                )
            except CALL_FAILURES as error:
                raise kubelet_error(f"register {self._name}", self._kubelet_socket, error) from error
        self._become(LinkState(registered=True, registrations=self.state.registrations + 1))
        self._log.info("registered", registrations=self.state.registrations)

    async def _serve(self) -> PluginServer:
        """Serves a new socket, and then ends the earlier ones. Raises KubeletError."""
        server = PluginServer(self._folder / f"{self._stem}-{secrets.token_hex(3)}.sock", self._make_plugin())
        try:
            await server.listen()
        except BaseException:
            await server.drain(0.0)
            raise
        self.servers.append(server)
        for former in self.servers[:-1]:
            await former.drain(self._timing.handover_seconds)
            self.servers.remove(former)
        return server

    async def _until_lost(self, server: PluginServer, kubelet: FileIdentity | None) -> str:
        """Returns the reason once the registration is lost."""
        loop = asyncio.get_running_loop()
        watched_by, unwatched = loop.time() + self._timing.first_watch_seconds, "never_watched"
        while True:
            if server.open_streams:
                await server.wait_streams(until_tick(self._timing.watched_poll_seconds))
            else:
                await asyncio.sleep(until_tick(self._timing.poll_seconds))
            if FileIdentity.at(self._kubelet_socket) != kubelet:
                return "kubelet_restarted"
            if not server.in_place:  # a kubelet that starts also removes it
                return "own_socket_removed"
            if server.open_streams:
                watched_by, unwatched = loop.time() + self._timing.unwatched_seconds, "not_watched"
            elif loop.time() > watched_by:
                return unwatched

    async def _pause(self, seconds: float, kubelet: FileIdentity | None) -> None:
        """Waits for this time, or until a new kubelet.sock appears."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while FileIdentity.at(self._kubelet_socket) == kubelet:
            left = deadline - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(left, self._timing.poll_seconds))

    def _failed(self, error: str) -> None:
        if error != self.state.error:
            self._log.warning("registration_failed", error=error, remedy=_REMEDY)
        self._become(replace(self.state, registered=False, error=error))

    def _become(self, state: LinkState) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)
