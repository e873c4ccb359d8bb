"""The reporters of annotations of the node: they look once a second, and write what has changed."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, NoReturn

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.ports import Pods
from gpumgr.common.aio import until_tick

REPORT_SECONDS: Final = 1.0
#: An unchanged text is written again this often: the Node may have been deleted and registered again.
RESYNC_SECONDS: Final = 600.0

#: Sets an annotation of the node.
Annotate = Callable[[str, str | None], None]


class NodeAnnotationReporter(ABC):
    """`report` returns the current state. `clock` is monotonic, in seconds."""

    def __init__(self, annotate: Annotate, *, report: Callable[[], NodeReport], pods: Pods, clock: Callable[[], float]) -> None:
        self._annotate, self._report, self.pods, self.clock = annotate, report, pods, clock
        self._written: dict[str, tuple[str, float]] = {}

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        while True:
            self.report()
            await asyncio.sleep(until_tick(REPORT_SECONDS))

    def report(self) -> None:
        """To be called once a second. Writes nothing before the GPUs and the node's pods are known."""
        report = self._report()
        if report.view.inventory.snapshot.gpus and self.pods.synced:
            self.write(report)

    @abstractmethod
    def write(self, report: NodeReport) -> None:
        """Calls `annotate` for each annotation."""

    def annotate(self, key: str, text: str, again_seconds: float = RESYNC_SECONDS) -> None:
        """Sets the annotation if the text is another one, or was written so long ago."""
        if text != self._written.get(key, ("", 0.0))[0] or self.age(key) >= again_seconds:
            self._written[key] = text, self.clock()
            self._annotate(key, text)

    def age(self, key: str) -> float:
        """Seconds since it was written."""
        return self.clock() - self._written.get(key, ("", float("-inf")))[1]
