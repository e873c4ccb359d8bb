"""The highest memory limits that may be in force. Pure.

The agent evaluates each sample of the driver: it computes the limits of all containers, and the backends set them. Evaluations are numbered
from 1. The backends may still set limits after the end of an evaluation, and may fail for some containers. So a container may have the
limit of the latest evaluation that is in force, or of any later one.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.usage.node_use import AllocationOnGpu

#: In place of a limit that an earlier process of the agent may have set: more than any GPU has.
UNKNOWN_BYTES: Final = 1 << 62


class Enforced(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of evaluation `number` are in force, except for the containers in `obstacles` (container -> the reason). `kept_bytes`: the
    highest limit that running programs of such a container still have, if the backend knows it."""

    number: int = 0
    obstacles: Mapping[AllocationId, str] = msgspec.field(default_factory=dict)
    kept_bytes: Mapping[AllocationId, int] = msgspec.field(default_factory=dict)


class ComputedLimit(msgspec.Struct, frozen=True):
    """A limit of one container on one GPU, and the number of the evaluation that computed it."""

    number: int
    size_bytes: int


class LimitsInForce(msgspec.Struct, frozen=True, kw_only=True):
    """`last_number`: the number of the last evaluation. `now`: what is enforced now. `before_sample`: what was enforced at the end of the
    last evaluation, before the next sample is read. `computed`: for each container and GPU, the limits that may be in force."""

    last_number: int = 0
    now: Enforced = Enforced()
    before_sample: Enforced = Enforced()
    computed: Mapping[AllocationOnGpu, tuple[ComputedLimit, ...]] = msgspec.field(default_factory=dict)

    def with_sample(self, started: Mapping[AllocationOnGpu, int]) -> "LimitsInForce":
        """Call it first in each evaluation, with a new sample. Drops the limits that were no longer in force when the sample was read.
        `started`: the limits in bytes of the containers that `computed` lacks."""
        computed: dict[AllocationOnGpu, tuple[ComputedLimit, ...]] = {}
        for place, size_bytes in started.items():
            computed[place] = (ComputedLimit(self.last_number, size_bytes),)
        for place, limits in self.computed.items():
            computed[place] = _still_possible(limits, place[0], self.before_sample)
        return replace(self, computed=computed)

    def with_limits(self, limits: Mapping[AllocationOnGpu, int]) -> "LimitsInForce":
        """The next evaluation has computed these limits in bytes. `limits` must include all containers: a container that is missing in it
        is dropped from `computed`."""
        number = self.last_number + 1
        computed = {}
        for place, size_bytes in limits.items():
            # Only the highest possible limit matters, and the new one stays possible for longer than the earlier ones.
            higher = [earlier for earlier in self.computed.get(place, ()) if earlier.size_bytes > size_bytes]
            computed[place] = (*higher, ComputedLimit(number, size_bytes))
        return replace(self, last_number=number, computed=computed)

    def most_bytes(self, place: AllocationOnGpu) -> int:
        """The highest limit that may be in force, or was when the sample was read; 0 for a container that is not in `computed` yet."""
        return max((limit.size_bytes for limit in self.computed.get(place, ())), default=0)


def _still_possible(limits: tuple[ComputedLimit, ...], container: AllocationId, enforced: Enforced) -> tuple[ComputedLimit, ...]:
    """The limits of this container that may be in force while `enforced` is."""
    not_earlier = tuple(limit for limit in limits if limit.number >= enforced.number)
    if container not in enforced.obstacles:
        return not_earlier
    if container not in enforced.kept_bytes:
        return limits
    # The number 0 is lower than any evaluation's: this limit is dropped once the obstacle is gone or the container keeps another limit.
    return (ComputedLimit(0, enforced.kept_bytes[container]), *not_earlier)
