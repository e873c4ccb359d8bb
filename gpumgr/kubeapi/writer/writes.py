"""The requests behind announcements."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from gpumgr.allocator.pods import PodKey
from gpumgr.kubeapi.client import AnswerError, ApiServer, Method, PatchKind, answer_error
from gpumgr.kubeapi.writer import notices
from gpumgr.kubeapi.writer.notices import Body, Count, Eviction, Notice

#: The API server itself tries for ten seconds before it says that an eviction meant another life of the pod.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=5)


class Writes:
    """All of its coroutines raise AnswerError for a refusal, and what `ApiServer.request` raises when there is no answer."""

    def __init__(self, server: ApiServer, node: str) -> None:
        self._server, self._node = server, node

    async def create_event(self, notice: Notice, count: Count) -> bool:
        """False: it is there already, made by an earlier request whose answer was lost, perhaps with a smaller count."""
        body = notices.event_body(notice, count, self._node)
        return await self._send("POST", _events(notice), body, but={409}) == 0

    async def recount_event(self, notice: Notice, count: Count) -> bool:
        """False: there is no such event any more (the API server keeps them for an hour)."""
        path = f"{_events(notice)}/{notices.event_name(notice, count.first_at)}"
        return await self._send("PATCH", path, notices.recount_patch(count), but={404}) == 0

    async def annotate_pod(self, pod: PodKey, uid: str, values: Mapping[str, str | None]) -> bool:
        """False: there is no pod of this name any more. Raises AnswerError with status 409 if another life has it."""
        body = notices.annotations_patch(values, uid=uid)
        return await self._send("PATCH", _pod(pod), body, but={404}) == 0

    async def read_node(self) -> Mapping[str, Any]:
        """The Node. Raises AnswerError, too, for an answer that is none."""
        async with self._server.request("GET", self._path, {}, _TIMEOUT) as response:
            if response.status >= 300:
                raise await answer_error(response)
            body, status = await response.read(), response.status
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except ValueError as error:  # msgspec's own errors, and that of bytes which are no text
            raise AnswerError(f"the API server's answer is no Node: {error}", status=status) from error

    async def patch_node(self, patch: Body) -> None:
        await self._send("PATCH", self._path, patch)

    async def patch_node_status(self, patch: Body) -> None:
        """A strategic merge patch: of conditions the one of the same type is replaced."""
        await self._send("PATCH", f"{self._path}/status", patch, kind="strategic")

    async def evict(self, eviction: Eviction) -> bool:
        """False: this life of the pod was over already."""
        body = notices.eviction_body(eviction)
        return await self._send("POST", f"{_pod(eviction.pod)}/eviction", body, but={404, 409}) == 0

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self._node}"

    async def _send(self, method: Method, path: str, body: Body, *, but: Collection[int] = (), kind: PatchKind = "merge") -> int:
        """0 for success, or the status if it is one of `but`."""
        async with self._server.request(method, path, {}, _TIMEOUT, body, kind) as response:
            if response.status in but:
                return response.status
            if response.status >= 300:
                raise await answer_error(response)
        return 0


def _events(notice: Notice) -> str:
    return f"/api/v1/namespaces/{notices.event_namespace(notice)}/events"


def _pod(pod: PodKey) -> str:
    namespace, name = pod
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
