"""Which memory limits may be in force. Pure.

An evaluation computes and sets the limits once for each sample of the driver; evaluations are numbered from 1. Setting the limits may take
longer than the evaluation, and may fail for some containers. So for a sample only the highest possible limit is known: the highest one
that was computed in or after the last evaluation with limits in force before the sample.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.usage.node_use import AllocationOnGpu

#: The bound of a limit that an earlier process of the agent may have set: more than any GPU has.
UNKNOWN_BYTES: Final = 1 << 62


class Enforced(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the evaluation with this number are in force, except for the containers in `obstacles`; the value is the reason.
    `kept_bytes`: the highest limit that programs of such a container still have, where the backend knows it."""

    number: int = 0
    obstacles: Mapping[AllocationId, str] = msgspec.field(default_factory=dict)
    kept_bytes: Mapping[AllocationId, int] = msgspec.field(default_factory=dict)


class LimitsInForce(msgspec.Struct, frozen=True, kw_only=True):
    """`begun`: the number of the last evaluation. `now`: what is enforced now; `before_sample`: what was enforced at the end of the last
    evaluation; `under_sample`: what was enforced before the present sample was read. `computed`: for each container and GPU, the limits
    that may be in force, each with the number of its evaluation."""

    begun: int = 0
    now: Enforced = Enforced()
    before_sample: Enforced = Enforced()
    under_sample: Enforced = Enforced()
    computed: Mapping[AllocationOnGpu, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)

    def with_sample(self, started: Mapping[AllocationOnGpu, int]) -> "LimitsInForce":
        """Call it first in each evaluation: a new sample was read. `started`: the limits of the containers that `computed` lacks."""
        known = replace(self, under_sample=self.before_sample)
        computed = {place: known._possible(place[0], limits) for place, limits in self.computed.items()}
        return replace(known, computed={place: ((self.begun, size),) for place, size in started.items()} | computed)

    def _possible(self, name: AllocationId, limits: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        under = self.under_sample
        later = tuple(each for each in limits if each[0] >= under.number)
        if name not in under.obstacles:
            return later
        return ((0, under.kept_bytes[name]), *later) if name in under.kept_bytes else limits

    def with_limits(self, limits: Mapping[AllocationOnGpu, int]) -> "LimitsInForce":
        """An evaluation has computed these limits, of all containers, in bytes."""
        begun = self.begun + 1
        computed = {
            place: (*(each for each in self.computed.get(place, ()) if each[1] > size), (begun, size))
            for place, size in limits.items()
        }
        return replace(self, begun=begun, computed=computed)

    def most_bytes(self, place: AllocationOnGpu) -> int:
        """The highest limit that may be in force, or was when the present sample was read; 0 for a container that was granted later."""
        return max((size for _, size in self.computed.get(place, ())), default=0)
