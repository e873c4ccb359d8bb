"""Places of MIG devices: the profiles and their places on an H100 with 80 GB, as `nvidia-smi mig -lgip` and `-lgipp` print them."""

import pytest

from gpumgr.common.units import Amounts
from gpumgr.placement.mig import MigPlace, amounts_of, find_place, place_at, place_named, serves
from gpumgr.placement.requests import ReplicaRequest
from tests.mig_profiles import H100


def memory(mebibytes: int, cores: int = 0) -> ReplicaRequest:
    return ReplicaRequest(count=1, memory_mebibytes=mebibytes, cores=cores)


def placed(taken: int, *requests: ReplicaRequest) -> list[tuple[str, int]]:
    found = []
    for request in requests:
        place = find_place(H100, taken, request)
        assert place is not None
        assert not place.memory_slices & taken
        taken |= place.memory_slices
        found.append((place.profile.name, place.start))
    return found


def test_profiles_of_odd_sizes_begin_at_the_end() -> None:
    """Case 35 of HAMi's tests: 3g, 2g, 1g and 1g of an A100 begin at 4, 0, 3 and 2."""
    assert placed(0, memory(40000, 40), memory(15000, 20), memory(5000), memory(5000)) == [
        ("3g.40gb", 4),
        ("2g.20gb", 0),
        ("1g.10gb", 3),
        ("1g.10gb", 2),
    ]


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (memory(1), "1g.10gb"),
        (memory(9984), "1g.10gb"),
        (memory(9985), "1g.20gb"),
        (memory(9985, 15), "1g.20gb"),
        (memory(9985, 16), "2g.20gb"),
        (memory(1, 29), "2g.20gb"),
        (memory(1, 30), "3g.40gb"),
        (memory(1, 58), "4g.40gb"),
        (memory(1, 59), "7g.80gb"),
        (memory(40449), "7g.80gb"),
        (ReplicaRequest(count=1, cores=100), "7g.80gb"),
        (ReplicaRequest(count=1, memory_percent=100), "7g.80gb"),
        (ReplicaRequest(count=1, memory_percent=12), "1g.10gb"),
        (ReplicaRequest(count=1, memory_percent=25), "1g.20gb"),
        (ReplicaRequest(count=1, memory_percent=26), "3g.40gb"),
        (memory(81153), None),
    ],
)
def test_the_smallest_profile_with_the_memory_and_the_cores_is_taken(request_: ReplicaRequest, name: str | None) -> None:
    found = find_place(H100, 0, request_)
    assert (found and found.profile.name) == name


def test_a_full_gpu_has_no_place_and_a_larger_profile_is_taken_where_the_smallest_is_full() -> None:
    assert placed(0, *[memory(5000)] * 7) == [("1g.10gb", start) for start in (6, 5, 4, 3, 2, 1, 0)]
    assert find_place(H100, 0b0111_1111, memory(5000)) is None
    assert placed(0b0011_1111, memory(5000)) == [("1g.10gb", 6)]
    # Slices 6 and 7 are free: a device with 20 GB fits there, and nowhere else.
    assert placed(0b0011_1111, memory(15000)) == [("1g.20gb", 6)]


def test_the_amounts_name_the_place() -> None:
    places = [MigPlace(profile=each, start=start) for each in H100 for start in each.starts]
    assert len({amounts_of(place, H100) for place in places}) == len(places)
    assert all(place_at(H100, amounts_of(place, H100)) == place for place in places)
    assert all(place_named(H100, place.profile.name, place.start) == place for place in places)
    assert place_named(H100, "1g.10gb", 7) is None
    assert place_named(H100, "1g.10gb+me", 0) is None
    assert place_at(H100, Amounts(14, 9984)) is None


def test_the_devices_of_a_full_gpu_have_no_more_cores_than_it() -> None:
    small, half = amounts_of(MigPlace(profile=H100[5], start=0), H100), amounts_of(MigPlace(profile=H100[1], start=0), H100)
    assert (small.cores, half.cores) == (14, 57)
    assert amounts_of(MigPlace(profile=H100[0], start=0), H100).whole
    third = amounts_of(MigPlace(profile=H100[2], start=4), H100)
    assert half + third == Amounts(99, 80896, slices=0xFF)
    assert (half + third) - third == half


def test_one_device_serves_several_requests() -> None:
    both = memory(15000), memory(5000, 40)
    place = find_place(H100, 0, *both)
    assert place is not None
    assert (place.profile.name, place.start) == ("3g.40gb", 4)
    assert serves(H100, amounts_of(place, H100), *both)
    assert not serves(H100, amounts_of(place, H100), *both, memory(1, 58))
    assert not serves(H100, Amounts(42, 40448), memory(1))


def test_a_gpu_without_profiles_has_no_place() -> None:
    assert find_place((), 0, memory(1)) is None
