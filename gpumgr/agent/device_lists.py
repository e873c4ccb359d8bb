"""When the kubelet hears of a new offer, and what it must have heard by now.

ListAndWatch has no acknowledgement. Flips of free memory blocks (a GPU was taken or given back whole) are gathered for a second, a
failing GPU is told at once; what turned Healthy counts as seen by the kubelet one second after it was sent.
"""

import asyncio
from collections.abc import Callable

from gpumgr.agent.ports import Publish
from gpumgr.allocator.ids import Masks
from gpumgr.allocator.node_devices import NodeDevices
from gpumgr.units import GpuName

SETTLE_SECONDS = 1.0


class DeviceListPublisher:
    """Holds the latest offer back, or lets it out, and answers which blocks the kubelet surely sees Healthy."""

    def __init__(self, publish: Publish, *, clock: Callable[[], float]) -> None:
        self._publish = publish
        self._clock = clock
        self._sent: NodeDevices = ()
        self._seen_before: dict[GpuName, int] = {}
        self._changed_at: dict[GpuName, float] = {}
        self._sent_at = float("-inf")
        self._held_back: NodeDevices | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listening = False

    def start(self) -> None:
        """From now on there are servers that the kubelet can watch; what the books said before, nobody has seen."""
        self._listening = True
        self._send()

    def update(self, new: NodeDevices) -> None:
        """The offer is now `new`; sent at once if something failed or came back, else gathered with what follows."""
        if new == self._sent:
            self._held_back = None
            return
        self._held_back = new
        if not self._listening:
            return
        wait = 0.0 if self._urgent(new) else self._sent_at + SETTLE_SECONDS - self._clock()
        if wait <= 0:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._send)

    def hurry(self) -> bool:
        """Lets out what is held back. True if the kubelet is told of Healthy blocks that don't count as seen yet."""
        self._send()
        visible = self.visible_blocks()
        return any(card.healthy_blocks & ~visible[card.card.name] for card in self._sent)

    def visible_blocks(self, settle_seconds: float = SETTLE_SECONDS) -> Masks:
        """Memory blocks that were sent as Healthy so long ago and still are."""
        now = self._clock()
        result = {}
        for card in self._sent:
            gpu = card.card.name
            settled = now - self._changed_at.get(gpu, float("-inf")) >= settle_seconds
            result[gpu] = card.healthy_blocks if settled else card.healthy_blocks & self._seen_before[gpu]
        return result

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _urgent(self, new: NodeDevices) -> bool:
        """A GPU is new, has grown, or works for fewer cores than the kubelet believes."""
        if len(new) != len(self._sent):
            return True
        return any(n.card != s.card or n.healthy_cores != s.healthy_cores for n, s in zip(new, self._sent, strict=True))

    def _send(self) -> None:
        self.close()
        if self._held_back is None:
            return
        now, visible = self._clock(), self.visible_blocks()
        sent = {card.card.name: card for card in self._sent}
        for card in self._held_back:
            gpu = card.card.name
            if gpu in sent and sent[gpu] != card:
                self._seen_before[gpu], self._changed_at[gpu] = visible[gpu], now
        self._sent, self._held_back, self._sent_at = self._held_back, None, now
        self._publish(self._sent)
