import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.component.enforcement.mps.place import Place


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Place]:
    """Not below tmp_path: sockets' names are short."""
    made = Place(Path(tempfile.mkdtemp(prefix="mps")))
    yield made
    await made.close()
