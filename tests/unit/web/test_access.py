"""The one decision, as a table: which rooms open for whom."""

import socket
from typing import Any, get_args

import pytest

from gpumgr.web.access import Caller, Keys, Room, Whence, decide, whence

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
