"""The unix socket of one resource: binds it, checks that it answers and is in place, drains it and removes it."""

import errno
from pathlib import Path
from typing import Final

from gpumgr.deviceplugin.plugin import OPTIONS, SERVICE, DevicePlugin
from gpumgr.errors import KubeletError
from gpumgr.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.rpc.server import DrainingServer
from gpumgr.unix_socket import UnixSocket

_PROBE_TIMEOUT_SECONDS: Final = 5.0


class PluginServer:
    """A DevicePlugin service on its socket. A server is started once; a new socket requires a new server."""

    def __init__(self, path: Path, plugin: DevicePlugin) -> None:
        self.path = path
        self._plugin = plugin
        self._server = DrainingServer([plugin])
        self._socket = UnixSocket(path)

    @property
    def watchers(self) -> int:
        """ListAndWatch streams that are open now."""
        return self._server.open_streams

    @property
    def in_place(self) -> bool:
        """Whether the socket file is still that of this server. A restarting kubelet deletes it, while the socket stays open."""
        return self._socket.in_place

    async def start(self) -> None:
        """Binds and listens. A socket of an earlier process is replaced, any other file is kept.

        Raises KubeletError if the path is too long or can't be bound.
        """
        try:
            await self._server.start(sock=self._socket.bind(replace_served=True))
        except OSError as error:
            await self._server.close_now()
            remedy = "; use a folder with a shorter path" if error.errno == errno.ENAMETOOLONG else ""
            raise KubeletError(f"can't listen on {self.path}: {error.strerror or error}{remedy}") from error

    async def probe(self) -> None:
        """Connects to the own socket and requests the options, as the kubelet does during Register. Raises KubeletError."""
        async with UnixChannel(self.path) as channel:
            try:
                options = await channel.unary(
                    SERVICE + "GetDevicePluginOptions", b"", bytes, timeout_seconds=_PROBE_TIMEOUT_SECONDS
                )
            except CALL_FAILURES as error:
                raise kubelet_error("reach the own device plugin", self.path, error) from error
        if options != OPTIONS:
            raise KubeletError(f"another program answers on {self.path}: stop it, or give gpumgr another folder")

    async def end_watches(self, patience_seconds: float) -> None:
        """Ends the ListAndWatch streams after the running calls, for which it waits `patience_seconds` at most, and goes on serving."""
        if self.watchers:
            await self._server.wait_idle(patience_seconds)
            self._plugin.end_streams()

    async def drain(self, grace_seconds: float) -> None:
        """Ends the service in order (see DrainingServer.drain) and removes the socket file, unless a newer one has replaced it."""
        self._socket.remove()
        await self._server.drain(grace_seconds, self._plugin.end_streams)
