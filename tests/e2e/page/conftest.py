"""One browser and one web server for all files of this folder; every test begins with the same document."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.e2e.browser import Stage, chromium

from .documents import BEAT_SECONDS, document

# By default it waits for 5 s, and a machine that stalls may need more.
expect.set_options(timeout=30_000)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def open_stage() -> AsyncIterator[Stage]:
    stage = Stage(beat_seconds=BEAT_SECONDS)
    await stage.open()
    yield stage
    await stage.close()


@pytest.fixture
def stage(open_stage: Stage) -> Stage:
    open_stage.show(document())
    open_stage.remember()
    return open_stage
