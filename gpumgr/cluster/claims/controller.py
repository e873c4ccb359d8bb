"""Creates the templates that pods name, removes the gates of pods that the quotas allow, and sends events about pods that must wait."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, NoReturn

import structlog

from gpumgr.cluster.claims.gates import Decision, decide
from gpumgr.cluster.claims.objects import GATE, Key, UnboundPod
from gpumgr.cluster.claims.shapes import PREFIX, Shape, parse, template
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.common.aio import LogPace, wait_at_most
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer, Body, Method, PatchKind, failure_text
from gpumgr.kube.publisher.events import Event, EventSeries, pod_ref
from gpumgr.settings.schema import ClaimsSettings

_log = structlog.get_logger(__name__)

#: The timeout of a write, which starts only if this process is sure to lead for this time.
_WRITE_SECONDS: Final = 3.0
_SWEEP_SECONDS: Final = 60.0
#: The pause between two steps, because each step examines all claims while pods have the gate.
_PAUSE_SECONDS: Final = 0.1
#: The first and the longest pause after a write, for each object; Retry-After may be longer.
_PAUSES_SECONDS: Final = (0.5, 60.0)
#: The shortest time between two events about one pod.
_EVENT_SECONDS: Final = 60.0
#: The most events of one step; the next step sends the others.
_MAX_EVENTS: Final = 50
#: What is written; "sweep": an unused template is deleted.
OBJECTS: Final = ("template", "gate", "event", "sweep")
OUTCOMES: Final = ("ok", "error")
#: A pod that must wait, and the reason and the text of the event about the pod.
_Refused = tuple[UnboundPod, str, str]
_TEMPLATE_REFUSED, _QUOTA_EXCEEDED = "GpuClaimTemplateRefused", "GpuQuotaExceeded"


class ClaimsController:
    """Run `run` as a daemon. `leader` None: this process is the only one. `clock` is monotonic, in seconds. `writes` counts requests by
    object and outcome; `refused` is the number of gated pods that the quota does not allow."""

    def __init__(
        self,
        server: ApiServer,
        watches: ClaimWatches,
        settings: ClaimsSettings,
        identity: str,
        *,
        leader: Leadership | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        period_seconds: float = 1.0,
    ) -> None:
        self._server, self._watches, self._settings, self._identity = server, watches, settings, identity
        self._leader, self._clock, self._jitter, self._period = leader, clock, jitter, period_seconds
        self.writes: Counter[tuple[str, str]] = Counter()
        self.refused = 0
        #: (Kind, key) of an object -> when it may be written again, and the pause after that write.
        self._paused: dict[Hashable, tuple[float, float]] = {}
        #: UIDs of the pods that have lost the gate, until the watch shows that.
        self._opened: set[str] = set()
        #: The last event of each pod, and when it was sent.
        self._said: dict[str, tuple[str, float]] = {}
        self._swept_at = clock()
        #: Template -> the last sweep at which it was in use, or new.
        self._used_at: dict[Key, float] = {}
        self._failures = LogPace(clock)

    @property
    def leads(self) -> bool:
        return self._watches.problem is None and (self._leader is None or self._leader.outlives(_WRITE_SECONDS))

    async def run(self) -> NoReturn:
        while True:
            await wait_at_most(self._watches.changed, self._period)
            self._watches.changed.clear()
            if self.leads:
                await self.step()
                await asyncio.sleep(min(_PAUSE_SECONDS, self._period))

    async def step(self) -> None:
        refused = await self._create_templates()
        events = [*await self._open_gates(), *refused]
        for each in [each for each in events if self._is_due(each)][:_MAX_EVENTS]:
            await self._send(each)
        if self._clock() >= self._swept_at + _SWEEP_SECONDS:
            self._swept_at = self._clock()
            forgotten = self._clock() - _PAUSES_SECONDS[1]
            self._paused = {key: each for key, each in self._paused.items() if each[0] > forgotten}
            await self._sweep()

    # -- templates ---------------------------------------------------------------------------------------------------------

    async def _create_templates(self) -> list[_Refused]:
        """Creates missing templates that pods name. For each template that must not be created, returns a pod that names it."""
        known = self._watches.templates
        counts = Counter(key[0] for key, each in known.items() if each.managed)
        missing: dict[Key, UnboundPod] = {}
        for pod in sorted(self._watches.pods.values(), key=lambda each: (each.created, each.key)):
            for name in pod.templates:
                if name.startswith(PREFIX) and (pod.key[0], name) not in known:
                    missing.setdefault((pod.key[0], name), pod)
        creations, refused = [], list[_Refused]()
        for key, pod in missing.items():
            try:
                shape = parse(key[1])
            except ValueError as error:
                text = f"ResourceClaimTemplate {key[1]} does not exist, and can't be created: {error}"
                refused.append((pod, _TEMPLATE_REFUSED, text))
                continue
            if counts[key[0]] >= self._settings.max_templates_per_namespace:
                text = f"namespace {key[0]} has {counts[key[0]]} templates of gpumgr, the limit"
                remedy = "delete some, or set claims.max_templates_per_namespace higher"
                refused.append((pod, _TEMPLATE_REFUSED, f"ResourceClaimTemplate {key[1]} is not created: {text}; {remedy}"))
                continue
            counts[key[0]] += 1
            creations.append(self._create_template(key, shape))
        await asyncio.gather(*creations)
        return refused

    async def _create_template(self, key: Key, shape: Shape) -> None:
        path = f"/apis/resource.k8s.io/v1/namespaces/{key[0]}/resourceclaimtemplates"
        if await self._write("template", key, "POST", path, template(*key, shape), but=(409,)):
            _log.info("template_created", namespace=key[0], template=key[1])

    async def _sweep(self) -> None:
        """Deletes gpumgr's templates that no pod or claim has used for `template_idle_hours`."""
        now, in_use = self._clock(), set(self._watches.templates_in_use())
        self._used_at = {key: now if key in in_use else self._used_at.get(key, now) for key in self._watches.templates}
        for key, each in list(self._watches.templates.items()):
            if each.managed and now - self._used_at[key] >= 3600 * self._settings.template_idle_hours:
                path = f"/apis/resource.k8s.io/v1/namespaces/{key[0]}/resourceclaimtemplates/{key[1]}"
                if await self._write("sweep", each.uid, "DELETE", path, {"preconditions": {"uid": each.uid}}, but=(404, 409)):
                    _log.info("template_deleted", namespace=key[0], template=key[1])

    # -- gates -------------------------------------------------------------------------------------------------------------

    async def _open_gates(self) -> list[_Refused]:
        """Removes the gates of the pods that the quotas allow. Returns the pods that the quotas refuse."""
        pods, quotas = self._watches.pods, self._watches.quotas
        self._opened = {uid for uid in self._opened if uid in pods and pods[uid].gate is not None}
        self._said = {uid: said for uid, said in self._said.items() if uid in pods}
        gated = {uid: pod for uid, pod in pods.items() if pod.gate is not None and uid not in self._opened}
        decision = Decision()
        if quotas.problem is not None:
            decision.refused = [(pod, quotas.problem) for pod in gated.values()]
        elif gated:
            decision = decide(*self._watches.demands(gated), quotas)
        self.refused = len(decision.refused)
        await asyncio.gather(*map(self._open, decision.allowed))
        return [(pod, _QUOTA_EXCEEDED, text) for pod, text in decision.refused]

    async def _open(self, pod: UnboundPod) -> None:
        """Removes the gate of one pod. The `test` operations of the patch fail if the pod was replaced or its gates have changed."""
        gate = f"/spec/schedulingGates/{pod.gate}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{gate}/name", "value": GATE},
            {"op": "remove", "path": gate},
        ]
        path = f"/api/v1/namespaces/{pod.key[0]}/pods/{pod.key[1]}"
        if await self._write("gate", (pod.uid, pod.gate), "PATCH", path, patch, but=(404, 422), patch="json"):
            self._opened.add(pod.uid)
            _log.info("gate_removed", namespace=pod.key[0], pod=pod.key[1], pod_uid=pod.uid)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _is_due(self, refused: _Refused) -> bool:
        """Whether the text is new for this pod, its last event is not recent, and no pause lasts."""
        pod, _, text = refused
        said, paused = self._said.get(pod.uid), self._paused.get(("event", pod.uid), (0.0, 0.0))[0]
        return self._clock() >= paused and (said is None or (said[0] != text and self._clock() >= said[1] + _EVENT_SECONDS))

    async def _send(self, refused: _Refused) -> None:
        pod, reason, text = refused
        event = Event(about=pod_ref(pod.key, pod.uid), reason=reason, message=text, warning=True)
        series = EventSeries.once(event, time.time())
        if await self._write("event", pod.uid, "POST", series.path, series.body(self._identity), but=(404, 409)):
            self._said[pod.uid] = text, self._clock()

    async def _write(
        self,
        about: str,
        key: Hashable,
        method: Method,
        path: str,
        body: Body,
        *,
        but: tuple[int, ...],
        patch: PatchKind = "merge",
    ) -> bool | None:
        """True: written. False: the API server answered with a status in `but`, because another client changed the object first. None: the
        write failed, or was not sent because this process does not lead or the pause of the object (`key`) lasts. The pause doubles with
        each refusal or failure."""
        due, pause = self._paused.get((about, key), (0.0, _PAUSES_SECONDS[0]))
        if not self.leads or self._clock() < due:
            return None
        slept, longer = pause * (0.8 + 0.4 * self._jitter()), min(2 * pause, _PAUSES_SECONDS[1])
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                done = await self._server.send(method, path, body, but=but, patch=patch)
        except API_FAILURES as error:
            self.writes[about, "error"] += 1
            slept = max(slept, error.retry_after_seconds if isinstance(error, AnswerError) else 0.0)
            self._paused[about, key] = self._clock() + slept, longer
            if self._failures.due():
                _log.warning("claims_write_failed", path=path, error=failure_text(error), again_after_seconds=round(slept, 1))
            return None
        self.writes[about, "ok"] += 1
        # The watch may show the change later, so there is a pause after a success, too.
        self._paused[about, key] = self._clock() + slept, _PAUSES_SECONDS[0] if done else longer
        return done
