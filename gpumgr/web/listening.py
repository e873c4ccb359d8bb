"""Opens the listening sockets: the configured address, 127.0.0.1 if that address excludes it, and the unix socket for root."""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final

import structlog

from gpumgr.common.errors import InputError
from gpumgr.common.unix_socket import UnixSocket

_log = structlog.get_logger(__name__)

#: Connections that wait to be accepted: enough for a burst of kube-scheduler.
_BACKLOG: Final = 1024
_LOOPBACK: Final = "127.0.0.1"


class ListenError(InputError):
    """The process can't listen at the configured address or socket. The message ends with the remedy."""


async def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listens on all addresses of `host`, and on 127.0.0.1 if none of them accepts loopback connections. Port 0 takes a free port, the same
    one for all addresses.

    Raises ListenError; no socket stays open then.
    """
    listeners: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            port = port or (listeners[0].getsockname()[1] if listeners else 0)
            # A socket for "::" also serves IPv4, unless `host` has IPv4 addresses too, which get sockets of their own.
            both = address[0] == "::" and len(found) == 1 and socket.has_dualstack_ipv6()
            place = (address[0], port, *address[2:])
            listeners.append(socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ListenError(f"can't listen on {host}:{port}: {error.strerror or error}; choose another address or port") from error
    if needs_loopback([listener.getsockname()[0] for listener in listeners]):
        listeners += _listen_loopback(listeners[0].getsockname()[1])
    return listeners


def needs_loopback(addresses: Sequence[str]) -> bool:
    """Whether no address accepts loopback connections, which `kubectl port-forward` and programs in the pod make."""
    found = [ip_address(address) for address in addresses]
    return not any(address.is_loopback or address.is_unspecified for address in found)


def _listen_loopback(port: int) -> list[socket.socket]:
    """Empty if it can't listen there: the configured address still serves the pages."""
    try:
        return [socket.create_server((_LOOPBACK, port), backlog=_BACKLOG)]
    except OSError as error:
        _log.warning(
            "loopback_not_served", address=f"{_LOOPBACK}:{port}", error=error.strerror, consequence="port-forward does not work"
        )
        return []


def listen_unix(unix: UnixSocket) -> socket.socket:
    """Makes the socket's folder if it does not exist. Raises ListenError."""
    try:
        unix.path.parent.mkdir(parents=True, exist_ok=True)
        listener = unix.bind()
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ListenError(f"can't listen on {unix.path}: {error.strerror or error}; set another http.socket") from error
    return listener
