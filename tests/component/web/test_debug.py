"""The debug pages of the process."""

import asyncio
import re
import threading
import time

import aiohttp


async def innermost(event: asyncio.Event) -> None:
    await event.wait()


async def outermost(event: asyncio.Event) -> None:
    await innermost(event)


async def test_stacks_of_tasks_go_down_to_where_they_wait(client: aiohttp.ClientSession) -> None:
    event = asyncio.Event()
    task = asyncio.create_task(outermost(event), name="a_sleeper")
    async with client.get("/debug/stacks") as answer:
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        text = await answer.text()
    part = text.partition("task a_sleeper: outermost\n")[2].partition("\ntask ")[0]
    order = [part.index(line) for line in ("await innermost(event)", "await event.wait()")]
    assert order == sorted(order)
    event.set()
    await task


def of_the_waiter(text: str) -> str:
    return text.partition("thread a_waiter (")[2].partition("\nthread ")[0]


async def test_stacks_of_threads(client: aiohttp.ClientSession) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="a_waiter")
    thread.start()
    text = ""
    while "waiter.acquire()" not in of_the_waiter(text):  # it may not have had its turn yet
        async with client.get("/debug/stacks") as answer:
            text = await answer.text()
    go.set()
    thread.join()
    assert re.search(r"^\d+ tasks, \d+ threads\n", text)
    part = of_the_waiter(text)
    assert "self._bootstrap_inner()" in part
    assert part.index("_bootstrap_inner") < part.rindex("waiter.acquire()")
    assert "thread MainThread" in text


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def test_a_profile_names_what_holds_the_loop(client: aiohttp.ClientSession) -> None:
    asked = asyncio.ensure_future(client.get("/debug/profile?seconds=1"))
    while not asked.done():
        burn(0.03)
        await asyncio.sleep(0.01)
    async with asked.result() as answer:
        text = await answer.text()
    first, second, blank, _, top, *_ = text.splitlines()
    samples, busy = re.fullmatch(r"(\d+) samples in 1 s; the event loop was busy in ([\d.]+) % of them", first).groups()  # type: ignore[union-attr]
    assert int(samples) > 0
    assert 0 < float(busy) < 100
    assert re.fullmatch(r"timers were late by [\d.]+ ms \(p50\), [\d.]+ ms \(p99\), [\d.]+ ms \(worst\)", second)
    assert blank == ""
    assert f"burn ({__file__}" in top


async def test_one_profile_at_a_time(client: aiohttp.ClientSession) -> None:
    refused = None
    while refused is None:  # on a machine that stalls for a second the first is over before the second is read
        first = asyncio.ensure_future(client.get("/debug/profile?seconds=1"))
        while not profiling() and not first.done():  # noqa: ASYNC110  it sends no event
            await asyncio.sleep(0.01)
        async with client.get("/debug/profile?seconds=1") as answer:
            refused = await answer.json() if answer.status == 409 else None
        async with await first as answer:
            assert answer.status == 200
    assert refused == {"error": "another profile is being taken; try again when it is done"}
    assert not profiling()


def profiling() -> bool:
    return any(thread.name == "profile" for thread in threading.enumerate())
