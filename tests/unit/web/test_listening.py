import socket

import pytest

from gpumgr.web.listening import listen_tcp, needs_loopback


@pytest.mark.parametrize(
    ("addresses", "needed"),
    [
        (["127.0.0.1"], False),
        (["::1"], False),
        (["0.0.0.0"], False),
        (["::"], False),
        (["10.1.2.3"], True),
        (["fd00::5"], True),
        (["10.1.2.3", "127.0.0.1"], False),
    ],
)
def test_a_pods_own_address_is_not_all(addresses: list[str], needed: bool) -> None:
    assert needs_loopback(addresses) == needed


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
async def test_the_unspecified_address_of_ipv6_accepts_ipv4_too() -> None:
    (listening,) = await listen_tcp("::", 0)
    with listening:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listening.getsockname()[1])).close()
