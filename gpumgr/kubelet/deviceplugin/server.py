"""The unix socket of one resource: checks that it answers, ends its streams."""

from pathlib import Path
from typing import Final

from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.common.rpc.unix_server import UnixServer
from gpumgr.kubelet.deviceplugin.plugin import OPTIONS, SERVICE, DevicePlugin

_PROBE_TIMEOUT_SECONDS: Final = 5.0


class PluginServer(UnixServer):
    """A DevicePlugin service on its socket. A server is started once; a new socket requires a new server."""

    def __init__(self, path: Path, plugin: DevicePlugin) -> None:
        super().__init__(path, [plugin], plugin.end_streams)

    @property
    def watchers(self) -> int:
        """ListAndWatch streams that are open now."""
        return self._server.open_streams

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
            self._end_streams()
