"""Containers as the container runtime lists them, with the cgroup of their processes."""

from dataclasses import dataclass

from gpumgr.ledger.pods import PodKey, is_static_uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One started container. `attempt` counts its restarts from 0.

    `cgroup` is the path of its cgroup below the root of the hierarchy that counts its memory (v2: the unified one), with a leading
    slash; None while it is unknown. `pid` is the host's number of its first process, None if it does not run.
    """

    id: str
    pod: PodKey
    pod_uid: str
    name: str
    attempt: int = 0
    running: bool = True
    pid: int | None = None
    cgroup: str | None = None
    created_at: float = 0.0

    @property
    def static(self) -> bool:
        """Whether it belongs to a static pod."""
        return is_static_uid(self.pod_uid)

    def describe(self) -> str:
        """For messages."""
        if not self.name:
            return f"container {self.id[:12]} of pod uid {self.pod_uid}"
        return f"{'/'.join(self.pod)} ({self.name})"
