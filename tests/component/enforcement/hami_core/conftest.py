"""The C side, compiled once: a client that does to a region what the library does."""

import subprocess

import pytest

from tests.component.enforcement.hami_core.harness import SOURCES, Client


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Static, as containers without any libraries run it, too."""
    program = tmp_path_factory.mktemp("client") / "region_client"
    flags = ["-static", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", program, SOURCES / "region_client.c"], check=True)
    return Client(program)
