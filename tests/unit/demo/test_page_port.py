"""Each demo has a page port of its own."""

from gpumgr.demo.runner import reserved_page_port


def test_two_demos_reserve_different_ports_before_their_agents_listen() -> None:
    with reserved_page_port() as first:
        with reserved_page_port() as second:
            assert 0 < first < second
        with reserved_page_port() as again:
            assert again == second
