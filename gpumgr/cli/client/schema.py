"""Decodes the agent's responses into the structs of gpumgr.agent.api. Every text in them is made printable for a terminal."""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from gpumgr.agent.api import MaintenanceResult, NodeState, PodDetails, PodRef
from gpumgr.cli.printable import cleaned
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.pods import PodKey

T = TypeVar("T")

STATE: Final = "/api/state"
STREAM: Final = "/api/stream"
PODS: Final = "/api/pods"


def read_state(document: Any) -> NodeState:
    """Raises GpumgrError if it does not fit the schema, as the other functions."""
    return _convert(cleaned(document), NodeState)


def read_pod(document: Any) -> PodDetails:
    return _convert(cleaned(document), PodDetails)


def read_pods(documents: Any) -> frozenset[PodKey]:
    """The names as they are, since requests contain them."""
    return frozenset((each.namespace, each.pod) for each in _convert(documents, list[PodRef]))


def read_entries(documents: Sequence[Any]) -> list[HistoryEntry]:
    return _convert(cleaned(documents), list[HistoryEntry])


def read_result(document: Any) -> MaintenanceResult:
    return _convert(cleaned(document), MaintenanceResult)


def _convert(document: Any, kind: type[T]) -> T:
    try:
        return convert(document, kind)
    except UnreadableText as error:
        raise GpumgrError(
            f"the agent's response can't be decoded: {error}; it may be of another version than this command"
        ) from error
