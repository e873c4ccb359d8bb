"""The one decision, as a table: which rooms open for whom."""

import socket
from typing import Any, get_args

import pytest

from gpumgr.web.door.access import Caller, Keys, Room, Whence, decide, whence

ROOMS: tuple[Room, ...] = get_args(Room)
TOKEN = Keys(takes_token=True, token=b"s3cret")
CA = Keys(takes_certificate=True)
BOTH = Keys(takes_token=True, token=b"s3cret", takes_certificate=True)
BROKEN = Keys(takes_token=True, token=None)

ALL = set(ROOMS)
READ = {"probe", "metrics", "page", "debug"}


def beyond(authorization: str | None = None, *, certified: bool = False) -> Caller:
    return Caller(whence="beyond", certified=certified, authorization=authorization)


@pytest.mark.parametrize("keys", [Keys(), TOKEN, CA, BOTH, BROKEN])
@pytest.mark.parametrize(("here", "opened"), [("unix", ALL), ("loopback", READ)])
def test_this_host_needs_no_key(here: Whence, opened: set[Room], keys: Keys) -> None:
    assert {room for room in ROOMS if decide(room, Caller(whence=here), keys) is None} == opened


@pytest.mark.parametrize(
    ("keys", "caller", "opened"),
    [
        (Keys(), beyond(), {"probe", "metrics"}),
        (Keys(), beyond("Bearer s3cret", certified=True), {"probe", "metrics"}),
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
def test_from_beyond(keys: Keys, caller: Caller, opened: set[Room]) -> None:
    assert {room for room in ROOMS if decide(room, caller, keys) is None} == opened


@pytest.mark.parametrize(
    ("room", "keys", "status", "words"),
    [
        ("page", Keys(), 403, "set http.token_file or http.client_ca_file"),
        ("page", CA, 403, "show a client certificate"),
        ("page", TOKEN, 401, "Authorization: Bearer TOKEN"),
        ("page", BOTH, 401, "or a client certificate"),
        ("debug", TOKEN, 403, "kubectl port-forward"),
        ("order", BOTH, 403, "unix socket"),
    ],
)
def test_a_denial_says_what_to_do(room: Room, keys: Keys, status: int, words: str) -> None:
    denial = decide(room, beyond(), keys)
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
        (socket.AF_INET6, ("::ffff:10.0.0.1", 5, 0, 0), "beyond"),
        (socket.AF_INET6, ("fe80::1%eth0", 5, 0, 2), "beyond"),
        (socket.AF_INET, ("10.0.0.1", 5), "beyond"),
        (socket.AF_INET, None, "beyond"),
        (socket.AF_INET, (), "beyond"),
        (socket.AF_INET, ("localhost", 5), "beyond"),
    ],
)
def test_whence(family: int, peer: Any, seen: Whence) -> None:
    assert whence(family, peer) == seen


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
    assert decide("page", Caller(whence="loopback", hosts=(host,)), Keys(), ("node-1",)) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:15990", "127.0.0.1.evil.example", "localhost.evil.example", "", ":80", "[evil]", "[::1", "node-2", "::1",
     "127.0.0.1:80:80", "localhost:x", "user@localhost"],
)  # fmt: skip
def test_on_the_loopback_no_other_name_will_do(host: str) -> None:
    for hosts in ((host,), ("localhost", host)):
        denial = decide("metrics", Caller(whence="loopback", hosts=hosts), Keys(), ("node-1",))
        assert denial is not None
        assert denial.status == 403
        assert "no name of this host" in denial.sentence


def test_elsewhere_names_do_not_matter() -> None:
    assert decide("order", Caller(whence="unix", hosts=("agent",)), Keys()) is None
    assert decide("metrics", Caller(whence="beyond", hosts=("gpumgr.monitoring.svc",)), Keys()) is None
    assert decide("page", Caller(whence="loopback"), Keys()) is None  # HTTP/1.0
