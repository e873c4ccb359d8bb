"""A local copy of a list of API objects, kept up to date by a watch, as client-go's reflector does it.

Invariants:
1. The copy has the newest resource version received. If that version has expired, all objects are listed again. An object that the list
   lacks counts as deleted.
2. No behaviour of the server ends or blocks the reflector. Each wait has a limit, and each failure is retried after a growing, jittered
   pause or Retry-After. Only a watch that lasted for `lasted_seconds` is resumed at once.
3. Each object is decoded on its own. An object that can't be read is reported in the log and in an event. The copy keeps its last readable
   state.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Generic, NoReturn, TypeVar

import aiohttp
import msgspec
import structlog

from gpumgr.common.aio import LogPace, sliced
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, decode_answer
from gpumgr.kube.client import (
    API_FAILURES,
    MAX_RETRY_AFTER_SECONDS,
    REQUEST_TIMEOUT,
    AnswerError,
    ApiServer,
    answer_error,
    failure_text,
)
from gpumgr.kube.watched import ObjectReader, T, Watched, metadata_of

_log = structlog.get_logger(__name__)

_PAGE = "500"
#: In seconds. `_SHORTEST_LIST` is the shortest timeout of a list, `_SHORTEST_WATCH` the duration of a watch after a list that failed.
_SHORTEST_LIST = 5.0
_SHORTEST_WATCH = 5


class _PageMetadata(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion")
    following: str | None = msgspec.field(name="continue", default=None)


class _Page(msgspec.Struct):
    """A part of a list. Its objects are decoded one after another, because a decoded object is many times larger than its text."""

    metadata: _PageMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_K = TypeVar("_K")


class WatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`watch_seconds`: the shortest and the longest requested duration of a watch. A silent watch is given up `silence_seconds` after that
    duration. `lasted_seconds`: a watch that lasted this long is resumed at once. `pause_seconds`: the first and the longest pause after a
    failure.

    The last two fields limit the time without an event, a bookmark or a requested end of a watch. After `list_seconds` the objects are
    listed again. After `outdated_seconds` the copy is outdated if a list has failed, too.
    """

    watch_seconds: tuple[int, int] = (240, 300)
    silence_seconds: float = 15.0
    lasted_seconds: float = 10.0
    pause_seconds: tuple[float, float] = (0.5, 30.0)
    list_seconds: float = math.inf
    outdated_seconds: float = math.inf


def prompt_watches(outdated_seconds: float) -> WatchTimes:
    """Times with which a silent server is noticed within `outdated_seconds` (15 or more).

    The API server sends a bookmark once a minute and about 2 s before the requested end of a watch (storage/cacher), but none if the
    resource has not changed since the watch began. So watches are short: with 30 s they take 18 to 20 s, their end may be 2 s late, and 8 s
    are left for a list.
    """
    return WatchTimes(
        watch_seconds=(int(0.6 * outdated_seconds), int(outdated_seconds * 2 / 3)),
        silence_seconds=outdated_seconds / 15,
        lasted_seconds=outdated_seconds / 3,
        pause_seconds=(0.5, 5.0),
        list_seconds=0.6 * outdated_seconds,
        outdated_seconds=outdated_seconds,
    )


class ExpiredError(GpumgrError):
    """The resource version is too old (410), or the stream is malformed. All objects must be listed again."""


