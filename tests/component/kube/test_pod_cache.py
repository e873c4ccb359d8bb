"""The pod cache follows the API server through outages and malformed answers."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from gpumgr.kube.reflector import WatchTimes
from tests.background import until

from .conftest import Start
from .fake_api_server import Answer, FakeApiServer, cut, event, listed, pod, raw, silent, status


async def test_lists_this_nodes_pods_then_follows_changes(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a"))
    async with start() as running:
        a = running.cache.get(("default", "a"))
        assert a is not None
        assert a.containers[0].cores == 10
        assert running.cache.by_uid("uid-a") is a
        assert api.seen[0]["fieldSelector"] == "spec.nodeName=node-1"
        assert await running.next() == (None, a)

        api.put_document(pod("b", "uid-b"))
        before, b = await running.next()
        assert (before, b) == (None, running.cache.get(("default", "b")))

        api.put_document(pod("b", "uid-b", phase="Failed"))
        before, after = await running.next()
        assert before == b
        assert after is not None
        assert after.ended

        api.remove("uid-b")
        assert await running.next() == (after, None)
        assert [view.uid for view in running.cache.all()] == ["uid-a"]
        assert running.cache.by_uid("uid-b") is None


async def test_reads_a_long_list_page_by_page(api: FakeApiServer, start: Start) -> None:
    for last in (False, False, True):
        page = listed(json.dumps(pod(f"p{len(api.lists)}", f"uid-{len(api.lists)}")))
        api.lists.append(raw((page if last else page.replace('"5"}', f'"5", "continue": "{len(api.lists)}"}}')).encode()))
    async with start() as running:
        assert {view.uid for view in running.cache.all()} == {"uid-0", "uid-1", "uid-2"}
        assert [query.get("continue") for query in api.seen if "watch" not in query] == [None, "0", "1"]


async def test_a_name_that_recurs_belongs_to_the_later_incarnation(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("web-0", "uid-1"))
    async with start() as running:
        await running.next()
        api.put_document(pod("web-0", "uid-2"))
        await running.next()
        api.remove("uid-1")
        await running.next()
        assert running.cache.get(("default", "web-0")) is running.cache.by_uid("uid-2") is not None


async def test_after_an_expired_version_a_list_reports_deletions(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("stays", "uid-s"))
    api.put_document(pod("goes", "uid-g"))
    async with start() as running:
        await running.next()
        await running.next()
        await until(lambda: api.count(watch=True) == 1)
        del api._pods.items["uid-g"]  # without an event
        api.put_document(pod("new", "uid-n"))
        assert (await running.next())[1] == running.cache.by_uid("uid-n")
        api.expire_history()
        assert await running.next_uids() == ("uid-g", None)
        assert {view.uid for view in running.cache.all()} == {"uid-s", "uid-n"}


async def test_a_relist_without_differences_reports_nothing(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a"))
    async with start() as running:
        await running.next()
        api.watches.append(raw(event("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})))
        api.end_watches()
        await until(lambda: api.count(watch=False) == 2 and api.count(watch=True) >= 2)
        api.put_document(pod("b", "uid-b"))
        assert await running.next_uids() == (None, "uid-b")


BIG = pod("big", "uid-big", annotations={"notes": "x" * 3_000_000}, resourceVersion="9")
WORD = pod("späße", "uid-w", resourceVersion="9")
WORD_LINE = json.dumps({"type": "ADDED", "object": WORD}, ensure_ascii=False).encode() + b"\n"

FAILURES = {
    "410 as a status": status(410, "gone"),
    "429": status(429, "slow down", {"Retry-After": "0"}),
    "500": status(500, "no"),
    "503": status(503, "no", {"Retry-After": "Fri, 31 Dec 2027 23:59:59 GMT"}),
    "403": status(403, "pods is forbidden"),
    "410 as an event": raw(event("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})),
    "500 as an event": raw(event("ERROR", {"code": 500, "message": "no reason"})),
    "an event that is no JSON": raw(b'{"type": "ADDED", "obj\n'),
    "an event that is a list": raw(b"[1]\n"),
    "an event without an object": raw(b'{"type": "ADDED"}\n'),
    "an object without metadata": raw(b'{"type": "ADDED", "object": {}}\n'),
    "an object that is null": raw(b'{"type": "MODIFIED", "object": null}\n'),
    "no UTF-8": raw(b'{"type": "\xff\xfe"}\n'),
    "an end at once": raw(),
    "a truncated line": raw(event("ADDED", BIG)[:1000]),
    "a reset before the first byte": cut(),
    "a reset amid a line": cut(event("ADDED", BIG)[:1000]),
    "a page of HTML": raw(b"<html>\n<body>proxy</body>\n"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_watch_that_fails_is_resumed(failure: str, api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a"))
    api.watches.extend([FAILURES[failure]] * 2)
    async with start() as running:
        await running.next()
        await until(lambda: api.count(watch=True) >= 3)
        api.put_document(pod("later", "uid-l"))
        assert await running.next_uids() == (None, "uid-l")
        assert running.cache.by_uid("uid-a") is not None


LIST_FAILURES: dict[str, Answer] = {
    "401": status(401, "who are you"),
    "500": status(500, "etcd is away"),
    "429": status(429, "slow down", {"Retry-After": "0"}),
    "no JSON": raw(b"<html>"),
    "no list": raw(b"[]"),
    "no metadata": raw(b'{"items": []}'),
    "a reset": cut(b'{"metadata": '),
    "no answer at all": cut(),
}


@pytest.mark.parametrize("failure", LIST_FAILURES)
async def test_a_list_that_fails_is_repeated(failure: str, api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a"))
    api.lists.extend([LIST_FAILURES[failure]] * 2)
    async with start(synced=False) as running:
        assert not running.cache.synced
        await running.cache.wait_synced()
        assert api.count(watch=False) >= 3
        assert running.cache.by_uid("uid-a") is not None


@pytest.mark.parametrize(
    ("parts", "uid"),
    [
        pytest.param((event("ADDED", BIG),), "uid-big", id="3 MB"),
        pytest.param(tuple(WORD_LINE[n : n + 1] for n in range(len(WORD_LINE))), "uid-w", id="byte by byte"),
        pytest.param((b"\n\n" + WORD_LINE + b"\n",), "uid-w", id="empty lines"),
    ],
)
async def test_lines_may_be_split_anywhere(parts: tuple[bytes, ...], uid: str, api: FakeApiServer, start: Start) -> None:
    api.watches.append(raw(*parts))
    async with start() as running:
        assert await running.next_uids() == (None, uid)


async def test_a_silent_connection_is_closed_after_a_bounded_time(api: FakeApiServer, start: Start) -> None:
    api.watches.append(silent(b"\n"))
    async with start(WatchTimes(pause_seconds=(0.005, 0.02), watch_seconds=(0, 0), silence_seconds=0.05)):
        await until(lambda: api.count(watch=True) >= 2)


async def test_a_bookmark_advances_the_version(api: FakeApiServer, start: Start) -> None:
    api.watches.append(raw(event("BOOKMARK", {"metadata": {"resourceVersion": "70"}})))
    async with start():
        await until(lambda: api.count(watch=True) == 2)
        assert api.seen[-1]["resourceVersion"] == "70"
        assert api.count(watch=False) == 1


@pytest.mark.parametrize(
    ("present", "uid"),
    [
        pytest.param(None, None, id="any incarnation"),
        pytest.param(pod("a", "uid-a", phase="Failed"), None, id="one that has not ended"),
        pytest.param(pod("a", "uid-a"), "uid-wanted", id="this one"),
    ],
)
async def test_waits_for_a_pod_until_the_cache_has_it(
    present: dict[str, Any] | None, uid: str | None, api: FakeApiServer, start: Start
) -> None:
    key = ("default", "a")
    async with start() as running:
        if present is not None:
            api.put_document(present)
            assert await running.cache.wait_for(key, 30, uid="uid-a") is running.cache.by_uid("uid-a") is not None
        for seconds in (0, 0.01):
            assert await running.cache.wait_for(key, seconds, uid=uid) is None
        *waiting, given_up = [asyncio.create_task(running.cache.wait_for(key, 30, uid=uid)) for _ in range(3)]
        await asyncio.sleep(0)
        given_up.cancel()
        api.put_document(pod("a", "uid-ended", phase="Failed"))
        assert await running.cache.wait_for(key, 30, uid="uid-ended") is not None
        assert not any(each.done() for each in waiting)
        api.put_document(pod("a", "uid-wanted"))
        found = await asyncio.gather(*waiting, running.cache.wait_for(key, 30, uid=uid))
        assert all(each is running.cache.by_uid("uid-wanted") is not None for each in found)


@pytest.mark.parametrize("end", ["ended", "deleted"])
async def test_waits_for_the_end_of_pods(end: str, api: FakeApiServer, start: Start) -> None:
    for name in ("a", "b", "c"):
        api.put_document(pod(name, f"uid-{name}"))
    async with start() as running:
        await running.cache.wait_ended({"uid-a"}, 0.01)
        await running.cache.wait_ended({"unknown"}, 60)
        waiting = asyncio.create_task(running.cache.wait_ended({"uid-a", "uid-b"}, 60))
        for number, name in enumerate(("c", "a", "b"), start=1):
            await asyncio.sleep(0)
            assert not waiting.done()
            api.put_document(pod(name, f"uid-{name}", phase="Succeeded")) if end == "ended" else api.remove(f"uid-{name}")
            for _ in range(4 if number == 1 else 1):  # three changes are the list's
                await running.next()
        await waiting


async def test_what_it_lacks_is_deleted_only_while_the_api_server_answers(api: FakeApiServer, start: Start) -> None:
    async with start(synced=False) as running:
        assert not running.cache.reachable
        await running.cache.wait_synced()
        assert running.cache.reachable
        await until(lambda: api.count(watch=True) == 1)
        down = asyncio.Event()

        async def away(request: web.Request) -> web.StreamResponse:
            down.set()
            return await status(503, "the API server is shutting down")(request)

        api.watches.extend([away] * 3)
        api.end_watches()
        await down.wait()
        await until(lambda: api.count(watch=True) >= 3)
        assert not running.cache.reachable
        await until(lambda: api.count(watch=True) >= 5)
        api.put_document(pod("a", "uid-a"))
        await running.next()
        assert running.cache.reachable


@pytest.mark.peer_bug("B2: its wait ends with a successful patch only")
async def test_waiting_for_a_pod_ends_though_the_api_server_never_answers(api: FakeApiServer, start: Start) -> None:
    api.lists.append(silent())
    async with start(synced=False) as running:
        assert await running.cache.wait_for(("team", "late"), 0.02) is None
        assert not running.cache.synced
