"""ResourceClaims as values: what the kubelet names, and what it is answered."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """A ResourceClaim as the kubelet names it. A claim that was deleted and made again has the same name and another uid."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One device of a prepared claim.

    `requests` are the claim's requests that it serves ("main", or "main/sub" of a prioritized list); none = all of them. `cdi_ids` are
    names like "vendor/class=name". `share_id` identifies the share of a device that several claims may use.
    """

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None
