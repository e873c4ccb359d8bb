"""The loopback beside an address that is reached from elsewhere only."""

import asyncio
import contextlib
import gc
import socket
import warnings

import pytest
from structlog.testing import capture_logs

from gpumgr.web import http_server
from gpumgr.web.listening import ListenError, listen_tcp, needs_loopback
from tests.component.web.conftest import Serve
from tests.component.web.scene import get, parsed, say


def own_address() -> str:
    """Where this machine would send from; the loopback if it has nothing else. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_that_comes_just_before_the_end_is_closed(serve: Serve, turns: int) -> None:
    """In whichever turn of the event loop the server ends; a socket that is only lost would be a ResourceWarning."""
    server = await serve()
    await asyncio.sleep(0)  # it accepts
    await asyncio.sleep(0)
    with warnings.catch_warnings(record=True) as seen, socket.create_connection(server.address) as client:
        warnings.simplefilter("always")
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.stop()
        gc.collect()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert seen == []


async def test_a_bug_while_it_accepts_is_logged_and_it_accepts_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    readable, calls = http_server._readable, 0

    async def fails_at_first(listening: socket.socket) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        await readable(listening)

    monkeypatch.setattr(http_server, "_readable", fails_at_first)
    with capture_logs() as logs:
        server = await serve()
        async with asyncio.timeout(30):
            assert parsed(await say(server.address, get("/graph")))[0] == 200
    assert [(line["event"], line["daemon"]) for line in logs if line["log_level"] == "error"] == [("daemon_failed", "web_accept")]


@pytest.mark.parametrize("address", ["0.0.0.0", own_address()])
async def test_the_loopback_answers_with_any_configured_address(serve: Serve, address: str) -> None:
    host, port = (await serve(address=address)).address
    assert host == address
    assert parsed(await say(("127.0.0.1", port), get("/graph")))[0] == 200


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
def test_the_loopback_is_added_unless_an_address_includes_it(addresses: list[str], needed: bool) -> None:
    assert needs_loopback(addresses) == needed


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
async def test_the_unspecified_address_of_ipv6_accepts_ipv4_too(serve: Serve) -> None:
    server = await serve(address="::")
    port = server.address[1]
    assert server.url == f"http://[::]:{port}"
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, port)).close()


async def test_a_used_port_on_the_loopback_is_reported_and_the_address_still_serves() -> None:
    address = own_address()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with capture_logs() as logs:
            if address == "127.0.0.1":  # a machine without a network
                with pytest.raises(ListenError, match="another process listens there"):
                    await listen_tcp(address, port)
                return
            (listener,) = await listen_tcp(address, port)
        assert listener.getsockname()[:2] == (address, port)
        listener.close()
        assert [line["event"] for line in logs] == ["loopback_not_served"]


async def test_an_unknown_host_name_is_reported() -> None:
    with pytest.raises(
        ListenError, match=r"can't listen on nowhere\.invalid:0: Name or service not known; choose another address"
    ):
        await listen_tcp("nowhere.invalid", 0)


async def test_a_name_is_listened_on_at_all_its_addresses() -> None:
    listeners = await listen_tcp("localhost", 0)
    assert "127.0.0.1" in [listener.getsockname()[0] for listener in listeners]
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()
