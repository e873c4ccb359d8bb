"""Each demo has a page port of its own."""

import socket

from gpumgr.sim.demo.runner import reserved_page_port


def test_two_demos_reserve_different_ports_before_their_agents_listen() -> None:
    with reserved_page_port() as first:
        with reserved_page_port() as second:
            assert 0 < first < second
        with reserved_page_port() as again:
            assert again == second


def test_a_reserved_port_is_left_to_the_agent() -> None:
    with reserved_page_port() as port, socket.create_server(("127.0.0.1", port)), reserved_page_port() as other:
        assert other not in (0, port)
