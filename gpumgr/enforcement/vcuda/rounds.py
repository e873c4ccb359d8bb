"""Registrations of one container, entered together: however many come at once, few looks into its cgroup are needed."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gpumgr.usage.containers import Container

#: Enters these callers of this container; blocks, and runs in a thread.
Enter = Callable[[Container, Collection[int]], None]
#: Rounds of all containers take turns: side by side they would only fight for the interpreter.
_TURNS: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vcuda_rounds")


class Rounds:
    """One round at a time. Who comes while one runs is part of the next, which begins after they came and so sees them."""

    def __init__(self, enter: Enter) -> None:
        self._enter: Final = enter
        self._container: Container | None = None
        self._callers: set[int] = set()
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def join(self, container: Container, pid: int) -> None:
        """Returns when a round with `pid` has ended. Raises what the round raised; a caller that leaves stops no round."""
        self._container = container
        self._callers.add(pid)
        if self._next is None:
            self._next = asyncio.create_task(self._round(self._running), name="vcuda_round")
            self._next.add_done_callback(_hear)
        await asyncio.shield(self._next)

    async def _round(self, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        callers, self._callers = self._callers, set()
        assert self._container is not None  # whoever made the round joined it
        await asyncio.get_running_loop().run_in_executor(_TURNS, self._enter, self._container, callers)


def _hear(task: "asyncio.Task[None]") -> None:
    """Takes note of a failure that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
