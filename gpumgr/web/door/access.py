"""Who may enter which room: one pure decision.

This host may read everything; orders are taken on the unix socket alone, which only root can open. Whoever comes from beyond reads
metrics and probes until an operator says who else may: by a token, by a client certificate, or by either. No header tells where a
request comes from: only the connection itself does.

One header tells where it does not come from. A page from elsewhere that a browser on this host shows can make its own name lead to
127.0.0.1 (DNS rebinding), and then reads here what it likes; but its requests bear that name in `Host`.
"""

import hmac
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Literal

#: "probe": the kubelet's probes; "metrics": what a scraper reads; "page": all else that can be read; "debug": the process's inside;
#: "order": what changes something.
Room = Literal["probe", "metrics", "page", "debug", "order"]
#: How a connection came in.
Whence = Literal["unix", "loopback", "beyond"]

CHALLENGE: Final = 'Bearer realm="gpumgr"'
#: `Host: NAME[:PORT]`, where an IPv6 address stands in brackets.
_HOST: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`certified`: the handshake proved a certificate that the client CA signed. `authorization` and `hosts` are the request's headers
    (`Host` should come once, and does not in HTTP/1.0)."""

    whence: Whence
    certified: bool = False
    authorization: str | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What opens the rooms from beyond. `token` None although `takes_token`: its file can't be used now, so nobody has it."""

    takes_token: bool = False
    token: bytes | None = None
    takes_certificate: bool = False


@dataclass(frozen=True, slots=True)
class Denial:
    """An HTTP status, what to do about it in a sentence, and the WWW-Authenticate header (None: there is none)."""

    status: Literal[401, 403]
    sentence: str
    challenge: str | None = None


_ORDERS: Final = Denial(
    403, "orders are taken on the agent's unix socket alone (http.socket); use `gpumgr gpu` on the node, as root"
)
_DEBUG: Final = Denial(403, "/debug is for this host alone; use `kubectl exec` or `kubectl port-forward`, or ask on the node")
_CLOSED: Final = Denial(
    403,
    "from beyond this host only /metrics, /metric, /healthz and /readyz are served; set http.token_file or http.client_ca_file to "
    "say who may read the rest",
)
_STRANGE_HOST: Final = Denial(
    403, "the request's Host is no name of this host; ask it by an IP address, as localhost, or by the node's name"
)
_CERTIFICATE: Final = Denial(
    403, "show a client certificate that http.client_ca_file has signed; without one only /healthz and /readyz are served"
)
_TOKEN: Final = Denial(401, "show the token of http.token_file in the header `Authorization: Bearer TOKEN`", CHALLENGE)
_EITHER: Final = Denial(
    401,
    "show the token of http.token_file in the header `Authorization: Bearer TOKEN`, or a client certificate that "
    "http.client_ca_file has signed",
    CHALLENGE,
)


def decide(room: Room, caller: Caller, keys: Keys, names: Collection[str] = ()) -> Denial | None:
    """None: come in. `names` are this host's own, besides localhost."""
    if caller.whence == "unix":
        return None
    if caller.whence == "loopback" and not all(_is_ours(host, names) for host in caller.hosts):
        return _STRANGE_HOST
    if room == "order":
        return _ORDERS
    if caller.whence == "loopback" or room == "probe":
        return None
    if room == "debug":
        return _DEBUG
    if not (keys.takes_token or keys.takes_certificate):
        return None if room == "metrics" else _CLOSED
    if keys.takes_certificate and caller.certified:
        return None
    if not keys.takes_token:
        return _CERTIFICATE
    if _same(_bearer(caller.authorization), keys.token):
        return None
    return _EITHER if keys.takes_certificate else _TOKEN


def whence(family: int, peer: Any) -> Whence:
    """By the family of the connection's socket and its peer's address. What can't be read is from beyond."""
    if family == socket.AF_UNIX:
        return "unix"
    try:
        address = ip_address(peer[0])
    except (TypeError, ValueError, IndexError):
        return "beyond"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else "beyond"


def _is_ours(host: str, names: Collection[str]) -> bool:
    """Nobody can make an address mean another one, so each will do."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    if found["name"] and found["name"].rstrip(".").lower() in {"localhost", *(name.lower() for name in names)}:
        return True
    try:
        ip_address(found["name"] or found["v6"] or "")
    except ValueError:
        return False
    return True


def _bearer(authorization: str | None) -> bytes | None:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else None


def _same(shown: bytes | None, token: bytes | None) -> bool:
    """In a time that tells nothing of where they differ."""
    return shown is not None and token is not None and hmac.compare_digest(shown, token)
