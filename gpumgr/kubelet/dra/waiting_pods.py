"""Makes the kubelet retry pods that wait for a claim of this driver.

A kubelet that could not prepare a pod's claims tries again only after 60 to 90 s, unless the pod changes. It does not even call the
driver if the driver is not registered, or if the API server refuses to show it the claim because the authorizer has not processed the
binding of the pod yet ("no relationship found between node and this object", seen with 40 pods at once). So a pod that still has no
prepared claim some seconds after its binding gets an annotation, which changes the pod. This is repeated with growing pauses.

A claim that the ledger holds, but that this process has not prepared, is ambiguous: the kubelet may have got no answer from an earlier
process of the agent, or the pod's image is being pulled. It causes only a few retries after each registration.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

import structlog

from gpumgr.kube.client import API_FAILURES, UNREADABLE, ApiServer
from gpumgr.kubelet.dra.claim_reader import find_shares
from gpumgr.placement.pods import PodView

_log = structlog.get_logger(__name__)

RETRY_ANNOTATION: Final = "gpumgr.io/claims-retried"
_FIRST_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
#: Retries of a pod for a claim that the ledger holds, after each registration.
_HELD_RETRIES: Final = 3
#: Time limit for all requests about one pod.
_TRY_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Wait:
    """A pod, and the claims that it waits for. `ours` is None until it is known whether one of them is for this driver. `tried`: claim
    that the ledger holds -> retries of the pod since the last registration."""

    due_at: float
    pause_seconds: float
    retries: int = 0
    missing: Collection[str] = ()
    ours: bool | None = None
    tried: Counter[str] = field(default_factory=Counter)


class WaitingPods:
    """`run` it as a daemon. `pods`: the pods that are bound to this node. `pool`: the node's pool of devices. `held` returns the claims
    in the ledger: (namespace, name) -> whether this process has prepared the claim. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        server: ApiServer,
        pods: Callable[[], Iterable[PodView]],
        pool: str,
        held: Callable[[], Mapping[tuple[str, str], bool]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._pods, self._pool, self._held, self._clock = server, pods, pool, held, clock
        self._waiting: dict[str, _Wait] = {}
        self._error = ""

    def retry_now(self) -> None:
        """To be called when the kubelet has registered the driver. Makes every waiting pod due."""
        for wait in self._waiting.values():
            wait.due_at, wait.pause_seconds = self._clock(), _FIRST_SECONDS
            wait.tried.clear()

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self.step()
                self._error = ""
            except (*API_FAILURES, *UNREADABLE) as error:
                if str(error) != self._error:
                    _log.warning(
                        "claiming_pods_not_retried", error=str(error), consequence="the kubelet retries them within 90 s"
                    )
                self._error = str(error)

    async def step(self) -> None:
        """Retries the pods that are due. Raises what requests raise."""
        held, now = self._held(), self._clock()
        pods = {pod.uid: pod for pod in self._pods() if pod.claims and pod.phase == "Pending" and not pod.started}
        self._waiting = {uid: self._waiting.get(uid) or _Wait(now + _FIRST_SECONDS, _FIRST_SECONDS) for uid in pods}
        for uid, wait in self._waiting.items():
            pod = pods[uid]
            lacking = {use.claim for use in pod.claims if not held.get((pod.namespace, use.claim))}
            known = {name for name in lacking if (pod.namespace, name) in held}
            missing = lacking - {name for name in known if wait.tried[name] >= _HELD_RETRIES}
            if missing and not wait.missing:
                wait.due_at, wait.pause_seconds = now + _FIRST_SECONDS, _FIRST_SECONDS
            if missing != wait.missing:
                wait.missing, wait.ours = missing, bool(missing & known) or None
            if missing and wait.due_at <= now and wait.ours is not False:
                async with asyncio.timeout(_TRY_SECONDS):
                    await self._retry(pod, wait)

    async def _retry(self, pod: PodView, wait: _Wait) -> None:
        wait.due_at = self._clock() + _FIRST_SECONDS  # for a request that fails; the pause grows only after a retry
        if wait.ours is None:
            for name in sorted(wait.missing):
                _, shares = await find_shares(self._server, self._pool, pod.namespace, name)
                if shares:
                    wait.ours = True
                    break
            else:
                wait.ours = False
        if not wait.ours:
            return
        wait.retries += 1
        body = {"metadata": {"uid": pod.uid, "annotations": {RETRY_ANNOTATION: str(wait.retries)}}}
        if await self._server.send("PATCH", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", body, but=(404, 409)):
            _log.info("claiming_pod_retried", pod="/".join(pod.key), pod_uid=pod.uid, retries=wait.retries)
        held = self._held()
        wait.tried.update(name for name in wait.missing if (pod.namespace, name) in held)
        wait.due_at += wait.pause_seconds - _FIRST_SECONDS
        wait.pause_seconds = min(2 * wait.pause_seconds, _LONGEST_SECONDS)
