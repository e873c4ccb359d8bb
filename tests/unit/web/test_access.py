"""The one decision, as a table: which rooms open for whom."""

import socket
from typing import Any, get_args

import pytest

from gpumgr.web.access import AuthPolicy, HttpClient, Origin, Scope, authorize, origin_of

ROOMS: tuple[Scope, ...] = get_args(Scope)
TOKEN = AuthPolicy(takes_token=True, token=b"s3cret")
CA = AuthPolicy(takes_certificate=True)
BOTH = AuthPolicy(takes_token=True, token=b"s3cret", takes_certificate=True)
BROKEN = AuthPolicy(takes_token=True, token=None)

ALL = set(ROOMS)
READ = {"probe", "metrics", "page"}


def beyond(authorization: str | None = None, *, certified: bool = False) -> HttpClient:
    return HttpClient(origin="remote", certified=certified, authorization=authorization)


@pytest.mark.parametrize("keys", [AuthPolicy(), TOKEN, CA, BOTH, BROKEN])
@pytest.mark.parametrize(("here", "opened"), [("unix", ALL), ("loopback", READ)])
def test_this_host_needs_no_key(here: Origin, opened: set[Scope], keys: AuthPolicy) -> None:
    assert {room for room in ROOMS if authorize(room, HttpClient(origin=here), keys) is None} == opened


@pytest.mark.parametrize(
    ("keys", "caller", "opened"),
    [
        (AuthPolicy(), beyond(), {"probe", "metrics"}),
        (AuthPolicy(), beyond("Bearer s3cret", certified=True), {"probe", "metrics"}),
        (TOKEN, beyond(), {"probe"}),
        (TOKEN, beyond("Bearer s3cret"), {"probe", "metrics", "page"}),
        (TOKEN, beyond("bearer  s3cret "), {"probe", "metrics", "page"}),
        (TOKEN, beyond("Bearer s3cret2"), {"probe"}),
        (TOKEN, beyond("Bearer s3cre"), {"probe"}),
        (TOKEN, beyond("Bearer"), {"probe"}),
        (TOKEN, beyond("Bearer \udcff"), {"probe"}),
        (TOKEN, beyond("Basic s3cret"), {"probe"}),
        (TOKEN, beyond("s3cret"), {"probe"}),
        (TOKEN, beyond(certified=True), {"probe"}),
        (CA, beyond(), {"probe"}),
        (CA, beyond("Bearer s3cret"), {"probe"}),
        (CA, beyond(certified=True), {"probe", "metrics", "page"}),
        (BOTH, beyond(), {"probe"}),
        (BOTH, beyond("Bearer s3cret"), {"probe", "metrics", "page"}),
        (BOTH, beyond(certified=True), {"probe", "metrics", "page"}),
        (BROKEN, beyond("Bearer "), {"probe"}),
        (BROKEN, beyond("Bearer None"), {"probe"}),
        (BROKEN, beyond(), {"probe"}),
    ],
)
def test_from_beyond(keys: AuthPolicy, caller: HttpClient, opened: set[Scope]) -> None:
    assert {room for room in ROOMS if authorize(room, caller, keys) is None} == opened


@pytest.mark.parametrize(
    ("room", "keys", "status", "words"),
    [
        ("page", AuthPolicy(), 403, "set http.token_file or http.client_ca_file"),
        ("page", CA, 403, "present a client certificate"),
        ("page", TOKEN, 401, "Authorization: Bearer TOKEN"),
        ("page", BOTH, 401, "or present a client certificate"),
        ("maintenance", BOTH, 403, "unix socket"),
    ],
)
def test_a_denial_names_the_remedy(room: Scope, keys: AuthPolicy, status: int, words: str) -> None:
    denial = authorize(room, beyond(), keys)
    assert denial is not None
    assert denial.status == status
    assert words in denial.sentence
    assert (denial.challenge is not None) == (status == 401)


@pytest.mark.parametrize(
    ("family", "peer", "seen"),
    [
        (socket.AF_UNIX, "", "unix"),
        (socket.AF_INET, ("127.0.0.1", 5), "loopback"),
        (socket.AF_INET, ("127.8.9.1", 5), "loopback"),
        (socket.AF_INET6, ("::1", 5, 0, 0), "loopback"),
        (socket.AF_INET6, ("::ffff:127.0.0.1", 5, 0, 0), "loopback"),
        (socket.AF_INET6, ("::ffff:10.0.0.1", 5, 0, 0), "remote"),
        (socket.AF_INET6, ("fe80::1%eth0", 5, 0, 2), "remote"),
        (socket.AF_INET, ("10.0.0.1", 5), "remote"),
        (socket.AF_INET, None, "remote"),
        (socket.AF_INET, (), "remote"),
        (socket.AF_INET, ("localhost", 5), "remote"),
    ],
)
def test_whence(family: int, peer: Any, seen: Origin) -> None:
    assert origin_of(family, peer) == seen


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:15990",
        "[::1]:15990",
        "[::1]",
        "10.1.2.3:1",
        "localhost",
        "LOCALHOST:80",
        "localhost.",
        "Node-1",
        "node-1:5",
    ],
)
def test_on_the_loopback_addresses_and_own_names_will_do(host: str) -> None:
    assert authorize("page", HttpClient(origin="loopback", hosts=(host,)), AuthPolicy(), ("node-1",)) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:15990", "127.0.0.1.evil.example", "localhost.evil.example", "", ":80", "[evil]", "[::1", "node-2", "::1",
     "127.0.0.1:80:80", "localhost:x", "user@localhost"],
)  # fmt: skip
def test_on_the_loopback_no_other_name_will_do(host: str) -> None:
    for hosts in ((host,), ("localhost", host)):
        denial = authorize("metrics", HttpClient(origin="loopback", hosts=hosts), AuthPolicy(), ("node-1",))
        assert denial is not None
        assert denial.status == 403
        assert "not a name of this host" in denial.sentence


def test_elsewhere_names_do_not_matter() -> None:
    assert authorize("maintenance", HttpClient(origin="unix", hosts=("agent",)), AuthPolicy()) is None
    assert authorize("metrics", HttpClient(origin="remote", hosts=("gpumgr.monitoring.svc",)), AuthPolicy()) is None
    assert authorize("page", HttpClient(origin="loopback"), AuthPolicy()) is None  # HTTP/1.0
