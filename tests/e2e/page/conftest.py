"""One browser and one web server for all files of this folder; every test begins with the same document."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.e2e.browser import Stage, chromium

from .documents import document


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def open_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.open()
    yield stage
    await stage.close()


@pytest.fixture
def stage(open_stage: Stage) -> Stage:
    open_stage.show(document())
    return open_stage
