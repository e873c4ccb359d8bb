"""GPUs that an operator took out of service, and his words for it: values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """`since` is in unix seconds. `draining`: those who are still on the GPU shall go, too."""

    reason: str = ""
    since: float = 0.0
    draining: bool = False
