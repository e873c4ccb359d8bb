"""Decides when a changed device list is sent to the kubelet, and which ids the kubelet must have received by now. Changes of free memory
blocks (a whole GPU was granted or freed) are sent at most once a second, the failure of a GPU at once. ListAndWatch has no
acknowledgement, so an id that turned Healthy counts as visible to the kubelet one second after it was sent."""

import asyncio
from collections.abc import Callable

from gpumgr.agent.ports import Publish
from gpumgr.common.units import GpuName
from gpumgr.ledger.ids import Masks
from gpumgr.ledger.node import NodeDevices

SETTLE_SECONDS = 1.0


class DeviceListPublisher:
    """`publish` sends a list to the kubelet. `clock` is monotonic, in seconds."""

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
        """Call it when the servers that the kubelet watches have started. No list is sent before."""
        self._listening = True
        self._send()

    def update(self, new: NodeDevices) -> None:
        """The device list is now `new`. It is sent at once if it is `_urgent`, else at most SETTLE_SECONDS later."""
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
        """Sends a list that is held back. True if the list sent last has Healthy memory blocks that do not count as visible yet."""
        self._send()
        visible = self.visible_blocks()
        return any(each.healthy_blocks & ~visible[each.gpu.name] for each in self._sent)

    def visible_blocks(self, settle_seconds: float = SETTLE_SECONDS) -> Masks:
        """Memory blocks that were sent as Healthy `settle_seconds` ago or earlier, and are still Healthy."""
        now = self._clock()
        result = {}
        for each in self._sent:
            gpu = each.gpu.name
            settled = now - self._changed_at.get(gpu, float("-inf")) >= settle_seconds
            result[gpu] = each.healthy_blocks if settled else each.healthy_blocks & self._seen_before[gpu]
        return result

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _urgent(self, new: NodeDevices) -> bool:
        """Whether a GPU is new or forgotten or has other memory, or its Healthy cores, replicas or MIG devices have changed."""
        if len(new) != len(self._sent):
            return True
        return any(
            (n.gpu, n.healthy_cores, n.healthy_replicas, n.healthy_instances)
            != (s.gpu, s.healthy_cores, s.healthy_replicas, s.healthy_instances)
            for n, s in zip(new, self._sent, strict=True)
        )

    def _send(self) -> None:
        self.close()
        if self._held_back is None:
            return
        now, visible = self._clock(), self.visible_blocks()
        sent = {each.gpu.name: each for each in self._sent}
        for each in self._held_back:
            gpu = each.gpu.name
            if gpu in sent and sent[gpu] != each:
                self._seen_before[gpu], self._changed_at[gpu] = visible[gpu], now
        self._sent, self._held_back, self._sent_at = self._held_back, None, now
        self._publish(self._sent)
