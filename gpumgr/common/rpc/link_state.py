"""Whether the kubelet has registered a server of this process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """A registration. `registrations` counts the ones that have succeeded, `error` says what is wrong since, or now, and what to do."""

    registered: bool = False
    registrations: int = 0
    error: str | None = None
