"""What the agent answers, as values: of its JSON the part that the commands show. Every text in them may go to a terminal.

/api/state is a `State`, /api/pods a list of `Named`, /api/pods/{namespace}/{pod} a `Story`, /api/history a list of entries, as the
history itself has them.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from gpumgr.allocator.history import Entry
from gpumgr.allocator.pods import PodKey
from gpumgr.cli.printable import cleaned
from gpumgr.errors import GpumgrError

T = TypeVar("T")

STATE: Final = "/api/state"
STREAM: Final = "/api/stream"
PODS: Final = "/api/pods"


class Cordoned(msgspec.Struct, frozen=True, kw_only=True):
    reason: str = ""
    since: float = 0.0
    draining: bool = False


class Strangers(msgspec.Struct, frozen=True, kw_only=True):
    processes: int | None = None
    memory_bytes: int | None = None


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: not told."""

    uuid: str
    name: str
    index: int | None = None
    model: str | None = None
    memory_blocks: int = 0
    cores_free: int = 0
    memory_blocks_free: int = 0
    healthy: bool | None = True
    reason: str | None = None
    message: str | None = None
    cordon: Cordoned | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    strangers: Strangers | None = None


class ContainerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation on one of its GPUs; `cores` and `memory_bytes` are what it was granted there. None: not known, or not told."""

    allocation: str
    namespace: str | None = None
    pod: str | None = None
    uid: str | None = None
    container: str | None = None
    init: bool = False
    gpu: str
    cores: int = 0
    memory_bytes: int | None = None
    whole: bool = False
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    processes: int | None = None
    over: bool = False
    mechanisms: tuple[str, ...] = ()
    granted_at: float = 0.0
    why: str = ""

    @property
    def pod_name(self) -> str:
        """namespace/pod, or what else is known."""
        if self.pod is not None:
            return f"{self.namespace}/{self.pod}"
        return f"pod uid {self.uid}" if self.uid else f"allocation {self.allocation}"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the driver lists and can't describe."""

    index: int
    message: str = ""


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """Of an entry of the history its number."""

    number: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one instant, `at` in unix seconds. `history` has its newest entries."""

    node: str = ""
    at: float = 0.0
    driver_version: str | None = None
    not_ready: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    gpus: tuple[GpuRow, ...]
    containers: tuple[ContainerRow, ...]
    history: tuple[Numbered, ...] = ()


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of which something is known."""

    namespace: str
    pod: str


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one container of a pod asks for; `kind` is init, sidecar or app."""

    container: str
    kind: str = "app"
    cores: int = 0
    memory_blocks: int = 0


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known under a pod's name; `uid` is of its newest life, `earlier_uids` newest first, `history` oldest first. `gpus` are
    those that it has."""

    namespace: str
    pod: str
    uid: str | None = None
    earlier_uids: tuple[str, ...] = ()
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    request: tuple[Asked, ...] = ()
    allocations: tuple[ContainerRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    history: tuple[Entry, ...] = ()


def read_state(document: Any) -> State:
    """Raises GpumgrError if it is none."""
    return _read(document, State)


def read_story(document: Any) -> Story:
    """Raises GpumgrError if it is none."""
    return _read(document, Story)


def read_pods(documents: Any) -> frozenset[PodKey]:
    """As they are called: these names may be asked for again. Raises GpumgrError if one of them is none."""
    return frozenset((each.namespace, each.pod) for each in _converted(documents, list[Named]))


def read_entries(documents: Sequence[Any]) -> list[Entry]:
    """Raises GpumgrError if one of them is none."""
    return _read(documents, list[Entry])


def _read(document: Any, kind: type[T]) -> T:
    return _converted(cleaned(document), kind)


def _converted(document: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise GpumgrError(
            f"the agent's answer can't be understood: {error}; it may be of another version than this command"
        ) from error
