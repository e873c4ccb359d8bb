"""Passes the node's state to the reporters once a second. `NodeReporter` publishes labels and the condition GpuTrouble; the reporters in
`inventory` and `hami` publish annotations. A reporter may publish the same state each time: the publisher writes what has changed."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NoReturn, Protocol

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import BugLog, until_tick
from gpumgr.kube.publisher.events import cut
from gpumgr.kube.publisher.objects import Condition
from gpumgr.placement.topology.devices import NodeSnapshot
from gpumgr.placement.topology.labels import gpu_labels

REPORT_SECONDS: Final = 1.0
#: The condition's reason while there is no trouble.
NO_TROUBLE: Final = "GpusWork"
#: The limit of the condition's message. The API server accepts 32 KiB, which is too long to read.
MAX_MESSAGE_BYTES: Final = 2048
#: How long the kubelet or the driver may be unavailable before the condition says so: both are restarted in normal operation.
PATIENCE_SECONDS: Final = 15.0
#: Reasons why a GPU takes no new containers that do not count as trouble, as in the alert rules (config/prometheus/gpumgr.rules.yaml):
#: leftovers of an ended pod are temporary, a cordon has its own message, MIG is a setting, and an unavailable driver is a state of the
#: node.
_NO_TROUBLE: Final = ("quarantine", "operator", "mig", "nvml_down")


class NodeReports:
    """The daemon: calls each of the reporters with the current state once a second. A bug of one of them does not stop the others."""

    def __init__(self, report: Callable[[], NodeReport], reporters: Mapping[str, Callable[[NodeReport], None]]) -> None:
        self._report, self._reporters = report, reporters
        self._bugs = {name: BugLog(name) for name in reporters}

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        while True:
            report = self._report()
            for name, publish in self._reporters.items():
                try:
                    publish(report)
                except Exception as error:
                    self._bugs[name].record(error)
            await asyncio.sleep(until_tick(REPORT_SECONDS))


class NodeSink(Protocol):
    """Both calls return at once and may be repeated (gpumgr.kube.publisher.publisher.Publisher)."""

    def label(self, labels: Mapping[str, str]) -> None: ...

    def set_condition(self, condition: Condition | None) -> None: ...


class NodeReporter:
    """`describe_node`: publish the condition, and labels that describe the GPUs; `node_labels` are published in any case.

    Labels and a condition that must not be published are removed once: an earlier process, or this one with other settings, may have
    written them. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        node: NodeSink,
        *,
        describe_node: bool = True,
        node_labels: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._clock = node, clock
        self._labels: tuple[NodeSnapshot, dict[str, str]] | None = None
        self._not_ready_since: float | None = None
        self._was_ready = False
        self.switch(describe_node=describe_node, node_labels=node_labels)

    def switch(self, *, describe_node: bool, node_labels: tuple[str, ...]) -> None:
        """Sets what is published from now on."""
        self._describe_node, self._node_labels = describe_node, node_labels
        self._labels, self._removed = None, False

    def report(self, report: NodeReport) -> None:
        """To be called once a second."""
        if not self._describe_node and not self._removed:
            self._removed = True
            self._node.set_condition(None)
            if not self._node_labels:  # otherwise other labels are removed when these are written
                self._node.label({})
        if not (self._describe_node or self._node_labels):
            return
        if report.nvml_up:  # without the driver, the labels stay as they are
            self._node.label(self._gpu_labels(report.view.inventory.snapshot))
        if self._describe_node and (condition := self._condition(report)) is not None:
            self._node.set_condition(condition)

    def _gpu_labels(self, snapshot: NodeSnapshot) -> dict[str, str]:
        if self._labels is None or self._labels[0] is not snapshot:
            self._labels = snapshot, gpu_labels(snapshot, describe=self._describe_node, further=self._node_labels)
        return self._labels[1]

    def _condition(self, report: NodeReport) -> Condition | None:
        """None within PATIENCE_SECONDS after the start, unless all is ready earlier."""
        now, lasts = self._clock(), False
        if not report.not_ready:
            self._not_ready_since, self._was_ready = None, True
        else:
            since = self._not_ready_since = now if self._not_ready_since is None else self._not_ready_since
            lasts = now - since >= PATIENCE_SECONDS
        if not lasts and not self._was_ready:
            return None
        self._was_ready = True
        number = len(report.view.ledger.gpu_registry.gpus)
        healthy = f"{number} GPU{'' if number == 1 else 's'}, none in trouble"
        return condition_of([*_troubles(report, not_ready=lasts)], healthy=healthy)


def condition_of(troubles: Sequence[tuple[str, str]], *, healthy: str) -> Condition:
    """The condition for (reason, sentence) pairs, the most severe first, which gives the condition its reason. `healthy` is the message
    without any pair."""
    if not troubles:
        return Condition(trouble=False, reason=NO_TROUBLE, message=healthy)
    message = cut("; ".join(sentence for _, sentence in troubles), MAX_MESSAGE_BYTES)
    return Condition(trouble=True, reason=troubles[0][0], message=message)


def _troubles(report: NodeReport, *, not_ready: bool) -> Iterator[tuple[str, str]]:
    """(reason, message), the most severe first. `not_ready`: include what the node lacks to take pods."""
    if not_ready and not report.nvml_up:
        yield "DriverAway", "; ".join(report.not_ready)
        return  # the state of each GPU would only repeat this reason
    view, reasons = report.view, report.unschedulable()
    failures = view.inventory.failures(view.ledger.gpu_registry)
    cordoned: list[tuple[str, str]] = []
    for gpu in view.ledger.gpu_registry.gpus:
        label, cordon = view.node.label(gpu.name), report.cordons.get(gpu.uuid)
        if cordon is not None:
            cordoned.append(("GpuCordoned", f"{label} is cordoned" + (f": {cordon.reason}" if cordon.reason else "")))
        reason = reasons.get(gpu.name, "quarantine")
        failed = gpu.name in failures and reason != "nvml_down"
        if failed or (cordon is None and reason not in _NO_TROUBLE):
            yield "GpuUnhealthy", f"{label}: {view.node.unschedulable[gpu.name]}"
    yield from (("GpuUnhealthy", failure.sentence) for failure in view.inventory.unnamed(view.ledger.gpu_registry))
    unlisted = view.inventory.snapshot.unlisted_sentence
    if unlisted is not None and report.nvml_up:
        yield "GpuNotListed", unlisted
    yield from cordoned
    if not_ready:
        yield from (("NotRegistered", sentence) for sentence in report.not_ready if sentence != unlisted)