class Reflector(Generic[T]):
    """Keeps the copy up to date while `run` runs. `on_change(before, after)` is called for each difference; None: the object does not
    exist. `on_list` is called after each list, because changes before it may have been missed."""

    def __init__(
        self,
        server: ApiServer,
        watched: Watched[T],
        *,
        on_change: Callable[[T | None, T | None], None],
        on_list: Callable[[], object] = lambda: None,
        watch_times: WatchTimes | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._watched, self._on_change, self._on_list = server, watched, on_change, on_list
        self._times, self._sleep, self._jitter = watch_times or WatchTimes(), sleep, jitter
        self._objects: dict[str, T] = {}
        self._reader = ObjectReader(server, watched)
        #: The resource version to watch from; None: list first.
        self._version: str | None = None
        self._watching_since: float | None = None
        self._logged: str | None = None
        self._clock, self._heard_at = clock, clock()
        #: Why the last list failed; None once the server has sent something.
        self._list_error: str | None = None
        #: When (by `clock`) the copy becomes outdated if the server sends nothing. The scheduler reads it in each call.
        self.outdated_at = math.inf
        self._outdated_log = LogPace(clock)
        self.synced = asyncio.Event()

    @property
    def answered(self) -> bool:
        """Whether the last request succeeded; True before the first one."""
        return self._logged is None

    @property
    def unreadable(self) -> int:
        """How many objects can't be read."""
        return len(self._reader.unreadable)

    @property
    def silent_seconds(self) -> float:
        """The seconds since the last event, bookmark or requested end of a watch, or since the start of the last list that succeeded."""
        return self._clock() - self._heard_at

    @property
    def outdated(self) -> str | None:
        """Why the copy may be outdated; None if it is not."""
        if self._clock() < self.outdated_at:
            return None
        return (
            f"the API server has sent nothing about {self.resource} for {self.silent_seconds:.0f} s, and a list has failed "
            f"({self._list_error})"
        )

    @property
    def resource(self) -> str:
        return self._watched.path.rpartition("/")[2]

    def expire(self) -> None:
        """Makes the next `run` begin with a list. Must not be called while `run` runs."""
        self._version = None
        self.synced.clear()

    async def run(self) -> NoReturn:
        pause, listing = self._times.pause_seconds[0], False
        while True:
            self._watching_since, wanted = None, 0.0
            # After a list that failed, a watch is tried, because it may still work.
            listing = self._version is None or (self.silent_seconds >= self._times.list_seconds and not listing)
            try:
                if listing:
                    await self._list()
                    listing = False
                await self._watch(self._version or "")
            except API_FAILURES as error:
                if listing:
                    self._list_error, self.outdated_at = failure_text(error), self._heard_at + self._times.outdated_seconds
                if isinstance(error, ExpiredError):
                    self._version = None
                if isinstance(error, AnswerError):
                    wanted = min(error.retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
                self._log_once(failure_text(error))
            if (why := self.outdated) is not None and self._outdated_log.due():
                _log.error("objects_outdated", path=self._watched.path, reason=why)
            since = self._watching_since
            if since is not None and self._clock() - since >= self._times.lasted_seconds:
                pause = self._times.pause_seconds[0]
                continue
            slept = max(wanted, pause * (0.8 + 0.4 * self._jitter()))
            until_list = self._times.list_seconds - self.silent_seconds
            await self._sleep(min(slept, until_list) if until_list > 0 else slept)
            pause = min(pause * 2, self._times.pause_seconds[1])

    def _log_once(self, text: str) -> None:
        """Logs the same text again only after a request has succeeded."""
        if text != self._logged:
            self._logged = text
            _log.warning("api_server_retries", path=self._watched.path, error=text)

    def _heard(self, at: float) -> None:
        self._heard_at, self._list_error, self.outdated_at = at, None, math.inf

    # -- list --------------------------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        found: dict[str, T] = {}
        begun = self._clock()
        uids: set[str] = set()
        query = {**self._watched.query, "limit": _PAGE}
        while True:
            page = await _decoded(await self._page(query), _Page)
            async for item in sliced(page.items or ()):
                metadata = metadata_of(item)
                uids.add(metadata.uid)
                read = await self._reader.read(item, metadata, self._objects.get(metadata.uid))
                if read is not None:
                    found[read.uid] = read
            if not page.metadata.following:
                break
            query = {**self._watched.query, "limit": _PAGE, "continue": page.metadata.following}
        if "" in uids:  # an object without a UID may be any object that seems to be missing
            found = {**self._objects, **found}
        self._reader.listed(uids)
        gone: dict[str, T | None] = dict.fromkeys(self._objects.keys() - found.keys())
        async for uid, after in sliced([*gone.items(), *found.items()]):
            self._replace(uid, after)
        self._version, self._logged = page.metadata.resource_version, None
        self._heard(begun)
        self._on_list()
        self.synced.set()

    async def _page(self, query: Mapping[str, str]) -> bytes:
        # A list that hangs must fail before the copy is outdated. Later lists have the usual timeout.
        left = self._times.outdated_seconds - self.silent_seconds
        timeout = aiohttp.ClientTimeout(total=max(_SHORTEST_LIST, left), sock_connect=10) if 0 < left < 60 else REQUEST_TIMEOUT
        async with self._server.request("GET", self._watched.path, query, timeout) as response:
            await _check_status(response)
            return await response.read()

    def _replace(self, uid: str, after: T | None) -> None:
        before = self._objects.pop(uid, None)
        if after is not None:
            self._objects[after.uid] = after
        if before != after:
            self._on_change(before, after)

    # -- watch -------------------------------------------------------------------------------------------------------------

    async def _watch(self, version: str) -> None:
        low, high = self._times.watch_seconds
        seconds = low + round((high - low) * self._jitter()) if self._list_error is None else _SHORTEST_WATCH
        query = {
            **self._watched.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=seconds + self._times.silence_seconds)
        async with self._server.request("GET", self._watched.path, query, timeout) as response:
            await _check_status(response)
            self._logged, self._watching_since = None, self._clock()
            async for line in _lines(response.content):
                await self._event(await _decoded(line, _Event))
            if self._clock() - self._watching_since >= seconds - 1:  # lasted as requested: nothing was left to send
                self._heard(self._clock())

    async def _event(self, event: _Event) -> None:
        if event.type == "ERROR":
            raise ExpiredError(f"the watch ended with {bytes(event.object)[:300].decode(errors='replace')}")
        metadata = metadata_of(event.object)
        self._heard(self._clock())
        if event.type == "BOOKMARK":
            self._version = metadata.resource_version or self._version
            return
        if not metadata.uid:
            raise ExpiredError("an event of the watch has no object with a UID")
        after = None
        if event.type == "DELETED":
            self._reader.unreadable.pop(metadata.uid, None)
        else:
            after = await self._reader.read(event.object, metadata, self._objects.get(metadata.uid))
        self._version = metadata.resource_version
        self._replace(metadata.uid, after)


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    error = await answer_error(response)
    raise ExpiredError(str(error)) if error.status == 410 else error


async def _decoded(text: bytes, kind: type[_K]) -> _K:
    try:
        return await decode_answer(text, kind)
    except UnreadableText as error:
        raise ExpiredError(f"the server's JSON can't be used: {error}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines, of any length. Text after the last line break is an incomplete event, so it is dropped."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*parts, end])
            parts.clear()
            if line.strip():
                yield line
        parts.append(rest)
