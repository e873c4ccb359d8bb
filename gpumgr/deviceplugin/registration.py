"""Keeps both resources offered to the kubelet: serve, prove, register, notice when that no longer holds, and again.

Law 1. Nothing here ends the process: a kubelet that is away, hangs or says no is weather, told once and retried.
Law 2. Register only what was proven: the own socket answers before the kubelet is asked to dial it (it does so inside Register).
Law 3. "Registered" means that a kubelet watches us. A new kubelet.sock, a missing socket of ours, or nobody on ListAndWatch
       means register again, in place. Polling tells; lost inotify events can't.
Law 4. Old ListAndWatch streams end *before* Register. Kubelets 1.25 to 1.35 look clients up by resource name: when an old
       stream ends later, they disconnect the new registration in its place.
Law 5. Nothing is registered while `held_back_by` has a reason. Once it has none it is not asked again: from then on pods have GPUs
       of which nobody else knows, and to stay away would give those to others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import structlog

from gpumgr._pb.deviceplugin.v1beta1 import DevicePluginOptions, RegisterRequest
from gpumgr.aio import Latest, forever
from gpumgr.deviceplugin.plugin import Allocator, DevicePlugin, Observer
from gpumgr.deviceplugin.server import Identity, PluginServer, identity
from gpumgr.errors import KubeletError
from gpumgr.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.units import RESOURCE_OF, Kind

_log = structlog.get_logger(__name__)

#: Short, since the whole path must fit a unix socket; the kubelet joins it to its own folder.
SOCKET_NAMES: Final[dict[Kind, str]] = {"core": "gpumgr-core.sock", "memory": "gpumgr-memory.sock"}
KUBELET_SOCKET_NAME: Final = "kubelet.sock"
_REMEDY: Final = (
    "start the kubelet, or set kubelet.device_plugin_dir to the folder of its kubelet.sock, which a pod must have mounted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """How patient the link is, in seconds. The kubelet may take 10 s to dial back inside Register."""

    poll_seconds: float = 0.4
    register_timeout_seconds: float = 15.0
    first_retry_seconds: float = 0.1
    last_retry_seconds: float = 5.0
    #: How long nobody may watch any more before we register again.
    unwatched_seconds: float = 1.0
    #: The same right after Register, where a busy kubelet may take its time; doubles while it helps nothing.
    first_watch_seconds: float = 5.0
    #: How long running calls may take before a replaced socket's streams end.
    handover_seconds: float = 1.0
    #: How often it is asked whether something still holds us back.
    held_back_seconds: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """One resource as the kubelet has it. `registrations` counts successful Register calls, `error` is the last failure since."""

    registered: bool = False
    registrations: int = 0
    error: str | None = None


class KubeletLink:
    """Both resources towards one kubelet. `run` is a daemon; `stop` ends it, lets running calls finish, and leaves no socket."""

    def __init__(
        self,
        folder: Path,
        allocator: Allocator,
        devices: Mapping[Kind, Latest[bytes]],
        *,
        timing: LinkTiming | None = None,
        on_state: Callable[[Kind, LinkState], None] = lambda _kind, _state: None,
        observe: Observer = lambda *_: None,
        random: Random | None = None,
    ) -> None:
        """`folder` is the kubelet's device plugin folder; `devices` holds an encoded list for each resource to offer."""
        #: Why not to register, in a sentence with its remedy; asked until it says None. To be set before `run`.
        self.held_back_by: Callable[[], Awaitable[str | None]] = _nothing
        self._on_state = on_state
        self._timing = timing or LinkTiming()
        self._registered, self._free = asyncio.Event(), asyncio.Event()
        self._resources = {
            kind: _ResourceLink(
                folder,
                kind,
                partial(DevicePlugin, kind, allocator, watched, observe),
                self._timing,
                self._changed,
                random or Random(),
                self._free,
            )
            for kind, watched in devices.items()
        }
        self._daemons: list[asyncio.Task[None]] = []

    @property
    def registered(self) -> bool:
        return self._registered.is_set()

    @property
    def states(self) -> dict[Kind, LinkState]:
        return {kind: resource.state for kind, resource in self._resources.items()}

    async def wait_registered(self) -> None:
        """Returns once all resources are registered."""
        await self._registered.wait()

    async def run(self) -> None:
        """Keeps the resources registered until `stop` or cancellation."""
        async with asyncio.TaskGroup() as group:
            self._daemons.append(group.create_task(self._wait_until_free(), name="kubelet_link_held_back"))
            for kind, resource in self._resources.items():
                name = f"kubelet_link_{kind}"
                self._daemons.append(group.create_task(forever(name, resource.keep), name=name))

    async def stop(self, grace_seconds: float) -> None:
        """Ends `run`; calls under way may take `grace_seconds`, then the streams end, and the sockets are removed."""
        for daemon in self._daemons:
            daemon.cancel()
        if self._daemons:
            await asyncio.wait(self._daemons)
        await asyncio.gather(*(resource.drain(grace_seconds) for resource in self._resources.values()))

    async def _wait_until_free(self) -> None:
        told = None
        while (reason := await self.held_back_by()) is not None:
            if reason != told:
                _log.warning("registration_waits", reason=reason)
                for resource in self._resources.values():
                    resource.hold_back(reason)
            told = reason
            await asyncio.sleep(self._timing.held_back_seconds)
        self._free.set()

    def _changed(self, kind: Kind, state: LinkState) -> None:
        if all(resource.state.registered for resource in self._resources.values()):
            self._registered.set()
        else:
            self._registered.clear()
        self._on_state(kind, state)


