"""Ports for listeners that begin later, and that come back where they were."""

import random
import socket
from itertools import islice
from pathlib import Path

#: Ports that this process has given out: those who have them may be down for a while.
_GIVEN: set[int] = set()


def free_ports(number: int) -> list[int]:
    """Ports of 127.0.0.1 without a listener at this moment, and that stay free until they are bound: the system itself gives
    none of them to a connection or to a listener without a given port, and none is returned twice."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in (*range(10_000, first), *range(last + 1, 1 << 16)) if port not in _GIVEN]
    random.shuffle(others)
    ports = list(islice(filter(_is_free, others), number))
    assert len(ports) == number, f"too few ports are free outside of {first} to {last}"
    _GIVEN.update(ports)
    return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
