"""Listings of PodResources from plain dicts."""

from collections.abc import Collection, Mapping, Sequence

from gpumgr.placement.pods import ClaimKey, Containers, Listing, PodKey


def listing_from(
    held: Mapping[PodKey, Mapping[str, Mapping[str, Sequence[str]]]], claims: Collection[ClaimKey] = frozenset()
) -> Listing:
    """`held`: pod -> container -> resource -> device ids."""

    def read(pod: PodKey) -> Containers:
        return {container: {name: tuple(ids) for name, ids in resources.items()} for container, resources in held[pod].items()}

    return Listing(tuple(held), read, lambda: claims)
