"""One resource's unix socket: bound, proven, watched for removal, drained and unlinked."""

import os
import stat
from pathlib import Path
from typing import Final

from gpumgr.deviceplugin.plugin import OPTIONS, SERVICE, DevicePlugin
from gpumgr.errors import KubeletError
from gpumgr.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.rpc.server import DrainingServer

#: sun_path of Linux's sockaddr_un, less the closing zero.
MAX_PATH_BYTES: Final = 107
_PROBE_TIMEOUT_SECONDS: Final = 5.0

#: Device, inode and time of change of a file: a re-created one differs, even if it got the old inode's number.
Identity = tuple[int, int, int]


def identity(path: Path) -> Identity | None:
    """What tells this socket file from its successors; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


class PluginServer:
    """A DevicePlugin service on its socket. A server serves once; a new socket takes a new server."""

    def __init__(self, path: Path, plugin: DevicePlugin) -> None:
        self.path = path
        self._plugin = plugin
        self._server = DrainingServer([plugin])
        self._inode: tuple[int, int] | None = None

    @property
    def watchers(self) -> int:
        """ListAndWatch streams that are open now."""
        return self._server.open_streams

    @property
    def in_place(self) -> bool:
        """Whether the socket file is there and is ours. A restarting kubelet deletes it; the listening socket notices nothing."""
        found = identity(self.path)
        return found is not None and found[:2] == self._inode

    async def start(self) -> None:
        """Binds and listens; a stale socket of an earlier process is replaced, any other file is left alone.

        Raises KubeletError if the path is too long or can't be bound.
        """
        size = len(os.fsencode(self.path))
        if size > MAX_PATH_BYTES:
            raise KubeletError(
                f"can't listen on {self.path}: the path has {size} bytes and a unix socket allows {MAX_PATH_BYTES}; "
                "use a folder with a shorter path"
            )
        try:
            await self._server.start(path=str(self.path))
            self.path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            await self._server.cut()
            raise KubeletError(f"can't listen on {self.path}: {error.strerror or error}") from error
        found = identity(self.path)
        self._inode = found[:2] if found else None

    async def probe(self) -> None:
        """Dials the own socket and asks for the options, as the kubelet will in the middle of Register. Raises KubeletError."""
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
        """Ends the ListAndWatch streams once the running calls are through, and goes on serving."""
        if self.watchers:
            await self._server.quiet(patience_seconds)
            self._plugin.end_streams()

    async def drain(self, grace_seconds: float) -> None:
        """Ends the service in order (see DrainingServer.drain) and removes the socket file, unless a newer one took its place."""
        if self.in_place:
            self.path.unlink(missing_ok=True)
        await self._server.drain(grace_seconds, self._plugin.end_streams)