async def _nothing() -> None:
    """Nothing holds us back."""


class _ResourceLink:
    """One resource's socket and registration."""

    def __init__(
        self,
        folder: Path,
        kind: Kind,
        make_plugin: Callable[[], DevicePlugin],
        timing: LinkTiming,
        on_state: Callable[[Kind, LinkState], None],
        random: Random,
        free: asyncio.Event,
    ) -> None:
        """`free`: nothing is registered before it is set."""
        self._kind: Kind = kind
        self._kubelet_socket = folder / KUBELET_SOCKET_NAME
        self._own_socket = folder / SOCKET_NAMES[kind]
        self._make_plugin = make_plugin
        self._timing = timing
        self._on_state = on_state
        self._random, self._free = random, free
        self._server: PluginServer | None = None
        self._log = _log.bind(resource=RESOURCE_OF[kind])
        self.state = LinkState()

    async def keep(self) -> None:
        """Registers, waits until that no longer holds, and again. Never returns."""
        await self._free.wait()
        retry_seconds = self._timing.first_retry_seconds
        first_watch_seconds = self._timing.first_watch_seconds
        kubelet = None
        while True:
            before, kubelet = kubelet, identity(self._kubelet_socket)
            if kubelet != before:
                retry_seconds = self._timing.first_retry_seconds
            try:
                await self._register()
            except KubeletError as error:
                self._failed(str(error))
                await self._pause(retry_seconds * self._random.uniform(0.5, 1.0), kubelet)
                retry_seconds = min(2 * retry_seconds, self._timing.last_retry_seconds)
                continue
            retry_seconds = self._timing.first_retry_seconds
            reason, was_watched = await self._until_lost(kubelet, first_watch_seconds)
            first_watch_seconds = self._timing.first_watch_seconds if was_watched else min(2 * first_watch_seconds, 60.0)
            self._log.warning("registration_lost", reason=reason)
            self._become(replace(self.state, registered=False))

    def hold_back(self, reason: str) -> None:
        self._become(replace(self.state, error=reason))

    async def drain(self, grace_seconds: float) -> None:
        if self._server is not None:
            await self._server.drain(grace_seconds)
            self._server = None
        self._become(replace(self.state, registered=False))

    async def _register(self) -> None:
        """One attempt: a proven socket first, then Register. Raises KubeletError."""
        server = await self._serve()
        await server.probe()
        request = RegisterRequest(
            version="v1beta1",
            endpoint=self._own_socket.name,
            resource_name=RESOURCE_OF[self._kind],
            options=DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
        )
        async with UnixChannel(self._kubelet_socket) as channel:
            try:
                await channel.unary(
                    "/v1beta1.Registration/Register", request, bytes, timeout_seconds=self._timing.register_timeout_seconds
                )
            except CALL_FAILURES as error:
                raise kubelet_error(f"register {RESOURCE_OF[self._kind]}", self._kubelet_socket, error) from error
        self._become(LinkState(registered=True, registrations=self.state.registrations + 1))
        self._log.info("registered", registrations=self.state.registrations)

    async def _serve(self) -> PluginServer:
        """The server on the socket that is in place: the running one, or a new one which takes over from it."""
        old = self._server
        if old is not None:
            await old.end_watches(self._timing.handover_seconds)
            if old.in_place:
                return old
        self._server = PluginServer(self._own_socket, self._make_plugin())
        try:
            await self._server.start()
        except KubeletError:
            self._server = None
            raise
        finally:
            if old is not None:
                await old.drain(self._timing.handover_seconds)
        return self._server

    async def _until_lost(self, kubelet: Identity | None, first_watch_seconds: float) -> tuple[str, bool]:
        """Why the registration no longer holds, and whether anybody ever watched."""
        loop = asyncio.get_running_loop()
        was_watched = False
        last_watched = loop.time()
        while True:
            await asyncio.sleep(self._timing.poll_seconds)
            if self._server is None or not self._server.in_place:
                return "own_socket_removed", was_watched
            if identity(self._kubelet_socket) != kubelet:
                return "kubelet_restarted", was_watched
            if self._server.watchers:
                was_watched = True
                last_watched = loop.time()
            elif loop.time() - last_watched > (self._timing.unwatched_seconds if was_watched else first_watch_seconds):
                return "nobody_watches", was_watched

    async def _pause(self, seconds: float, kubelet: Identity | None) -> None:
        """Waits, but no longer than until a new kubelet.sock appears."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while identity(self._kubelet_socket) == kubelet:
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
            self._on_state(self._kind, state)
