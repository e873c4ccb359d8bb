"""Calls as the kubelet makes them, and what answers them by a script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.background import until


@dataclass
class Scripted:
    """Answers at once, unless `hold` is set (then when it is cleared)."""

    hold: asyncio.Event | None = None
    began: int = 0
    ended: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    async def turn(self, *call: Any, failure: Exception | None) -> None:
        self.calls.append(call)
        self.began += 1
        if self.hold is not None:
            await self.hold.wait()
        self.ended += 1
        if failure is not None:
            raise failure

    async def until_began(self, calls: int = 1) -> None:
        await until(lambda: self.began == calls)


@asynccontextmanager
async def channel_to(path: Path) -> AsyncIterator[Any]:
    """As the kubelet dials: unix socket, no TLS, authority "localhost", 4 MiB limit (the default)."""
    async with grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        yield channel


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
