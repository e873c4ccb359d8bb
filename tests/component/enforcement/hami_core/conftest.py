"""The C side, compiled once: the layouts as a compiler sees them, and a client that does to a region what the library does."""

import subprocess
from pathlib import Path

import pytest

from tests.component.enforcement.hami_core.harness import Client

SOURCES = Path(__file__).resolve().parents[3] / "data" / "enforcement"


@pytest.fixture(scope="session")
def printed_layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Layout -> field -> offset, out of the compiler."""
    program = tmp_path_factory.mktemp("layouts") / "region_layouts"
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-o", program, SOURCES / "region_layouts.c"], check=True)
    found: dict[str, dict[str, int]] = {}
    for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
        layout, field, offset = line.split()
        found.setdefault(layout, {})[field] = int(offset)
    return found


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Static, as containers without any libraries run it, too."""
    program = tmp_path_factory.mktemp("client") / "region_client"
    flags = ["-static", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", program, SOURCES / "region_client.c"], check=True)
    return Client(program)
