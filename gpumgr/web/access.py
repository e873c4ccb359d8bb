"""Authorization: what each client may read or change. Pure functions.

Clients on this host may read everything; only the unix socket, which only root can open, accepts maintenance requests. Remote clients may
read metrics and probes. With a token file or client CA, remote clients with the token or a certificate may read everything, and all other
remote clients only the probes. Whether a client is remote is decided by the address of its connection, never by headers.

The `Host` header of loopback clients is checked against DNS rebinding: a web page in a browser on this host can make its own name resolve
to 127.0.0.1, but then its requests have this name in `Host`.
"""

import hmac
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Literal

import msgspec

#: probe: for the kubelet; metrics: for scrapers; page: everything else that can be read; maintenance: requests that change something.
Scope = Literal["probe", "metrics", "page", "maintenance"]
Origin = Literal["unix", "loopback", "remote"]

CHALLENGE: Final = 'Bearer realm="gpumgr"'
#: `Host: NAME[:PORT]`, with an IPv6 address in brackets.
_HOST: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


class HttpClient(msgspec.Struct, frozen=True, kw_only=True):
    """`certified`: the client CA signed the client's certificate. `hosts`: `Host` headers: none (HTTP/1.0), one or, wrongly, several."""

    origin: Origin
    certified: bool = False
    authorization: str | None = None
    hosts: tuple[str, ...] = ()


class AuthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What remote clients must present. `takes_token` without `token`: the token file can't be read, so no token is valid."""

    takes_token: bool = False
    token: bytes | None = None
    takes_certificate: bool = False


CurrentPolicy = Callable[[], Awaitable[AuthPolicy]]


class Denial(msgspec.Struct, frozen=True):
    """`sentence` has the reason with its remedy. `challenge` is the WWW-Authenticate header."""

    status: Literal[401, 403]
    sentence: str
    challenge: str | None = None


_MAINTENANCE: Final = Denial(
    403, "maintenance requests are accepted only on the agent's unix socket (http.socket); use `gpumgr gpu` on the node, as root"
)
_NOT_CONFIGURED: Final = Denial(
    403,
    "remote clients can read only /metrics, /metric, /healthz and /readyz; set http.token_file or http.client_ca_file to give access to "
    "the rest",
)
_FOREIGN_HOST: Final = Denial(
    403, "the request's Host is not a name of this host; use an IP address, localhost, or the node's name"
)
_CERTIFICATE: Final = Denial(
    403, "present a client certificate that http.client_ca_file has signed; without one only /healthz and /readyz are served"
)
_TOKEN: Final = Denial(401, "send the token of http.token_file in the header `Authorization: Bearer TOKEN`", CHALLENGE)
_TOKEN_OR_CERTIFICATE: Final = Denial(
    401,
    "send the token of http.token_file in the header `Authorization: Bearer TOKEN`, or present a client certificate that "
    "http.client_ca_file has signed",
    CHALLENGE,
)


def authorize(scope: Scope, caller: HttpClient, policy: AuthPolicy, names: Collection[str] = ()) -> Denial | None:
    """Why the request is denied; None if it is allowed. `names` are the names of this host besides localhost."""
    if caller.origin == "unix":
        return None
    if caller.origin == "loopback" and not all(_names_this_host(host, names) for host in caller.hosts):
        return _FOREIGN_HOST
    if scope == "maintenance":
        return _MAINTENANCE
    if caller.origin == "loopback" or scope == "probe":
        return None
    if not (policy.takes_token or policy.takes_certificate):
        return None if scope == "metrics" else _NOT_CONFIGURED
    if policy.takes_certificate and caller.certified:
        return None
    if not policy.takes_token:
        return _CERTIFICATE
    sent = _bearer(caller.authorization)
    if sent is not None and policy.token is not None and hmac.compare_digest(sent, policy.token):
        return None
    return _TOKEN_OR_CERTIFICATE if policy.takes_certificate else _TOKEN


def origin_of(family: int, peer: Any) -> Origin:
    """An address that can't be parsed counts as remote."""
    if family == socket.AF_UNIX:
        return "unix"
    try:
        address = ip_address(peer[0])
    except (TypeError, ValueError, IndexError):
        return "remote"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else "remote"


def _names_this_host(host: str, names: Collection[str]) -> bool:
    """True for every IP address: DNS rebinding needs a name."""
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
