import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.kubelet import SimKubelet
from tests.component.sim.kubelet.plugin import GooglePlugin

MakeNode = Callable[..., Any]


@pytest.fixture
async def make_node(folder: Path) -> AsyncIterator[MakeNode]:
    """Starts a stand-in kubelet with options, and a plugin for each resource with the devices given for it."""
    async with AsyncExitStack() as stack:

        async def make(core: dict[str, int | None], memory: dict[str, int | None], **options: Any) -> Any:
            kubelet = await stack.enter_async_context(SimKubelet(Path(tempfile.mkdtemp(dir=folder)), **options))
            plugin = await stack.enter_async_context(GooglePlugin(kubelet, core, memory))
            return kubelet, plugin

        yield make
