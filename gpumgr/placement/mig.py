"""Where on a GPU a MIG device can be created, and with which profile. Pure.

Source of the rules: HAMi 2.10, pkg/device/nvidia: selectMigCandidate and orderedMigPlacements. In addition to HAMi's rules, a request for
cores gets a profile with that part of the GPU's compute; less than one core may be missing.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.placement.devices import MigProfile
from gpumgr.placement.requests import ReplicaRequest

#: Beginnings of profile names. These devices are created at the last free place, so that larger devices still fit before it.
_FROM_THE_END: Final = ("1g.", "3g.")


class MigPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG device to create: `start` is its first memory slice."""

    profile: MigProfile
    start: int

    @property
    def memory_slices(self) -> int:
        """Slice n as bit n."""
        return (1 << self.profile.size) - 1 << self.start


def amounts_of(place: MigPlace, profiles: Sequence[MigProfile]) -> Amounts:
    """What the MIG device takes of a GPU with these profiles. Cores are rounded down, so that the devices of a full GPU have at most its
    100 cores together."""
    most = max(profile.slices for profile in profiles)
    return Amounts(place.profile.slices * CORES_PER_GPU // most, place.profile.memory_mebibytes, slices=place.memory_slices)


def find_place(profiles: Sequence[MigProfile], taken: int, *requests: ReplicaRequest) -> MigPlace | None:
    """The best free place of the smallest profile that satisfies all requests. `taken`: memory slices as bits."""
    return next((places[0] for profile in _fitting(profiles, *requests) if (places := _places(profile, taken))), None)


def serves(profiles: Sequence[MigProfile], amounts: Amounts, *requests: ReplicaRequest) -> bool:
    """Whether a MIG device with these amounts satisfies all requests."""
    place = place_at(profiles, amounts)
    return place is not None and place.profile in _fitting(profiles, *requests)


def place_at(profiles: Sequence[MigProfile], amounts: Amounts) -> MigPlace | None:
    """The place with this memory and these memory slices. If several profiles match, the one with the nearest cores is taken, because
    schedulers round cores differently."""
    wanted = amounts.memory_mebibytes, amounts.slices
    places = (place for profile in profiles for place in _places(profile, 0))
    found = [place for place in places if (place.profile.memory_mebibytes, place.memory_slices) == wanted]
    return min(found, key=lambda place: abs(amounts_of(place, profiles).cores - amounts.cores), default=None)


def place_named(profiles: Sequence[MigProfile], name: str, start: int) -> MigPlace | None:
    """`start`: the first memory slice."""
    named = (place for profile in profiles if profile.name == name for place in _places(profile, 0))
    return next((place for place in named if place.start == start), None)


def has_place(profiles: Sequence[MigProfile], taken: int) -> bool:
    return any(_places(profile, taken) for profile in profiles)


def without_places(profile: MigProfile, taken: int) -> MigProfile:
    """The profile without the places that overlap the memory slices in `taken` (bits)."""
    return replace(profile, starts=tuple(sorted(place.start for place in _places(profile, taken))))


def most_devices(profiles: Sequence[MigProfile]) -> int:
    return max((len(profile.starts) for profile in profiles), default=0)


def _fitting(profiles: Sequence[MigProfile], *requests: ReplicaRequest) -> Iterator[MigProfile]:
    """The profiles that fit, the smallest first. A percentage of memory is counted in slices, because all MIG devices together have less
    memory than the GPU."""
    most_slices = max((profile.slices for profile in profiles), default=0)
    most_size = max((profile.size for profile in profiles), default=0)

    def enough(profile: MigProfile, request: ReplicaRequest) -> bool:
        if profile.slices * CORES_PER_GPU <= (request.cores - 1) * most_slices:
            return False
        if request.whole or request.memory_mebibytes is None:
            percent = CORES_PER_GPU if request.whole else request.memory_percent
            return profile.size * CORES_PER_GPU >= percent * most_size
        return profile.memory_mebibytes >= request.memory_mebibytes

    for profile in sorted(profiles, key=lambda each: (each.memory_mebibytes, each.slices, each.name)):
        if all(enough(profile, request) for request in requests):
            yield profile


def _places(profile: MigProfile, taken: int) -> list[MigPlace]:
    """The free places of the profile, the best first."""
    starts = profile.starts[::-1] if profile.name.startswith(_FROM_THE_END) else profile.starts
    places = [MigPlace(profile=profile, start=start) for start in starts]
    return [place for place in places if not place.memory_slices & taken]
