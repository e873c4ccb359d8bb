"""All steps of an evaluation run on the event loop, and calls are held without a pause."""

import asyncio
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)

    monkeypatch.setattr("gpumgr.runtime.suspensions.HOLD_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", inline)
