"""A picture as families: which there are, in which order, and what they need from one picture to the next."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gpumgr.agent.picture import Picture
from gpumgr.allocator.pods import PodView
from gpumgr.metrics import containers, gpus, health
from gpumgr.metrics.containers import CONTAINER_LABELS, container_blocks
from gpumgr.metrics.gpu_manager import HOLDER_LABELS, gpu_manager_blocks
from gpumgr.metrics.gpus import gpu_blocks
from gpumgr.metrics.hami import hami_blocks
from gpumgr.metrics.health import health_blocks
from gpumgr.metrics.text import Block, LabelTexts

#: Our own; not all are in every picture.
FAMILIES: Final = (*health.FAMILIES, *gpus.FAMILIES, *containers.FAMILIES)


class Drawing:
    """For one thread at a time. Who is not in a picture has no series any more."""

    def __init__(
        self,
        *,
        node: str,
        gpu_manager_names: bool,
        hami_names: bool,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` is the Kubernetes node's name; the names are those of other agents' gauges, drawn beside our own, and may be switched
        at any time."""
        self._node, self._clock, self._wall_clock = node, clock, wall_clock
        self.gpu_manager_names, self.hami_names = gpu_manager_names, hami_names
        self._containers, self._holders = LabelTexts(*CONTAINER_LABELS), LabelTexts(*HOLDER_LABELS)

    def blocks(self, picture: Picture | None, pods: Sequence[PodView] = ()) -> Iterator[Block]:
        """Each family once. `pods` are those of the node, as far as they are known; only other agents' gauges need them."""
        self._containers.turn()
        self._holders.turn()
        yield from health_blocks(picture, sampled_at=self._sampled_at(picture))
        if picture is None:
            return
        yield from gpu_blocks(picture, node=self._node)
        yield from container_blocks(picture, self._containers)
        if self.gpu_manager_names:
            yield from gpu_manager_blocks(picture, pods, node=self._node, texts=self._holders)
        if self.hami_names:
            yield from hami_blocks(picture, pods, node=self._node)

    def _sampled_at(self, picture: Picture | None) -> float | None:
        """From the sample's age, so that a wall clock that was set meanwhile doesn't make it older or younger."""
        if picture is None or picture.sampled_at is None:
            return None
        return self._wall_clock() - max(0.0, self._clock() - picture.sampled_at)
