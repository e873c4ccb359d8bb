"""The requests behind announcements, and what each kind of them needs to be allowed."""

from collections.abc import Collection, Mapping
from typing import Final, Literal

import aiohttp

from gpumgr.kubeapi import notices
from gpumgr.kubeapi.client import ApiServer, Method, answer_error
from gpumgr.kubeapi.notices import Body, Count, Eviction, Notice

#: The API server itself tries for ten seconds before it says that an eviction meant another life of the pod.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=5)

What = Literal["event", "annotation", "eviction"]

#: RBAC rules, as a person would say them.
RIGHTS: Final[Mapping[What, str]] = {
    "event": "create and patch on events",
    "annotation": "patch on nodes",
    "eviction": "create on pods/eviction",
}


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

    async def annotate_node(self, values: Mapping[str, str | None]) -> None:
        await self._send("PATCH", f"/api/v1/nodes/{self._node}", notices.annotations_patch(values))

    async def evict(self, eviction: Eviction) -> bool:
        """False: this life of the pod was over already."""
        namespace, name = eviction.pod
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        return await self._send("POST", path, notices.eviction_body(eviction), but={404, 409}) == 0

    async def _send(self, method: Method, path: str, body: Body, *, but: Collection[int] = ()) -> int:
        """0 for success, or the status if it is one of `but`."""
        async with self._server.request(method, path, {}, _TIMEOUT, body) as response:
            if response.status in but:
                return response.status
            if response.status >= 300:
                raise await answer_error(response)
        return 0


def remedy(what: What, status: int, node: str) -> str:
    """What to do about a request that is refused for good."""
    if status == 403:
        return f"allow it in the agent's ClusterRole: {RIGHTS[what]}"
    if status == 404 and what == "annotation":
        return f"there is no node {node}: set node.name to the name that `kubectl get nodes` shows"
    return "nothing; it is not tried again"


def _events(notice: Notice) -> str:
    return f"/api/v1/namespaces/{notice.pod[0]}/events"
