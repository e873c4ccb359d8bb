"""What the Node object shows of us: annotations, labels, and the condition GpuTrouble. Each is a job of the writer's."""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from gpumgr.kubeapi.client import AnswerError
from gpumgr.kubeapi.writer.condition import (
    NO_CONDITION,
    Condition,
    Told,
    condition_patch,
    has_condition,
    parse_told,
    removal_patch,
    told_next,
)
from gpumgr.kubeapi.writer.jobs import Job, NodeJob
from gpumgr.kubeapi.writer.node_labels import labels_patch
from gpumgr.kubeapi.writer.notices import annotations_patch
from gpumgr.kubeapi.writer.outbox import Outbox
from gpumgr.kubeapi.writer.pace import Pace
from gpumgr.kubeapi.writer.writes import Writes

log = structlog.get_logger(__name__)

_NEVER: Final = float("-inf")
_BY_HAND: Final = "if an earlier agent described the node, take it away by hand: config/README.md, Remove, has the commands"


class NodeFace:
    """What is wished is said as often as one likes; it becomes a job when it differs from what was written, or is old.

    `write` raises what `Writes` raises, and then the job waits still. `clock` is monotonic, `wall` tells unix seconds.
    """

    def __init__(
        self, writes: Writes, outbox: Outbox[Job], pace: Pace, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._writes, self._outbox, self._pace, self._clock, self._wall = writes, outbox, pace, clock, wall
        self._annotations: dict[str, str | None] = {}
        self._labels: Mapping[str, str] | None = None
        self._labels_at = _NEVER
        self._condition: Condition | None = None
        self._told: Told | None = None
        self._told_at = _NEVER

    # -- wishes ------------------------------------------------------------------------------------------------------------

    def annotate(self, key: str, value: str | None) -> None:
        """None takes the annotation away."""
        self._annotations[key] = value
        self._outbox.put("annotations", self._clock())

    def label(self, labels: Mapping[str, str]) -> None:
        """All of our labels, none if `labels` is empty; others that were ours are taken away."""
        now = self._clock()
        if labels != self._labels or now - self._labels_at >= self._pace.heartbeat_seconds:
            self._labels = dict(labels)
            self._outbox.put("labels", now)

    def tell(self, condition: Condition) -> None:
        """NO_CONDITION takes it away."""
        now, before = self._clock(), self._condition
        self._condition = condition
        if before is None or before != condition:
            pause_seconds = self._pause_seconds(before, condition)
            if pause_seconds < self._pace.reword_seconds:
                self._outbox.done("condition")  # it may wait for a later time
            self._outbox.put("condition", max(now, self._told_at + pause_seconds))
        elif now - self._told_at >= self._pace.heartbeat_seconds:
            self._outbox.put("condition", now)

    # -- jobs --------------------------------------------------------------------------------------------------------------

    async def write(self, job: NodeJob) -> None:
        try:
            await self._write(job)
        except AnswerError as error:
            if error.status != 403 or not self._takes_away(job):
                raise
            # The rights come and go with what is described: mostly there is nothing, and nothing to ask for.
            log.info("node_description_left", what=job, error=str(error), remedy=_BY_HAND)
            self._outbox.done(job)

    def _takes_away(self, job: NodeJob) -> bool:
        return (job == "labels" and not self._labels) or (job == "condition" and self._condition == NO_CONDITION)

    async def _write(self, job: NodeJob) -> None:
        match job:
            case "annotations":
                await self._write_annotations()
            case "labels":
                await self._write_labels()
            case "condition":
                await self._write_condition()

    def give_up(self, job: NodeJob) -> None:
        """It was refused for good. What is wished still is tried again with the next heartbeat."""
        self._outbox.done(job)
        match job:
            case "annotations":
                self._annotations.clear()
            case "labels":
                self._labels_at = self._clock()
            case "condition":
                self._told_at = self._clock()

    async def _write_annotations(self) -> None:
        values = dict(self._annotations)
        await self._writes.patch_node(annotations_patch(values))
        for key, value in values.items():
            if self._annotations[key] == value:
                del self._annotations[key]
        if not self._annotations:
            self._outbox.done("annotations")

    async def _write_labels(self) -> None:
        """Others write labels, too: what stands there is read each time."""
        labels = self._labels or {}
        if (patch := labels_patch(await self._writes.read_node(), labels)) is not None:
            await self._writes.patch_node(patch)
            if not labels:
                log.info("node_description_removed", what="labels")
        self._labels_at = self._clock()
        if self._labels == labels:
            self._outbox.done("labels")

    async def _write_condition(self) -> None:
        wish = self._condition
        if wish is None:
            raise RuntimeError("a condition is wished before it is written")
        await (self._remove_condition() if wish == NO_CONDITION else self._tell_condition(wish))
        self._told_at = self._clock()
        latest = self._condition or wish
        if latest == wish:
            self._outbox.done("condition")
        else:
            self._outbox.again("condition", self._told_at + self._pause_seconds(wish, latest))

    def _pause_seconds(self, before: Condition | None, condition: Condition) -> float:
        """How long after the last write the next may come."""
        if before is None or before.trouble != condition.trouble:
            return 0.0
        same_gist = (before.reason, before.gist) == (condition.reason, condition.gist)
        return self._pace.reword_seconds if same_gist else self._pace.news_seconds

    async def _tell_condition(self, wish: Condition) -> None:
        """The node is read once: an earlier life of the agent may have told the same, and since when."""
        if self._told is None:
            self._told = parse_told(await self._writes.read_node())
        before, now = self._told, self._wall()
        if before is None or before.condition != wish or now - before.at >= self._pace.heartbeat_seconds:
            told = told_next(wish, before, now)
            await self._writes.patch_node_status(condition_patch(told))
            self._told = told

    async def _remove_condition(self) -> None:
        if has_condition(await self._writes.read_node()):
            await self._writes.patch_node_status(removal_patch())
            log.info("node_description_removed", what="condition")
        self._told = None
