"""The highest memory limits that may be in force.

An evaluation (one for each sample of the driver) computes all limits, and the backends set them. The backends may finish after the end of
the evaluation, or fail for some containers. Until they finish, no later limits are set.
"""

from collections.abc import Mapping
from typing import Final

from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import AllocationOnGpu

#: For a limit that an earlier process of the agent may have set: more than any GPU has.
UNKNOWN_BYTES: Final = 1 << 62

Limits = Mapping[AllocationOnGpu, int]


class LimitsInForce:
    """Sizes are in bytes. A `place` is a container's allocation on one GPU. `latest`: what the last evaluation computed; None before the
    first."""

    def __init__(self) -> None:
        self.latest: Limits | None = None
        #: Container -> why its limits are not in force.
        self.obstacles: Mapping[AllocationId, str] = {}
        #: The highest limit before `latest` that may still be in force.
        self._earlier: dict[AllocationOnGpu, int] = {}
        #: What may have been in force when the sample of the last evaluation was read, and when the next one is read.
        self._at_sample: Limits = {}
        self._at_next_sample: Limits = {}

    def knows(self, place: AllocationOnGpu) -> bool:
        """Whether the latest evaluation knew the container on this GPU."""
        return place in self._earlier

    def begin_evaluation(self, started: Limits) -> None:
        """`started`: the limits of new containers."""
        self._earlier, self._at_sample = {**self._earlier, **started}, {**self._at_next_sample, **started}

    def compute(self, limits: Limits) -> None:
        """Call it when an evaluation has computed these limits."""
        self._earlier, self.latest = {place: self._now(place) for place in limits}, limits

    def enforced(self, limits: Limits, obstacles: Mapping[AllocationId, str], kept_bytes: Mapping[AllocationId, int]) -> None:
        """Call it when these limits are in force, except for the containers in `obstacles` (with the reason). `kept_bytes`: the highest
        limit that running programs of such a container still have, if known."""
        for place in self._earlier.keys() & limits.keys():
            kept = kept_bytes.get(place[0]) if place[0] in obstacles else 0
            if kept is not None:
                self._earlier[place] = max(limits[place], kept)
        self.obstacles = obstacles

    def end_evaluation(self) -> None:
        """Call it before the next sample is read."""
        self._at_next_sample = {place: self._now(place) for place in self._earlier}

    def most_bytes(self, place: AllocationOnGpu) -> int:
        """The highest limit that may be in force, or may have been when the last sample was read; 0 for a container that no evaluation
        knows."""
        return max(self._at_sample.get(place, 0), self._now(place))

    def _now(self, place: AllocationOnGpu) -> int:
        return max(self._earlier.get(place, 0), (self.latest or {}).get(place, 0))
