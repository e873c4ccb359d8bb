"""How the agent itself is, and what it deals with: driver, kubelet, API server, readers, mechanisms. Pure functions of a picture."""

from collections.abc import Iterator
from typing import Final

from gpumgr.agent.picture import OutboxState, Picture
from gpumgr.metrics.gpus import current_shares
from gpumgr.metrics.text import Block, block, counter, gauge, label_text

_UP: Final = gauge("nvml_up", "1 while the driver's library answers.")
_READY: Final = gauge("agent_ready", "1 while the node can take pods with GPUs.")
_TAKEN: Final = gauge("nvml_last_sample_timestamp_seconds", "When the GPUs were last sampled, in unix time.")
_ERRORS: Final = counter("nvml_call_errors_total", "Calls of the driver's library that went wrong.", "function", "code")
_STREAMS: Final = gauge("listandwatch_streams", "Open ListAndWatch calls of the kubelet.", "resource")
_CONNECTIONS: Final = gauge("http_connections", "Connections that the web server has open.")
_REFUSED: Final = counter("http_connections_refused_total", "Connections that the web server had no room for.")
_SERVER_UP: Final = gauge("api_server_up", "1 while the API server answers.")
_WAITING: Final = gauge("api_queue_waiting", "What waits to be written to the API server.")
_OLDEST: Final = gauge(
    "api_queue_oldest_seconds", "For how long the oldest thing has been due to be written to the API server; 0: nothing is."
)
_DROPPED: Final = counter("api_queue_dropped_total", "What was never written to the API server.")
_WRITES: Final = counter("api_writes_total", "What was written to the API server, and how that ended.", "what", "outcome")
_MECHANISMS: Final = gauge("enforcement_info", "What keeps new shares within their limits; always 1.", "backend", "limits")
_FREE: Final = gauge("containers_without_enforcement", "Containers that share a GPU and that nothing keeps within their shares.")
_REGISTRATIONS: Final = counter("vcuda_registrations_total", "Registrations of processes with the backend vcuda.", "result")
_RESTARTS: Final = counter("mps_daemon_restarts_total", "Crashed MPS daemons that were started again.", "gpu")

FAMILIES: Final = (
    *(_UP, _READY, _TAKEN, _ERRORS, _STREAMS, _CONNECTIONS, _REFUSED),
    *(_SERVER_UP, _WAITING, _OLDEST, _DROPPED, _WRITES),
    *(_MECHANISMS, _FREE, _REGISTRATIONS, _RESTARTS),
)

#: What is written to the API server, and how that ends; others count together.
WRITES: Final = ("pod", "event", "node", "eviction")
OUTCOMES: Final = ("ok", "refused")


def health_blocks(picture: Picture | None, *, sampled_at: float | None) -> Iterator[Block]:
    """`picture` None: there was none yet. `sampled_at`: unix seconds of its sample, None if it has none."""
    yield block(_UP, {"": picture is not None and picture.nvml_up})
    yield block(_READY, {"": picture is not None and not picture.not_ready})
    if picture is None:
        return
    if sampled_at is not None:
        yield block(_TAKEN, {"": round(sampled_at, 3)})
    yield block(_ERRORS, {label_text(_ERRORS.labels, (call, str(code))): n for (call, code), n in picture.nvml_errors.items()})
    yield block(_STREAMS, {label_text(_STREAMS.labels, (resource,)): number for resource, number in picture.streams.items()})
    yield block(_CONNECTIONS, {"": picture.connections})
    yield block(_REFUSED, {"": picture.connections_refused})
    if picture.outbox is not None:
        yield from _api_server(picture.outbox)
    yield from _mechanisms(picture)


def _api_server(outbox: OutboxState) -> Iterator[Block]:
    yield block(_SERVER_UP, {"": not outbox.away})
    yield block(_WAITING, {"": outbox.waiting})
    yield block(_OLDEST, {"": max(0.0, outbox.oldest_seconds)})
    yield block(_DROPPED, {"": outbox.dropped})
    # All series stand from the start, so that a first refusal shows as an increase.
    writes = dict.fromkeys(((what, outcome) for what in WRITES for outcome in OUTCOMES), 0)
    for (what, outcome), times in outbox.written.items():
        key = (what if what in WRITES else "other", outcome if outcome in OUTCOMES else "other")
        writes[key] = writes.get(key, 0) + times
    yield block(_WRITES, {label_text(_WRITES.labels, key): times for key, times in writes.items()})


def _mechanisms(picture: Picture) -> Iterator[Block]:
    yield block(_MECHANISMS, {label_text(_MECHANISMS.labels, each): 1 for each in picture.enforcement})
    free = [s for s in current_shares(picture.view.ledger) if not s.anonymous and not _kept(s.mechanisms)]
    yield block(_FREE, {"": len(free)})
    results = picture.vcuda_registrations.items()
    yield block(_REGISTRATIONS, {label_text(_REGISTRATIONS.labels, (result,)): times for result, times in results})
    restarts = picture.mps_daemon_restarts.items()
    yield block(_RESTARTS, {label_text(_RESTARTS.labels, (uuid,)): times for uuid, times in restarts})


def _kept(mechanisms: tuple[str, ...]) -> bool:
    return any(name not in ("none", "mps-open") for name in mechanisms)
