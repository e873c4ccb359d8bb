"""The desired state of the Node object: the agent's annotations, its labels, and the condition GpuTrouble."""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from gpumgr.kube.client import AnswerError, ApiServer
from gpumgr.kube.publisher.condition import (
    Condition,
    condition_patch,
    has_condition,
    labels_patch,
    parse_condition,
    removal_patch,
)
from gpumgr.kube.publisher.work_queue import Job

_log = structlog.get_logger(__name__)

#: A condition with an unchanged status is written at most this often: the kubelet's own interval (nodeStatusUpdateFrequency).
CONDITION_SECONDS: Final = 10.0
_NEVER: Final = float("-inf")
_BY_HAND: Final = "if an earlier agent described the node, remove that by hand: docs/operations.md, Remove, has the commands"


class NodeStatus:
    """Calls may be repeated: changes are queued at once, unchanged state every `resync_seconds`.

    `put` queues a job for a time. The `write_` methods raise what `ApiServer.send` raises. `clock` is monotonic, `wall` unix seconds.
    """

    def __init__(
        self,
        server: ApiServer,
        node: str,
        put: Callable[[Job, float], object],
        *,
        resync_seconds: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._server, self._path, self._put = server, f"/api/v1/nodes/{node}", put
        self._resync_seconds, self._clock, self._wall = resync_seconds, clock, wall
        self._annotations: dict[str, str | None] = {}
        self._annotated, self._removed = False, set[str]()
        self._labels: Mapping[str, str] | None = None
        self._labels_at = _NEVER
        self._condition: Condition | None = None
        self._condition_at = self._written_at = _NEVER
        #: What the API server has, and since when (unix seconds) with this status; None until the Node was read.
        self._written: tuple[Condition, float] | None = None

    # -- desired state -----------------------------------------------------------------------------------------------------

    def annotate(self, key: str, value: str | None) -> None:
        """None removes the annotation."""
        self._annotations[key], self._annotated = value, True
        self._put(Job("annotations"), self._clock())

    def remove_once(self, key: str) -> None:
        """Removes an annotation that another program sets again and again."""
        self._removed.add(key)
        self._put(Job("annotations"), self._clock())

    def keep_removals(self) -> bool:
        """Drops the annotations that are not written yet, except the removals of `remove_once`. False: there are none."""
        self._annotated = False
        return bool(self._removed)

    def label(self, labels: Mapping[str, str]) -> None:
        """Sets the agent's labels; others that it wrote before are removed."""
        now = self._clock()
        if labels != self._labels or now - self._labels_at >= self._resync_seconds:
            self._labels, self._labels_at = dict(labels), now
            self._put(Job("labels"), now)

    def set_condition(self, condition: Condition | None) -> None:
        """Sets the condition; None removes it. A new status is due at once, a new message CONDITION_SECONDS after the last write."""
        now, before = self._clock(), self._condition
        if condition == before and now - self._condition_at < self._resync_seconds:
            return
        same_status = condition is not None and before is not None and condition.trouble == before.trouble
        self._condition, self._condition_at = condition, now
        self._put(Job("condition"), max(now, self._written_at + CONDITION_SECONDS) if same_status else now)

    # -- writing -----------------------------------------------------------------------------------------------------------

    async def write_annotations(self, _: object) -> None:
        """All that are set, but only if one of them was set since the last write: the inventory is long."""
        removed, annotated = self._removed, self._annotated
        self._removed, self._annotated = set(), False
        values = {**dict.fromkeys(removed), **(self._annotations if annotated else {})}
        try:
            if values:
                await self._server.send("PATCH", self._path, {"metadata": {"annotations": values}})
        except BaseException:
            self._removed |= removed
            self._annotated |= annotated
            raise

    async def write_labels(self, _: object) -> None:
        """Other components write labels, too: the present ones are read each time."""
        labels = self._labels or {}
        try:
            if (patch := labels_patch(await self._server.read("GET", self._path), labels)) is not None:
                await self._server.send("PATCH", self._path, patch)
                if not labels:
                    _log.info("node_description_removed", what="labels")
        except AnswerError as error:
            self._check_removal(error, "labels", removing=not labels)

    async def write_condition(self, _: object) -> None:
        condition = self._condition
        self._written_at = self._clock()
        try:
            await (self._remove_condition() if condition is None else self._write_condition(condition))
        except AnswerError as error:
            self._check_removal(error, "condition", removing=condition is None)

    async def _write_condition(self, condition: Condition) -> None:
        """The Node is read once: an earlier process may have written the same condition."""
        now = self._wall()
        if self._written is None and (found := parse_condition(await self._server.read("GET", self._path))) is not None:
            self._written = found[:2]
            if found[0] == condition and now - found[2] < self._resync_seconds:
                return
        before = self._written
        since = before[1] if before is not None and before[0].trouble == condition.trouble else now
        await self._server.send(
            "PATCH", f"{self._path}/status", condition_patch(condition, since=since, now=now), patch="strategic"
        )
        self._written = (condition, since)

    async def _remove_condition(self) -> None:
        self._written = None
        if has_condition(await self._server.read("GET", self._path)):
            await self._server.send("PATCH", f"{self._path}/status", removal_patch(), patch="strategic")
            _log.info("node_description_removed", what="condition")

    def _check_removal(self, error: AnswerError, what: str, *, removing: bool) -> None:
        """Raises `error`, unless only the right to remove is missing: usually there is nothing to remove, so the right is not required."""
        if error.status != 403 or not removing:
            raise error
        _log.info("node_description_left", what=what, error=str(error), remedy=_BY_HAND)
