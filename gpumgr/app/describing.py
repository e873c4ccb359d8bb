"""What the node shows of its GPUs in the API server: labels, and the condition GpuTrouble."""

import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from gpumgr.agent.picture import Picture
from gpumgr.kubeapi.writer.condition import CORDONED, NO_CONDITION, Condition, condition_of
from gpumgr.topology.devices import NodeSnapshot
from gpumgr.topology.labels import gpu_labels

#: For so long the agent may be without kubelet or driver before the condition tells of it: both come and go with restarts.
PATIENCE_SECONDS: Final = 15.0
#: Why a GPU takes nothing new although it is well, as in the alert rules (config/prometheus/gpumgr.rules.yaml): what an ended pod left
#: passes, what an operator does is told in his own words, MIG was chosen, and a driver that is away is told of the node.
_NO_TROUBLE: Final = ("quarantine", "operator", "mig", "nvml_down")


class NodeSide(Protocol):
    """Neither call waits; both may be repeated at will (gpumgr.kubeapi.writer.announcer.Announcer)."""

    def label_node(self, labels: dict[str, str]) -> None: ...

    def tell_condition(self, condition: Condition) -> None: ...


class Describing:
    """Call it once a second. `describe_node`: the condition, and labels of what the GPUs are; `node_labels` are written in any case.
    What is not to be told (any more) is taken away once: an earlier agent, or this one with other settings, may have told it.

    `picture` gives the instant that all readers see. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        announcer: NodeSide,
        *,
        picture: Callable[[], Picture],
        describe_node: bool = True,
        node_labels: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcer, self._picture, self._clock = announcer, picture, clock
        self._describe_node, self._node_labels = describe_node, node_labels
        self._labelled: tuple[NodeSnapshot, dict[str, str]] | None = None
        self._not_ready_since: float | None = None
        self._was_ready = False
        self._taken_away = False

    def __call__(self) -> None:
        if not self._describe_node and not self._taken_away:
            self._take_away()
        if not (self._describe_node or self._node_labels):
            return
        picture = self._picture()
        if picture.nvml_up:  # without the driver, what was written before holds
            self._announcer.label_node(self._labels(picture.view.inventory.snapshot))
        if self._describe_node and (condition := self._condition(picture)) is not None:
            self._announcer.tell_condition(condition)

    def _take_away(self) -> None:
        self._taken_away = True
        self._announcer.tell_condition(NO_CONDITION)
        if not self._node_labels:  # else the others go when these are written
            self._announcer.label_node({})

    def _labels(self, snapshot: NodeSnapshot) -> dict[str, str]:
        if self._labelled is None or self._labelled[0] is not snapshot:
            self._labelled = snapshot, gpu_labels(snapshot, describe=self._describe_node, further=self._node_labels)
        return self._labelled[1]

    def _condition(self, picture: Picture) -> Condition | None:
        """None: a moment after the start nobody knows yet."""
        if not picture.not_ready:
            self._not_ready_since, self._was_ready = None, True
        elif self._not_ready_since is None:
            self._not_ready_since = self._clock()
        since = self._not_ready_since
        lasts = since is not None and self._clock() - since >= PATIENCE_SECONDS
        if since is not None and not lasts and not self._was_ready:
            return None
        self._was_ready = True
        number = len(picture.view.ledger.cards.cards)
        return condition_of(
            [*_troubles(picture, tell_not_ready=lasts)], well=f"{number} GPU{'' if number == 1 else 's'}, none in trouble"
        )


def _troubles(picture: Picture, *, tell_not_ready: bool) -> Iterator[tuple[str, str]]:
    """(reason, sentence), the weightiest first."""
    if tell_not_ready and not picture.nvml_up:
        yield "DriverAway", "; ".join(picture.not_ready)
        return  # what is said of each GPU then says no more
    view, words = picture.view, picture.unfit()
    failures = view.inventory.failures(view.ledger.cards)
    cordoned: list[tuple[str, str]] = []
    for card in view.ledger.cards.cards:
        label, cordon = view.node.label(card.name), picture.cordons.get(card.uuid)
        if cordon is not None:
            cordoned.append((CORDONED, f"{label} is cordoned" + (f": {cordon.reason}" if cordon.reason else "")))
        word = words.get(card.name, "quarantine")
        failed = card.name in failures and word != "nvml_down"
        if failed or (cordon is None and word not in _NO_TROUBLE):
            yield "GpuUnhealthy", f"{label}: {view.node.unfit[card.name]}"
    yield from (("GpuUnhealthy", failure.sentence) for failure in view.inventory.unnamed(view.ledger.cards))
    yield from cordoned
    if tell_not_ready:
        yield from (("NotRegistered", sentence) for sentence in picture.not_ready)
